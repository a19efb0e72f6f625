"""Derivatives of chains of torch tensors: autograd, forward mode, transforms."""

import importlib
import weakref

import numpy as np
import pytest

import arraylogchain as alc
from arraylogchain import _chains as array_chains

# torch 2.13 warns of its own code when forward mode is first used.
pytestmark = [
    pytest.mark.chains,
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
]

# Shapes of log potentials, transitions, initial and final weights.
SHAPES = {
    "one chain": ((3, 2), (2, 2, 2), (2,)),
    "final weights": ((2, 3, 2), (2, 2), (2,), (2, 2)),
    "one matrix": ((2, 3, 2), (1, 2, 2), (2,)),
    "rows share potentials": ((1, 3, 2), (4, 2, 2, 2), None),
    "batch of initial weights": ((2, 3, 2), (1, 1, 2, 2), (4, 1, 2)),
    "one step": ((1, 2), None, (3, 2)),
    "unused matrix": ((1, 2), (1, 2, 2), None),
}
INF = float("inf")
chains = pytest.mark.parametrize("shapes", SHAPES.values(), ids=list(SHAPES))
linear_and_logs = pytest.mark.parametrize("logs", [False, True], ids=["linear", "logs"])


@pytest.fixture
def torch(torch_backend):
    return torch_backend.xp


def arguments(torch, shapes, logs, grad=True, dtype="float64", seed=0):
    """Return the arguments of a chain by name."""
    rng = np.random.default_rng(seed)
    prefix = "log_" if logs else ""
    names = ("log_potentials", f"{prefix}transitions", f"{prefix}initial", f"{prefix}final")
    arrays = {}
    for name, shape in zip(names, shapes, strict=False):
        if shape is not None:
            x = rng.normal(size=shape)
            x = x if name.startswith("log_") else np.exp(x)
            arrays[name] = torch.from_numpy(x).to(getattr(torch, dtype)).requires_grad_(grad)
    return arrays


def method(name, arrays):
    """Return a method of `LogChain` as a function of its arguments by position."""

    def call(*args):
        return getattr(alc.LogChain(**dict(zip(arrays, args, strict=True))), name)()

    return call


def written(torch, arrays):
    """Return log Z computed from linear weights; valid for moderate ranges."""

    def call(*args):
        values = dict(zip(arrays, args, strict=True))
        for name in ("transitions", "initial", "final"):
            if f"log_{name}" in values:
                values[name] = values[f"log_{name}"].exp()
        weights = values["log_potentials"].exp()
        state = weights[..., 0, :]
        if "initial" in values:
            state = state * values["initial"]
        matrices = values.get("transitions")
        for step in range(1, weights.shape[-2]):
            matrix = matrices
            if matrices.ndim > 2:
                matrix = matrices[..., min(step, matrices.shape[-3]) - 1, :, :]
            state = (state[..., None, :] @ matrix)[..., 0, :] * weights[..., step, :]
        total = (state * values["final"] if "final" in values else state).sum(-1)
        return torch.where(total == 0, -INF, torch.where(total == 0, 1, total).log())

    return call


# Differentiable methods of a chain.
OPERATIONS = ["log_partition", "marginals", "expected_transitions", "posterior", "filtered"]
OPERATIONS += ["entropy", "forward_messages", "backward_messages", "log_weight", "log_probability"]
OF_PATHS = ("log_weight", "log_probability")
ONLY_BACKWARD = ("entropy",)
TWICE = ("log_partition", *OF_PATHS, "forward_messages", "backward_messages")
operations = pytest.mark.parametrize("name", OPERATIONS)


def parts_of(out):
    """Return the tensors of a result, 0 where they are infinite."""
    parts = (x for x in (out if isinstance(out, tuple) else (out,)) if x is not None)
    return tuple(x.masked_fill(x.isinf(), 0) for x in parts)


def operation(name, make, arrays):
    """Return an operation's results as a function of tensors by position, and without autograd."""
    detached = make(**{n: x.detach() for n, x in arrays.items()})
    # Rows with NaN weights have states of -1.
    states = [detached.sample(2, rng=0).clamp(min=0)] if name in OF_PATHS else []

    def call(*args):
        chain = make(**dict(zip(arrays, args, strict=True)))
        return parts_of(getattr(chain, name)(*states))

    return call, parts_of(getattr(detached, name)(*states))


