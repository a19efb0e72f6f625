"""The same answers as hmmlearn, dynamax and torch-struct, where theirs are sound.

They compute in double precision and on logs, or on shares of a step: so what they are given here
has a moderate range. A library is skipped where it is not installed, unless it is required.
"""

import numpy as np
import pytest
from scipy import stats

import arraylogchain as alc
from tests.chain_scenarios import normal, uniform
from tests.conftest import import_or_skip
from tests.error_model import assert_within, log_recursion_bound

pytestmark = pytest.mark.chains


def model(T, K, *, closed=0.0, seed=0):
    """Return normalised transitions and initial weights, some of them closed."""
    rng = np.random.default_rng(seed)
    transitions = rng.random((K, K)) * ((rng.random((K, K)) >= closed) | np.eye(K, dtype=bool))
    initial = rng.random(K)
    return transitions / transitions.sum(-1, keepdims=True), initial / initial.sum()


def assert_log(ours, theirs, steps, K, size=None):
    """Compare logs; ours are far better than what is allowed here."""
    theirs = np.asarray(theirs, np.float64)
    bound = log_recursion_bound(theirs if size is None else size, steps, K, "float64")
    assert_within(np.asarray(ours), theirs, bound)


def assert_shares(ours, theirs, steps, K, size):
    """Compare probabilities, which are exponentials of differences of logs."""
    bound = 3 * log_recursion_bound(size, steps, K, "float64")
    assert_within(np.asarray(ours), np.asarray(theirs, np.float64), bound)


# hmmlearn ------------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", ["log", "scaling"])
@pytest.mark.parametrize("closed", [0.0, 0.4])
@pytest.mark.parametrize("K", [2, 5])
def test_hmmlearn(K, closed, implementation):
    """Sequences of several lengths, put one after another there and in rows here."""
    hmm = import_or_skip("hmmlearn.hmm")
    lengths = [20, 1, 7]
    transitions, initial = model(20, K, closed=closed)
    them = hmm.GaussianHMM(K, "diag", implementation=implementation)
    them.startprob_, them.transmat_ = initial, transitions
    them.means_, them.covars_ = normal(K, 2, sd=2), 0.5 + uniform(K, 2)
    observed = normal(sum(lengths), 2, sd=2, seed=1)

    densities = stats.norm.logpdf(observed[:, None], them.means_, np.sqrt(them._covars_)).sum(
        axis=-1
    )
    x = np.full((3, 20, K), np.nan)
    ends = np.cumsum(lengths)
    for row, (end, length) in enumerate(zip(ends, lengths, strict=True)):
        x[row, :length] = densities[end - length : end]
    ours = alc.LogChain(x, transitions=transitions[None], initial=initial, lengths=lengths)

    real = np.arange(20) < np.array(lengths)[:, None]
    score = them.score(observed, lengths)
    assert_log(ours.log_partition().sum(), score, 20, K)
    marginals = ours.marginals()[real]
    assert_shares(marginals, them.predict_proba(observed, lengths), 20, K, score)
    weight, states = them.decode(observed, lengths, algorithm="viterbi")
    path = ours.viterbi()
    np.testing.assert_array_equal(path.states[real], states)
    assert_log(path.log_weight.sum(), weight, 20, K)


# dynamax -------------------------------------------------------------------------------------


@pytest.fixture
def jax_and_dynamax():
    """dynamax, and jax in double precision for as long as the test runs."""
    hmm = import_or_skip("dynamax.hidden_markov_model")
    jax = import_or_skip("jax")
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    yield jax, hmm
    jax.config.update("jax_enable_x64", before)


# dynamax 1.0.3 and what it imports use names that jax is about to drop.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("closed", [0.0, 0.4])
@pytest.mark.parametrize("per_step", [False, True], ids=["one matrix", "one per step"])
def test_dynamax(jax_and_dynamax, per_step, closed):
    jax, hmm = jax_and_dynamax
    T, K = 30, 4
    x = normal(T, K, sd=3)
    each = [model(T, K, closed=closed, seed=i) for i in range(T - 1 if per_step else 1)]
    transitions, initial = np.stack([m for m, _ in each]), each[0][1]
    given = [
        jax.numpy.asarray(a) for a in (initial, transitions if per_step else transitions[0], x)
    ]
    ours = alc.LogChain(x, transitions=transitions, initial=initial)

    smoothed = hmm.hmm_smoother(*given)
    size = float(np.abs(x).max(axis=-1).sum())
    assert_log(ours.log_partition(), smoothed.marginal_loglik, T, K, size)
    assert_shares(ours.marginals(), smoothed.smoothed_probs, T, K, size)
    counts = np.asarray(smoothed.trans_probs)
    counts = counts if per_step else counts.reshape(-1, K, K).sum(axis=0)
    assert_shares(ours.expected_transitions().reshape(counts.shape), counts, T, K, T * size)
    messages = ours.forward_messages()
    shares = np.exp(messages - np.logaddexp.reduce(messages, axis=-1, keepdims=True))
    assert_shares(shares, hmm.hmm_filter(*given).filtered_probs, T, K, size)
    mode = hmm.hmm_posterior_mode(*given)
    np.testing.assert_array_equal(ours.viterbi().states, np.asarray(mode))


# torch-struct --------------------------------------------------------------------------------


# Its distributions leave out what torch asks of them.
@pytest.mark.filterwarnings("ignore:.*arg_constraints:UserWarning")
def test_torch_struct(torch_backend):
    """A linear-chain CRF, whose potentials there are [..., to, from] and hold all weights."""
    struct, torch = import_or_skip("torch_struct"), torch_backend.xp
    rows, T, K = 4, 9, 3
    lengths = [9, 2, 5, 9]
    x, edges = normal(rows, T, K, sd=2), normal(T - 1, K, K, sd=2, seed=1)
    pairs = edges + x[:, 1:, None, :]
    pairs[:, 0] += x[:, 0, :, None]
    them = struct.LinearChainCRF(
        torch.from_numpy(pairs).mT.contiguous(), lengths=torch.tensor(lengths)
    )
    given = [torch.from_numpy(a) for a in (x, edges)]
    ours = alc.LogChain(given[0], log_transitions=given[1], lengths=lengths)

    def numpy(a):
        return a.detach().numpy()

    size = float(np.abs(x).max(-1).sum(-1).max() + np.abs(edges).max((-2, -1)).sum())
    assert_log(numpy(ours.log_partition()), numpy(them.partition), T, K, size)
    both = numpy(them.marginals).swapaxes(-1, -2)  # from, to
    marginals = numpy(ours.marginals())
    assert_shares(marginals[:, 0], both[:, 0].sum(-1), T, K, size)
    assert_shares(marginals[:, 1:], both.sum(-2), T, K, size)
    assert_shares(numpy(ours.expected_transitions()), both.sum(0), T, K, rows * size)
    # A sum over paths of p times its log, which is of that size.
    assert_log(numpy(ours.entropy()), numpy(them.entropy), T, K, size**2)

    path = ours.viterbi()
    assert_log(numpy(path.log_weight), numpy(them.max), T, K, size)
    theirs, _ = them.struct.from_parts(them.argmax)
    real = np.arange(T) < np.array(lengths)[:, None]
    np.testing.assert_array_equal(path.states.numpy()[real], theirs.numpy()[real])
