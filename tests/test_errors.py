"""Every error names the argument, its value, and a valid one."""

import importlib
import inspect
import types

import numpy as np
import pytest

import arraylogchain as alc
from arraylogchain._inputs.chain import ARGUMENTS
from tests.checks import mentions
from tests.conftest import make_backend

PRODUCTS = ["matmul", "logmatmulexp", "maxplus_matmul"]


def ones(*shape, dtype="float64"):
    return np.ones(shape, dtype)


def chain(x=None, **options):
    """Build a chain and solve it: errors may be raised at once or when it is used."""
    x = ones(5, 3) if x is None else x
    return alc.LogChain(x, **options).log_partition()


@pytest.mark.parametrize("function", PRODUCTS)
@pytest.mark.parametrize("position", [0, 1])
@pytest.mark.parametrize(
    ("value", "words"),
    [
        ([[1.0, 2.0], [3.0, 4.0]], ["list", "torch.as_tensor"]),
        (2.0, ["float"]),
        (None, ["NoneType"]),
        ("text", ["str"]),
        (np.ones((2, 2), int), ["int64", "float64"]),
        (np.ones((2, 2), np.uint8), ["uint8", "float64"]),
        (np.ones((2, 2), bool), ["bool", "float64"]),
        (np.ones((2, 2), complex), ["complex128", "float64"]),
        (np.ones((2, 2), object), ["object", "float64"]),
        (np.ma.ones((2, 2)), ["masked"]),
    ],
    ids=lambda v: v[0] if isinstance(v, list) and isinstance(v[0], str) else "",
)
def test_operands_that_are_no_real_arrays(function, position, value, words):
    operands = [ones(2, 2), ones(2, 2)]
    operands[position] = value
    with pytest.raises(TypeError, match=mentions("ab"[position], *words)):
        getattr(alc, function)(*operands)


MISFITS = [((2, 3), (4, 5)), ((3,), (4,)), ((3,), (4, 3)), ((2, 3), (2,))]
MISFITS += [((2, 1), (3, 4)), ((2, 2, 3), (3, 3, 4)), ((2, 0), (3, 4))]


@pytest.mark.parametrize("function", PRODUCTS)
@pytest.mark.parametrize(("a", "b"), MISFITS)
def test_shapes_that_do_not_fit(backend, function, a, b):
    with pytest.raises(ValueError, match=mentions("a", "b", a, b)):
        getattr(alc, function)(*(backend.asarray(ones(*s), "float32") for s in (a, b)))


@pytest.mark.parametrize("function", PRODUCTS)
@pytest.mark.parametrize("position", [0, 1])
def test_operands_without_axes(backend, function, position):
    operands = [backend.asarray(ones(3, 3), "float32")] * 2
    operands[position] = backend.asarray(1.0, "float32")
    with pytest.raises(ValueError, match=mentions("ab"[position])):
        getattr(alc, function)(*operands)


@pytest.mark.parametrize("function", PRODUCTS)
def test_mixed_libraries(backend, function):
    other = make_backend("strict" if backend.name == "numpy" else "numpy").asarray(ones(3, 3))
    a = backend.asarray(ones(3, 3), "float32")
    for operands in [(a, other), (other, a)]:
        with pytest.raises(TypeError, match=mentions("a", "b", "numpy")):
            getattr(alc, function)(*operands)


@pytest.mark.parametrize("function", PRODUCTS)
def test_mixed_devices(function):
    strict = make_backend("strict").xp
    a, b = (strict.ones((3, 3), device=strict.Device(d)) for d in ("device1", "device2"))
    with pytest.raises(ValueError, match=r"(?s)(?=.*device1)(?=.*device2)"):
        getattr(alc, function)(a, b)


def test_mixed_libraries_and_dtypes_in_a_chain(torch_backend):
    transitions = torch_backend.asarray(ones(4, 3, 3))
    in_transform = torch_backend.xp.func.vmap(lambda x: chain(x, transitions=ones(4, 3, 3)))
    for f in (lambda x: chain(transitions=transitions), in_transform):
        with pytest.raises(TypeError, match=mentions("log_potentials", "transitions", "torch")):
            f(torch_backend.asarray(ones(2, 5, 3)))
    with pytest.raises(TypeError, match=mentions("log_potentials", "transitions", "torch")):
        chain(transitions=torch_backend.xp.ones((4, 3, 3), dtype=torch_backend.xp.int64))


