"""LogChain.log_weight: the log weight of any path, its gradients, and what is no path."""

import numpy as np
import pytest

import arraylogchain as alc
from tests import reference
from tests.checks import CHAIN_SHAPES, mentions
from tests.path_checks import MIXED_FORMS, Case, given_in_forms
from tests.test_chain import FORMS, given_as, normal, uniform
from tests.test_torch_chain import INF, arguments, chains, in_logs

# torch 2.13 warns of its own code when forward mode is first used.
pytestmark = [
    pytest.mark.chains,
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
]


def some_states(*shape, K, seed=3):
    return np.random.default_rng(seed).integers(0, K, shape)


@pytest.mark.parametrize("forms", MIXED_FORMS[2:])
@pytest.mark.parametrize(("x", "transitions", "initial"), [s for s in CHAIN_SHAPES if s[0][-1]])
def test_batch_axes(backend, dtype, forms, x, transitions, initial):
    """Paths have axes that broadcast with the batch, and may have more of them in front."""
    start = None if initial is None else uniform(*initial)
    case = Case(
        backend, dtype, normal(*x), **given_in_forms(forms, uniform(*transitions, seed=1), start)
    )
    batch = np.broadcast_shapes(x[:-2], transitions[:-3], () if initial is None else initial[:-1])
    T, K = x[-2:]
    for axes in ((), batch, (5, *batch), (3, *(1 for _ in batch))):
        found = case.check_log_weight(some_states(*axes, T, K=K))
        assert found.shape == np.broadcast_shapes(axes, batch)


@pytest.mark.parametrize("form", FORMS)
def test_all_paths_add_up(backend, dtype, form):
    x, transitions, initial = normal(2, 4, 3), uniform(3, 3, 3), uniform(3)
    case = Case(backend, dtype, x, **given_as(form, transitions, initial))
    paths, _ = reference.enumerate_paths(case.lattice)
    weights = case.check_log_weight(paths[:, None]).astype(float)
    total = case.read(case.chain.log_partition()).astype(float)
    tolerance = 1e-5 if dtype == "float32" else 1e-13
    np.testing.assert_allclose(np.logaddexp.reduce(weights, axis=0), total, atol=tolerance)


@pytest.mark.parametrize("kind", ["int8", "int16", "int32", "int64", "uint8"])
def test_integer_types(backend, dtype, kind):
    case = Case(backend, dtype, normal(2, 5, 4), transitions=uniform(1, 4, 4))
    states = some_states(2, 5, K=4)
    expected = case.check_log_weight(states)
    np.testing.assert_array_equal(case.check_log_weight(states.astype(kind)), expected)


def test_many_states(backend, dtype):
    """Small integer types hold the states of large chains, but not their pairs."""
    case = Case(backend, dtype, normal(2, 5, 300), transitions=uniform(4, 300, 300))
    case.check_log_weight(some_states(3, 2, 5, K=300).astype(np.int16))
    case.check_log_weight(some_states(3, 2, 5, K=256).astype(np.uint8))


@pytest.mark.parametrize("forms", MIXED_FORMS)
@pytest.mark.parametrize("sd", [1, 100, 1000])
def test_wide_ranges(backend, dtype, forms, sd):
    transitions = np.exp(normal(11, 5, 5, sd=min(sd, 15)))
    transitions[:, 2, 3] = 0
    x = normal(4, 12, 5, sd=sd)
    x[0, 7] = -INF
    case = Case(backend, dtype, x, **given_in_forms(forms, transitions, uniform(5)))
    weights = case.check_log_weight(some_states(50, 4, 12, K=5))
    assert np.all(weights[:, 0] == -INF)
    assert np.any(np.isfinite(weights))


def test_totals_that_cancel(backend, dtype):
    x = np.round(normal(2, 40, 5, sd=3), 1)
    x[:, ::2] += 10_000
    x[:, 1::2] -= 10_000
    case = Case(backend, dtype, x, transitions=uniform(39, 5, 5))
    case.check_log_weight(some_states(9, 2, 40, K=5))


@pytest.mark.parametrize("steps", [1, 2999])
def test_long_chains(backend, dtype, steps):
    x, transitions = normal(3000, 3, sd=2) - 5, uniform(steps, 3, 3)
    for form in FORMS:
        case = Case(backend, dtype, x, **given_as(form, transitions, uniform(3)))
        case.check_log_weight(some_states(4, 3000, K=3))


def test_half_precisions(backend, half):
    for forms in MIXED_FORMS:
        options = given_in_forms(forms, uniform(5, 4, 4), uniform(4))
        case = Case(backend, half, normal(3, 6, 4, sd=3), **options)
        case.check_log_weight(some_states(7, 3, 6, K=4))


def test_workspace_changes_no_answer(np_backend, dtype):
    options = given_as("linear", uniform(199, 5, 5), uniform(5))
    case = Case(np_backend, dtype, normal(30, 200, 5), **options, workspace=1 << 20)
    case.check_log_weight(some_states(50, 30, 200, K=5))


@pytest.mark.parametrize("state", [-1, 4, 100, -100])
def test_states_out_of_range(backend, state):
    case = Case(backend, "float32", normal(2, 5, 4), transitions=uniform(1, 4, 4))
    states = np.zeros((2, 5), np.int64)
    for place in ((0, 0), (1, 2), (1, 4)):
        wrong = states.copy()
        wrong[place] = state
        with pytest.raises(ValueError, match=mentions("states")):
            case.chain.log_weight(backend.asarray(wrong))


