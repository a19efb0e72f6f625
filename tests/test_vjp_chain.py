"""Gradients of log_partition with respect to all that a chain was given."""

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

import arraylogchain as alc
from arraylogchain import _dispatch
from arraylogchain._array.chains.posterior import TilePosterior
from tests import error_model, gradient_reference
from tests.checks import CHAIN_SHAPES, mentions
from tests.conftest import make_backend
from tests.gradient_checks import COTANGENTS, check_posterior, check_vjp_chain
from tests.test_chain import FORMS, given_as, normal, uniform
from tests.test_posterior import linear
from tests.test_properties import DTYPES, WORKSPACES, chains

pytestmark = pytest.mark.chains

INF, NAN = np.inf, np.nan


def eps(dtype):
    return error_model.EPS[dtype]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("T", [1, 2, 3, 4])
def test_agrees_with_all_paths(backend, dtype, form, T):
    x, transitions, initial = normal(T, 3, sd=2), uniform(T - 1, 3, 3), uniform(3)
    found = check_vjp_chain(
        backend, dtype, x, np.asarray(0.75), **given_as(form, transitions, initial)
    )
    in_logs = form == "logs"
    point = [x, *(np.log(w) if in_logs else w for w in (transitions, initial))]
    function = gradient_reference.all_paths(in_logs, in_logs, 0.75)
    for ours, exact in zip(found, gradient_reference.evaluate_mp(function, point), strict=True):
        rtol = 1e-4 if dtype == "float32" else 1e-12
        np.testing.assert_allclose(ours.astype(float), exact.astype(float), rtol=rtol, atol=rtol)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("x", "transitions", "initial"), CHAIN_SHAPES)
def test_batch_axes(np_backend, dtype, form, x, transitions, initial):
    """What rows or steps share has the sum of their gradients, and its own shape."""
    start = None if initial is None else uniform(*initial)
    found = check_vjp_chain(
        np_backend, dtype, normal(*x), **given_as(form, uniform(*transitions, seed=1), start)
    )
    for gradient, shape in zip(found, (x, transitions, initial), strict=True):
        assert (gradient is None and shape is None) or gradient.shape == shape


def test_what_was_not_given_has_no_gradient(backend, dtype):
    found = check_vjp_chain(backend, dtype, normal(2, 1, 4))
    assert found[1] is found[2] is None
    found = check_vjp_chain(backend, dtype, normal(2, 1, 4), log_initial=normal(4))
    assert found[1] is None
    assert found[2].shape == (4,)


@pytest.mark.parametrize("logs", ["transitions", "initial"])
def test_one_linear_and_one_in_logs(backend, dtype, logs):
    x, transitions, initial = normal(3, 6, 4, sd=5), uniform(5, 4, 4), uniform(4)
    if logs == "transitions":
        options = {"log_transitions": np.log(transitions), "initial": initial}
    else:
        options = {"transitions": transitions, "log_initial": np.log(initial)}
    check_vjp_chain(backend, dtype, x, **options)


@pytest.mark.parametrize("kind", COTANGENTS)
@pytest.mark.parametrize("form", FORMS)
def test_cotangents(backend, dtype, form, kind):
    x = normal(9, 7, 5, sd=3)
    check_vjp_chain(backend, dtype, x, kind, **given_as(form, uniform(6, 5, 5), uniform(5)))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("sd", [1, 5, 15, 30, 100, 1000])
def test_wide_potentials(backend, dtype, form, sd):
    x = normal(5, 12, 8, sd=sd)
    check_vjp_chain(backend, dtype, x, **given_as(form, uniform(11, 8, 8), uniform(8)))


@pytest.mark.parametrize("sd", [1, 20, 100, 1000])
@pytest.mark.parametrize("steps", [1, 9])
def test_wide_log_transitions(backend, dtype, sd, steps):
    logs = normal(steps, 6, 6, sd=sd)
    logs[:, 2, 3] = -INF
    _, edges, _ = check_vjp_chain(
        backend, dtype, normal(3, 10, 6), log_transitions=logs, log_initial=normal(6, sd=sd)
    )
    assert np.all(edges[:, 2, 3] == 0)


@pytest.mark.parametrize("decades", [5, 15, 30])
def test_wide_linear_transitions(backend, dtype, decades):
    rng = np.random.default_rng(8)
    transitions = 10.0 ** rng.uniform(-decades, decades, (9, 6, 6))
    initial = 10.0 ** rng.uniform(-decades, decades, 6)
    x = normal(3, 10, 6)
    check_vjp_chain(backend, dtype, x, transitions=transitions, initial=initial)


