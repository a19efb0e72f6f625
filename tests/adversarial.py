"""Chains with weights over hundreds of powers of ten, and checks of what is computed of them."""

import numpy as np

from tests.checks import check_chain
from tests.conftest import make_backend
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