def check_derivatives(torch, name, make, arrays, fwd_over_rev=True):
    f, plain = operation(name, make, arrays)
    args = tuple(arrays.values())
    torch.testing.assert_close(tuple(x.detach() for x in f(*args)), plain)
    assert torch.autograd.gradcheck(f, args, check_forward_ad=name not in ONLY_BACKWARD)
    if name in TWICE:
        also = {"check_fwd_over_rev": fwd_over_rev and name == "log_partition"}
        assert torch.autograd.gradgradcheck(f, args, **also)


# Properties of log weights are tested by test_lengths too, for every operation.
IN_LOGS = [pytest.param(name, True, marks=pytest.mark.exhaustive) for name in OPERATIONS[1:]]
EVERY_FORM = [*((name, False) for name in OPERATIONS), ("log_partition", True), *IN_LOGS]


@pytest.mark.parametrize(("name", "logs"), EVERY_FORM)
@chains
def test_derivatives(torch, shapes, logs, name):
    """All operations have derivatives in both modes, also if they are gradients themselves."""
    if name == "expected_transitions" and shapes[1] is None:
        pytest.skip("there are none")
    check_derivatives(torch, name, alc.LogChain, arguments(torch, shapes, logs))


@pytest.mark.parametrize(("kind", "weight"), [("float32", 1e-37), ("float64", 1e-307)])
def test_counts_beside_gradients_that_overflow(torch, kind, weight):
    """The gradient is count / weight, beyond the range of the dtype."""
    T = 2001
    arrays = arguments(torch, ((T, 1), (1, 1, 1), None), logs=False, dtype=kind)
    with torch.no_grad():
        arrays["transitions"].fill_(weight)
    counts = alc.LogChain(**arrays).expected_transitions()
    torch.testing.assert_close(counts, torch.full_like(counts, T - 1))


@linear_and_logs
def test_posterior_takes_one_pass(torch, monkeypatch, logs):
    """One pass computes all results that values or gradients need."""
    arrays, passes = arguments(torch, SHAPES["one matrix"], logs), []
    for name in ("value_and_pullback", "posterior", "marginals", "expected_transitions"):
        compute = getattr(array_chains.marginals, name)
        counted = lambda *args, f=compute: passes.append(1) or f(*args)  # noqa: E731
        monkeypatch.setattr(array_chains.marginals, name, counted)
    result = alc.LogChain(**arrays).posterior()
    assert len(passes) == 1
    monkeypatch.undo()
    plain = alc.LogChain(**{name: x.detach() for name, x in arrays.items()}).posterior()
    for x, expected in zip(result, plain, strict=True):
        torch.testing.assert_close(x.detach(), expected)


@pytest.mark.parametrize(
    "name", ["one chain", "one matrix", "rows share potentials", "final weights"]
)
@linear_and_logs
def test_transforms(torch, name, logs):
    func = torch.func
    arrays = arguments(torch, SHAPES[name], logs, grad=False)
    args = tuple(arrays.values())
    ours, theirs = method("log_partition", arrays), written(torch, arrays)
    torch.testing.assert_close(ours(*args).flatten(), theirs(*args).flatten())
    transforms = {
        "grad": func.grad,
        "hessian": func.hessian,
        "reverse over reverse": lambda f, argnums: func.jacrev(func.jacrev(f, argnums), argnums),
        "reverse over forward": lambda f, argnums: func.jacrev(func.jacfwd(f, argnums), argnums),
    }
    for transform in transforms.values():
        for argnum in range(len(args)):
            result = transform(lambda *x: ours(*x).sin().sum(), argnums=argnum)(*args)
            expected = transform(lambda *x: theirs(*x).sin().sum(), argnums=argnum)(*args)
            torch.testing.assert_close(result, expected)


@operations
@linear_and_logs
def test_vmap(torch, name, logs):
    """Values and gradients per sample, for whichever argument is mapped."""
    arrays = arguments(torch, SHAPES["final weights"], logs, grad=False)
    f, _ = operation(name, alc.LogChain, arrays)
    every = tuple(range(len(arrays)))
    gradient = torch.func.grad(lambda *args: sum(x.sin().sum() for x in f(*args)), argnums=every)
    for mapped in every:
        args = list(arrays.values())
        rows = [args[mapped] * scale for scale in (1, 0.5, 2)]
        args[mapped] = torch.stack(rows, -1)
        in_dims = tuple(-1 if i == mapped else None for i in every)
        for g in (f, gradient):
            result = torch.func.vmap(g, in_dims)(*args)
            each = [g(*args[:mapped], row, *args[mapped + 1 :]) for row in rows]
            expected = tuple(torch.stack(parts) for parts in zip(*each, strict=True))
            torch.testing.assert_close(result, expected)