@pytest.mark.parametrize("centre", [1e4, -1e4])
def test_shifted_potentials(backend, dtype, centre):
    x = normal(3, 20, 5, sd=3) + centre
    check_vjp_chain(backend, dtype, x, transitions=uniform(19, 5, 5), initial=uniform(5))


def test_closed_edges_have_a_gradient(backend, dtype):
    """At a weight of 0 the gradient is that of opening the edge, not 0 / 0."""
    x, initial = np.zeros((2, 2)), np.array([1.0, 0.0])
    transitions = np.array([[[1.0, 0.0], [0.0, 1.0]]])
    found = check_vjp_chain(
        backend, dtype, x, np.asarray(1.0), **given_as("linear", transitions, initial)
    )
    assert found[1].tolist() == [[[1, 1], [0, 0]]]
    assert found[2].tolist() == [1, 1]
    found = check_vjp_chain(
        backend, dtype, x, np.asarray(1.0), **given_as("logs", transitions, initial)
    )
    assert found[1].tolist() == [[[1, 0], [0, 0]]]
    assert found[2].tolist() == [1, 0]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("sd", [1, 30, 1000])
@pytest.mark.parametrize("steps", [1, 11])
def test_sparse_transitions(backend, dtype, form, sd, steps):
    rng = np.random.default_rng(9)
    transitions = uniform(steps, 7, 7) * (rng.random((steps, 7, 7)) < 0.4)
    x = normal(4, 12, 7, sd=sd)
    x[rng.random(x.shape) < 0.1] = -INF
    options = given_as(form, transitions, np.eye(7)[2])
    potentials, _, _ = check_vjp_chain(backend, dtype, x, "ones", **options)
    assert np.all(potentials[x == -INF] == 0)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("log_ratio", [-30, -100, -300, -690, -1500])
def test_only_path_leads_through_unlikely_states(backend, dtype, form, log_ratio):
    K = T = 9
    x = np.zeros((T, K))
    x[1:-1, 1:] = log_ratio / (T - 2)
    x[-1, :-1] = -INF
    transitions = 0.5 * (np.eye(K) + np.eye(K, k=1))
    options = given_as(form, transitions[None], np.eye(K)[0])
    potentials, edges, _ = check_vjp_chain(backend, dtype, x, np.asarray(1.0), **options)
    np.testing.assert_allclose(potentials, np.eye(K), atol=1e4 * eps(dtype))
    along = edges[0][np.arange(K - 1), np.arange(1, K)]
    np.testing.assert_allclose(along, 1 if form == "logs" else 2, rtol=1e4 * eps(dtype))


@pytest.mark.parametrize("form", FORMS)
def test_left_to_right(backend, dtype, form):
    x = normal(3, 12, 6, sd=9)
    transitions = 0.5 * (np.eye(6) + np.eye(6, k=1))
    check_vjp_chain(backend, dtype, x, **given_as(form, transitions[None], np.eye(6)[0]))


@pytest.mark.parametrize("form", FORMS)
def test_impossible_chains_have_no_gradient(backend, dtype, form):
    """Not even with respect to the closed edge that makes them impossible."""
    x, transitions, initial = normal(5, 6, 4), uniform(5, 5, 4, 4), uniform(5, 4)
    x[0] = -INF
    x[1, 3] = -INF
    transitions[2, 2] = 0
    initial[3] = 0
    found = check_vjp_chain(backend, dtype, x, **given_as(form, transitions, initial))
    for gradient in found:
        assert not np.any(gradient[:4])
        assert np.any(gradient[4])
    found = check_vjp_chain(
        backend, dtype, np.full((3, 2), -INF), **given_as(form, uniform(1, 2, 2), uniform(2))
    )
    assert not any(np.any(gradient) for gradient in found)


@pytest.mark.parametrize("form", FORMS)
def test_infinite_sum_has_no_gradient(backend, dtype, form):
    x = normal(3, 6, 4)
    x[1, 2, 1] = INF
    potentials, _, _ = check_vjp_chain(
        backend, dtype, x, **given_as(form, uniform(5, 4, 4), uniform(4))
    )
    assert not np.any(potentials[1])
    assert np.all(np.any(potentials[[0, 2]], axis=-1))