@pytest.mark.parametrize("shape", [(), (4,), (6,), (3, 5), (2, 5, 1), (5, 2)])
def test_states_of_wrong_shape(backend, shape):
    case = Case(backend, "float32", normal(2, 5, 4), transitions=uniform(1, 4, 4))
    with pytest.raises(ValueError, match=mentions("states")):
        case.chain.log_weight(backend.asarray(np.zeros(shape, np.int64)))


@pytest.mark.parametrize("kind", ["float32", "bool"])
def test_states_that_are_no_integers(backend, kind):
    case = Case(backend, "float32", normal(2, 5, 4), transitions=uniform(1, 4, 4))
    with pytest.raises(TypeError, match=mentions("states")):
        case.chain.log_weight(backend.asarray(np.zeros((2, 5), kind)))


def test_a_path_with_its_weight_is_no_array_of_states(backend):
    case = Case(backend, "float32", normal(2, 5, 4), transitions=uniform(1, 4, 4))
    with pytest.raises(TypeError, match=r"path\.states"):
        case.chain.log_weight(case.chain.viterbi())


@in_logs
def test_what_is_large_and_cancels(torch_backend, logs):
    """With gradients as without: offsets that add up to nothing leave no rounding."""
    torch = torch_backend.xp
    given = arguments(torch, ((6, 3), (5, 3, 3), (3,)), logs)
    with torch.no_grad():
        given["log_potentials"] += torch.tensor([1e15, -1e15] * 3)[:, None]
    states = torch.from_numpy(some_states(4, 6, K=3))
    detached = alc.LogChain(**{name: x.detach() for name, x in given.items()})
    found = alc.LogChain(**given).log_weight(states).detach()
    torch.testing.assert_close(found, detached.log_weight(states), rtol=1e-15, atol=1e-15)


@chains
@in_logs
@pytest.mark.parametrize("more", [(), (5,)])
def test_derivatives(torch_backend, shapes, logs, more):
    torch = torch_backend.xp
    given = arguments(torch, shapes, logs)
    K = shapes[0][-1]
    batch = alc.LogChain(**{n: v.detach() for n, v in given.items()}).log_partition().shape
    states = torch.from_numpy(some_states(*more, *batch, shapes[0][-2], K=K))

    def weight(*args):
        return alc.LogChain(**dict(zip(given, args, strict=True))).log_weight(states)

    assert torch.autograd.gradcheck(weight, tuple(given.values()))
    assert torch.autograd.gradgradcheck(weight, tuple(given.values()))


@in_logs
def test_no_gradient_where_there_is_no_weight(torch_backend, logs, dtype):
    """Paths of weight 0, through any of the arrays, beside one that has a gradient."""
    torch = torch_backend.xp
    given = arguments(torch, ((3, 2), (2, 2, 2), (2,)), logs, dtype=dtype)
    closed = -INF if logs else 0.0
    x, transitions, initial = given.values()
    with torch.no_grad():
        x[2, 1], transitions[0, 0, 1], initial[1] = -INF, closed, closed
    states = torch.tensor([[0, 0, 1], [0, 1, 0], [1, 0, 0], [1, 1, 1], [0, 0, 0]])
    weight = alc.LogChain(**given).log_weight(states)
    assert torch.isneginf(weight).tolist() == [True] * 4 + [False]
    gradients = torch.autograd.grad(weight.sum(), (x, transitions, initial))
    expected = [torch.zeros_like(v) for v in (x, transitions, initial)]
    for t in range(3):
        expected[0][t, 0] = 1
    for t in range(2):
        expected[1][t, 0, 0] = 1 if logs else 1 / transitions.detach()[t, 0, 0]
    expected[2][0] = 1 if logs else 1 / initial.detach()[0]
    for found, exact in zip(gradients, expected, strict=True):
        torch.testing.assert_close(found, exact)


def test_score_of_a_crf(torch_backend):
    """Log weight minus log partition: the gradient is what was seen less what is expected."""
    torch = torch_backend.xp
    given = arguments(torch, ((4, 7, 3), (1, 3, 3), (3,)), logs=True)
    states = torch.from_numpy(some_states(4, 7, K=3))
    chain = alc.LogChain(**given)
    (chain.log_weight(states) - chain.log_partition()).sum().backward()
    taken = torch.nn.functional.one_hot(states, 3)
    detached = alc.LogChain(**{name: v.detach() for name, v in given.items()})
    expected = taken - detached.marginals()
    torch.testing.assert_close(given["log_potentials"].grad, expected)
    pairs = torch.zeros(3, 3, dtype=torch.float64)
    pairs.index_put_(
        (states[:, :-1], states[:, 1:]), torch.ones(4, 6, dtype=torch.float64), accumulate=True
    )
    expected = pairs - detached.expected_transitions()[0]
    torch.testing.assert_close(given["log_transitions"].grad[0], expected)
    expected = taken[:, 0].sum(0) - detached.marginals()[:, 0].sum(0)
    torch.testing.assert_close(given["log_initial"].grad, expected)
