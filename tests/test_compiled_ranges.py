"""Compiled loops: weights over hundreds of powers of ten, which a forgotten certificate loses."""

import numpy as np
import pytest

import arraylogchain as alc
from arraylogchain import plan
from arraylogchain._compiled import why_not
from tests import reference
from tests.adversarial import (
    NUMPY,
    adversarial,
    check_every_operation,
    check_huge_gradients,
    check_sum_and_counts,
)
from tests.checks import check_chain
from tests.error_model import EPS
from tests.gradient_checks import check_posterior

if why_not() is not None:
    pytest.skip(why_not(), allow_module_level=True)

from tests.compiled_chain import CompiledChain, value_and_gradients


def first_of(count, usual):
    """Return numbers, of which README's command takes the first few."""
    marks = pytest.mark.exhaustive
    return [*range(usual), *(pytest.param(n, marks=marks) for n in range(usual, count))]


@pytest.fixture(autouse=True, params=[8, pytest.param(1, marks=pytest.mark.exhaustive)])
def _compiled(monkeypatch, request):
    monkeypatch.setattr(alc, "LogChain", CompiledChain)
    monkeypatch.setattr(alc.vjp, "log_partition", value_and_gradients)
    monkeypatch.setattr(plan, "_PACK_ROWS", request.param)


@pytest.mark.parametrize("block", first_of(10, 4))
def test_sums_and_counts(block):
    for seed in range(200 * block, 200 * (block + 1)):
        check_sum_and_counts(CompiledChain, seed)


@pytest.mark.parametrize("in_logs", [False, True])
@pytest.mark.parametrize("block", first_of(6, 2))
def test_every_operation(block, in_logs):
    for seed in range(15 * block, 15 * (block + 1)):
        check_every_operation(seed, in_logs)


def test_counts_of_weights_whose_gradients_are_huge():
    check_huge_gradients(CompiledChain, value_and_gradients, rtol=1e-14)
    x = np.array([[0, -2000.0], [0, 0], [0, -2000]])
    chain = CompiledChain(x, transitions=np.array([[[5e-324, 0], [0, 1]]]))
    np.testing.assert_allclose(chain.expected_transitions(), [[[2, 0], [0, 0]]], rtol=1e-14)
    gradient = value_and_gradients(chain)[1](np.array(-1.0)).transitions
    assert gradient[0, 0, 0] == -np.finfo(float).max
    float32 = CompiledChain(x.astype("f4"), transitions=np.array([[[1e-44, 0], [0, 1]]], "f4"))
    gradient = value_and_gradients(float32)[1](np.array(1.0)).transitions
    assert gradient.dtype == np.float32
    assert gradient[0, 0, 0] == np.finfo(np.float32).max


@pytest.mark.parametrize("size", [1e-200, 1e200])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_cotangents_bring_gradients_into_range(size, sign):
    """Gradients that only cotangents make numbers: those of ones are too large, or too small."""
    x, cotangent = np.array([[0, -1.8 * np.log(size)], [0, 0]]), np.array(sign * size)
    expected = pytest.approx(sign * size**-0.8, rel=1e-12)
    chain = CompiledChain(x, transitions=np.array([[[1.0, 0], [0, 0]]]))
    assert value_and_gradients(chain)[1](cotangent).transitions[0, 1, 0] == expected
    chain = CompiledChain(x[:1], initial=np.array([1.0, 0]))
    assert value_and_gradients(chain)[1](cotangent).initial[1] == expected


def test_nan_without_a_cotangent():
    """Zero times NaN is NaN, in the row that has it; rows without a path have no derivatives."""
    x = np.zeros((3, 4, 2))
    x[1, 2, 0], x[2, 1] = np.nan, -np.inf
    chain = CompiledChain(x, transitions=np.full((1, 2, 2), 0.5))
    gradient = value_and_gradients(chain)[1](np.zeros(3)).log_potentials
    assert np.all(np.isnan(gradient[1]))
    assert np.all(gradient[[0, 2]] == 0)


@pytest.mark.parametrize("K", [1, 3, 4, 7, 30])
@pytest.mark.parametrize("T", [600])
def test_long_products_that_leave_the_range(K, T):
    """Steps by 1e-30 and 1e30, and rows whose states drift apart and come back."""
    rng = np.random.default_rng(K)
    x = rng.normal(size=(3, T, K))
    P = rng.random((T - 1, K, K)) * 10.0 ** rng.choice([-30, 0, 30], (T - 1, 1, 1))
    check_chain(NUMPY, "float64", x, transitions=P)
    x[1, :300, :1] -= 5
    x[1, 300:, :1] += 5
    x[2, 10:, -1] -= np.linspace(0, 3000, T - 10)
    mostly_kept = np.eye(K)[None] + 1e-12
    check_chain(NUMPY, "float64", x, transitions=mostly_kept)
    check_posterior(NUMPY, "float64", x[:, ::4], transitions=mostly_kept)