def test_repeated_backward_and_changes_in_place(torch):
    arrays = arguments(torch, SHAPES["one matrix"], logs=False)
    moved = arrays["transitions"] * 1
    z = alc.LogChain(arrays["log_potentials"], transitions=moved).log_partition().sum()
    first = torch.autograd.grad(z, arrays["transitions"], retain_graph=True)
    again = torch.autograd.grad(z, arrays["transitions"], retain_graph=True)
    torch.testing.assert_close(again, first)
    moved.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.backward()


def test_layouts(torch):
    base = arguments(torch, ((4, 3, 5), (1, 3, 3), None), logs=True)
    for view in (lambda x: x.mT, lambda x: x[:1].mT.expand(6, 5, 3), lambda x: x.flip(0)[::2].mT):
        arrays = base | {"log_potentials": view(base["log_potentials"])}
        args = tuple(arrays.values())
        ours = method("log_partition", arrays)(*args).sin().sum()
        theirs = written(torch, arrays)(*args).sin().sum()
        leaves = tuple(base.values())
        result, expected = (torch.autograd.grad(x, leaves) for x in (ours, theirs))
        torch.testing.assert_close(result, expected)


@pytest.mark.parametrize("kind", ["float32", "float16", "bfloat16"])
def test_dtypes_and_autocast(torch, kind):
    arrays = arguments(torch, ((4, 6, 3), (1, 3, 3), None), logs=False, dtype="float32")
    x = arrays["log_potentials"].detach().to(getattr(torch, kind)).requires_grad_()
    P = arrays["transitions"]

    def gradients():
        z = alc.LogChain(x, transitions=P).log_partition()
        return z, *torch.autograd.grad(z.sum(), (x, P))

    plain = gradients()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(gradients(), plain, rtol=0, atol=0)
    z, x_gradient, P_gradient = plain
    assert (z.dtype, x_gradient.dtype, P_gradient.dtype) == (torch.float32, x.dtype, torch.float32)
    wide = [y.detach().double().requires_grad_() for y in (x, P)]
    names = ("log_potentials", "transitions")
    written(torch, dict(zip(names, wide, strict=True)))(*wide).sum().backward()
    tolerance = dict.fromkeys(("rtol", "atol"), 1e-05 if kind == "float32" else 0.01)
    torch.testing.assert_close(x_gradient.double(), wide[0].grad, **tolerance)
    torch.testing.assert_close(P_gradient.double(), wide[1].grad, rtol=1e-5, atol=1e-5)


def test_zeros_of_linear_transitions(torch):
    """A transition of weight 0 has first and second derivatives."""
    arrays = arguments(torch, ((2, 4, 3), (1, 3, 3), (3,)), logs=False)
    with torch.no_grad():
        arrays["transitions"][0, 1] = torch.tensor([0.0, 0.0, 1.0])
        arrays["initial"][0] = 0
    args = tuple(arrays.values())
    ours, theirs = method("log_partition", arrays), written(torch, arrays)
    for f in (lambda h: torch.func.grad(h, argnums=(0, 1, 2)), lambda h: torch.func.hessian(h, 1)):
        results = [f(lambda *x, h=h: h(*x).sin().sum())(*args) for h in (ours, theirs)]
        torch.testing.assert_close(*results)
    assert (torch.autograd.grad(ours(*args).sum(), args[1])[0][0, 1, :2] > 0).all()


def test_counts_have_derivatives_by_zeros(torch):
    """Counts of a first state of weight 0 are 0, but depend on its weight."""
    arrays = arguments(torch, ((2, 2), (1, 2, 2), (2,)), logs=False, grad=False)
    arrays["initial"][0] = 0
    x, P, initial = arrays.values()

    def expected(initial):
        return P * torch.func.grad(written(torch, arrays), argnums=1)(x, P, initial)

    result = torch.func.jacrev(lambda y: method("expected_transitions", arrays)(x, P, y))(initial)
    torch.testing.assert_close(result, torch.func.jacrev(expected)(initial))


