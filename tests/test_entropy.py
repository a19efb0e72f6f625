"""LogChain.entropy: that of the posterior over paths, on every range, and its gradients."""

import hypothesis
import numpy as np
import pytest

import arraylogchain as alc
from tests import reference
from tests.checks import CHAIN_SHAPES
from tests.conftest import make_backend
from tests.error_model import assert_within, entropy_bound
from tests.path_checks import MIXED_FORMS, Case, given_in_forms
from tests.test_chain import FORMS, given_as, normal, uniform, wide_linear_weights, wide_log_weights
from tests.test_properties import DTYPES, WORKSPACES
from tests.test_properties import chains as any_chains
from tests.test_torch_chain import INF, SHAPES, arguments, chains, in_logs, method

# torch 2.13 warns of its own code when forward mode is first used.
pytestmark = [
    pytest.mark.chains,
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
]


@pytest.mark.parametrize("sd", [1, 10, 300])
@pytest.mark.parametrize("T", [1, 2, 4])
def test_reference_agrees_with_all_paths(T, sd):
    """The bound's exact entropy, by the recursion and by mpmath from all paths."""
    logs = np.log(uniform(max(T - 1, 1), 3, 3)) * sd
    logs[:, 0, 1] = -INF
    x, start = normal(T, 3, sd=sd), normal(3, seed=1)
    _, weights = reference.enumerate_paths(reference.lattice(x, logs, start))
    found = reference.entropy(x, logs, start).entropy
    # The weights are handed on in double precision.
    assert float(found) == pytest.approx(float(reference.entropy_mp(weights)), rel=1e-10)


@pytest.mark.parametrize("forms", MIXED_FORMS)
@pytest.mark.parametrize("T", [1, 2, 3, 5])
def test_agrees_with_all_paths(backend, dtype, forms, T):
    options = given_in_forms(forms, uniform(T - 1, 3, 3), uniform(3))
    case = Case(backend, dtype, normal(5, T, 3), **options)
    found = case.check_entropy()
    _, weights = reference.enumerate_paths(case.lattice)
    exact = np.array([reference.entropy_mp(row) for row in weights])
    assert_within(found, exact, entropy_bound(exact, 0 * exact, 0 * exact, T, 3, dtype))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("x", "transitions", "initial"), CHAIN_SHAPES)
def test_batch_axes(np_backend, dtype, form, x, transitions, initial):
    start = None if initial is None else uniform(*initial)
    options = given_as(form, uniform(*transitions, seed=1), start)
    found = Case(np_backend, dtype, normal(*x), **options).check_entropy()
    batch = np.broadcast_shapes(x[:-2], transitions[:-3], () if initial is None else initial[:-1])
    assert found.shape == batch


@pytest.mark.parametrize("forms", MIXED_FORMS)
@pytest.mark.parametrize("sd", [3, 15, 100, 1000])
def test_wide_potentials(backend, dtype, forms, sd):
    options = given_in_forms(forms, uniform(11, 8, 8), uniform(8))
    Case(backend, dtype, normal(5, 12, 8, sd=sd), **options).check_entropy()


@pytest.mark.parametrize("decades", [5, 30])
def test_wide_linear_transitions(backend, dtype, decades):
    x, options = wide_linear_weights(decades)
    Case(backend, dtype, x, **options).check_entropy()


@pytest.mark.parametrize("sd", [20, 1000])
@pytest.mark.parametrize("steps", [1, 9])
def test_wide_log_transitions(backend, dtype, sd, steps):
    x, options = wide_log_weights(sd, steps)
    Case(backend, dtype, x, **options).check_entropy()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("centre", [1e5, -1e5, 1e7])
def test_what_paths_have_in_common_has_no_part(backend, dtype, form, centre):
    """The log of Z minus the mean log weight would be a difference of large, rounded numbers."""
    x = np.round(normal(3, 12, 5, sd=3)) + centre  # exact in single precision
    transitions = uniform(11, 5, 5)
    found = Case(backend, dtype, x, **given_as(form, transitions)).check_entropy()
    near = Case(backend, dtype, x - centre, **given_as(form, transitions)).check_entropy()
    np.testing.assert_allclose(found, near, rtol=1e-4 if dtype == "float32" else 1e-12)
    x[:, ::2] -= 2 * centre
    Case(backend, dtype, x, **given_as(form, transitions)).check_entropy()


@pytest.mark.parametrize("form", FORMS)
def test_one_path_has_no_entropy(backend, dtype, form):
    """A cycle that is entered at one state: every step is known."""
    K, T = 5, 40
    cycle = np.roll(np.eye(K), 1, axis=1)
    x = normal(3, T, K, sd=20)
    case = Case(backend, dtype, x, **given_as(form, cycle[None], np.eye(K)[2]))
    assert not np.any(case.check_entropy() < 0)
    assert not np.any(reference.entropy(*case.arguments, **case.options).entropy)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("T", [1, 2, 30, 300])
def test_uniform_chain(backend, dtype, form, T):
    K = 4
    options = given_as(form, np.full((1, K, K), 0.25))
    found = Case(backend, dtype, np.full((2, T, K), -7.0), **options).check_entropy()
    # Sums of equal shares: rounding should not pile up as it may in the worst case.
    np.testing.assert_allclose(found, T * np.log(K), rtol=1e-5 if dtype == "float32" else 1e-13)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("sd", [1, 1000])
