"""Chains whose number of states changes from step to step, given as sequences of arrays."""

import itertools

import numpy as np
import pytest

import arraylogchain as alc
from tests.checks import mentions
from tests.sequence_checks import Case
from tests.test_chain import normal, uniform

# torch 2.13 warns of its own code when forward mode is first used.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")

INF = np.inf
FORMS = [(False, False), (True, True), (False, True), (True, False)]
STATES = ("forward_messages", "backward_messages", "marginals")


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
    assert np.all(case.read(case.chain.log_partition()) == -INF)
    for name in ("marginals", "forward_messages", "backward_messages"):
        case.read_all(getattr(case.chain, name)(), [(2, n) for n in sizes])
    counts = case.chain.expected_transitions()
    counts = case.read_all(counts, [(m, n) for m, n in itertools.pairwise(sizes)])
    assert not any(np.any(c) for c in counts)
    assert not np.any(case.read(case.chain.viterbi().states, "int64"))
    assert not np.any(case.read(case.chain.sample(2, np.random.default_rng(0)), "int64"))


@pytest.mark.parametrize("logs", FORMS[:2], ids=["linear", "logs"])
def test_equal_sizes_are_an_ordinary_chain(backend, dtype, logs):
    """Bit by bit, arrays that are views of the ordinary chain's included."""
    x, edges, start = normal(5, 6, 4), uniform(5, 4, 4), uniform(4)
    edges, start = (np.log(edges), np.log(start)) if logs[0] else (edges, start)
    prefix = "log_" if logs[0] else ""
    x, edges, start = (backend.asarray(a, dtype) for a in (x, edges, start))
    initial = {f"{prefix}initial": start}
    whole = alc.LogChain(x, **{f"{prefix}transitions": edges}, **initial)
    parts = [edges[i, ...] for i in range(5)]
    ours = alc.LogChain(
        [x[:, i, :] for i in range(6)], **{f"{prefix}transitions": parts}, **initial
    )
    for name in ("log_partition", "entropy"):
        found, expected = (backend.read(getattr(c, name)(), dtype) for c in (ours, whole))
        np.testing.assert_array_equal(found, expected)
    for name in (*STATES, "expected_transitions"):
        axis = -3 if name == "expected_transitions" else -2
        found = [backend.read(m, dtype) for m in getattr(ours, name)()]
        expected = backend.read(getattr(whole, name)(), dtype)
        np.testing.assert_array_equal(np.stack(found, axis=axis), expected)
    found, expected = (backend.to_numpy(c.viterbi().states) for c in (ours, whole))
    np.testing.assert_array_equal(found, expected)
    found, expected = (
        backend.to_numpy(c.sample(5, np.random.default_rng(0))) for c in (ours, whole)
    )
    np.testing.assert_array_equal(found, expected)


def test_long_chains(np_backend, dtype):
    """Long ones may be cut into segments, on the way there and back."""
    rng = np.random.default_rng(0)
    sizes = [*rng.integers(1, 4, 399), 3]
    xs, edges, _ = arrays(sizes)
    chain = alc.LogChain(
        [x.astype(dtype) for x in xs], transitions=[e.astype(dtype) for e in edges]
    )
    tolerance = 2e-5 if dtype == "float32" else 1e-12
    alpha, beta = chain.forward_messages(), chain.backward_messages()
    assert [m.shape[-1] for m in alpha] == sizes
    log_z = chain.log_partition()
    for a, b, p in zip(alpha, beta, chain.marginals(), strict=True):
        assert np.logaddexp.reduce(a + b) == pytest.approx(float(log_z), rel=tolerance)
        assert p.sum() == pytest.approx(1, rel=20 * tolerance)
    states = np.concatenate([chain.sample(20, rng), chain.viterbi().states[None]])
    assert np.all(states < sizes)
    total, state = 0.0, np.exp(xs[0].astype(np.longdouble))
    for x, e in zip(xs[1:], edges, strict=True):
        state = (state @ e) * np.exp(x)
        total, state = total + np.log(state.sum()), state / state.sum()
    assert float(log_z) == pytest.approx(float(total + np.log(state.sum())), rel=tolerance)


