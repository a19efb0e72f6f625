"""Chains of 100,000 steps: errors do not pile up, and nothing runs out of range."""

import numpy as np
import pytest

import arraylogchain as alc
from arraylogchain import _select
from tests import reference
from tests.chain_checks import check_chain
from tests.chain_scenarios import FORMS, normal, uniform, weights_as
from tests.error_model import assert_within, chain_bound, filtered_bounds

pytestmark = pytest.mark.chains

T, K = 100_000, 4


@pytest.mark.parametrize("steps", [1, T - 1], ids=["one matrix", "one per step"])
@pytest.mark.parametrize("form", FORMS)
def test_single_precision_agrees_with_double(steps, form):
    """Errors are far below the bound, and do not grow: the chain forgets steps long ago."""
    # The least entry is half of the largest: a step reduces differences to a sixth or less.
    weights = weights_as(form, 0.5 + 0.5 * uniform(steps, K, K), uniform(K))
    single = {"log_potentials": normal(T, K), **weights}
    single = {name: array.astype("float32") for name, array in single.items()}
    chain = alc.LogChain(**single)
    wide = alc.LogChain(**{name: array.astype(float) for name, array in single.items()})
    log_z, exact = chain.log_partition(), wide.log_partition()
    # Whatever path decides, its weights lie at most this far below the largest.
    gap = 2 * np.sum(np.ptp(single["log_potentials"], axis=-1)) + T * np.log(2)
    assert_within(log_z, exact, chain_bound(exact, gap, T, K, "float32"))
    assert abs(float(log_z) - exact) < 2e-6 * abs(exact)
    if not _select.COMPILED:
        return  # array operations take seconds
    linear = [np.exp(reference.wide(x)) if form == "logs" else x for x in list(single.values())[1:]]
    known = reference.long_chain(single["log_potentials"], *linear)
    assert_within(exact, known, chain_bound(known, gap, T, K, "float64"))
    filtered, logs = wide.filtered()
    assert np.sum(logs, dtype=np.longdouble) == pytest.approx(exact, rel=1e-14)
    gaps = np.full((T, K), 2 * np.max(np.ptp(single["log_potentials"], axis=-1)))
    bounds = filtered_bounds(filtered, logs, gaps, 2, K, "float32")
    for result, expected, bound in zip(chain.filtered(), (filtered, logs), bounds, strict=True):
        assert_within(result, expected, bound)


def test_uniform_chain_is_exactly_known():
    """Doubly stochastic halves and potentials of 0: every message is log 1 at every step.

    Powers of two are exact, so that errors do not pile up, whatever the bound would allow.
    """
    x = np.zeros((T, 2), np.float32)
    chain = alc.LogChain(x, transitions=np.full((1, 2, 2), 0.5, np.float32))
    assert abs(float(chain.log_partition()) - np.log(2)) < 1e-4
    assert np.max(np.abs(chain.forward_messages())) < 1e-4


def test_entropy_of_a_markov_chain_is_known(np_backend, dtype):
    """That of the start and of every step: errors do not pile up, whatever the bound allows."""
    steps = 2000
    stay = np.array([[[0.75, 0.25], [0.25, 0.75]]])
    options = {"transitions": stay, "initial": np.full(2, 0.5), "only": ("entropy",)}
    case = check_chain(np_backend, dtype, np.zeros((steps, 2)), **options)
    expected = np.log(2) - (steps - 1) * (0.75 * np.log(0.75) + 0.25 * np.log(0.25))
    result = case.chain.entropy()
    np.testing.assert_allclose(result, expected, rtol=2e-5 if dtype == "float32" else 1e-12)
