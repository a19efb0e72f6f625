"""Chains whose number of states changes from step to step, padded by `pad_states`."""

import itertools

import numpy as np
import pytest

import arraylogchain as alc
from tests.checks import mentions
from tests.pad_checks import Case
from tests.test_chain import normal, uniform

# torch 2.13 warns of its own code when forward mode is first used.
pytestmark = [
    pytest.mark.chains,
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
]

INF = np.inf
FORMS = [(False, False), (True, True), (False, True), (True, False)]


def arrays(sizes, x_batches=((),), edge_batches=((),), start_batch=(), logs=(False, False), sd=1.0):
    """Return potentials, transitions and initial weights; batch axes repeat from the first."""
    xs = [normal(*x_batches[i % len(x_batches)], n, sd=sd, seed=i) for i, n in enumerate(sizes)]
    edges = [
        uniform(*edge_batches[i % len(edge_batches)], m, n, seed=100 + i)
        for i, (m, n) in enumerate(itertools.pairwise(sizes))
    ]
    start = None if start_batch is None else uniform(*start_batch, sizes[0], seed=99)
    edges = [np.log(e) for e in edges] if logs[0] else edges
    return xs, edges, np.log(start) if logs[1] and start is not None else start


def check_all(case):
    case.check_sums()
    case.check_paths()


SIZES = {
    "growing": (1, 2, 3, 4),
    "shrinking": (4, 3, 2),
    "mixed": (2, 4, 1, 3, 1, 2),
    "equal": (3, 3, 3),
    "one step": (3,),
    "two steps": (2, 3),
    "one state": (1, 1),
}


@pytest.mark.parametrize("sizes", SIZES.values(), ids=list(SIZES))
@pytest.mark.parametrize("logs", FORMS[:2], ids=["linear", "logs"])
def test_sizes(np_backend, dtype, sizes, logs):
    check_all(Case(np_backend, dtype, *arrays(sizes, logs=logs), logs))


# Batch axes of potentials, of transitions (in turns), and of initial weights.
BATCHES = {
    "rows": ([(3,)], [()], ()),
    "some have rows": ([(3,), (), (1,)], [()], None),
    "matrices differ": ([(3,)], [(), (3,), (1,)], (3,)),
    "initial weights differ": ([()], [()], (3,)),
    "two axes": ([(2, 1), (3,), ()], [(), (2, 1)], (1, 3)),
    "no rows": ([(0,)], [()], ()),
}


@pytest.mark.parametrize("batches", BATCHES.values(), ids=list(BATCHES))
@pytest.mark.parametrize("logs", FORMS[:2], ids=["linear", "logs"])
def test_batch_axes(np_backend, dtype, batches, logs):
    check_all(Case(np_backend, dtype, *arrays((2, 4, 1, 3), *batches, logs=logs), logs))


@pytest.mark.parametrize("batches", ["some have rows", "matrices differ"])
@pytest.mark.parametrize("logs", FORMS[:2], ids=["linear", "logs"])
def test_elsewhere(backend, dtype, batches, logs):
    check_all(Case(backend, dtype, *arrays((2, 3, 1, 2), *BATCHES[batches], logs=logs), logs))


@pytest.mark.parametrize("logs", FORMS[2:], ids=["log initial", "log transitions"])
def test_lengths(backend, dtype, logs):
    given = arrays((2, 3, 1, 3), [(4,), ()], [(), (4,)], logs=logs)
    check_all(Case(backend, dtype, *given, logs, lengths=[4, 1, 3, 2]))


@pytest.mark.parametrize("logs", FORMS[:2], ids=["linear", "logs"])
def test_exact_zeros(backend, dtype, logs):
    """Zeros of the arrays beside those of states that there are not; one row has no path."""
    xs, edges, start = arrays((2, 4, 1, 3), [(3,)], logs=logs)
    closed = -INF if logs[0] else 0.0
    xs[1][0, 1] = xs[0][1, 1] = -INF
    xs[2][2] = -INF
    edges[0][0, :2] = closed
    edges[2][0, 1] = closed
    start[0] = closed
    check_all(Case(backend, dtype, xs, edges, start, logs))


