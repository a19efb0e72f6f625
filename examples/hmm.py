"""Hidden Markov models with `fit`, `predict` and `score`: Gaussian and categorical observations.

    $ python examples/hmm.py
    log-likelihood: -7571.1 at first, -5679.0 after 100 rounds
    transitions: [[0.95, 0.05], [0.109, 0.891]], means: [-0.985, 1.52]
    states right: 98.4%

Copy `HMM`, one of its two subclasses, and `normalized` and `divide`. Sequences are rows of one
padded array, with their lengths. `fit` is EM (Baum-Welch): the library computes expected counts,
and the M-step turns them into the next model. Results agree with hmmlearn's
`GaussianHMM(covariance_type="diag")` with flat priors.
"""

from __future__ import annotations

import numpy as np

import arraylogchain as alc


class HMM:
    """Base class: transitions and EM; a subclass defines the emissions."""

    def __init__(self, num_states: int, rng: np.random.Generator) -> None:
        self.initial = np.full(num_states, 1 / num_states)
        self.transitions = rng.dirichlet(np.full(num_states, 5.0), size=num_states)

    def chain(self, observations: np.ndarray, lengths: np.ndarray | None = None) -> alc.LogChain:
        """Return the chain of the hidden states of observations [n, T, ...]."""
        return alc.LogChain(
            self.log_likelihoods(observations),
            transitions=self.transitions,
            initial=self.initial,
            lengths=lengths,
        )

    def score(self, observations: np.ndarray, lengths: np.ndarray | None = None) -> float:
        """Return the log-likelihood of all observations."""
        return float(self.chain(observations, lengths).log_partition().sum())

    def predict(self, observations: np.ndarray, lengths: np.ndarray | None = None) -> np.ndarray:
        """Return the most probable sequence of states of each row, -1 past its end."""
        return self.chain(observations, lengths).viterbi().states

    def fit(
        self, observations: np.ndarray, lengths: np.ndarray | None = None, rounds: int = 100
    ) -> list[float]:
        """Train by EM; return the log-likelihood before each round, which never falls."""
        history = []
        for _ in range(rounds):
            log_z, marginals, counts = self.chain(observations, lengths).posterior()
            history.append(float(log_z.sum()))
            self.initial = normalized(marginals[:, 0].sum(axis=0), self.initial)
            self.transitions = normalized(counts, self.transitions)
            # Marginals are zero past the end of a row, so padding has no weight.
            self.update(observations, marginals)
        return history


class GaussianHMM(HMM):
    """Each state has a mean and a variance for each of D features; observations are [n, T, D]."""

    def __init__(self, means: np.ndarray, rng: np.random.Generator) -> None:
        super().__init__(len(means), rng)
        self.means, self.variances = means, np.ones_like(means)

    def log_likelihoods(self, observations: np.ndarray) -> np.ndarray:
        """Return the log density of each observation in each state, [n, T, K]."""
        distance = (observations[..., None, :] - self.means) ** 2 / self.variances
        return -0.5 * (distance + np.log(2 * np.pi * self.variances)).sum(axis=-1)

    def update(self, observations: np.ndarray, marginals: np.ndarray) -> None:
        """Set the weighted means and variances."""
        weights = marginals.sum(axis=(0, 1))[:, None]
        sums = np.einsum("ntk,ntd->kd", marginals, observations)
        self.means = divide(sums, weights, self.means)
        squares = (observations[..., None, :] - self.means) ** 2
        sums = np.einsum("ntk,ntkd->kd", marginals, squares)
        self.variances = np.maximum(divide(sums, weights, self.variances), 1e-6)


class CategoricalHMM(HMM):
    """Each state has a probability for each symbol; observations are integers [n, T]."""

    def __init__(self, num_states: int, num_symbols: int, rng: np.random.Generator) -> None:
        super().__init__(num_states, rng)
        self.emissions = rng.dirichlet(np.full(num_symbols, 5.0), size=num_states)

    def log_likelihoods(self, observations: np.ndarray) -> np.ndarray:
        """Return the log probability of each observation in each state, [n, T, K]."""
        with np.errstate(divide="ignore"):  # log(0) is -inf, an exact zero
            return np.log(self.emissions).T[observations]

    def update(self, observations: np.ndarray, marginals: np.ndarray) -> None:
        """Set the probabilities to the expected frequency of each symbol."""
        symbols = np.eye(self.emissions.shape[-1])[observations]
        counts = np.einsum("ntk,ntv->kv", marginals, symbols)
        self.emissions = normalized(counts, self.emissions)


def divide(sums: np.ndarray, weights: np.ndarray, old: np.ndarray) -> np.ndarray:
    """Return sums / weights, and the old values where the weight is zero."""
    return np.divide(sums, weights, out=old.copy(), where=weights > 0)


def normalized(counts: np.ndarray, old: np.ndarray) -> np.ndarray:
    """Return counts as probabilities; a row without counts keeps its old ones."""
    return divide(counts, counts.sum(axis=-1, keepdims=True), old)


def main() -> GaussianHMM:
    """Draw sequences from a model with two states, and recover the states."""
    rng = np.random.default_rng(0)
    states = alc.LogChain(
        np.zeros((20, 200, 2)), transitions=np.array([[0.95, 0.05], [0.1, 0.9]])
    ).sample(rng=rng)[0]
    observations = rng.normal(np.array([-1.0, 1.5])[states], 0.8)[..., None]

    model = GaussianHMM(np.quantile(observations, [[0.25], [0.75]]), rng)
    history = model.fit(observations)
    print(
        f"log-likelihood: {history[0]:.1f} at first, {history[-1]:.1f} after {len(history)} rounds"
    )
    transitions, means = model.transitions.round(3).tolist(), model.means[:, 0].round(3).tolist()
    print(f"transitions: {transitions}, means: {means}")
    print(f"states right: {np.mean(model.predict(observations) == states):.1%}")
    return model


if __name__ == "__main__":
    main()