def test_mixed_dtypes(torch_backend):
    """Gradients have the dtypes of the arrays, everything else has the widest."""
    torch = torch_backend.xp
    dtypes = [torch.float32, torch.float64, torch.bfloat16]
    xs, edges, start = arrays((2, 3, 2), [(4,)])
    xs = [torch.from_numpy(x).to(t) for x, t in zip(xs, dtypes, strict=True)]
    edges = [torch.from_numpy(e).to(t) for e, t in zip(edges, dtypes[1:], strict=True)]
    chain = alc.LogChain(xs, transitions=edges, initial=torch.from_numpy(start).half())
    assert {m.dtype for m in chain.marginals()} == {torch.float64}
    value, pullback = alc.vjp.log_partition(chain)
    gradients = pullback(torch.ones_like(value))
    assert [d.dtype for d in gradients.log_potentials] == dtypes
    assert [d.dtype for d in gradients.transitions] == dtypes[1:]
    assert gradients.initial.dtype == torch.float16


def test_wanted_gradients():
    xs, edges, _ = arrays((2, 3, 2), start_batch=None)
    _, pullback = alc.vjp.log_partition(alc.LogChain(xs, transitions=edges))
    gradients = pullback(1.0, wanted=["transitions"])
    assert gradients.log_potentials is None
    assert gradients.initial is None
    assert [g.shape for g in gradients.transitions] == [(2, 3), (3, 2)]


def test_infinite_weights_give_states_that_there_are():
    xs, edges, _ = arrays((2, 2, 3))
    xs[0][1] = INF
    chain = alc.LogChain(xs, transitions=edges)
    assert np.all(chain.viterbi().states < [2, 2, 3])
    assert np.all(chain.sample(9, np.random.default_rng(0)) < [2, 2, 3])


def test_arrays_are_read_when_the_chain_is_made():
    xs, edges, _ = arrays((2, 3))
    chain = alc.LogChain(xs, transitions=edges)
    before = chain.log_partition()
    xs[0][...] = edges[0][...] = np.nan
    assert chain.log_partition() == before
    assert all(p.flags.owndata for p in chain.marginals())
    assert all(p.flags.owndata for p in chain.expected_transitions())


# ------------------------------------------------------------------------------------------ torch


def tensors(torch, logs, batches=((),), dtype="float64"):
    """Return leaves of a chain of 2, 1 and 3 states: three, two and one."""
    xs, edges, start = arrays((2, 1, 3), batches, [(), (2,)], logs=logs)
    return [
        torch.from_numpy(a).to(getattr(torch, dtype)).requires_grad_() for a in (*xs, *edges, start)
    ]


def chain_of(logs, *leaves, **options):
    names = "log_transitions" if logs[0] else "transitions", "log_initial" if logs[1] else "initial"
    options |= {names[0]: leaves[3:5], names[1]: leaves[5]}
    return alc.LogChain(leaves[:3], **options)


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
        found = getattr(chain_of(logs, *leaves, lengths=lengths), name)(*arguments)
        return tuple(found) if isinstance(found, list) else found

    # Marginals and expected transitions are derivatives already, so that these are second ones.
    forward = name == "log_partition"
    assert torch.autograd.gradcheck(f, leaves, check_forward_ad=forward)