@pytest.mark.parametrize("sd", [20, 400])
@pytest.mark.parametrize("logs", FORMS[:2], ids=["linear", "logs"])
def test_wide_ranges(np_backend, dtype, sd, logs):
    check_all(Case(np_backend, dtype, *arrays((2, 4, 1, 3), [(3,)], logs=logs, sd=sd), logs))


def test_half_precisions(backend, half):
    given = arrays((2, 4, 1, 3), [(3,)], [(), (3,)])
    Case(backend, half, *given).check_sums()


@pytest.mark.parametrize("sizes", [(2, 0, 3), (0, 2), (2, 0), (0, 0)])
def test_steps_without_states(backend, dtype, sizes):
    """There is no path through them."""
    case = Case(backend, dtype, *arrays(sizes, [(2,)]))
    case.check_padding()
    chain, T, K = case.chain, len(sizes), max(sizes)
    assert np.all(case.read(chain.log_partition()) == -INF)
    for name in ("marginals", "forward_messages", "backward_messages"):
        assert case.read(getattr(chain, name)()).shape == (2, T, K)
    assert not np.any(case.read(chain.marginals()))
    assert not np.any(case.read(chain.expected_transitions()))
    assert not np.any(case.read(chain.viterbi().states, "int64"))
    assert not np.any(case.read(chain.sample(2, np.random.default_rng(0)), "int64"))


@pytest.mark.parametrize("logs", FORMS[:2], ids=["linear", "logs"])
def test_equal_sizes_change_nothing(backend, dtype, logs):
    """Bit by bit, of arrays that are views of the ordinary chain's."""
    x, edges, start = normal(5, 6, 4), uniform(5, 4, 4), uniform(4)
    edges, start = (np.log(edges), np.log(start)) if logs[0] else (edges, start)
    prefix = "log_" if logs[0] else ""
    x, edges, start = (backend.asarray(a, dtype) for a in (x, edges, start))
    weights = {
        f"{prefix}transitions": [edges[i, ...] for i in range(5)],
        f"{prefix}initial": start,
    }
    padded = alc.pad_states([x[:, i, :] for i in range(6)], **weights)
    assert np.all(backend.read(padded.mask, "bool"))
    for ours, theirs in zip(padded, (x, edges, start), strict=False):
        np.testing.assert_array_equal(backend.read(ours, dtype), backend.to_numpy(theirs))


def test_long_chains(np_backend, dtype):
    """Long ones may be cut into segments, on the way there and back."""
    rng = np.random.default_rng(0)
    sizes = [*rng.integers(1, 4, 399), 3]
    xs, edges, _ = arrays(sizes)
    padded = alc.pad_states(
        [x.astype(dtype) for x in xs], transitions=[e.astype(dtype) for e in edges]
    )
    chain = alc.LogChain(padded.log_potentials, transitions=padded.transitions)
    tolerance = 2e-5 if dtype == "float32" else 1e-12
    alpha, beta, log_z = chain.forward_messages(), chain.backward_messages(), chain.log_partition()
    sums = np.logaddexp.reduce(np.where(padded.mask, alpha + beta, -np.inf), axis=-1)
    np.testing.assert_allclose(sums, float(log_z), rtol=tolerance)
    np.testing.assert_allclose(chain.marginals().sum(-1), 1, rtol=20 * tolerance)
    states = np.concatenate([chain.sample(20, rng), chain.viterbi().states[None]])
    assert np.all(states < sizes)
    total, state = 0.0, np.exp(xs[0].astype(np.longdouble))
    for x, e in zip(xs[1:], edges, strict=True):
        state = (state @ e) * np.exp(x)
        total, state = total + np.log(state.sum()), state / state.sum()
    assert float(log_z) == pytest.approx(float(total + np.log(state.sum())), rel=tolerance)


