"""Tensors of torch: whether they take part in autograd, and whether their values can be read.

None of these functions imports torch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping
from functools import wraps
from operator import attrgetter
from typing import Any, TypeVar

from arraylogchain._core.context import Array

F = TypeVar("F", bound=Callable[..., Any])


def dynamo_disabled(function: F, traced: Callable[..., Any] | None = None) -> F:
    """Exclude a public function from `torch.compile` tracing, which calls `traced` if it is given.

    The compiler takes more than a second to import, so that it is only used once it is imported.
    """
    hidden: list[F] = []

    @wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        if "torch._dynamo" not in sys.modules:
            return function(*args, **options)
        if traced is not None and sys.modules["torch"].compiler.is_compiling():
            return traced(*args, **options)
        if not hidden:
            hidden.append(sys.modules["torch"].compiler.disable(function))
        return hidden[0](*args, **options)

    return call  # type: ignore[return-value]


def is_compiling() -> bool:
    """Return whether torch compiles or exports the caller."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.compiler.is_compiling()


def detached(x: Array) -> Array:
    """Return a tensor detached from autograd, and any other array unchanged."""
    return x.detach() if hasattr(x, "detach") else x


def is_differentiated(*arrays: Array | None) -> bool:
    """Return whether a tensor takes part in autograd, forward mode or a transform of torch."""
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    tensors = [x for x in arrays if isinstance(x, torch.Tensor)]
    if torch.is_grad_enabled() and any(map(attrgetter("requires_grad"), tensors)):
        return True
    unpack = torch.autograd.forward_ad.unpack_dual
    return not are_plain(*tensors) or any(unpack(x).tangent is not None for x in tensors)


def are_plain(*arrays: Array) -> bool:
    """Return whether all tensors have memory of their own, unlike those in transforms.

    Dense tensors are tested; others that `check_tensors` rejects count as plain, except fake ones.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return True
    first = True
    for x in arrays:
        if not isinstance(x, torch.Tensor):
            continue
        if type(x) is not torch.Tensor and is_fake(x):
            return False
        try:
            # In torch.func.grad not even a new view has memory, so that detaching one shows it.
            (x.detach() if first else x).data_ptr()
            first = False
        except RuntimeError:
            if not x.is_nested and x.layout == torch.strided:
                return False
    return True


def layouts_of_tensors(arrays: Collection[Any]) -> list[Any]:
    """Return the addresses, shapes, strides and dtypes of tensors.

    A chain keeps the memory alive, so that an equal address means the same memory. The list is
    empty for other arrays; if a tensor is copied for computation, as integers are and what torch
    negates lazily; if one has no address, as sparse tensors; and while a tracer of torch runs.
    """
    torch = sys.modules.get("torch")
    if torch is None or not {torch.Tensor, torch.nn.Parameter}.issuperset(map(type, arrays)):
        return []
    if _trace(torch) or any(x.is_neg() or not x.dtype.is_floating_point for x in arrays):
        return []
    try:
        return [(x.data_ptr(), x.shape, x.stride(), x.dtype) for x in arrays]
    except RuntimeError:
        return []


def check_tensors(arguments: Mapping[str, Any]) -> None:
    """Raise ValueError for tensors that are not dense, or whose values cannot be read.

    In transforms of `torch.func` tensors pass, as differentiable functions have rules for these.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return
    trace = _trace(torch)
    for name, x in arguments.items():
        if isinstance(x, torch.Tensor) and (reason := trace or _unreadable(torch, name, x)):
            actual, instead = reason
            raise ValueError(f"{name} must be a dense tensor with values, got {actual}; {instead}")


def _trace(torch: Any) -> tuple[str, str] | None:
    """Return a description of the tracer that would record results as constants, and a hint."""
    if torch.jit.is_tracing():
        return "one that torch.jit.trace traces", "call this outside of the trace"
    proxies = sys.modules.get("torch.fx.experimental.proxy_tensor")
    if proxies is not None and proxies.get_proxy_mode() is not None:
        return "one that make_fx or torch.export traces", "call this outside of the trace"
    return None


def _unreadable(torch: Any, name: str, x: Any) -> tuple[str, str] | None:
    """Return a description of a tensor that cannot be read, and a hint; None for others."""
    if type(x) is not torch.Tensor:
        if is_fake(x):
            return "a fake tensor, as torch.export makes", "call this outside of the export"
        if is_instance(x, "torch.masked.maskedtensor.core", "MaskedTensor"):
            return "a masked tensor", f"fill it first, by {name}.to_tensor(...)"
    try:
        if not x.is_nested and x.data_ptr():  # read first, as nearly all tensors are dense
            return None
        has_storage = True
    except RuntimeError:
        has_storage = False
    if x.is_meta:
        return "one on the meta device", "move it to a device that has its values"
    if x.is_nested:
        return "a nested tensor", "torch.nested.to_padded_tensor makes a dense one"
    if x.layout != torch.strided:
        layout = str(x.layout).removeprefix("torch.").removeprefix("_")
        return f"one of layout {layout}", f"{name}.to_dense() makes a dense one"
    if x.numel() and has_storage:
        return "one that torch.func.functionalize wraps", "call this outside of it"
    return None


def is_fake(x: Any) -> bool:
    return is_instance(x, "torch._subclasses.fake_tensor", "FakeTensor")


def is_instance(x: Any, module: str, name: str) -> bool:
    """Return whether an object is of a class of a module that may not be imported."""
    return module in sys.modules and isinstance(x, getattr(sys.modules[module], name))