@pytest.mark.parametrize("logs", FORMS[:2], ids=["linear", "logs"])
def test_autograd_agrees_with_vjp(torch_backend, logs, dtype):
    torch = torch_backend.xp
    leaves = tensors(torch, logs, [(2,), ()], dtype)
    chain = chain_of(logs, *leaves)
    for _ in range(2):  # a chain may be used repeatedly
        found = torch.autograd.grad(chain.log_partition().sum(), leaves)
    plain = chain_of(logs, *(x.detach() for x in leaves))
    value, pullback = alc.vjp.log_partition(plain)
    x, edges, start = pullback(torch.ones_like(value))
    for ours, theirs in zip(found, [*x, *edges, start], strict=True):
        torch.testing.assert_close(ours, theirs, check_device=False)
    with torch.no_grad():
        for name in STATES:
            for ours, theirs in zip(getattr(chain, name)(), getattr(plain, name)(), strict=True):
                torch.testing.assert_close(ours, theirs)
    assert not any(m.requires_grad for m in plain.marginals())
    assert all(m.requires_grad for m in chain.marginals())
    with pytest.raises(NotImplementedError, match="requires grad"):
        alc.vjp.log_partition(chain)


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
        ).marginals()[0]
        for x in leaves[0]
    ]
    torch.testing.assert_close(found, torch.stack(rows))


def test_compile(torch_backend):
    torch = torch_backend.xp
    torch._dynamo.reset()

    def loss(*leaves):
        chain = chain_of(FORMS[0], *leaves)
        return chain.log_partition().sum() + sum(m.sin().sum() for m in chain.marginals())

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
        ([ones(5, 2), ones(3), ones(6, 4)], {"transitions": P}, ["log_potentials[2]", 5, 6]),
        ([ones(5, 2), *X[1:]], {"transitions": [P[0], ones(6, 3, 4)]}, ["transitions[1]", 5, 6]),
        ([ones(5, 2), *X[1:]], {"transitions": P, "initial": ones(6, 2)}, ["initial", 5, 6]),
        (X, {"transitions": P, "lengths": 4}, ["lengths", 4, 3]),
        (X, {"transitions": P, "lengths": [1, 2]}, ["lengths", "(2,)"]),
    ],
    ids=str,
)
def test_shapes_that_do_not_fit(x, options, words):
    with pytest.raises(ValueError, match=mentions(*words)):
        alc.LogChain(x, **options)