@pytest.mark.parametrize("form", FORMS)
def test_nan_stays_in_its_row(backend, dtype, form):
    x, g, transitions = normal(3, 6, 4), normal(3, seed=1), uniform(3, 5, 4, 4)
    expected = check_vjp_chain(backend, dtype, x, g, **given_as(form, transitions))
    x[1, 2, 1] = NAN
    options = {
        name: None if w is None else backend.asarray(w, dtype)
        for name, w in given_as(form, transitions).items()
    }
    chain = alc.LogChain(backend.asarray(x, dtype), **options)
    _, pullback = alc.vjp.log_partition(chain)
    found = pullback(backend.asarray(g, dtype))
    for ours, exact in zip(found[:2], expected[:2], strict=True):
        ours = backend.read(ours, dtype)
        assert np.isnan(ours[1]).any()
        np.testing.assert_allclose(
            ours[[0, 2]], exact[[0, 2]], rtol=1e3 * eps(dtype), atol=1e3 * eps(dtype)
        )


@pytest.mark.parametrize("sd", [1, 60, 1000])
def test_what_tiles_share_is_added_up(monkeypatch, dtype, sd):
    """Potentials and initial weights of all rows, each of which is a tile of its own."""
    monkeypatch.setattr(_dispatch, "COMPILED", False)
    options = given_as("linear", uniform(3, 5, 64, 64), uniform(64))
    backend, x = make_backend("numpy"), normal(6, 64, sd=sd)
    check_vjp_chain(backend, dtype, x, **options, workspace=1 << 20)
    check_posterior(backend, dtype, x, **options, workspace=1 << 20)


@pytest.mark.parametrize("kind", ["float16", "bfloat16", "float32", "float64"])
def test_derivatives_beyond_the_dtype(kind, backend):
    """No path may use the edge; several steps of several rows would gain exp(1000) by it."""
    if kind not in backend.dtypes:
        pytest.skip("no such dtype here")
    x, P, initial = np.zeros((4, 8, 2)), np.eye(2), np.asarray([1.0, 0.0])
    x[:, 6, 1] = 1000
    given = [backend.asarray(each, kind) for each in (x, P, initial)]
    _, pullback = alc.vjp.log_partition(
        alc.LogChain(given[0], transitions=given[1], initial=given[2])
    )
    found = backend.to_numpy(pullback(backend.asarray(np.ones(4), kind)).transitions)
    np.testing.assert_array_equal(np.isfinite(found), True)
    assert found[0, 1] > 6e4


def test_derivatives_beyond_the_dtype_of_both_signs(backend):
    """Beside matrices of small weights, each at a step of its own."""
    x = np.full((2, 8, 2), [0.0, -30.0])
    x[0, 3, 1] = x[1, 5, 1] = 30
    given = (x, np.asarray([[1e-30, 0], [1e-33, 1e-30]]), np.asarray([1.0, 0.0]))
    potentials, P, initial = (backend.asarray(each, "float32") for each in given)
    _, pullback = alc.vjp.log_partition(alc.LogChain(potentials, transitions=P, initial=initial))
    found = pullback(backend.asarray(np.asarray([1.0, -1.0]), "float32")).transitions
    assert np.all(np.isfinite(backend.to_numpy(found)))


def test_half_precisions(backend, half):
    for form in FORMS:
        options = given_as(form, uniform(5, 4, 4), uniform(4))
        check_vjp_chain(backend, half, normal(3, 6, 4, sd=3), **options)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("steps", [1, 399])
@pytest.mark.parametrize("sd", [2, 30])
def test_long_chains(np_backend, dtype, form, steps, sd):
    """Long enough for the value to be computed in segments."""
    options = given_as(form, uniform(steps, 3, 3), uniform(3))
    check_vjp_chain(np_backend, dtype, normal(400, 3, sd=sd), **options)


@pytest.mark.parametrize("workspace", [1 << 20, 1 << 21])
@pytest.mark.parametrize("sd", [1, 1000])
def test_workspace_changes_no_gradient(np_backend, dtype, workspace, sd):
    x = normal(300, 6, 10, sd=sd)
    options = given_as("linear", uniform(5, 10, 10), uniform(10))
    check_vjp_chain(np_backend, dtype, x, **options, workspace=workspace)


def test_views_and_an_expanded_cotangent(dtype):
    x, transitions = normal(5, 3, 4).astype(dtype), uniform(4, 4, 4).astype(dtype)
    viewed = alc.LogChain(x.swapaxes(0, 1), transitions=np.asfortranarray(transitions[::-1])[::-1])
    plain = alc.LogChain(x.swapaxes(0, 1).copy(), transitions=transitions)
    ours = alc.vjp.log_partition(viewed)[1](np.broadcast_to(np.asarray(2.0, dtype), (3,)))
    expected = alc.vjp.log_partition(plain)[1](np.full(3, 2.0, dtype))
    for a, b in zip(ours[:2], expected[:2], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e3 * eps(dtype), atol=1e3 * eps(dtype))