@pytest.mark.parametrize(("steps", "size"), [(1, 1.0), (1, 1e-31), (599, 1.0)])
def test_states_that_drift_apart(steps, size):
    """Left to right, with the same exponents for hundreds of steps, or for a few."""
    rng, K = np.random.default_rng(0), 20
    x = rng.normal(size=(2, 600, K)) + np.linspace(0, 5, K)
    x[1, :, 3:] += np.linspace(0, 20, K - 3)
    x[1, ::7, 4] = -np.inf
    P = size * np.triu(np.tril(rng.random((steps, K, K)), 2))
    _, messages = check_chain(NUMPY, "float64", x, transitions=P, initial=np.eye(K)[0])
    check_posterior(NUMPY, "float64", x, transitions=P)
    shares = CompiledChain(x, transitions=P).run("filtered")[0]
    assert np.all(np.abs(shares.sum(-1) - 1) <= 2 * K * EPS["float64"])
    # Rows take turns, a few steps each.
    chain = CompiledChain(x, transitions=P, initial=np.eye(K)[0], workspace=1 << 16)
    np.testing.assert_allclose(chain.forward_messages(), messages, rtol=2 * EPS["float64"])


def test_small_shares_of_states_that_drift_apart():
    """Numbers times powers of two that are no numbers any more."""
    x = np.array([[0, -1300 * np.log(2)], *[[0, 0]] * 30])
    chain = CompiledChain(x, transitions=np.diag([1, 2.0**10])[None], initial=np.ones(2))
    shares = chain.run("filtered")[0][:, 1]
    np.testing.assert_allclose(shares[28:], 2.0 ** np.array([-1020, -1010, -1000]), rtol=1e-12)


def test_flushing_to_zero(request):
    """Processors may be told to take subnormal numbers for zero, as torch can."""
    torch = pytest.importorskip("torch")
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor does not flush")
    request.addfinalizer(lambda: torch.set_flush_denormal(False))
    # Subnormal products beside one that is not; then such a product alone.
    for weights in ([2.0**-114, 2.0**-118, 2.0**-118], [2.0**-30, 0, 0]):
        for bits in range(480, 630):
            x, P = np.zeros((3, 4)), np.zeros((2, 4, 4))
            x[:2, 1:] = -np.log(2) * np.array([[600], [bits]])
            P[0], P[1, 0, 0], P[1, 1:, 1] = np.eye(4), 1.0, weights
            torch.set_flush_denormal(True)
            found = alc.LogChain(x, transitions=P).forward_messages()[2, 1]
            torch.set_flush_denormal(False)
            assert abs(found - np.log(sum(weights)) + (600 + bits) * np.log(2)) < 1e-12
    for seed in range(200):
        x, P, p0 = adversarial(seed)
        if np.all((P == 0) | (P >= 2.0**-1022)) and np.all(p0 >= 2.0**-1022):
            torch.set_flush_denormal(False)
            with np.errstate(divide="ignore"):
                exact = reference.chain(
                    x, np.log(reference.wide(P)), np.log(reference.wide(p0))
                ).log_partition
            torch.set_flush_denormal(True)
            found = alc.LogChain(x, transitions=P, initial=p0).log_partition()
            if np.isinf(exact):
                assert found == exact
            else:
                size = np.max(np.abs(np.where(np.isfinite(x), x, 0))) + 700
                assert abs(found - exact) <= 4 * EPS["float64"] * (abs(exact) + len(x) * size)


def test_pairs_whose_weights_are_hardly_numbers():
    """The only path leads through weights whose products in linear space lose their last digits."""
    x = np.array([[-460.3 * np.log(2), 0], [-689.7, 0], [0, 0]])
    chain = CompiledChain(x, transitions=np.array([[[1.0, 0], [0, 0]]]))
    np.testing.assert_allclose(chain.expected_transitions(), [[[2, 0], [0, 0]]], rtol=1e-14)
    np.testing.assert_allclose(chain.marginals(), [[1, 0]] * 3, rtol=1e-14)
    chain = CompiledChain(x, log_transitions=np.array([[[0, -np.inf], [-np.inf, -np.inf]]]))
    gradients = value_and_gradients(chain)[1](np.array(1e-300))
    np.testing.assert_allclose(gradients.transitions * 1e300, [[[2, 0], [0, 0]]], rtol=1e-14)


def test_samples_of_weights_that_are_hardly_numbers():
    """1 to 1.3, of which subnormal numbers would make the same."""
    x = np.array([[-260 * np.log(2), np.log(1.3) - 260 * np.log(2), 0], [0, -np.inf, -np.inf]])
    transitions = np.zeros((1, 3, 3))
    transitions[0, :2, 0] = 1e-305
    states = CompiledChain(x, transitions=transitions).sample(100_000, np.random.default_rng(0))
    share = (states[:, 0] == 0).mean()
    assert share == pytest.approx(1 / 2.3, abs=5 * 0.5 / np.sqrt(100_000))