@pytest.mark.parametrize(
    ("x", "options", "words"),
    [
        (X, {"transitions": ones(2, 3, 3)}, ["log_potentials", "list", "transitions", "ndarray"]),
        (tuple(X), {"log_transitions": ones(1, 3, 3)}, ["tuple", "log_transitions", "ndarray"]),
        (ones(3, 3), {"transitions": [ones(3, 3)] * 2}, ["ndarray", "transitions", "list"]),
        (ones(1, 3), {"transitions": []}, ["log_potentials", "ndarray", "transitions", "list"]),
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
        alc.LogChain(x, **options)


@pytest.mark.parametrize("grad", [False, True])
def test_tensors_that_do_not_fit(torch_backend, grad):
    torch = torch_backend.xp
    x = [torch.ones(2, requires_grad=grad), torch.ones(3)]
    p = torch.ones(2, 3)
    for wrong, words in [(p.numpy(), "torch"), (p.long(), "int64"), ([[1.0] * 3] * 2, "list")]:
        with pytest.raises(TypeError, match=mentions("transitions[0]", words)):
            alc.LogChain(x, transitions=[wrong])
    with pytest.raises(ValueError, match=mentions("transitions[0]", "(3, 2)", "2, 3")):
        alc.LogChain(x, transitions=[p.mT])
    with pytest.raises(ValueError, match=mentions("devices", "meta")):
        alc.LogChain(x, transitions=[p.to("meta")])


def test_mixed_libraries(backend):
    other = "float64" if backend.name == "numpy" else None
    xs = [backend.asarray(ones(2), "float32"), np.ones(3)]
    if other:
        assert np.isfinite(alc.LogChain(xs, transitions=[ones(2, 3)]).log_partition())
        return
    with pytest.raises(TypeError, match=mentions("log_potentials[0]", "log_potentials[1]")):
        alc.LogChain(xs, transitions=[backend.asarray(ones(2, 3), "float32")])


@pytest.mark.parametrize(
    ("states", "words"),
    [
        ([2, 0, 0], ["states", 2, "step 0", "0 to 1"]),
        ([[1, 2, 3], [1, 3, 3]], ["states", 3, "step 1", "0 to 2"]),
        ([0, 0, 4], ["states", 4]),
        ([0, -1, 0], ["states", -1]),
        ([0, 0], ["states", "(2,)"]),
    ],
)
def test_states_that_a_step_does_not_have(backend, states, words):
    xs, edges = ([backend.asarray(a, "float32") for a in given] for given in (X, P))
    states = backend.asarray(np.array(states))
    with pytest.raises(ValueError, match=mentions(*words)):
        alc.LogChain(xs, transitions=edges).log_weight(states)
    # Past the end they may be anything.
    past = backend.asarray(np.array([1, 7, -9]))
    assert float(alc.LogChain(xs, transitions=edges, lengths=1).log_weight(past)) == 1
    if backend.name == "torch":
        xs[0].requires_grad_()
        with pytest.raises(ValueError, match=mentions(*words)):
            alc.LogChain(xs, transitions=edges).log_weight(states)
        weight = alc.LogChain(xs, transitions=edges, lengths=1).log_weight(past)
        assert weight.item() == 1


# ------------------------------------------------------------------------------------------ print


def test_print_of_arrays():
    x, options = np.zeros((5, 6, 4), np.float32), {"transitions": np.ones((1, 4, 4), np.float32)}
    assert repr(alc.LogChain(x, **options)) == (
        "LogChain(log_potentials=[5, 6, 4], transitions=[1, 4, 4], float32, numpy, route=vector)"
    )
    chain = alc.LogChain(x, **options, log_initial=np.zeros(4), lengths=[6, 1, 2, 3, 4])
    assert repr(chain) == (
        "LogChain(log_potentials=[5, 6, 4], transitions=[1, 4, 4], log_initial=[4], lengths=[5], "
        f"float64, numpy, route={chain.plan().route})"
    )


def test_print_of_sequences():
    xs, edges, start = arrays((2, 3, 4), [(5,)])
    chain = alc.LogChain(xs, transitions=edges, initial=start)
    assert repr(chain) == (
        "LogChain(log_potentials=([5, 2], [5, 3], [5, 4]), transitions=([2, 3], [3, 4]), "
        "initial=[2], float64, numpy, route=vector)"
    )
    xs, edges, _ = arrays([2, 3] * 20)
    text = repr(alc.LogChain(xs, transitions=edges))
    assert "log_potentials=([2], [3], ... 37 more ..., [3])" in text


def test_print_elsewhere(backend):
    x, transitions = (backend.asarray(a, "float32") for a in (normal(3, 2), uniform(1, 2, 2)))
    text = repr(alc.LogChain(x, transitions=transitions))
    assert "float32" in text
    assert backend.xp.__name__ in text
    assert backend.device is None or str(backend.device) in text


def test_print_of_tensors_that_require_grad(torch_backend, monkeypatch):
    """Nothing is computed, and no values are read: those of a transform have none."""
    torch = torch_backend.xp
    x, transitions = torch.zeros(5, 3, 2, requires_grad=True), torch.ones(1, 2, 2)
    chain = alc.LogChain(x, transitions=transitions)
    monkeypatch.setattr(alc.LogChain, "_enter", None)
    expected = (
        "LogChain(log_potentials=[5, 3, 2], transitions=[1, 2, 2], float32, torch cpu, "
        "requires_grad=True, route=vector)"
    )
    assert repr(chain) == expected
    seen = []

    def value(x):
        chain = alc.LogChain(x, transitions=transitions)
        seen.append(repr(chain))
        return x.sum()

    torch.func.vmap(value)(x.detach())
    assert seen == [expected.replace("[5, 3, 2]", "[3, 2]").replace("requires_grad=True, ", "")]