@pytest.mark.parametrize("sd", [1, 1000])
def test_pullback_can_be_called_again(backend, dtype, sd):
    arrays = (normal(4, 7, 5, sd=sd), uniform(6, 5, 5), uniform(5))
    x, transitions, initial = (backend.asarray(v, dtype) for v in arrays)
    _, pullback = alc.vjp.log_partition(alc.LogChain(x, transitions=transitions, initial=initial))
    g, other = (backend.asarray(normal(4, seed=i), dtype) for i in (1, 2))
    first = [backend.to_numpy(d).copy() for d in pullback(g)[:3]]
    pullback(other)
    for d, again in zip(first, pullback(g)[:3], strict=True):
        np.testing.assert_array_equal(d, backend.to_numpy(again))


def test_value_is_log_partition(backend, dtype):
    x, transitions = (
        backend.asarray(normal(4, 7, 5), dtype),
        backend.asarray(uniform(6, 5, 5), dtype),
    )
    chain = alc.LogChain(x, transitions=transitions)
    value, _ = alc.vjp.log_partition(chain)
    tolerance = 100 * eps(dtype)
    np.testing.assert_allclose(
        backend.read(value, dtype), backend.to_numpy(chain.log_partition()), rtol=tolerance
    )


@pytest.mark.parametrize("form", FORMS)
def test_gradients_are_posteriors(np_backend, dtype, form):
    """With a cotangent of ones: marginals, and the counts, or counts over weights."""
    transitions = uniform(6, 5, 5)
    options = {
        k: v if v is None else v.astype(dtype) for k, v in given_as(form, transitions).items()
    }
    chain = alc.LogChain(normal(4, 7, 5).astype(dtype), **options)
    _, pullback = alc.vjp.log_partition(chain)
    found = pullback(np.ones(4, dtype))
    tolerance = 1e3 * eps(dtype)
    np.testing.assert_allclose(found.log_potentials, chain.marginals(), atol=tolerance)
    counts = found.transitions * (1 if form == "logs" else options["transitions"])
    np.testing.assert_allclose(counts, chain.expected_transitions(), atol=tolerance)


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda g: g[:-1], ValueError),
        (lambda g: g[None], ValueError),
        (lambda g: np.asarray(2.0), ValueError),
        (lambda g: 2.0, TypeError),
        (lambda g: None, TypeError),
        (lambda g: g.tolist(), TypeError),
        (lambda g: g.astype(int), TypeError),
    ],
    ids=["row", "axis", "0-d", "number", "None", "list", "integers"],
)
def test_cotangents_that_do_not_fit(make, error):
    chain = alc.LogChain(normal(3, 5, 2), transitions=uniform(4, 2, 2))
    _, pullback = alc.vjp.log_partition(chain)
    with pytest.raises(error, match=mentions("cotangent")):
        pullback(make(normal(3)))


def test_cotangent_of_another_library(torch_backend):
    chain = alc.LogChain(normal(3, 5, 2), transitions=uniform(4, 2, 2))
    _, pullback = alc.vjp.log_partition(chain)
    with pytest.raises(TypeError, match=mentions("cotangent")):
        pullback(torch_backend.asarray(normal(3)))


@hypothesis.given(
    chain=chains(), kind=st.sampled_from(COTANGENTS), dtype=DTYPES, workspace=WORKSPACES
)
@hypothesis.settings(max_examples=50)
def test_any_chain_with_logs(chain, kind, dtype, workspace):
    x, edges, initial = chain
    check_vjp_chain(
        make_backend("numpy"),
        dtype,
        x,
        kind,
        log_transitions=edges,
        log_initial=initial,
        workspace=workspace,
    )


@hypothesis.given(chain=chains(), dtype=DTYPES, sharpness=st.sampled_from([0.01, 0.1, 1.0]))
@hypothesis.settings(max_examples=50)
def test_any_chain_with_linear_weights(chain, dtype, sharpness):
    x, edges, initial = chain
    transitions, start = (None if w is None else linear(w, sharpness) for w in (edges, initial))
    check_vjp_chain(make_backend("numpy"), dtype, x, transitions=transitions, initial=start)


@hypothesis.given(chain=chains(), name=st.sampled_from(["strict", "strict-no_float64", "torch"]))
@hypothesis.settings(max_examples=12)
def test_any_chain_elsewhere(chain, name):
    x, edges, initial = chain
    check_vjp_chain(make_backend(name), "float32", x, log_transitions=edges, log_initial=initial)