@linear_and_logs
def test_minus_infinity(torch, logs):
    """Rows without a path, and states that are ruled out, have zeros and never NaN."""
    arrays = arguments(torch, ((3, 4, 3), (1, 3, 3), (3,)), logs, grad=False)
    x, P = arrays["log_potentials"], arrays["log_transitions" if logs else "transitions"]
    x[0, 2] = -INF
    x[1, 1:, 0] = -INF
    P[0, 2, 0] = P[0, 1, 2] = -INF if logs else 0.0
    for value in arrays.values():
        value.requires_grad_()
    args = tuple(arrays.values())
    z = method("log_partition", arrays)(*args)
    assert z[0] == -INF
    expected = torch.autograd.grad(written(torch, arrays)(*args)[1:].sin().sum(), args)
    # Cotangents of the row without paths have no effect.
    ours = torch.autograd.grad(z, args, torch.cat((z[:1] * 0 + 3, z[1:].cos())), create_graph=True)
    for grad, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(grad, torch.nan_to_num(other))
    assert (ours[0][x.isinf()] == 0).all()
    seconds = torch.autograd.grad(ours, args, [torch.ones_like(y) for y in ours])
    primals, ones = tuple(y.detach() for y in args), tuple(torch.ones_like(y) for y in args)
    _, tangent = torch.func.jvp(method("log_partition", arrays), primals, ones)
    for y in (*seconds, tangent):
        assert torch.isfinite(y).all()
    assert tangent[0] == 0
    assert (seconds[0][0] == 0).all()
    assert (method("marginals", arrays)(*args)[0] == 0).all()


def test_wide_ranges(torch):
    """First derivatives are right on any range; second ones raise where they cannot be."""
    x = torch.tensor([[0, -400.0]] * 2 + [[0, 200]] * 4, dtype=torch.float64, requires_grad=True)
    identity = torch.eye(2, dtype=torch.float64)[None].log()

    def log_z(x):
        return alc.LogChain(x, log_transitions=identity).log_partition()

    # Both paths stay in one state, with the same weight; the reference loses one.
    (grad,) = torch.autograd.grad(log_z(x), x, create_graph=True)
    torch.testing.assert_close(grad, torch.full_like(grad, 0.5))
    with pytest.raises(FloatingPointError, match="range too widely"):
        torch.autograd.grad(grad.sin().sum(), x)
    with pytest.raises(FloatingPointError, match="range too widely"):
        torch.func.jvp(log_z, (x.detach(),), (torch.ones_like(x),))


@pytest.mark.parametrize("scale", [1e-300, 1e308])
def test_second_derivatives_of_large_and_small_weights(torch, scale):
    """A factor of all transitions adds to the value, and changes no derivative."""
    arrays = arguments(torch, ((2, 4, 3), (1, 3, 3), None), logs=False, grad=False)
    x, P = arrays.values()
    P = P / P.max()

    def product(P):
        """Return a product with the matrix of second derivatives."""
        f = lambda x: alc.LogChain(x, transitions=P).log_partition().sum()  # noqa: E731
        return torch.func.jvp(torch.func.grad(f), (x,), (x.cos(),))[1]

    torch.testing.assert_close(product(P * scale), product(P))


def test_second_derivatives_of_what_nearly_underflows(torch):
    """Squares of weights would underflow."""
    final = torch.tensor([-400, 0], dtype=torch.float64)
    x = torch.tensor([[0, -400]], dtype=torch.float64)
    hessian = torch.func.hessian(lambda x: alc.LogChain(x, log_final=final).log_partition())(x)
    torch.testing.assert_close(
        hessian[0, :, 0], torch.tensor([[0.25, -0.25], [-0.25, 0.25]]) + 0 * x
    )
    assert not torch.func.hessian(lambda x: alc.LogChain(x).forward_messages())(x).any()


def test_infinite_weights_have_no_second_derivatives(torch):
    arrays = arguments(torch, ((2, 4, 3), (1, 3, 3), None), logs=True, grad=False)
    arrays["log_potentials"][1, 2, 0] = INF
    arrays["log_potentials"].requires_grad_()
    z = alc.LogChain(**arrays).log_partition()
    (grad,) = torch.autograd.grad(z.sum(), arrays["log_potentials"], create_graph=True)
    assert (grad[1] == 0).all()
    with pytest.raises(FloatingPointError, match="infinite or range too widely"):
        grad.sin().sum().backward()


