"""Compiled loops: right within the error model, for all forms and shapes of chains."""

from types import SimpleNamespace

import numpy as np
import pytest

import arraylogchain as alc
from arraylogchain import plan
from arraylogchain._compiled import why_not
from tests import gradient_reference, reference
from tests.checks import CHAIN_SHAPES, check_chain
from tests.conftest import make_backend
from tests.error_model import EPS
from tests.gradient_checks import COTANGENTS, check_posterior, check_vjp_chain
from tests.path_checks import MIXED_FORMS, Case, given_in_forms
from tests.ragged_checks import Ragged
from tests.test_chain import FORMS, given_as, normal, uniform, wide_linear_weights, wide_log_weights

if why_not() is not None:
    pytest.skip(why_not(), allow_module_level=True)

from arraylogchain._compiled.chains import packs
from tests.compiled_chain import CompiledChain, value_and_gradients

INF, NAN = np.inf, np.nan
NUMPY = make_backend("numpy")
OPERATIONS = (
    "log_partition",
    "forward_messages",
    "backward_messages",
    "marginals",
    "expected_transitions",
    "entropy",
)


@pytest.fixture(autouse=True, params=[8, pytest.param(1, marks=pytest.mark.exhaustive)])
def _compiled(monkeypatch, request):
    monkeypatch.setattr(alc, "LogChain", CompiledChain)
    monkeypatch.setattr(alc.vjp, "log_partition", value_and_gradients)
    monkeypatch.setattr(plan, "_PACK_ROWS", request.param)


@pytest.fixture
def left(monkeypatch):
    """Collect how many rows packs leave to the loops over rows, by calls of loops."""
    counts = []
    take_packs = packs.take_packs

    def take(*args):
        totals, left = take_packs(*args)
        counts.append(sum(map(len, left)))
        return totals, left

    monkeypatch.setattr(packs, "take_packs", take)
    return counts


def check_all(dtype, x, *, g="normal", **options):
    """Compare every operation with the reference."""
    check_chain(NUMPY, dtype, x, **options)
    check_posterior(NUMPY, dtype, x, **options)
    check_vjp_chain(NUMPY, dtype, x, g, **options)
    case = Case(NUMPY, dtype, x, **options)
    states, _ = case.check_viterbi()
    case.check_entropy()
    if x.shape[-1]:
        case.check_log_weight(np.stack([states, np.random.default_rng(0).permuted(states)]))


@pytest.mark.parametrize("forms", MIXED_FORMS)
@pytest.mark.parametrize("T", [1, 2, 3, 6])
def test_forms(dtype, forms, T):
    check_all(dtype, normal(3, T, 3), **given_in_forms(forms, uniform(T - 1, 3, 3), uniform(3)))


@pytest.mark.parametrize(("form", "kind"), [("linear", "float32"), ("logs", "float64")])
@pytest.mark.parametrize(("x", "transitions", "initial"), CHAIN_SHAPES)
def test_shapes(form, kind, x, transitions, initial):
    start = None if initial is None else uniform(*initial)
    check_all(kind, normal(*x), **given_as(form, uniform(*transitions, seed=1), start))


def test_one_step_needs_no_transitions(dtype):
    check_all(dtype, normal(2, 1, 4), initial=uniform(4))
    check_all(dtype, normal(2, 1, 4))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("sd", [1, 30, 100, 1000])
def test_wide_potentials(dtype, form, sd):
    check_all(dtype, normal(4, 12, 9, sd=sd), **given_as(form, uniform(11, 9, 9), uniform(9)))


@pytest.mark.parametrize("sd", [20, 100, 1000])
@pytest.mark.parametrize("steps", [1, 9])
def test_wide_log_transitions(dtype, sd, steps):
    x, options = wide_log_weights(sd, steps)
    check_all(dtype, x, **options)


@pytest.mark.parametrize("closed", [-1e4, -720.0, -INF])
def test_transitions_that_are_as_good_as_closed(dtype, closed):
    """As in models that write -10,000 for what is not allowed."""
    logs = normal(1, 9, 9)
    logs[0, np.tri(9, k=-1, dtype=bool)] = closed
    check_all(dtype, normal(3, 12, 9, sd=5), log_transitions=logs)
    start = np.where(np.arange(9) == 8, 0.0, -INF)  # all but one path has to take a closed one
    x = normal(3, 12, 9)
    x[:, 5, 5:] = -INF
    check_all(dtype, x, log_transitions=logs, log_initial=start)


@pytest.mark.parametrize("decades", [5, 30])
def test_wide_linear_transitions(dtype, decades):
    x, options = wide_linear_weights(decades)
    check_all(dtype, x, **options)


