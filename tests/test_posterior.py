"""LogChain's marginals, expected transitions and backward messages."""

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

import arraylogchain as alc
from tests import error_model, gradient_reference
from tests.checks import CHAIN_SHAPES
from tests.conftest import make_backend
from tests.gradient_checks import check_posterior
from tests.test_chain import FORMS, given_as, normal, uniform, wide_linear_weights, wide_log_weights
from tests.test_properties import DTYPES, WORKSPACES, chains

pytestmark = pytest.mark.chains

INF, NAN = np.inf, np.nan


def assert_normalised(marginals, dtype, possible=True):
    """Marginals of a step add up to 1, or are all 0 where no path is possible."""
    total = marginals.astype(float).sum(axis=-1)
    np.testing.assert_allclose(total, np.where(possible, 1.0, 0.0), atol=1e4 * eps(dtype))


def eps(dtype):
    return error_model.EPS[dtype]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("T", [1, 2, 3, 4])
def test_agrees_with_all_paths(backend, dtype, form, T):
    x, transitions, initial = normal(T, 3, sd=2), uniform(T - 1, 3, 3), uniform(3)
    marginals, counts, _ = check_posterior(
        backend, dtype, x, **given_as(form, transitions, initial)
    )
    point = [x, np.log(transitions), np.log(initial)]
    exact = gradient_reference.evaluate_mp(gradient_reference.all_paths(True, True), point)
    tolerance = 1e-5 if dtype == "float32" else 1e-13
    np.testing.assert_allclose(marginals.astype(float), exact[0].astype(float), atol=tolerance)
    np.testing.assert_allclose(counts.astype(float), exact[1].astype(float), atol=tolerance)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("x", "transitions", "initial"), CHAIN_SHAPES)
def test_batch_axes(np_backend, dtype, form, x, transitions, initial):
    """Marginals have all batch axes; counts have the shape of the transitions."""
    start = None if initial is None else uniform(*initial)
    marginals, counts, backward = check_posterior(
        np_backend, dtype, normal(*x), **given_as(form, uniform(*transitions, seed=1), start)
    )
    batch = np.broadcast_shapes(x[:-2], transitions[:-3], () if initial is None else initial[:-1])
    assert marginals.shape == backward.shape == (*batch, *x[-2:])
    assert counts.shape == transitions


def test_one_step_needs_no_transitions(backend, dtype):
    marginals, _, backward = check_posterior(backend, dtype, normal(2, 1, 4), initial=uniform(4))
    assert_normalised(marginals, dtype)
    assert not np.any(backward)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("sd", [1, 5, 15, 30, 100, 1000])
def test_wide_potentials(backend, dtype, form, sd):
    x = normal(5, 12, 8, sd=sd)
    marginals, counts, _ = check_posterior(
        backend, dtype, x, **given_as(form, uniform(11, 8, 8), uniform(8))
    )
    assert_normalised(marginals, dtype)
    np.testing.assert_allclose(counts.sum(axis=(-2, -1)), 5, rtol=1e4 * eps(dtype))


@pytest.mark.parametrize("sd", [1, 20, 100, 1000])
@pytest.mark.parametrize("steps", [1, 9])
def test_wide_log_transitions(backend, dtype, sd, steps):
    x, options = wide_log_weights(sd, steps)
    _, counts, _ = check_posterior(backend, dtype, x, **options)
    assert np.all(counts[:, 2, 3] == 0)


@pytest.mark.parametrize("decades", [5, 15, 30])
def test_wide_linear_transitions(backend, dtype, decades):
    x, options = wide_linear_weights(decades)
    check_posterior(backend, dtype, x, **options)


@pytest.mark.parametrize("centre", [1e4, -1e4])
def test_shifted_potentials(backend, dtype, centre):
    """The size of log Z has no part in the error of a posterior."""
    x = normal(3, 20, 5, sd=3) + centre
    check_posterior(backend, dtype, x, transitions=uniform(19, 5, 5))


def test_alternating_shifts_cancel(backend, dtype):
    x = np.round(normal(2, 40, 5, sd=3), 1)
    x[:, ::2] += 10_000
    x[:, 1::2] -= 10_000
    check_posterior(backend, dtype, x, transitions=uniform(39, 5, 5))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("sd", [1, 30, 1000])
