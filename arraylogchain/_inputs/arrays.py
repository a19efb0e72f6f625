"""Validation of the caller's arrays and their conversion for computation.

Computations are written against the array API standard and do not depend on the library. Its
namespace, the device and the precision travel with every call in a `Context`.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache, lru_cache
from operator import attrgetter
from types import NoneType
from typing import Any

import array_api_compat
import numpy as np

from arraylogchain._core.context import Array, Context, library_name
from arraylogchain._core.precision import DOUBLE, SINGLE
from arraylogchain._inputs.tensors import are_plain, check_tensors, detached, is_instance

# Elements of a temporary for which elementwise operations stay in a CPU's L2 cache.
_CPU_BLOCK = 1 << 16
# On a device every operation is a launch: blocks are as large as the workspace allows.
_DEVICE_BLOCK = 1 << 26

# Device types of DLPack: CUDA's own memory, and managed memory.
_DLPACK_CUDA = (2, 13)

_FLOATING = ("float16", "bfloat16", "float32", "float64")
_known_contexts: dict[tuple[Any, ...], Context] = {}
# Cached: NumPy makes the name of a dtype again at each call, as slowly as a small product.
_numpy_name = cache(attrgetter("name"))
_NUMPY = {frozenset([np.dtype(name)]): name for name in ("float16", "float32", "float64")}


def prepare_inputs(
    arguments: Mapping[str, Array], like: str | None = None
) -> tuple[Context, Mapping[str, Array]]:
    """Validate the arguments of a call and convert them for computation.

    Parameters
    ----------
    arguments : mapping of str to array
        By name.
    like : str, optional
        Name of an argument whose dtype others get that are lists, integers or booleans.

    Returns
    -------
    context : Context
    ready : mapping of str to array
        The arguments, in the library that computes. Arrays are not copied, unless their library is
        read-only and its DLPack export copies.

    Raises
    ------
    TypeError
        For objects that are not arrays, dtypes that are not real floating, or mixed libraries.
    ValueError
        For arrays on different devices.
    """
    if set(map(type, arguments.values())) == {np.ndarray}:
        # The shortest path, for NumPy arrays of one dtype.
        name = _NUMPY.get(frozenset(map(attrgetter("dtype"), arguments.values())))
        if name is not None:
            return _numpy_context(name), arguments
    if like is not None:
        arguments = with_dtype_of(like, arguments)
    torch = sys.modules.get("torch")
    types = set(map(type, arguments.values()))
    if torch is not None and all(issubclass(x, torch.Tensor) for x in types):
        return _prepare_tensors(arguments)
    xp = common_namespace(arguments)
    check_same("device", {name: array_api_compat.device(x) for name, x in arguments.items()})
    # By names, as array_api_strict warns where a cache compares its dtypes.
    result_name = check_dtypes(
        tuple((name, dtype_name(x.dtype)) for name, x in arguments.items()), xp
    )
    device = array_api_compat.device(next(iter(arguments.values())))
    if library_name(xp) == "numpy":
        # Operators of subclasses, such as numpy.matrix, may differ.
        return _numpy_context(result_name), {name: np.asarray(x) for name, x in arguments.items()}
    if _can_be_written(xp):
        return native_context(xp, device, result_name), arguments
    if all(_is_on_cuda(x) for x in arguments.values()):
        return _through_cupy(xp, arguments, result_name)
    hosted = {name: _to_numpy(name, x) for name, x in arguments.items()}
    # Libraries that only export arrays import results from NumPy arrays.
    return _numpy_context(result_name, getattr(xp, "from_dlpack", None)), hosted


def _prepare_tensors(arguments: Mapping[str, Array]) -> tuple[Context, Mapping[str, Array]]:
    """Return tensors without copies, as NumPy arrays if they are on the CPU and not bfloat16."""
    torch = sys.modules["torch"]
    check_tensors(arguments)
    dtypes = tuple([(name, x.dtype) for name, x in arguments.items()])
    result, ready = check_dtypes(dtypes, torch), {}
    on_cpu = all(map(attrgetter("is_cpu"), arguments.values()))
    on_cpu = on_cpu and all(dtype is not torch.bfloat16 for _, dtype in dtypes)
    try:
        for name, x in arguments.items():
            if not (on_cpu or are_plain(x)):
                raise RuntimeError("there are no values")
            # force=True resolves lazy negation and detaches from autograd.
            ready[name] = x.numpy(force=True) if on_cpu else x.detach().resolve_neg()
    except RuntimeError:
        raise ValueError(
            f"{name} must be a tensor with values, got one inside a transform of torch.func; "
            "call this outside of torch.func, on all rows at once"
        ) from None
    if on_cpu:
        return _numpy_context(result, torch.from_numpy), ready
    check_same("device", {name: x.device for name, x in arguments.items()})
    return native_context(array_api_compat.array_namespace(x), x.device, result), ready


def with_dtype_of(like: str, arguments: Mapping[str, Array]) -> Mapping[str, Array]:
    """Return the arguments, with lists, integers and booleans in the dtype of one of them.

    Raises
    ------
    TypeError
        For lists that do not make an array of real numbers.
    """
    if len({(type(x), getattr(x, "dtype", None)) for x in arguments.values()}) == 1:
        return arguments
    prototype = arguments[like]
    return {name: _as_floating(name, x, like, prototype) for name, x in arguments.items()}


def _as_floating(name: str, x: Any, like: str, prototype: Array) -> Array:
    if x is prototype:  # dtypes of proxies have no equality
        return x
    dtype = getattr(x, "dtype", None)
    if type(x) is type(prototype) and dtype == getattr(prototype, "dtype", None):
        return x
    if dtype_name(dtype).startswith(("int", "uint", "bool")):
        xp = namespace_of(name, x)
        return xp.astype(x, getattr(xp, dtype_name(prototype.dtype), xp.float32))
    if not isinstance(x, (list, tuple)):
        return x
    array: Any = None
    with suppress(TypeError, ValueError, RuntimeError):
        array = np.asarray(x)
    if array is None or array.dtype.kind not in "biuf":
        raise TypeError(
            f"{name} must be an array or nested lists of real numbers, got a {type(x).__name__} "
            "that makes no such array"
        )
    xp, device = namespace_of(like, prototype), array_api_compat.device(prototype)
    return xp.asarray(array.tolist(), dtype=prototype.dtype, device=device)


@cache
def _numpy_context(result_name: str, hand_back: Callable[[Array], Array] | None = None) -> Context:
    return native_context(np, None, result_name, hand_back)


def native_context(
    xp: Any, device: Any, result_name: str, hand_back: Callable[[Array], Array] | None = None
) -> Context:
    """Return the context of arrays that a library computes with; cached with kernels."""
    key = (library_name(xp), getattr(device, "id", device), result_name, hand_back)
    if key in _known_contexts:
        return _known_contexts[key]
    on_cpu = xp is np or not _is_cuda(device)
    has_double = xp is np or not on_cpu or _has_float64(xp, device)
    context = Context(
        xp=xp,
        device=device,
        result_name=result_name,
        precision=DOUBLE if result_name == "float64" else SINGLE,
        widest=DOUBLE if has_double else SINGLE,
        block=_CPU_BLOCK if on_cpu else _DEVICE_BLOCK,
        hand_back=hand_back,
        has_out=library_name(xp) in ("numpy", "cupy", "torch"),
        kernels=_kernels_for(xp, device),
    )
    if context.kernels is not None and _is_cuda(device):
        _known_contexts[key] = context
    return context


def _is_cuda(device: Any) -> bool:
    return "cuda" in str(device).lower()


def _kernels_for(xp: Any, device: Any) -> Any:
    """Return the `Device` that runs kernels on arrays of a device, or None."""
    if xp is np or not _is_cuda(device):
        return None
    from arraylogchain._cuda.device import find

    device_or_reason = find(library_name(xp), device)
    return None if isinstance(device_or_reason, str) else device_or_reason


def common_namespace(arguments: Mapping[str, Array]) -> Any:
    """Return the namespace of arrays; raise TypeError if they are of several libraries."""
    check_tensors(arguments)
    namespaces = {name: namespace_of(name, x) for name, x in arguments.items()}
    check_same("library", {name: library_name(xp) for name, xp in namespaces.items()})
    return next(iter(namespaces.values()))


def namespace_of(name: str, x: Array) -> Any:
    if isinstance(x, np.ma.MaskedArray):
        raise TypeError(
            f"{name} must have no mask, got a masked array; {name}.filled(...) makes a plain one"
        )
    if is_instance(x, "torch.fx", "Proxy"):
        raise TypeError(
            f"{name} must be an array with values, got a proxy of torch.fx; let torch.fx.wrap keep "
            "the function that calls this as it is"
        )
    if is_instance(x, "jax.core", "Tracer"):
        raise TypeError(
            f"{name} must have values, got one traced by JAX; call this outside of jax.jit"
        )
    try:
        return array_api_compat.array_namespace(x)
    except TypeError:
        if hasattr(x, "__dlpack__") and hasattr(x, "device"):
            return sys.modules[type(x).__module__.partition(".")[0]]
    raise TypeError(
        f"{name} must be an array of floating-point numbers (NumPy, CuPy, torch, ...), "
        f"got {type(x).__name__}; np.asarray or torch.as_tensor, with dtype=float, makes one"
    )


def are_numpy(*arrays: Array | None) -> bool:
    """Return whether all arrays, None excepted, are of NumPy's own class."""
    return {np.ndarray, NoneType}.issuperset(map(type, arrays))