@pytest.mark.parametrize("kind", ["shifted", "alternating", "any magnitude"])
def test_large_potentials(dtype, kind):
    rng = np.random.default_rng(7)
    x = np.round(normal(2, 40, 5, sd=3), 1)
    if kind == "shifted":
        x += 1e4
    elif kind == "alternating":
        x[:, ::2] += 10_000
        x[:, 1::2] -= 10_000
    else:
        x = rng.normal(size=(4, 6, 5)) * 10.0 ** rng.integers(-20, 20, (4, 6, 5))
    check_chain(NUMPY, dtype, x, transitions=uniform(x.shape[1] - 1, 5, 5))
    if kind != "any magnitude":
        check_all(dtype, x, transitions=uniform(39, 5, 5))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("sd", [1, 1000])
@pytest.mark.parametrize("steps", [1, 11])
def test_sparse_transitions(dtype, form, sd, steps):
    """Also rows without a path."""
    rng = np.random.default_rng(9)
    transitions = uniform(steps, 7, 7) * (rng.random((steps, 7, 7)) < 0.3)
    x = normal(4, 12, 7, sd=sd)
    x[rng.random(x.shape) < 0.1] = -INF
    x[3, 5] = -INF
    check_all(dtype, x, **given_as(form, transitions, np.eye(7)[2]))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("K", [5, 8, 10, 13])
@pytest.mark.parametrize("width", [1, 2, 4])
def test_bands(dtype, form, K, width):
    rows, columns = np.indices((K, K))
    transitions = uniform(1, K, K) * ((columns >= rows) & (columns < rows + width))
    check_all(dtype, normal(3, 2 * K, K, sd=3), **given_as(form, transitions, np.eye(K)[0]))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("log_ratio", [-30, -300, -690, -1500, -1e5])
def test_only_path_leads_through_unlikely_states(dtype, form, log_ratio):
    K = T = 9
    x = np.zeros((T, K))
    x[1:-1, 1:] = log_ratio / (T - 2)
    x[-1, :-1] = -INF
    transitions = 0.5 * (np.eye(K) + np.eye(K, k=1))
    check_all(dtype, x, **given_as(form, transitions[None], np.eye(K)[0]))


def test_rejoining_after_a_long_detour(dtype):
    """Two separate groups of states, one 1200 nats below the other, and only it ends well."""
    x = normal(60, 4)
    x[:30, 2:] -= 40.0
    x[-1, :2] = -INF
    block = np.kron(np.eye(2), np.full((2, 2), 0.5))
    check_all(dtype, x, transitions=block[None])


@pytest.mark.parametrize("kind", COTANGENTS)
def test_cotangents(dtype, kind):
    options = given_as("linear", uniform(6, 5, 5), uniform(5))
    check_vjp_chain(NUMPY, dtype, normal(9, 7, 5, sd=3), kind, **options)


def test_half_precision():
    for form in FORMS:
        check_all("float16", normal(3, 6, 4, sd=3), **given_as(form, uniform(5, 4, 4), uniform(4)))


@pytest.mark.parametrize("garbage", [INF, -INF, NAN])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("steps", [1, 8])
def test_lengths(dtype, form, steps, garbage):
    lengths = [9, 1, 4, 9, 2]
    options = given_as(form, uniform(5, steps, 4, 4) + 0.01, uniform(4))
    if steps == 1:
        options["transitions" if form == "linear" else "log_transitions"][...] = 1.0
    ragged = Ragged(NUMPY, dtype, normal(5, 9, 4), lengths, garbage=garbage, **options)
    ragged.check_sums()
    ragged.check_paths()


@pytest.mark.parametrize("operation", [*OPERATIONS, "viterbi", "sample"])
def test_lengths_of_a_few_axes(operation):
    """Lengths broadcast, and groups of matrices lie behind other rows."""
    x, P, lengths = normal(2, 3, 6, 4), uniform(3, 5, 4, 4) + 0.01, np.array([[6], [3]])
    whole = CompiledChain(x, transitions=P, lengths=np.broadcast_to(lengths, (2, 3)))
    broadcast = CompiledChain(x, transitions=P, lengths=lengths)
    for chain in (whole, broadcast):
        chain.found = (
            chain.sample(3, np.random.default_rng(0))
            if operation == "sample"
            else chain.run(operation)
        )
    np.testing.assert_array_equal(broadcast.found, whole.found)
    if operation in ("viterbi", "sample"):
        assert np.all(whole.found[..., 1, :, 3:] == -1)
        assert np.all(whole.found[..., 0, :, :] >= 0)