@pytest.mark.parametrize("wanted", ["initial", ["log_transitions"], ["x", "initial"]])
def test_wanted_names_are_checked(wanted):
    _, pullback = alc.vjp.log_partition(alc.LogChain(np.zeros((1, 2)), initial=np.ones(2)))
    with pytest.raises(ValueError, match="wanted"):
        pullback(1.0, wanted)


@pytest.mark.parametrize("sd", [30, 100])
def test_closed_transitions_between_states_far_apart(backend, dtype, sd):
    """Where no transition leads from k to j, nothing bounds the product of their weights."""
    rng = np.random.default_rng(7)
    edges = np.where(np.tri(3, dtype=bool), rng.normal(size=(8, 3, 3)), -np.inf)
    for seed in range(8):
        x = sd * np.random.default_rng(seed).normal(size=(2, 9, 3))
        gradients = check_vjp_chain(backend, dtype, x, log_transitions=edges)
        assert not np.any(gradients[1][edges == -np.inf])


@pytest.mark.parametrize("scale", [1e-30, 1e-25, 1e-20, 1e9, 1e20])
@pytest.mark.parametrize("sd", [1, 8])
def test_cotangents_of_any_size(backend, dtype, sd, scale):
    """Weights of wide rows are kept far from 1; a cotangent must not push them out of range."""
    if backend.name == "strict-no_float64":
        scale = max(scale, 1e-20)  # there the wider range is missing
    rng = np.random.default_rng(0)
    x, transitions = sd * rng.normal(size=(2, 12, 4)), rng.random((1, 4, 4))
    options = {"transitions": transitions, "initial": np.ones(4)}
    check_vjp_chain(backend, dtype, x, g=np.full(2, scale), **options)


@pytest.mark.parametrize("form", FORMS)
def test_large_cotangent_and_a_state_out_of_reach(dtype, form):
    x = np.zeros((2, 12, 2), dtype)
    x[..., 1] = 50
    edges, start = np.array([[[1, 0], [0.5, 0.5]]], dtype), np.array([1, 0], dtype)
    with np.errstate(divide="ignore"):
        given = given_as(form, edges, start)
    _, pullback = alc.vjp.log_partition(
        alc.LogChain(x, **{n: v.astype(dtype) for n, v in given.items()})
    )
    gradients = pullback(np.array([1e9, 1], dtype))
    assert all(np.all(np.isfinite(gradient)) for gradient in gradients[:3])
    np.testing.assert_allclose(gradients.log_potentials[0, :, 0], 1e9, rtol=1e-5)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shared", [True, False])
def test_infinite_transition_has_no_gradient(backend, dtype, form, shared):
    rng = np.random.default_rng(0)
    edges = rng.random((2, 3, 3, 3))
    edges[0, 1, 0, 0] = np.inf
    given = given_as(form, edges[0] if shared else edges, np.ones(3))
    arrays = {name: backend.asarray(value, dtype) for name, value in given.items()}
    chain = alc.LogChain(backend.asarray(rng.normal(size=(2, 4, 3)), dtype), **arrays)
    value, pullback = alc.vjp.log_partition(chain)
    results = [*pullback(backend.asarray(np.ones(2), dtype))[:3], chain.marginals()]
    results.append(chain.expected_transitions())
    assert not any(np.any(np.isnan(backend.to_numpy(x))) for x in results)
    infinite = np.isinf(backend.to_numpy(value))
    assert np.all(infinite == [True, shared])
    marginals = backend.to_numpy(chain.marginals())
    assert not np.any(marginals[infinite])
    np.testing.assert_allclose(marginals[~infinite].sum(-1), 1, rtol=1e-5)


def test_interrupted_pullback_leaves_nothing_behind(monkeypatch):
    monkeypatch.setattr(_dispatch, "COMPILED", False)
    rng = np.random.default_rng(0)
    x, transitions = rng.normal(size=(3, 9, 4)), rng.random((8, 4, 4))
    _, pullback = alc.vjp.log_partition(alc.LogChain(x, transitions=transitions))
    _, fresh = alc.vjp.log_partition(alc.LogChain(x, transitions=transitions))
    add_pairs, calls = TilePosterior._add_pairs, []

    def interrupted(*args):
        calls.append(args)
        if len(calls) == 4:
            raise KeyboardInterrupt
        add_pairs(*args)

    with monkeypatch.context() as patch:
        patch.setattr(TilePosterior, "_add_pairs", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pullback(np.ones(3))
    for again, expected in zip(pullback(np.ones(3))[:2], fresh(np.ones(3))[:2], strict=True):
        np.testing.assert_allclose(again, expected, rtol=1e-14)