def test_mixed_dtypes(torch_backend):
    """The arrays of a list get the widest dtype among them, their gradients their own."""
    torch = torch_backend.xp
    dtypes = [torch.float32, torch.float64, torch.bfloat16]
    xs, edges, start = arrays((2, 3, 2), [(4,)])
    leaves = [torch.from_numpy(x).to(t) for x, t in zip(xs, dtypes, strict=True)]
    edges = [torch.from_numpy(e).float() for e in edges]
    for requires_grad in (False, True):
        for x in leaves:
            x.requires_grad_(requires_grad)
        padded = alc.pad_states(leaves, transitions=edges, initial=torch.from_numpy(start).half())
        expected = torch.float64, torch.float32, torch.float16, torch.bool
        assert tuple(x.dtype for x in padded if x is not None) == expected
    padded.log_potentials.sum(2).nan_to_num(neginf=0).sum().backward()
    assert [x.grad.dtype for x in leaves] == dtypes


def test_arrays_are_copied():
    xs, edges, start = arrays((2, 2), start_batch=())
    padded = alc.pad_states(xs, transitions=edges, initial=start)
    for x in (*xs, *edges, start):
        assert not any(np.shares_memory(x, ours) for ours in padded if ours is not None)


def test_states_that_a_step_does_not_have(backend, dtype):
    """Paths through them have weight zero; past the end they may be anything."""
    xs, edges, _ = arrays((2, 3, 4))
    xs, edges = ([backend.asarray(a, dtype) for a in given] for given in (xs, edges))
    padded = alc.pad_states(xs, transitions=edges)
    chain = alc.LogChain(padded.log_potentials, transitions=padded.transitions)
    paths = backend.asarray(np.array([[1, 2, 3], [2, 0, 0], [1, 3, 3]]))
    weights = backend.read(chain.log_weight(paths), dtype)
    np.testing.assert_array_equal(np.isfinite(weights), [True, False, False])
    assert np.all(weights[1:] == -INF)


# ------------------------------------------------------------------------------------------ torch


def tensors(torch, logs, batches=((),), dtype="float64"):
    """Return leaves of a chain of 2, 1 and 3 states: three, two and one."""
    xs, edges, start = arrays((2, 1, 3), batches, [(), (2,)], logs=logs)
    return [
        torch.from_numpy(a).to(getattr(torch, dtype)).requires_grad_() for a in (*xs, *edges, start)
    ]


def chain_of(logs, *leaves, **options):
    names = "log_transitions" if logs[0] else "transitions", "log_initial" if logs[1] else "initial"
    weights = dict(zip(names, (leaves[3:5], leaves[5]), strict=True))
    potentials, *rest = alc.pad_states(leaves[:3], **weights)[:3]
    return alc.LogChain(potentials, **dict(zip(names, rest, strict=True)), **options)


@pytest.mark.parametrize(
    ("logs", "lengths"), [(FORMS[0], None), (FORMS[1], [3, 2])], ids=["linear", "logs, lengths"]
)
@pytest.mark.parametrize(
    "name", ["log_partition", "marginals", "expected_transitions", "entropy", "log_weight"]
)
def test_derivatives(torch_backend, logs, name, lengths):
    torch = torch_backend.xp
    leaves = tensors(torch, logs, [(2,), ()])
    arguments = [torch.tensor([[0, 0, 2], [1, 0, 1]])] if name == "log_weight" else []

    def f(*leaves):
        return getattr(chain_of(logs, *leaves, lengths=lengths), name)(*arguments)

    # Marginals and expected transitions are derivatives already, so that these are second ones.
    forward = name == "log_partition"
    assert torch.autograd.gradcheck(f, leaves, check_forward_ad=forward)