def test_sparse_transitions(backend, dtype, form, sd):
    rng = np.random.default_rng(9)
    transitions = uniform(11, 7, 7) * (rng.random((11, 7, 7)) < 0.3)
    x = normal(4, 12, 7, sd=sd)
    x[rng.random(x.shape) < 0.1] = -INF
    options = given_as(form, transitions, np.eye(7)[2])
    marginals, counts, backward = check_posterior(backend, dtype, x, **options)
    assert np.all(marginals[x == -INF] == 0)
    assert np.all(counts[transitions == 0] == 0)
    reaches = np.ones((4, 7), bool)
    for t in reversed(range(12)):
        np.testing.assert_array_equal(np.isfinite(backward[:, t]), reaches)
        if t:
            reaches = np.einsum("kj,nj->nk", transitions[t - 1], reaches & (x[:, t] > -INF)) > 0


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("log_ratio", [-30, -100, -300, -690, -1500])
def test_only_path_leads_through_unlikely_states(backend, dtype, form, log_ratio):
    """One path ends well, and has all the probability, though it falls far behind the others."""
    K = T = 9
    x = np.zeros((T, K))
    x[1:-1, 1:] = log_ratio / (T - 2)
    x[-1, :-1] = -INF
    transitions = 0.5 * (np.eye(K) + np.eye(K, k=1))
    options = given_as(form, transitions[None], np.eye(K)[0])
    marginals, counts, _ = check_posterior(backend, dtype, x, **options)
    np.testing.assert_allclose(marginals, np.eye(K), atol=1e4 * eps(dtype))
    np.testing.assert_allclose(counts[0], np.eye(K, k=1), atol=1e4 * eps(dtype))


def test_two_groups_of_states_far_apart(backend, dtype):
    """One group leads by 1200 nats until the last step, which only the other survives."""
    T = 60
    x = normal(T, 4)
    x[:30, 2:] -= 40.0
    x[-1, :2] = -INF
    block = np.kron(np.eye(2), np.full((2, 2), 0.5))
    for form in FORMS:
        marginals, _, _ = check_posterior(backend, dtype, x, **given_as(form, block[None]))
        np.testing.assert_allclose(marginals[:, 2:].sum(axis=-1), 1, atol=1e5 * eps(dtype))


@pytest.mark.parametrize("form", FORMS)
def test_impossible_chains_are_all_zero(backend, dtype, form):
    """No path has a weight: whole rows of potentials, a closed step, no start."""
    x, transitions = normal(5, 6, 4), uniform(5, 5, 4, 4)
    initial = uniform(5, 4)
    x[0] = -INF
    x[1, 3] = -INF
    transitions[2, 2] = 0
    initial[3] = 0
    marginals, counts, backward = check_posterior(
        backend, dtype, x, **given_as(form, transitions, initial)
    )
    assert not np.any(marginals[:4])
    assert not np.any(counts[:4])
    assert_normalised(marginals[4], dtype)
    assert np.all(backward[1, :3] == -INF)
    assert np.all(backward[3] > -INF)


@pytest.mark.parametrize("form", FORMS)
def test_infinite_weight_has_no_posterior(backend, dtype, form):
    x = normal(3, 6, 4)
    x[1, 2, 1] = INF
    options = given_as(form, uniform(5, 4, 4), uniform(4))
    marginals, _, _ = check_posterior(backend, dtype, x, **options)
    assert not np.any(marginals[1])
    assert_normalised(marginals[[0, 2]], dtype)


@pytest.mark.parametrize("form", FORMS)
def test_nan_stays_in_its_row(backend, dtype, form):
    x, transitions = normal(3, 6, 4), uniform(5, 4, 4)
    expected, _, _ = check_posterior(backend, dtype, x, **given_as(form, transitions))
    x[1, 2, 1] = NAN
    options = {
        name: None if w is None else backend.asarray(w, dtype)
        for name, w in given_as(form, transitions).items()
    }
    chain = alc.LogChain(backend.asarray(x, dtype), **options)
    marginals = backend.read(chain.marginals(), dtype)
    assert np.isnan(marginals[1]).any()
    np.testing.assert_allclose(marginals[[0, 2]], expected[[0, 2]], atol=1e3 * eps(dtype))
    backward = backend.read(chain.backward_messages(), dtype)
    assert np.isnan(backward[1, :2]).all()
    assert not np.isnan(backward[1, 2:]).any()
    assert not np.isnan(backward[[0, 2]]).any()