def has_values(*arrays: Array) -> bool:
    """Return whether values can be read: not in Dask arrays, nor in transforms of torch."""
    return are_numpy(*arrays) or (not is_lazy(*arrays) and are_plain(*arrays))


def are_readable(*arrays: Array) -> bool:
    """Return whether values can be read without waiting for a device."""
    on_cpu = all("cpu" in str(array_api_compat.device(x)).lower() for x in arrays)
    return on_cpu and has_values(*arrays)


def is_lazy(*arrays: Any) -> bool:
    """Return whether one of the arrays is a Dask array, whose values are not in memory."""
    dask = sys.modules.get("dask.array")
    return dask is not None and any(isinstance(x, dask.Array) for x in arrays)


def raise_if_differentiated(arguments: Mapping[str, Array], function: str, instead: str) -> None:
    """Raise for tensors that require grad and for Dask arrays, which a pullback cannot serve.

    Raises
    ------
    TypeError
        For Dask arrays.
    NotImplementedError
        For tensors that require grad.
    """
    torch = sys.modules.get("torch")
    check_tensors(arguments)
    for name, x in arguments.items():
        if is_lazy(x):
            raise TypeError(
                f"{name} must be in memory for {function}, got a Dask array; {name}.compute() "
                "brings it there"
            )
        if torch is not None and torch.is_grad_enabled() and getattr(x, "requires_grad", False):
            raise NotImplementedError(
                f"{name} must not require grad for {function}, got a tensor that does; call "
                f"{instead}, which autograd follows, or pass {name}.detach()"
            )


