"""Chains with weights over hundreds of powers of ten, and checks of what is computed of them."""

import numpy as np

from tests import reference
from tests.checks import check_chain
from tests.conftest import make_backend
from tests.error_model import EPS
from tests.gradient_checks import check_posterior, check_vjp_chain
from tests.path_checks import Case

NUMPY = make_backend("numpy")


def adversarial(seed):
    """Return weights and potentials spread over up to 600 powers of ten, with zeros, few states."""
    rng = np.random.default_rng(seed)
    T, K = rng.integers(1, 9), rng.integers(1, 6)
    x = rng.normal(size=(T, K)) * 10.0 ** rng.uniform(-2, 3.5)
    x[rng.random(x.shape) < rng.choice([0, 0.3])] = -np.inf
    steps = rng.choice([1, max(T - 1, 1)])
    P = 10.0 ** (rng.uniform(-1, 1, size=(steps, K, K)) * rng.choice([1, 20, 150, 300]))
    P[rng.random(P.shape) < rng.choice([0, 0.5])] = 0
    p0 = 10.0 ** (rng.uniform(-1, 1, size=K) * rng.choice([1, 300]))
    return x, (P if T > 1 else P[:1]), p0


def check_sum_and_counts(make_chain, seed):
    """Check the sum, within roundings of the sizes of what is summed, and the number of moves."""
    x, P, p0 = adversarial(seed)
    with np.errstate(divide="ignore"):
        exact = reference.chain(x, np.log(reference.wide(P)), np.log(reference.wide(p0)))
    chain = make_chain(x, transitions=P, initial=p0)
    found = chain.log_partition()
    if np.isinf(exact.log_partition):
        assert found == exact.log_partition, seed
        return
    size = np.abs(np.where(np.isfinite(x), x, 0)).max() + 700
    bound = EPS["float64"] * (abs(exact.log_partition) + len(x) * size)
    assert abs(found - exact.log_partition) <= bound, seed
    moves = len(x) - 1
    assert abs(chain.expected_transitions().sum() - moves) <= 4 * moves * bound, seed


def check_huge_gradients(make_chain, value_and_gradients, rtol):
    """Check counts of weights whose gradients are huge, and these gradients."""
    x = np.array([[0, -2000.0], [0, 0], [0, -2000]])
    for tiny in (1e-300, 1e-304, 1e-306, 1e-308):
        chain = make_chain(x, transitions=np.array([[[tiny, 0], [0, 1]]]))
        np.testing.assert_allclose(chain.expected_transitions(), [[[2, 0], [0, 0]]], rtol=rtol)
        gradient = value_and_gradients(chain)[1](np.array(1.0)).transitions[0, 0, 0]
        assert gradient == np.finfo(float).max or abs(gradient * tiny / 2 - 1) <= rtol
        assert (gradient == np.finfo(float).max) == (2 / tiny > np.finfo(float).max)


def check_every_operation(seed, in_logs):
    """Check all results of an adversarial chain, and its counts against the number of moves."""
    x, P, p0 = adversarial(seed)
    with np.errstate(divide="ignore"):
        if in_logs:
            options = {"log_transitions": np.log(P), "log_initial": np.log(p0)}
        else:
            options = {"transitions": P, "initial": p0}
    check_chain(NUMPY, "float64", x, **options)
    _, counts, _ = check_posterior(NUMPY, "float64", x, **options)
    case = Case(NUMPY, "float64", x, **options)
    if np.isfinite(case.chain.log_partition()):
        np.testing.assert_allclose(counts.sum(), len(x) - 1, rtol=1e-12)
    check_vjp_chain(NUMPY, "float64", x, "ones", **options)
    case.check_viterbi()
    case.check_entropy()
    states = case.chain.sample(20, np.random.default_rng(seed))
    weights = case.check_log_weight(states)
    assert np.all(np.isfinite(weights) == np.isfinite(case.chain.log_partition()))