@linear_and_logs
def test_no_derivative_expands_shared_matrices(torch, logs):
    rows, T, K = 50, 4, 20
    arrays = arguments(torch, ((rows, T, K), (T - 1, K, K), (K,)), logs)
    args = tuple(arrays.values())
    largest = 0

    class Sizes(importlib.import_module("torch.utils._python_dispatch").TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for x in out if isinstance(out, (tuple, list)) else (out,):
                if isinstance(x, torch.Tensor):
                    largest = max(largest, x.untyped_storage().nbytes() // x.element_size())
            return out

    f = method("log_partition", arrays)
    with Sizes():
        first = torch.autograd.grad(f(*args).sin().sum(), args, create_graph=True)
        torch.autograd.grad([x.sin().sum() for x in first], args)
        torch.func.jvp(f, tuple(x.detach() for x in args), args)
    assert rows * T * K <= largest < rows * K * K


@operations
def test_derivatives_of_no_rows_are_empty(torch, name):
    arrays = arguments(torch, ((0, 3, 2), (0, 1, 2, 2), (0, 2)), logs=False)
    f, _ = operation(name, alc.LogChain, arrays)
    total = sum(x.sum() for x in f(*arrays.values()))
    gradients = torch.autograd.grad(total, tuple(arrays.values()), materialize_grads=True)
    assert [x.shape for x in gradients] == [x.shape for x in arrays.values()]


def test_what_is_refused(torch):
    arrays = arguments(torch, SHAPES["one matrix"], logs=True)
    chain = alc.LogChain(**arrays)
    z = chain.log_partition().sum()
    (first,) = torch.autograd.grad(z, arrays["log_potentials"], create_graph=True)
    (second,) = torch.autograd.grad(first.sin().sum(), arrays["log_potentials"], create_graph=True)
    with pytest.raises(NotImplementedError, match="third derivatives of log_partition"):
        second.sum().backward()
    with pytest.raises(NotImplementedError, match=r"vjp\.log_partition, .* chain's log_partition"):
        alc.vjp.log_partition(chain)
    for name in ("viterbi", "sample"):
        with pytest.raises(ValueError, match=r"log_potentials .* outside of torch\.func"):
            torch.func.vmap(lambda x, name=name: method(name, {"log_potentials": x})(x))(
                torch.zeros(2, 1, 3)
            )


def test_paths_need_no_gradient(torch):
    chain = alc.LogChain(**arguments(torch, SHAPES["one matrix"], logs=True))
    path, samples = chain.best_paths(2), chain.sample(2, rng=0)
    assert not chain.viterbi().log_weight.requires_grad
    assert not path.log_weight.requires_grad
    assert not samples.requires_grad
    assert chain.log_weight(path.states).requires_grad


def test_states_are_let_go_after_backward(torch, monkeypatch):
    """Residuals of a value live as long as its graph."""
    references, compute = [], array_chains.marginals.value_and_pullback

    def watched(*args):
        value, pullback = compute(*args)

        def watched_pullback(*args):
            return pullback(*args)

        references.append(weakref.ref(watched_pullback))
        return value, watched_pullback

    monkeypatch.setattr(array_chains.marginals, "value_and_pullback", watched)
    x = torch.randn(4, 7, 3, dtype=torch.float64, requires_grad=True)
    value = alc.LogChain(x, transitions=torch.rand(1, 3, 3, dtype=torch.float64)).log_partition()
    (first,) = torch.autograd.grad(value.sum(), x, retain_graph=True)
    (second,) = torch.autograd.grad(value.sum(), x)
    assert torch.equal(first, second)
    assert len(references) == 1
    assert references[0]() is None


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_weight_beside_a_zero_is_unknown(torch_backend, value):
    torch = torch_backend.xp
    x = torch.zeros(2, 2)
    x[0, 0] = value
    options = {"transitions": torch.tensor([[[1.0, 0.0], [1.0, 1.0]]])}
    for chain in (alc.LogChain(y, **options) for y in (x, x.clone().requires_grad_())):
        assert chain.log_weight(torch.tensor([0, 1])).isnan()
        with pytest.raises(TypeError, match="states must hold integers, got dtype object"):
            chain.log_weight(None)


def test_vmap_over_gradients_of_a_value_outside_of_it(torch):
    arrays = arguments(torch, SHAPES["one matrix"], logs=False)
    args = tuple(arrays.values())
    z = method("log_partition", arrays)(*args)
    gradients = lambda g: torch.autograd.grad(z, args, g, retain_graph=True)  # noqa: E731
    cotangents = torch.randn(4, *z.shape, dtype=z.dtype)
    mapped = torch.func.vmap(gradients)(cotangents)
    for result, *expected in zip(mapped, *map(gradients, cotangents), strict=True):
        torch.testing.assert_close(result, torch.stack(expected))