def check_same(what: str, values: Mapping[str, Any]) -> None:
    (first, expected), *following = values.items()
    for name, value in following:
        if value != expected:
            error = TypeError if what == "library" else ValueError
            raise error(
                f"{first} and {name} must be of one {what}, got {expected} and {value}; convert one"
            )


def dtype_name(dtype: Any) -> str:
    """Return 'float32' for numpy.dtype('float32'), torch.float32, array_api_strict.float32, ..."""
    if isinstance(dtype, np.dtype):
        return str(_numpy_name(dtype))
    return str(getattr(dtype, "name", dtype)).rpartition(".")[2]


@lru_cache(maxsize=256)
def check_dtypes(arguments: tuple[tuple[str, Any], ...], xp: Any) -> str:
    """Return the dtype of the result that a library computes from arrays of these dtypes.

    Raises
    ------
    TypeError
        For a dtype that is not real floating, or that the library does not have.
    """
    # NumPy or CuPy, which lack bfloat16, compute for libraries that only export arrays.
    computing = xp if _can_be_written(xp) else np
    dtypes = {name: dtype_name(dtype) for name, dtype in arguments}
    for name, dtype in dtypes.items():
        if dtype not in _FLOATING or not hasattr(computing, dtype):
            supported = " or ".join(x for x in _FLOATING if hasattr(computing, x))
            library = f", which {library_name(computing)} lacks" if dtype in _FLOATING else ""
            raise TypeError(f"{name} must have dtype {supported}, got {dtype}{library}")
    return promote(dtypes.values())