@pytest.mark.parametrize("value", [INF, NAN, -INF])
@pytest.mark.parametrize("name", ["potentials", "transitions", "initial"])
@pytest.mark.parametrize("form", FORMS)
def test_special_values(dtype, form, name, value):
    """They show where they took part, and only there; posteriors of infinite weights are 0."""
    x, P, p0 = normal(3, 6, 4), uniform(3, 5, 4, 4) + 0.01, uniform(3, 4)
    options = given_as(form, P, p0)
    key = name if form == "linear" else f"log_{name}"
    target = x if name == "potentials" else options[key]
    place = {"potentials": (1, 2, 3), "transitions": (1, 1, 0, 1), "initial": (1, 2)}[name]
    target[place] = 0.0 if form == "linear" and name != "potentials" and value == -INF else value
    check_chain(NUMPY, dtype, x, **options)
    if value == -INF:
        check_all(dtype, x, **options)
        return
    given = {k: None if v is None else v.astype(dtype) for k, v in options.items()}
    chain = CompiledChain(x.astype(dtype), **given)
    clean = CompiledChain(x[[0, 2]].astype(dtype), **{k: v[[0, 2]] for k, v in given.items()})
    for operation in OPERATIONS:
        found = chain.run(operation)
        np.testing.assert_array_equal(found[[0, 2]], clean.run(operation))
        if operation in ("marginals", "expected_transitions"):
            assert np.all(np.isnan(found[1])) if value is NAN else not np.any(found[1])
    assert np.isnan(chain.entropy()[1])
    states, samples = chain.run("viterbi"), chain.sample(5, np.random.default_rng(0))
    np.testing.assert_array_equal(states[[0, 2]], clean.run("viterbi"))
    assert np.all((states >= 0) & (states < 4))
    assert np.all((samples >= 0) & (samples < 4))
    _, pullback = value_and_gradients(chain)
    for gradient in pullback(np.ones(3))[:3]:
        assert np.all(np.isnan(gradient[1])) if value is NAN else not np.any(gradient[1])
        assert np.all(np.isfinite(gradient[[0, 2]]))


def test_special_transitions_where_no_weight_meets_them(dtype):
    """Infinity times zero is NaN, and so is a negative weight, which has no logarithm."""
    x, P = normal(2, 4, 3), uniform(1, 3, 3)
    x[0, :, 1] = -INF
    for value in (INF, NAN, -1.0):
        P[0, 1, 2] = value
        check = CompiledChain(x.astype(dtype), transitions=P.astype(dtype))
        assert np.isnan(check.log_partition()[0])
        with np.errstate(invalid="ignore"):
            logs = CompiledChain(x.astype(dtype), log_transitions=np.log(P).astype(dtype))
        np.testing.assert_allclose(
            check.forward_messages(), logs.forward_messages(), rtol=1e-4, atol=1e-4
        )


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("final_form", FORMS)
@pytest.mark.parametrize("lengths", [None, [6, 2, 1], [6, 2, 1, 6, 5, 4, 3, 2, 1]])
def test_final_weights(form, final_form, lengths):
    """They are further potentials of the last real step."""
    n = len(lengths or "few")
    x, P, final = normal(n, 6, 4), uniform(5, 4, 4), uniform(n, 4)
    final[0, 1] = 0
    last = np.arange(n), np.array(lengths or [6] * n) - 1
    more = x.copy()
    with np.errstate(divide="ignore"):
        more[last] += np.log(final)
        given = final if final_form == "linear" else np.log(final)
    options = given_as(form, P)
    chain = CompiledChain(x, final=given, lengths=lengths, **options)
    object.__setattr__(chain.chain, "final_in_logs", final_form == "logs")
    weighed = CompiledChain(more, lengths=lengths, **options)
    for operation in ("log_partition", "marginals", "expected_transitions", "entropy"):
        np.testing.assert_allclose(
            chain.run(operation), weighed.run(operation), rtol=1e-12, atol=1e-12
        )
    backward = chain.backward_messages()
    with np.errstate(divide="ignore"):
        np.testing.assert_allclose(backward[last], np.log(final), rtol=1e-12)
    z = np.logaddexp.reduce(backward[:, 0] + x[:, 0], axis=-1)
    np.testing.assert_allclose(z, weighed.log_partition(), rtol=1e-12)
    states = weighed.run("viterbi")
    np.testing.assert_array_equal(chain.run("viterbi"), states)
    np.testing.assert_allclose(chain.log_weight(states), weighed.log_weight(states), rtol=1e-12)
    rng = np.random.default_rng
    np.testing.assert_array_equal(chain.sample(50, rng(0)), weighed.sample(50, rng(0)))
    _, pullback = chain.run("value_and_pullback", True)
    found = pullback(np.ones(n), frozenset(["potentials", "final"]))
    p = weighed.marginals()[last]
    np.testing.assert_allclose(found["potentials"], weighed.marginals(), atol=1e-12)
    if final_form == "logs":
        np.testing.assert_allclose(found["final"], p, atol=1e-12)
    else:
        positive = final > 0
        np.testing.assert_allclose(found["final"][positive], (p[positive] / final[positive]))
        assert np.all(found["final"][~positive] > 0)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("batch", "own"), [((19,), (6,)), ((19,), (1,)), ((2, 9), (2, 1, 6))])
