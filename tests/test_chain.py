"""LogChain: log_partition and forward messages, right entry by entry on every range."""

import numpy as np
import pytest

import arraylogchain as alc
from tests import reference
from tests.checks import CHAIN_SHAPES, check_chain
from tests.error_model import assert_within, chain_bound

pytestmark = pytest.mark.chains

INF = np.inf
FORMS = ("linear", "logs")


def normal(*shape, sd=1.0, seed=0):
    return np.random.default_rng(seed).normal(0, sd, shape)


def uniform(*shape, seed=0):
    return np.random.default_rng(seed).random(shape)


def given_as(form, transitions, initial=None):
    """Return the options that give transitions and initial weights in linear space or as logs."""
    if form == "linear":
        return {"transitions": transitions, "initial": initial}
    with np.errstate(divide="ignore"):
        logs = None if initial is None else np.log(initial)
        return {"log_transitions": np.log(transitions), "log_initial": logs}


def wide_linear_weights(decades):
    """Return potentials, and linear weights of many magnitudes."""
    rng = np.random.default_rng(8)
    transitions = 10.0 ** rng.uniform(-decades, decades, (9, 6, 6))
    initial = 10.0 ** rng.uniform(-decades, decades, 6)
    return normal(3, 10, 6), {"transitions": transitions, "initial": initial}


def wide_log_weights(sd, steps):
    """Return potentials, and logs of weights of many magnitudes, one of them closed."""
    logs = normal(steps, 6, 6, sd=sd)
    logs[:, 2, 3] = -INF
    return normal(3, 10, 6), {"log_transitions": logs, "log_initial": normal(6, sd=sd)}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("T", [1, 2, 3, 4, 8, 9])
def test_agrees_with_all_paths(backend, dtype, form, T):
    x, transitions, initial = normal(T, 3, sd=2), uniform(T - 1, 3, 3), uniform(3)
    partition, _ = check_chain(backend, dtype, x, **given_as(form, transitions, initial))
    if T <= 4:
        exact = reference.all_paths(x, transitions, initial)
        tolerance = 1e-5 if dtype == "float32" else 1e-13
        assert partition == pytest.approx(float(exact), rel=tolerance, abs=tolerance)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("x", "transitions", "initial"), CHAIN_SHAPES)
def test_batch_axes(backend, dtype, form, x, transitions, initial):
    """Batch axes on any of the arguments broadcast; a step axis of one serves every step."""
    start = None if initial is None else uniform(*initial)
    partition, messages = check_chain(
        backend, dtype, normal(*x), **given_as(form, uniform(*transitions, seed=1), start)
    )
    batch = np.broadcast_shapes(x[:-2], transitions[:-3], () if initial is None else initial[:-1])
    assert partition.shape == batch
    assert messages.shape == (*batch, *x[-2:])


def test_one_step_needs_no_transitions(backend, dtype):
    partition, messages = check_chain(backend, dtype, normal(2, 1, 4), initial=uniform(4))
    assert partition.shape == (2,)
    assert messages.shape == (2, 1, 4)
    check_chain(backend, dtype, normal(1, 4), transitions=np.ones((0, 4, 4)))


def test_initial_defaults_to_ones(np_backend):
    x, transitions = normal(5, 3), uniform(4, 3, 3)
    default = alc.LogChain(x, transitions=transitions).log_partition()
    for start in ({"initial": np.ones(3)}, {"log_initial": np.zeros(3)}):
        ones = alc.LogChain(x, transitions=transitions, **start).log_partition()
        assert ones == default


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("sd", [1, 5, 15, 20, 30, 100, 1000])
def test_wide_potentials(backend, dtype, form, sd):
    x = normal(5, 12, 8, sd=sd)
    check_chain(backend, dtype, x, **given_as(form, uniform(11, 8, 8), uniform(8)))


@pytest.mark.parametrize("centre", [1e4, -1e4])
def test_shifted_potentials(backend, dtype, centre):
    x = normal(3, 20, 5, sd=3) + centre
    check_chain(backend, dtype, x, transitions=uniform(19, 5, 5))


def test_alternating_shifts_cancel(backend, dtype):
    """Totals of many thousands come and go; what is left must not carry their rounding."""
    x = np.round(normal(2, 40, 5, sd=3), 1)
    x[:, ::2] += 10_000
    x[:, 1::2] -= 10_000
    check_chain(backend, dtype, x, transitions=uniform(39, 5, 5))


def test_potentials_of_any_magnitude(backend, dtype):
    rng = np.random.default_rng(7)
    x = rng.normal(size=(4, 6, 5)) * 10.0 ** rng.integers(-20, 20, (4, 6, 5))
    check_chain(backend, dtype, x, transitions=uniform(5, 5, 5))


@pytest.mark.parametrize("decades", [5, 15, 30])
def test_wide_linear_transitions(backend, dtype, decades):
    """Weights need no normalisation; tiny and huge ones are used as they are."""
    x, options = wide_linear_weights(decades)
    check_chain(backend, dtype, x, **options)