@pytest.mark.parametrize("logs", FORMS[:2], ids=["linear", "logs"])
def test_autograd_agrees_with_vjp(torch_backend, logs, dtype):
    """Gradients reach the arrays of the lists, summed over what was broadcast."""
    torch = torch_backend.xp
    leaves = tensors(torch, logs, [(2,), ()], dtype)
    found = torch.autograd.grad(chain_of(logs, *leaves).log_partition().sum(), leaves)
    plain = chain_of(logs, *(x.detach() for x in leaves))
    assert not any(x.requires_grad for x in plain.arrays.values())
    value, pullback = alc.vjp.log_partition(plain)
    x, edges, start, _ = pullback(torch.ones_like(value))
    expected = [
        *(x[:, i, :n] for i, n in enumerate((2, 1, 3))),
        edges[..., 0, :2, :1],
        edges[..., 1, :1, :3],
        start[..., :2],
    ]
    for ours, theirs in zip(found, expected, strict=True):
        theirs = theirs.sum_to_size(ours.shape)
        torch.testing.assert_close(ours, theirs, check_device=False)
    assert chain_of(logs, *leaves).marginals().requires_grad
    with torch.no_grad():
        assert not chain_of(logs, *leaves).arrays["log_potentials"].requires_grad


def test_only_some_require_grad(torch_backend):
    torch = torch_backend.xp
    leaves = [x.detach() for x in tensors(torch, FORMS[0])]
    leaves[1].requires_grad_()
    chain_of(FORMS[0], *leaves).log_partition().sum().backward()
    torch.testing.assert_close(leaves[1].grad, torch.full((1,), 2.0, dtype=torch.float64))


def test_transforms(torch_backend):
    """Of torch.func: a batch of chains, and per-sample gradients."""
    torch = torch_backend.xp
    leaves = [x.detach() for x in tensors(torch, FORMS[0], [(4,)])]

    def value(x, *rest):
        return chain_of(FORMS[0], x, leaves[1][0], leaves[2][0], *rest).log_partition().sum()

    gradient = torch.func.vmap(torch.func.grad(value), in_dims=(0, None, None, None))
    found = gradient(leaves[0], leaves[3], leaves[4][0], leaves[5])
    rows = [
        chain_of(
            FORMS[0], x, leaves[1][0], leaves[2][0], leaves[3], leaves[4][0], leaves[5]
        ).marginals()[0, :2]
        for x in leaves[0]
    ]
    torch.testing.assert_close(found, torch.stack(rows))


def test_compile(torch_backend):
    torch = torch_backend.xp
    torch._dynamo.reset()

    def loss(*leaves):
        chain = chain_of(FORMS[0], *leaves)
        return chain.log_partition().sum() + chain.marginals().sin().sum()

    leaves = tensors(torch, FORMS[0], [(2,), ()])
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    found, expected = (torch.autograd.grad(f(*leaves), leaves) for f in (compiled, loss))
    torch.testing.assert_close(found, expected)


# --------------------------------------------------------------------------------------- mistakes


def ones(*shape):
    return np.ones(shape)


X = [ones(2), ones(3), ones(4)]
P = [ones(2, 3), ones(3, 4)]


@pytest.mark.parametrize(
    ("x", "options", "words"),
    [
        ([], {"transitions": []}, ["log_potentials", "empty"]),
        ((), {}, ["log_potentials", "empty"]),
        (X, {}, ["transitions", "log_transitions", 3]),
        (X, {"transitions": P[:1]}, ["transitions", 1, 2, 3]),
        (X, {"transitions": [*P, ones(4, 4)]}, ["transitions", 3, 2]),
        (X, {"transitions": []}, ["transitions", 0, 2]),
        (X, {"log_transitions": P[:1]}, ["log_transitions", 1, 2]),
        (X, {"transitions": P, "log_transitions": P}, ["transitions", "log_transitions", "both"]),
        ([ones(2), ones(), ones(4)], {"transitions": P}, ["log_potentials[1]", "()", "K_1"]),
        (X, {"transitions": [P[0], ones(4)]}, ["transitions[1]", "(4,)", 3, 4]),
        (X, {"transitions": [ones(3, 2), P[1]]}, ["transitions[0]", "(3, 2)", "2, 3"]),
        (X, {"transitions": [P[0], ones(3, 3)]}, ["transitions[1]", "(3, 3)", "3, 4"]),
        (X, {"log_transitions": [P[0], ones(4, 3)]}, ["log_transitions[1]", "(4, 3)", "3, 4"]),
        (X, {"transitions": P, "initial": ones(4)}, ["initial", "(4,)", "log_potentials[0]", 2]),
        (X, {"transitions": P, "log_initial": ones()}, ["log_initial", "()", 2]),
        (X, {"transitions": P, "final": ones(2)}, ["final", "(2,)", "log_potentials[2]", 4]),
        (X, {"transitions": P, "final": ones(4), "log_final": ones(4)}, ["final", "both"]),
        ([ones(5, 2), ones(3), ones(6, 4)], {"transitions": P}, ["log_potentials[2]", 5, 6]),
        ([ones(5, 2), *X[1:]], {"transitions": [P[0], ones(6, 3, 4)]}, ["transitions[1]", 5, 6]),
        ([ones(5, 2), *X[1:]], {"transitions": P, "initial": ones(6, 2)}, ["initial", 5, 6]),
    ],
    ids=str,
)
def test_shapes_that_do_not_fit(x, options, words):
    with pytest.raises(ValueError, match=mentions(*words)):
        alc.pad_states(x, **options)