def test_packs(dtype, left, form, batch, own):
    """Rows that share their matrices, some in packs of their own."""
    x = normal(*batch, 7, 5, sd=3)
    x[np.random.default_rng(0).random(x.shape) < 0.1] = -INF
    P = uniform(*own, 5, 5)
    P[..., 1, 2:] = 0
    check_all(dtype, x, **given_as(form, P, uniform(*batch, 5)))
    assert len(left) > 0
    assert sum(left) == 0


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("steps", [1, 8])
def test_packs_of_different_lengths(dtype, left, form, steps):
    lengths = np.random.default_rng(0).integers(1, 10, 19)
    lengths[8:16] = 2  # matrices that no row of a pack reads
    options = given_as(form, uniform(steps, 4, 4) + 0.01, uniform(4))
    ragged = Ragged(NUMPY, dtype, normal(19, 9, 4), lengths, **options)
    ragged.check_sums()
    assert len(left) > 0
    assert sum(left) == 0


@pytest.mark.parametrize("scale", [1.0, 1e6])
def test_packs_of_long_rows(left, scale):
    """Their weights leave the range of numbers again and again."""
    x, P = normal(9, 400, 3, sd=5), scale * uniform(1, 3, 3)
    x[0, :, 1:] -= 50.0
    check_chain(NUMPY, "float64", x, transitions=P)
    check_posterior(NUMPY, "float64", x[:, ::4], transitions=P)
    chain = CompiledChain(x, transitions=P)
    np.testing.assert_array_equal(chain.posterior()[0], chain.log_partition())
    assert len(left) > 0
    assert sum(left) == 0


@pytest.mark.parametrize("sd", [30, 100, 1000])
def test_packs_of_wide_potentials(dtype, left, sd):
    check_all(dtype, normal(12, 12, 5, sd=sd), **given_as("linear", uniform(11, 5, 5), uniform(5)))
    assert sum(left) > 0 or sd < 1000


def test_packs_of_weights_that_are_hardly_numbers():
    """Some would lose their last digits, as subnormal numbers, and then decide alone."""
    x = np.zeros((27, 4, 2))
    x[:, 1, 0], x[:, 2, 0] = -690.0, np.linspace(-100.0, -220.0, 27)
    x[:, 3, 1] = -INF
    found = CompiledChain(x, transitions=np.eye(2)[None]).log_partition()
    np.testing.assert_allclose(found, x[..., 0].sum(-1), rtol=1e-15)


def test_packs_of_small_entries():
    """A product with one would vanish, and then decide alone."""
    x, P = np.zeros((9, 8, 3)), np.tile(np.eye(3), (7, 1, 1))
    x[:, 1, 0], x[:, 2, 0], x[:, 3:, 0] = -690.0, np.linspace(-30.0, -70.0, 9), -INF
    x[:, :3, 1], x[:, 4:, 2] = -INF, -400.0
    P[2, 0, 1] = 1e-60
    found = CompiledChain(x, transitions=P).log_partition()
    np.testing.assert_allclose(found, -690.0 + x[:, 2, 0] + np.log(1e-60), rtol=1e-14)


def test_packs_of_small_derivatives(monkeypatch):
    """What they are made of would be less than all normal numbers."""
    x, P = normal(9, 3, 2), uniform(1, 2, 2)
    x[:, 1, 1] = -400.0
    found = []
    for least in (8, 10):
        monkeypatch.setattr(plan, "_PACK_ROWS", least)
        _, pullback = value_and_gradients(CompiledChain(x, transitions=P))
        found.append(pullback(np.full(9, 1e-80)).transitions)
    np.testing.assert_allclose(*found, rtol=1e-13)