@pytest.mark.parametrize("sd", [1, 20, 100, 1000])
@pytest.mark.parametrize("steps", [1, 9])
def test_wide_log_transitions(backend, dtype, sd, steps):
    logs = normal(steps, 6, 6, sd=sd)
    logs[:, 2, 3] = -INF
    check_chain(backend, dtype, normal(3, 10, 6), log_transitions=logs, log_initial=normal(6))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("sd", [1, 30, 1000])
def test_sparse_transitions(backend, dtype, form, sd):
    """Most edges closed, some states closed: messages are -inf exactly where no path leads."""
    rng = np.random.default_rng(9)
    transitions = uniform(11, 7, 7) * (rng.random((11, 7, 7)) < 0.3)
    x = normal(4, 12, 7, sd=sd)
    x[rng.random(x.shape) < 0.1] = -INF
    options = given_as(form, transitions, np.eye(7)[2])
    _, messages = check_chain(backend, dtype, x, **options)
    reached = np.isfinite(x[:, 0]) & (np.arange(7) == 2)
    for t in range(12):
        if t:
            reached = np.einsum("nk,kj->nj", reached, transitions[t - 1]) > 0
            reached &= np.isfinite(x[:, t])
        np.testing.assert_array_equal(np.isfinite(messages[:, t]), reached)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("log_ratio", [-30, -100, -300, -690, -1500])
def test_only_path_leads_through_unlikely_states(backend, dtype, form, log_ratio):
    """Left to right, one state a step: the likely state is a trap, the way out leads elsewhere.

    The only path that ends well falls behind the trap by exp(log_ratio) in all; exp(-690) is
    1e-300. Taking off the common maximum, or one clamp, loses it.
    """
    K = T = 9
    x = np.zeros((T, K))
    x[1:-1, 1:] = log_ratio / (T - 2)
    x[-1, :-1] = -INF
    transitions = 0.5 * (np.eye(K) + np.eye(K, k=1))
    options = given_as(form, transitions[None], np.eye(K)[0])
    partition, _ = check_chain(backend, dtype, x, **options)
    expected = log_ratio + (T - 1) * np.log(0.5)
    assert partition == pytest.approx(expected, rel=1e-6 if dtype == "float32" else 1e-14)


@pytest.mark.parametrize("ratio", [1e-30, 1e-150, 1e-300])
def test_unlikely_start_decides(np_backend, ratio):
    x = normal(6, 3)
    x[-1, :2] = -INF
    transitions = np.array([[[0.3, 0.7, 0], [0.6, 0.4, 0], [0, 0, 1.0]]])
    check_chain(np_backend, "float64", x, transitions=transitions, initial=np.array([1, 1, ratio]))


def test_rejoining_after_a_long_detour(backend, dtype):
    """Two separate groups of states, one 1200 nats below the other, and only it ends well."""
    T = 60
    x = normal(T, 4)
    x[:30, 2:] -= 40.0
    x[-1, :2] = -INF
    block = np.kron(np.eye(2), np.full((2, 2), 0.5))
    check_chain(backend, dtype, x, transitions=block[None])
    check_chain(backend, dtype, x, **given_as("logs", block[None]))


def test_identity_transitions_sum_the_potentials(backend, dtype):
    """Every state keeps to itself: each message is a plain sum, and they drift far apart."""
    T, K = 400, 5
    x = backend.to_numpy(backend.asarray(normal(T, K, sd=8), dtype))
    chain = alc.LogChain(
        backend.asarray(x, dtype), transitions=backend.asarray(np.eye(K)[None], dtype)
    )
    exact = np.cumsum(reference.wide(x), axis=0)
    assert np.ptp(exact[-1]) > 300
    gaps = np.cumsum(x.max(axis=-1, keepdims=True) - reference.wide(x), axis=0)
    bound = chain_bound(exact, gaps, np.arange(1, T + 1)[:, None], K, dtype)
    assert_within(backend.read(chain.forward_messages(), dtype), exact, bound)


@pytest.mark.parametrize("workspace", [1 << 20, 1 << 21])
@pytest.mark.parametrize("sd", [1, 1000])
def test_workspace_changes_no_answer(np_backend, dtype, workspace, sd):
    x = normal(300, 6, 10, sd=sd)
    options = given_as("linear", uniform(5, 10, 10), uniform(10))
    check_chain(np_backend, dtype, x, **options, workspace=workspace)


def test_layouts_and_inputs(np_backend, dtype):
    """Views in, the same answer out; nothing is written to (inputs of the suite are read-only)."""
    x, transitions = normal(5, 3, 4).astype(dtype), uniform(4, 4, 4).astype(dtype)
    plain = alc.LogChain(x.swapaxes(0, 1).copy(), transitions=transitions).log_partition()
    viewed = alc.LogChain(
        x.swapaxes(0, 1), transitions=np.asfortranarray(transitions[::-1])[::-1]
    ).log_partition()
    np.testing.assert_allclose(viewed, plain, rtol=8 * np.finfo(dtype).eps)


def test_results_do_not_depend_on_what_was_asked_before(np_backend, dtype):
    x, transitions = normal(4, 7, 5).astype(dtype), uniform(6, 5, 5).astype(dtype)
    chain = alc.LogChain(x, transitions=transitions)
    first = chain.log_partition()
    messages = chain.forward_messages()
    np.testing.assert_array_equal(chain.log_partition(), first)
    np.testing.assert_array_equal(chain.forward_messages(), messages)