@pytest.mark.parametrize(
    ("x", "options", "words"),
    [
        (X, {"transitions": ones(2, 3, 3)}, ["transitions", "ndarray", "list", "K_{i+1}"]),
        (tuple(X), {"log_transitions": ones(1, 3, 3)}, ["log_transitions", "ndarray"]),
        (ones(3, 3), {"transitions": [ones(3, 3)] * 2}, ["log_potentials", "ndarray", "list"]),
        ([[1.0, 2.0], ones(3)], {"transitions": P[:1]}, ["log_potentials[0]", "list"]),
        (X, {"transitions": [P[0], None]}, ["transitions[1]", "NoneType"]),
        (X, {"transitions": [P[0].astype(int), P[1]]}, ["transitions[0]", "int64", "float64"]),
        (X, {"transitions": P, "initial": [1.0, 1.0]}, ["initial", "list"]),
        ([ones(2) > 0], {}, ["log_potentials[0]", "bool"]),
    ],
    ids=str,
)
def test_what_is_no_sequence_of_real_arrays(x, options, words):
    with pytest.raises(TypeError, match=mentions(*words)):
        alc.pad_states(x, **options)


@pytest.mark.parametrize("grad", [False, True])
def test_tensors_that_do_not_fit(torch_backend, grad):
    torch = torch_backend.xp
    x = [torch.ones(2, requires_grad=grad), torch.ones(3)]
    p = torch.ones(2, 3)
    for wrong, words in [(p.numpy(), "torch"), (p.long(), "int64"), ([[1.0] * 3] * 2, "list")]:
        with pytest.raises(TypeError, match=mentions("transitions[0]", words)):
            alc.pad_states(x, transitions=[wrong])
    with pytest.raises(ValueError, match=mentions("transitions[0]", "(3, 2)", "2, 3")):
        alc.pad_states(x, transitions=[p.mT])
    with pytest.raises(ValueError, match=mentions("devices", "meta")):
        alc.pad_states(x, transitions=[p.to("meta")])


def test_mixed_libraries(backend):
    other = "float64" if backend.library == "numpy" else None
    xs = [backend.asarray(ones(2), "float32"), np.ones(3)]
    if other:
        assert alc.pad_states(xs, transitions=[ones(2, 3)]).log_potentials.dtype == other
        return
    with pytest.raises(TypeError, match=mentions("log_potentials[0]", "log_potentials[1]")):
        alc.pad_states(xs, transitions=[backend.asarray(ones(2, 3), "float32")])


@pytest.mark.parametrize("name", ["log_potentials", "transitions", "log_transitions", "initial"])
@pytest.mark.parametrize("kind", [list, tuple])
def test_chains_take_no_lists(name, kind):
    given = {"log_potentials": ones(2, 3), "transitions": ones(1, 3, 3)}
    if name == "log_transitions":
        given[name] = given.pop("transitions")
    given[name] = kind([ones(3)] * 2)
    with pytest.raises(TypeError, match=mentions(name, kind.__name__, "pad_states", "np.asarray")):
        alc.LogChain(**given)