WORKSPACE_CALLS = {
    **{f: lambda w, f=f: getattr(alc, f)(ones(2, 2), ones(2, 2), workspace=w) for f in PRODUCTS},
    "logchainexp": lambda w: alc.logchainexp(ones(3, 2, 2), workspace=w),
    "LogChain": lambda w: chain(transitions=ones(4, 3, 3), workspace=w),
}


@pytest.mark.parametrize("call", list(WORKSPACE_CALLS))
@pytest.mark.parametrize("workspace", [1048575, 1, 0, -5])
def test_small_workspace(call, workspace):
    with pytest.raises(ValueError, match=mentions("workspace", "1048576", workspace)):
        WORKSPACE_CALLS[call](workspace)


@pytest.mark.parametrize(
    ("value", "error", "words"),
    [
        ([], ValueError, ["matrices"]),
        ((), ValueError, ["matrices"]),
        (1.5, TypeError, ["matrices", "float"]),
        (None, TypeError, ["matrices", "NoneType"]),
        ([ones(2, 2), [[1.0]]], TypeError, ["list"]),
        ([ones(2, 3), ones(4, 2)], ValueError, ["matrices", "(4, 2)", 3]),
        ([ones(2, 3, 3), ones(4, 3, 3)], ValueError, ["(2, 3, 3)", "(4, 3, 3)"]),
        ([ones(2, 2), ones(2, 2), np.ones((2, 2), int)], TypeError, ["int64"]),
        ([ones(2, 2), np.ones((2, 2), int), ones(2, 2)], TypeError, ["matrices", "1", "int64"]),
        (np.ones((3, 2, 2), int), TypeError, ["matrices", "int64"]),
        (ones(3, 2, 4), ValueError, ["matrices", "(3, 2, 4)"]),
        (ones(2, 2), ValueError, ["matrices", "(2, 2)"]),
        ([ones(2, 2), ones(2)], ValueError, ["(2,)"]),
    ],
    ids=str,
)
def test_logchainexp(value, error, words):
    with pytest.raises(error, match=mentions(*words)):
        alc.logchainexp(value)


P, one, two = ones(4, 3, 3), ones(3), ones(2, 5, 3)
SWAPPED = "[..., 5, 3], their last two axes swapped"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, ["transitions", "log_transitions"]),
        ({"transitions": P, "log_transitions": P}, ["transitions", "log_transitions"]),
        ({"transitions": P, "initial": one, "log_initial": one}, ["initial", "log_initial"]),
        ({"transitions": P, "final": one, "log_final": one}, ["log_final", "both"]),
        ({"x": ones(0, 3), "transitions": ones(1, 3, 3)}, ["log_potentials", "(0, 3)"]),
        ({"x": ones(2, 0, 3)}, ["log_potentials", "(2, 0, 3)"]),
        ({"x": ones(3), "transitions": ones(1, 3, 3)}, ["log_potentials", "(3,)"]),
        ({"x": np.float64(1.0) * ones()}, ["log_potentials", "()"]),
        ({"transitions": ones(3, 3, 3)}, ["transitions", "(3, 3, 3)", "4"]),
        ({"transitions": ones(5, 3, 3)}, ["transitions", "(5, 3, 3)", "4"]),
        ({"transitions": ones(0, 3, 3)}, ["transitions", "(0, 3, 3)", "4"]),
        ({"transitions": ones(4, 3, 2)}, ["transitions", "(4, 3, 2)"]),
        ({"transitions": ones(4, 2, 2)}, ["transitions", "(4, 2, 2)", "3"]),
        ({"transitions": ones(2, 2)}, ["transitions", "(2, 2)", "[3, 3]"]),
        ({"transitions": ones(3, 2)}, ["transitions", "(3, 2)", "[3, 3]"]),
        ({"log_transitions": ones(3, 3, 3)}, ["log_transitions", "(3, 3, 3)", "4"]),
        ({"log_transitions": ones(3)}, ["log_transitions", "(3,)"]),
        ({"transitions": ones(4, 3, 3), "initial": ones(2)}, ["initial", "(2,)", "3"]),
        ({"transitions": ones(4, 3, 3), "initial": ones()}, ["initial", "()"]),
        ({"transitions": ones(3, 3), "final": ones(2)}, ["final", "(2,)", "3"]),
        ({"x": two, "transitions": P, "final": ones(4, 3)}, ["log_potentials", "final", 2, 4]),
        ({"x": two, "transitions": ones(4, 4, 3, 3)}, ["log_potentials", "transitions", 2, 4]),
        ({"x": ones(5, 0), "transitions": ones(0, 0)}, ["log_potentials", "(5, 0)"]),
        ({"x": ones(3, 5), "transitions": ones(3, 3)}, ["transitions", "[5, 5]", SWAPPED]),
        ({"x": ones(7, 3, 5), "initial": one}, [SWAPPED]),
        ({"x": ones(7, 5, 3), "transitions": ones(7, 3, 3)}, ["is [7, 1, 3, 3]"]),
        ({"transitions": -ones(3, 3)}, ["log_transitions"]),
        ({"transitions": ones(3, 3), "lengths": 0}, ["lengths must be from 1 to T = 5, got 0"]),
        ({"x": two, "transitions": P, "lengths": [5, 2000]}, ["got 2000"]),
        ({"transitions": ones(3, 3), "lengths": [2, 3]}, ["lengths", "()"]),
        ({"transitions": ones(4, 3, 3), "log_initial": ones(4)}, ["log_initial", "(4,)", "3"]),
        ({"x": two, "transitions": P, "initial": ones(4, 3)}, ["log_potentials", "initial", 2, 4]),
        ({"x": ones(2, 5, 0), "transitions": ones(0, 0)}, ["log_potentials", "(2, 5, 0)"]),
        ({"x": ones(5, 1, 3), "lengths": [2, 3]}, ["lengths", (2,), (5,)]),
        ({"transitions": P, "lengths": [2, 3]}, ["got shape (2,)", "padded to [n, T, K]"]),
        ({"transitions": P, "workers": 0}, ["workers must be at least 1, got 0"]),
        (
            {"transitions": P, "workspace": 100},
            ["workspace must be at least 1048576 bytes, got 100"],
        ),
    ],
    ids=str,
)
def test_chain_shapes_and_options(options, words):
    """The constructor raises for a chain that cannot be solved."""
    with pytest.raises(ValueError, match=mentions(*words)):
        alc.LogChain(options.get("x", ones(5, 3)), **{n: v for n, v in options.items() if n != "x"})