def test_half_precisions(backend, half):
    x = normal(3, 6, 4, sd=3)
    for form in FORMS:
        check_posterior(backend, half, x, **given_as(form, uniform(5, 4, 4), uniform(4)))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("steps", [1, 399])
def test_long_chains(np_backend, dtype, form, steps):
    options = given_as(form, uniform(steps, 3, 3), uniform(3))
    marginals, counts, _ = check_posterior(np_backend, dtype, normal(400, 3, sd=2), **options)
    assert_normalised(marginals, dtype)
    assert counts.sum() == pytest.approx(399, rel=1e4 * eps(dtype))


@pytest.mark.parametrize("workspace", [1 << 20, 1 << 21])
@pytest.mark.parametrize("sd", [1, 1000])
def test_workspace_changes_no_answer(np_backend, dtype, workspace, sd):
    x = normal(300, 6, 10, sd=sd)
    options = given_as("linear", uniform(5, 10, 10), uniform(10))
    check_posterior(np_backend, dtype, x, **options, workspace=workspace)


def test_layouts_and_inputs(np_backend, dtype):
    x, transitions = normal(5, 3, 4).astype(dtype), uniform(4, 4, 4).astype(dtype)
    plain = alc.LogChain(x.swapaxes(0, 1).copy(), transitions=transitions)
    viewed = alc.LogChain(x.swapaxes(0, 1), transitions=np.asfortranarray(transitions[::-1])[::-1])
    for name in ("marginals", "expected_transitions", "backward_messages"):
        expected = getattr(plain, name)()
        np.testing.assert_allclose(getattr(viewed, name)(), expected, atol=100 * eps(dtype))


def test_results_do_not_depend_on_what_was_asked_before(np_backend, dtype):
    x, transitions = normal(4, 7, 5).astype(dtype), uniform(6, 5, 5).astype(dtype)
    chain = alc.LogChain(x, transitions=transitions)
    names = ("marginals", "expected_transitions", "backward_messages", "log_partition")
    first = {name: getattr(chain, name)().copy() for name in names}
    for name in reversed(names):
        np.testing.assert_array_equal(getattr(chain, name)(), first[name])


def test_messages_meet_at_every_step(np_backend, dtype):
    """alpha times beta, summed over a step's states, is Z; divided by it, a marginal."""
    x, transitions = normal(3, 9, 5).astype(dtype), uniform(8, 5, 5).astype(dtype)
    chain = alc.LogChain(x, transitions=transitions)
    product = chain.forward_messages() + chain.backward_messages()
    z = chain.log_partition()[:, None]
    np.testing.assert_allclose(np.logaddexp.reduce(product, axis=-1) - z, 0, atol=1e3 * eps(dtype))
    np.testing.assert_allclose(
        np.exp(product - z[..., None]), chain.marginals(), atol=1e3 * eps(dtype)
    )


@hypothesis.given(chain=chains(), dtype=DTYPES, workspace=WORKSPACES)
@hypothesis.settings(max_examples=50)
def test_any_chain_with_logs(chain, dtype, workspace):
    x, edges, initial = chain
    check_posterior(
        make_backend("numpy"),
        dtype,
        x,
        log_transitions=edges,
        log_initial=initial,
        workspace=workspace,
    )


@hypothesis.given(chain=chains(), dtype=DTYPES, sharpness=st.sampled_from([0.01, 0.1, 1.0]))
@hypothesis.settings(max_examples=50)
def test_any_chain_with_linear_weights(chain, dtype, sharpness):
    x, edges, initial = chain
    transitions, start = (None if w is None else linear(w, sharpness) for w in (edges, initial))
    check_posterior(make_backend("numpy"), dtype, x, transitions=transitions, initial=start)


def linear(logs, sharpness):
    """Return weights from 0 over tiny to large ones, as far as float32 has them."""
    return np.where(logs == -INF, 0, np.exp(np.clip(logs * sharpness, -80, 80)))