@pytest.mark.parametrize("kind", ["wide", NAN, INF, "impossible"])
def test_only_packs_with_rows_out_of_range_are_left(monkeypatch, left, kind):
    x, P = normal(24, 12, 5), uniform(1, 5, 5)
    if kind == "wide":
        x[10] *= 1000
    elif kind == "impossible":
        x[10, 3] = -INF
    else:
        x[10, 3, 2] = kind
    chain = CompiledChain(x, transitions=P)
    found = chain.posterior()
    _, pullback = value_and_gradients(chain)
    gradients = pullback(normal(24))
    assert left == [8, 8, 0]  # what values have kept is not taken up again
    monkeypatch.setattr(plan, "_PACK_ROWS", 25)
    _, by_rows = value_and_gradients(chain)
    expected = (*chain.posterior(), *by_rows(normal(24))[:2])
    for ours, rows in zip((*found, *gradients[:2]), expected, strict=True):
        np.testing.assert_allclose(ours, rows, rtol=1e-12, atol=1e-12)


def test_samples_are_drawn_in_proportion(dtype):
    """Frequencies of states and of pairs agree with the posterior."""
    x, P = normal(2, 5, 3, sd=2), uniform(4, 3, 3)
    case = Case(NUMPY, dtype, x, transitions=P)
    states = case.chain.sample(100_000, np.random.default_rng(0))
    exact = gradient_reference.chain(*case.arguments).marginals.exact
    found = np.stack([(states == k).mean(0) for k in range(3)], axis=-1)
    np.testing.assert_allclose(found, exact.astype(float), atol=5 * 0.5 / np.sqrt(100_000))
    pair = (states[:, 0, 1] == 1) & (states[:, 0, 2] == 2)
    paths, weights = reference.enumerate_paths(case.lattice)
    p = np.exp(weights[0] - reference.logsumexp(weights[0], 0))
    expected = float(p[(paths[:, 1] == 1) & (paths[:, 2] == 2)].sum())
    assert pair.mean() == pytest.approx(expected, abs=5 * 0.5 / np.sqrt(100_000))


def test_samples_follow_the_uniforms():
    """The first state up to which weights sum up to more than u times all of them."""
    x, P = normal(4, 3), uniform(1, 3, 3)
    chain = CompiledChain(x, transitions=P)
    states = chain.sample(200, np.random.default_rng(4))
    uniforms = np.random.default_rng(4).random((200, 4))
    alpha = np.exp(chain.forward_messages())
    for path, u in zip(states, uniforms, strict=True):
        for t in reversed(range(4)):
            weights = alpha[t] * (P[0][:, path[t + 1]] if t < 3 else 1)
            assert path[t] == np.argmax(np.cumsum(weights) > u[t] * weights.sum())


@pytest.mark.parametrize("u", [0.0, 2.0**-53, 1 - 2.0**-53])
@pytest.mark.parametrize("sd", [1, 1000])
def test_a_weight_of_zero_is_never_drawn(u, sd):
    x = normal(6, 9, 7, sd=sd)
    x[:, :, [0, 6]] = -INF
    P = uniform(8, 7, 7)
    P[::2, :, 1] = 0
    chain = CompiledChain(x, transitions=P)
    constant = SimpleNamespace(random=lambda shape: np.full(shape, u))
    assert np.all(np.isfinite(chain.log_weight(chain.sample(5, constant))))


def test_paths_with_axes_of_their_own(dtype):
    case = Case(NUMPY, dtype, normal(2, 1, 5, 4), transitions=uniform(3, 1, 4, 4))
    rng = np.random.default_rng(0)
    for axes in ((), (3,), (2, 3), (5, 2, 3), (5, 1, 1), (4, 2, 1)):
        found = case.check_log_weight(rng.integers(0, 4, (*axes, 5)))
        assert found.shape == np.broadcast_shapes(axes, (2, 3))
    for kind in ("int8", "uint8", "int32"):
        case.check_log_weight(rng.integers(0, 4, (2, 3, 5)).astype(kind))


@pytest.mark.parametrize("operation", [*OPERATIONS, "viterbi"])
def test_views_and_layouts(dtype, operation):
    x, P = normal(5, 3, 4).astype(dtype), uniform(4, 4, 4).astype(dtype)
    plain = CompiledChain(x.swapaxes(0, 1).copy(), transitions=P)
    viewed = CompiledChain(
        x[::-1].swapaxes(0, 1)[:, ::-1], transitions=np.asfortranarray(P[::-1])[::-1]
    )
    swapped = CompiledChain(
        plain.arrays["log_potentials"].astype(">f8"), transitions=P.astype(">f8")
    )
    expected = plain.run(operation)
    np.testing.assert_array_equal(viewed.run(operation), expected)
    np.testing.assert_allclose(swapped.run(operation), expected, rtol=8 * EPS[dtype], atol=1e-6)