@pytest.mark.parametrize("name", ["log_potentials", "transitions", "initial", "log_final"])
@pytest.mark.parametrize("kind", ["complex128", "<U3", "object"])
def test_chain_arguments_that_are_no_real_arrays(name, kind):
    arguments = {"log_potentials": ones(5, 3), "transitions": ones(4, 3, 3)}
    arguments.setdefault(name, ones(3))
    arguments[name] = arguments[name].astype(kind)
    with pytest.raises(TypeError, match=mentions(name)):
        chain(arguments.pop("log_potentials"), **arguments)
    if name != "log_potentials":
        arguments[name] = arguments[name].tolist()
        if kind != "object":  # which makes a list of numbers
            with pytest.raises(TypeError, match=mentions(name, "list", "real numbers")):
                chain(**arguments)


@pytest.mark.parametrize("kind", ["list", "tuple", "int64", "uint8", "bool"])
def test_lists_integers_and_bools_are_arrays_like_the_potentials(backend, dtype, kind):
    """This holds for all arguments but the potentials."""
    x = np.log([[0.5, 0.25], [0.75, 1.0], [0.5, 0.5]])
    small = {"transitions": [[1, 1], [0, 1]], "initial": [1, 0], "final": [1, 1]}
    potentials = backend.asarray(x, dtype)

    def made(values):
        if kind in ("list", "tuple"):
            return values if kind == "list" else tuple(values)
        return backend.asarray(values, kind)

    options = {name: made(values) for name, values in small.items()}
    arguments = {name: backend.asarray(np.asarray(v, float), dtype) for name, v in small.items()}
    chains = (alc.LogChain(potentials, **arrays, lengths=3) for arrays in (options, arguments))
    result, expected = (chain.log_partition() for chain in chains)
    assert result.dtype == expected.dtype
    assert backend.to_numpy(result) == backend.to_numpy(expected)
    states = alc.LogChain(potentials, **options).log_weight([0, 1, 1])
    assert np.isfinite(backend.to_numpy(states))