def test_sparse_transitions(backend, dtype, form, sd):
    """Some rows have no path; their entropy is 0."""
    rng = np.random.default_rng(9)
    transitions = uniform(11, 7, 7) * (rng.random((11, 7, 7)) < 0.3)
    x = normal(8, 12, 7, sd=sd)
    x[rng.random(x.shape) < 0.1] = -INF
    x[3, 5] = -INF
    found = Case(backend, dtype, x, **given_as(form, transitions, np.eye(7)[2])).check_entropy()
    assert found[3] == 0
    assert np.all(found >= 0)


@pytest.mark.parametrize("kind", ["plain", "hardly mixing", "wide"])
@pytest.mark.parametrize("per_step", [False, True], ids=["one matrix", "one per step"])
def test_long_chains(np_backend, dtype, kind, per_step):
    T, K = 400, 3
    x, transitions = normal(T, K), uniform(T - 1 if per_step else 1, K, K)
    if kind == "hardly mixing":
        transitions = np.eye(K) + 1e-3 * transitions
    x = 100 * x if kind == "wide" else x
    form = FORMS[per_step]
    Case(np_backend, dtype, x, **given_as(form, transitions)).check_entropy()


def test_entropy_of_a_markov_chain_is_known(np_backend, dtype):
    """That of the start and of every step: errors do not pile up, whatever the bound allows."""
    T = 2000
    stay = np.array([[[0.75, 0.25], [0.25, 0.75]]])
    case = Case(np_backend, dtype, np.zeros((T, 2)), transitions=stay, initial=np.full(2, 0.5))
    expected = np.log(2) - (T - 1) * (0.75 * np.log(0.75) + 0.25 * np.log(0.25))
    found = case.check_entropy()
    np.testing.assert_allclose(found, expected, rtol=2e-5 if dtype == "float32" else 1e-12)


@pytest.mark.parametrize("sd", [1, 1000])
def test_workspace_changes_no_answer(np_backend, dtype, sd):
    options = given_as("linear", uniform(5, 10, 10), uniform(10))
    x = normal(300, 6, 10, sd=sd)
    Case(np_backend, dtype, x, **options, workspace=1 << 20).check_entropy()


def test_half_precisions(backend, half):
    for forms in MIXED_FORMS:
        options = given_in_forms(forms, uniform(5, 4, 4), uniform(4))
        Case(backend, half, normal(3, 6, 4, sd=3), **options).check_entropy()


@hypothesis.given(chain=any_chains(), dtype=DTYPES, workspace=WORKSPACES)
@hypothesis.settings(max_examples=20)
def test_any_chain(chain, dtype, workspace):
    x, edges, initial = chain
    options = {"log_transitions": edges, "log_initial": initial}
    Case(make_backend("numpy"), dtype, x, **options, workspace=workspace).check_entropy()


@chains
@in_logs
def test_derivatives(torch_backend, shapes, logs):
    torch = torch_backend.xp
    given = arguments(torch, shapes, logs)
    entropy, args = method("entropy", given), tuple(given.values())
    detached = alc.LogChain(**{name: v.detach() for name, v in given.items()})
    torch.testing.assert_close(entropy(*args).detach(), detached.entropy())
    assert torch.autograd.gradcheck(entropy, args)


def written_entropy(torch, x, log_transitions, log_initial):
    """Return the entropy written out over all paths; sound where no state is closed."""
    T, K = x.shape
    paths = torch.cartesian_prod(*[torch.arange(K)] * T).reshape(-1, T)
    logs = log_initial[paths[:, 0]] + x[torch.arange(T), paths].sum(-1)
    steps = torch.arange(T - 1) % len(log_transitions)
    logs = logs + log_transitions[steps, paths[:, :-1], paths[:, 1:]].sum(-1)
    logs = torch.log_softmax(logs[torch.isfinite(logs)], 0)
    return -(logs.exp() * logs).sum()


@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("offset", [0.0, 1e4])
def test_gradients_agree_with_all_paths(torch_backend, dtype, offset, steps):
    """Also beside closed states and edges, whose gradients are 0, and for large offsets."""
    torch = torch_backend.xp
    given = arguments(torch, ((5, 3), (steps, 3, 3), (3,)), logs=True, dtype=dtype)
    x, edges, start = given.values()
    with torch.no_grad():
        x.mul_(8).round_().div_(8)  # exact with an offset, in single precision as well
        x[3, 1], edges[0, 2, 0], start[2] = -INF, -INF, -INF
    wide = [v.detach().double().requires_grad_() for v in (x, edges, start)]
    expected = torch.autograd.grad(written_entropy(torch, *wide), wide)
    with torch.no_grad():
        x.add_(offset)
    gradients = torch.autograd.grad(alc.LogChain(**given).entropy(), (x, edges, start))
    tolerance = 2e-5 if dtype == "float32" else 1e-12
    for found, exact in zip(gradients, expected, strict=True):
        torch.testing.assert_close(found.double(), exact.nan_to_num(0), rtol=0, atol=tolerance)


@in_logs
def test_gradient_of_chains_without_a_path_is_zero(torch_backend, logs):
    torch = torch_backend.xp
    given = arguments(torch, SHAPES["batch of initial weights"], logs)
    with torch.no_grad():
        given["log_potentials"][0, 1] = -INF
    entropy = alc.LogChain(**given).entropy()
    assert torch.all(entropy[:, 0] == 0)
    assert torch.all(entropy[:, 1] > 0)
    gradients = torch.autograd.grad(entropy[:, 0].sum(), tuple(given.values()))
    assert not any(g.any() for g in gradients)