def promote(names: Any) -> str:
    """Return the smallest supported dtype that holds all of these."""
    distinct = set(names)
    if len(distinct) == 1:
        return str(distinct.pop())
    # float16 and bfloat16 have no common format smaller than float32.
    return "float64" if "float64" in distinct else "float32"


def _can_be_written(xp: Any) -> bool:
    """Return whether a library has item assignment; immutable and deferred arrays do not."""
    return library_name(xp) in ("numpy", "cupy", "torch", "array_api_strict")


def _is_on_cuda(x: Array) -> bool:
    return hasattr(x, "__dlpack_device__") and int(x.__dlpack_device__()[0]) in _DLPACK_CUDA


def _through_cupy(
    xp: Any, arguments: Mapping[str, Array], result_name: str
) -> tuple[Context, Mapping[str, Array]]:
    """Convert arrays of a library that can only export to CuPy, on the same device.

    CuPy's stream waits for the library's stream. The library's stream waits for CuPy's when results
    are converted back, before the caller can free the arguments: their memory is not reused while
    CuPy reads it.
    """
    name, x = next(iter(arguments.items()))
    try:
        cupy = importlib.import_module("array_api_compat.cupy")
        ready = {name: cupy.from_dlpack(x) for name, x in arguments.items()}
    except ImportError as error:
        raise TypeError(
            f"{name}, a {type(x).__name__}, is on a CUDA device, where CuPy would compute; install "
            f"the extra cuda12 or cuda13, or bring {name} to the CPU ({error})"
        ) from error
    device = array_api_compat.device(ready[name])
    return native_context(cupy, device, result_name, getattr(xp, "from_dlpack", None)), ready


def _to_numpy(name: str, x: Array) -> Array:
    source = detached(x)
    if not hasattr(source, "__dlpack__"):
        kind = f"{type(x).__module__.partition('.')[0]} {type(x).__name__}"
        raise TypeError(
            f"{name} must be an array of a supported library, got a {kind}; np.asarray({name}) "
            "makes one of what fits into memory"
        )
    try:
        return np.from_dlpack(source)
    except (BufferError, RuntimeError, TypeError) as error:
        raise TypeError(
            f"{name} must be readable through DLPack, got a {type(x).__name__} that is not: {error}"
        ) from error


def on_host(name: str, x: Any) -> np.ndarray:
    """Return integers that decisions depend on as a NumPy array."""
    if isinstance(x, np.ma.MaskedArray):
        namespace_of(name, x)  # which raises
    check_tensors({name: x})
    try:
        if hasattr(x, "detach") and hasattr(x, "cpu"):
            # In a transform computed tensors have no memory, but `tolist` can read their values.
            x = x.detach().cpu()
            x = x.numpy() if are_plain(x) else x.tolist()
        elif hasattr(x, "get") and hasattr(x, "device"):  # CuPy
            x = x.get()
        elif hasattr(x, "__dlpack__") and not isinstance(x, np.ndarray):
            x = np.from_dlpack(x)
        return np.asarray(x)
    except (BufferError, RuntimeError, TypeError, ValueError):
        if not are_plain(x):
            raise NotImplementedError(
                f"{name} must have values that can be read, got a tensor without, as under "
                "torch.func.vmap; call this outside of it, on all rows at once"
            ) from None
        kind = type(x).__name__
        raise TypeError(
            f"{name} must be an array of integers, got a {kind} that cannot be read as one"
        ) from None


@cache
def _has_float64(xp: Any, device: Any) -> bool:
    """Return whether a device other than CUDA's computes in float64."""
    return "float64" in xp.__array_namespace_info__().dtypes(device=device)