def unreadable_tensors(torch, grad):
    """Return tensors that are not dense or have no values, each with words of its error."""
    x = torch.ones(2, 2)
    with importlib.import_module("torch._subclasses").FakeTensorMode():
        fake = torch.ones(2, 2, requires_grad=grad)
    masked = torch.masked.masked_tensor(x, x > 0, requires_grad=grad)
    yield torch.ones(2, 2, device="meta", requires_grad=grad), ("one on the meta device",)
    yield fake, ("a fake tensor", "torch.export")
    yield masked, ("a masked tensor", "to_tensor")
    yield x.to_sparse().requires_grad_(grad), ("sparse_coo", "to_dense")
    yield x.to_sparse_csr().requires_grad_(grad), ("sparse_csr", "to_dense")
    for layout in (torch.strided, torch.jagged):
        nested = torch.nested.nested_tensor([x, x], layout=layout, requires_grad=grad)
        yield nested, ("a nested tensor", "to_padded_tensor")


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors:UserWarning")
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
@pytest.mark.parametrize("grad", [False, True])
def test_tensors_that_cannot_be_read_are_named(torch_backend, grad):
    for x, words in unreadable_tensors(torch_backend.xp, grad):
        needed = "must be a dense tensor with values, got"
        for function in (alc.matmul, alc.logmatmulexp, alc.maxplus_matmul):
            with pytest.raises(ValueError, match=mentions(f"a {needed}", *words)):
                function(x, x)
        with pytest.raises(ValueError, match=mentions(f"log_potentials {needed}", *words)):
            alc.LogChain(x, transitions=torch_backend.xp.ones(2, 2))


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_what_vmap_hides(torch_backend):
    """Lengths, states and plans depend on values."""
    vmap, x = torch_backend.xp.func.vmap, torch_backend.asarray(ones(4, 5, 3))
    integers = torch_backend.xp.ones(4, 5, dtype=torch_backend.xp.int64)
    P = torch_backend.asarray(ones(3, 3))
    for error, word, call in (
        (NotImplementedError, "lengths", lambda x, n: chain(x, transitions=P, lengths=n[0])),
        (NotImplementedError, "states", lambda x, n: alc.LogChain(x, transitions=P).log_weight(n)),
        (ValueError, "log_potentials", lambda x, n: alc.LogChain(x, transitions=P).plan()),
    ):
        with pytest.raises(error, match=mentions(word, "outside of")):
            vmap(call)(x, integers)
    with pytest.raises(NotImplementedError, match=mentions("states", "vmap")):
        vmap(lambda n: alc.LogChain(x[0], transitions=P).log_weight(n))(integers)


def test_jax():
    jax = pytest.importorskip("jax")
    x = jax.numpy.ones((2, 2))
    with pytest.raises(TypeError, match=mentions("a", "traced by JAX")):
        jax.jit(alc.logmatmulexp)(x, x)
    with pytest.raises(TypeError, match=mentions("a", "bfloat16", "float32")):
        alc.logmatmulexp(x.astype("bfloat16"), x)


def test_pullbacks_name_the_function_that_was_called(torch_backend):
    dask = pytest.importorskip("dask.array")
    x, torch = dask.ones((2, 2)), torch_backend.xp
    t = torch.ones(2, 2, requires_grad=True)
    for name in ("matmul", "logmatmulexp", "maxplus_matmul"):
        with pytest.raises(TypeError, match=rf"must be in memory for vjp\.{name},"):
            getattr(alc.vjp, name)(x, x)
        with pytest.raises(NotImplementedError, match=rf"call arraylogchain\.{name},"):
            getattr(alc.vjp, name)(t, t)
    with pytest.raises(TypeError, match=r"must be in memory for vjp\.logchainexp,"):
        alc.vjp.logchainexp([x[x[:, 0] > 0], x])  # of unknown size
    with pytest.raises(NotImplementedError, match=mentions("cotangent", "detach")):
        alc.vjp.matmul(t.detach(), t.detach())[1](t)


def test_plans_are_of_methods():
    for name in ("value_and_pullback", "last_message", "solve"):
        with pytest.raises(ValueError, match=mentions("operation", name, "log_partition")):
            alc.LogChain(ones(5, 3), transitions=ones(3, 3)).plan(name)
    with pytest.raises(ValueError, match=mentions("expected_transitions", "log_transitions")):
        alc.LogChain(ones(1, 3)).plan("expected_transitions")


def negative(*shape):
    x = ones(*shape)
    x[-1, ...] = -0.5
    return x


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("transitions", negative(3, 3)),
        ("transitions", negative(4, 3, 3)),
        ("initial", negative(3)),
        ("final", negative(2, 3)),
    ],
)
@pytest.mark.parametrize("kind", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("library", ["numpy", "torch", "torch with gradients"])
def test_negative_weights(name, value, kind, library):
    arguments = {"log_potentials": ones(5, 3), "transitions": ones(3, 3), name: value}
    backend = make_backend(library.partition(" ")[0])
    if kind not in backend.dtypes:
        pytest.skip("NumPy has no bfloat16")
    arrays = {key: backend.asarray(x, kind) for key, x in arguments.items()}
    if "gradients" in library:
        arrays[name].requires_grad_()
    with pytest.raises(ValueError, match=mentions(name, f"log_{name}", "negative")):
        alc.LogChain(**arrays)
    arguments.pop(name)
    arguments = {**arguments, f"log_{name}": value}
    assert np.isfinite(chain(arguments.pop("log_potentials"), **arguments)).all()


MOST = (2**63 - 1) // 8 // 15


@pytest.mark.parametrize(
    ("method", "value", "text"),
    [
        ("sample", 2**70, f"num_samples must be at most {MOST}, got {2**70}"),
        ("sample", -1, "num_samples must be at least 0, got -1"),
        ("best_paths", 2**70, f"num_paths must be at most {MOST}, got {2**70}"),
        ("best_paths", 0, "num_paths must be at least 1, got 0"),
        ("best_paths", 2.0, "num_paths must be an integer, got float"),
        ("best_paths", np.array(2.5), "num_paths must be an integer, got ndarray"),
        ("best_paths", np.array(True), "num_paths must be an integer, got ndarray"),
    ],
)
@pytest.mark.parametrize("library", ["numpy", "dask"])
def test_numbers_of_samples_and_paths(library, method, value, text):
    x = ones(3, 5, 3)
    if library == "dask":
        x = pytest.importorskip("dask.array").from_array(x)
    with pytest.raises((TypeError, ValueError), match=text):
        getattr(alc.LogChain(x, transitions=ones(3, 3)), method)(value)


def test_what_no_row_reads_may_be_negative():
    weights = ones(2, 4, 3, 3)
    weights[0, 2:], weights[1, 3:] = -1.0, np.nan
    x = ones(2, 5, 3)
    good = alc.LogChain(x, transitions=weights, lengths=[3, 4]).log_partition()
    assert np.all(np.isfinite(good))
    with pytest.raises(ValueError, match=mentions("transitions", "log_transitions")):
        alc.LogChain(x, transitions=weights, lengths=[4, 4])
    alc.LogChain(x, transitions=-ones(3, 3), lengths=1)
    alc.LogChain(x[:, :1], transitions=-ones(3, 3))
    with pytest.raises(ValueError, match=mentions("transitions", "log_transitions")):
        alc.LogChain(x, transitions=-ones(3, 3), lengths=[1, 2])
    weights[1, 0, 0, 0] = -1.0  # next to NaN
    with pytest.raises(ValueError, match=mentions("transitions", "log_transitions")):
        alc.LogChain(x, transitions=weights, lengths=[3, 4])


class Lazy:
    """An array of a library with a namespace, but without values that can be read, as in Dask."""

    device = "cpu"

    def __init__(self, *shape):
        self.shape, self.ndim, self.dtype = shape, len(shape), np.dtype("float64")

    def __array_namespace__(self, api_version=None):
        return types.ModuleType("lazy")


@pytest.mark.parametrize("function", [*PRODUCTS, "logchainexp", "LogChain"])
def test_libraries_that_cannot_be_computed_with(function):
    name, operands, options = {
        "logchainexp": ("matrices", [Lazy(2, 3, 3)], {}),
        "LogChain": ("log_potentials", [Lazy(3, 2)], {"transitions": Lazy(1, 2, 2)}),
    }.get(function, ("a", [Lazy(3, 3), Lazy(3, 3)], {}))
    with pytest.raises(TypeError, match=mentions(name, "Lazy", "supported", "np.asarray")):
        getattr(alc, function)(*operands, **options)


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        (lambda x, P: alc.LogChain(x, P), ["positional"]),
        (lambda x, P: alc.LogChain(x, transition=P), ["transition"]),
        (lambda x, P: alc.LogChain(x, transitions=P, device="cuda"), ["device"]),
        (lambda x, P: alc.LogChain(None, transitions=P), ["log_potentials", "NoneType", "array"]),
        (lambda x, P: alc.LogChain([x, x[1:]], transitions=P), ["log_potentials", "padded"]),
        (lambda x, P: alc.LogChain(x, transitions=[[1.0, 1.0], [1.0]]), ["transitions", "list"]),
        (lambda x, P: chain(x, transitions=P, lengths=np.ma.array(2)), ["lengths", "masked"]),
    ],
)
def test_mistakes_of_newcomers(mistake, words):
    with pytest.raises(TypeError, match=mentions(*words)):
        mistake(ones(5, 3), ones(3, 3) / 3)


def test_the_signature_names_all_arguments():
    names = tuple(inspect.signature(alc.LogChain).parameters)
    assert names == (*ARGUMENTS, "lengths", "workspace", "workers")
