"""Train a hidden Markov model without a framework: `vjp.log_partition` and SciPy's L-BFGS.

The transition matrix and the initial probabilities are learned; the emission table is known. L-BFGS
needs a function that returns the loss and its gradient. The library differentiates the chain, and
one line differentiates the softmax that maps free parameters to probabilities.

    python examples/numpy_training.py --plot loss.png
"""

from __future__ import annotations

import argparse
from typing import NamedTuple

import numpy as np
from scipy.optimize import OptimizeResult, minimize
from scipy.special import softmax

import arraylogchain as alc


def softmax_gradient(probabilities: np.ndarray, gradient: np.ndarray) -> np.ndarray:
    """Return the gradient with respect to logits, from that with respect to their softmax."""
    mean = np.sum(probabilities * gradient, axis=-1, keepdims=True)
    return probabilities * (gradient - mean)


class Loss:
    """The negative log-likelihood per step as a function of a flat vector of parameters."""

    def __init__(self, log_potentials: np.ndarray) -> None:
        self.log_potentials = log_potentials  # [n, v, c]
        self.size = log_potentials.shape[-1]

    def unpack(self, parameters: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the transition matrix [c, c] and the initial probabilities [c]."""
        logits = parameters.reshape(self.size + 1, self.size)
        return softmax(logits[:-1], axis=-1), softmax(logits[-1])

    def __call__(self, parameters: np.ndarray) -> tuple[float, np.ndarray]:
        """Return the loss and its gradient."""
        transitions, initial = self.unpack(parameters)
        chain = alc.LogChain(self.log_potentials, transitions=transitions, initial=initial)
        log_z, pullback = alc.vjp.log_partition(chain)

        scale = -1 / self.log_potentials[..., 0].size
        # Gradients of arrays that all sequences share are summed over the sequences.
        gradients = pullback(np.full_like(log_z, scale), wanted=("transitions", "initial"))
        gradient = np.vstack(
            [
                softmax_gradient(transitions, gradients.transitions),
                softmax_gradient(initial, gradients.initial),
            ]
        )
        return scale * float(log_z.sum()), gradient.ravel()


def draw(
    rng: np.random.Generator,
    transitions: np.ndarray,
    initial: np.ndarray,
    emission: np.ndarray,
    shape: tuple[int, int],
) -> np.ndarray:
    """Draw n sequences of v symbols."""
    n, v = shape

    def choose(probabilities: np.ndarray) -> np.ndarray:
        """Draw an index from each row."""
        below = rng.random((n, 1)) < probabilities.cumsum(-1)[..., :-1]
        return probabilities.shape[-1] - 1 - below.sum(-1)

    states = [choose(np.broadcast_to(initial, (n, len(initial))))]
    for _ in range(v - 1):
        states.append(choose(transitions[states[-1]]))
    return np.stack([choose(emission[state]) for state in states], axis=-1)


class Outcome(NamedTuple):
    """Results of training."""

    result: OptimizeResult
    losses: list[float]
    true_loss: float
    error: float  # largest error of a learned transition probability


def main(n: int = 500, v: int = 100, c: int = 4, plot: str | None = None) -> Outcome:
    """Draw n sequences of v symbols, train on them, and compare with the true model."""
    rng = np.random.default_rng(0)
    truth = softmax(1.5 * rng.normal(size=(c + 1, c)), axis=-1)
    emission = softmax(3 * rng.normal(size=(c, 3 * c)), axis=-1)
    symbols = draw(rng, truth[:-1], truth[-1], emission, (n, v))

    loss = Loss(np.log(emission).T[symbols])
    losses = []

    def record(intermediate_result: OptimizeResult) -> None:
        losses.append(float(intermediate_result.fun))

    start = np.zeros(c * (c + 1))
    result = minimize(loss, start, jac=True, method="L-BFGS-B", callback=record)
    transitions, _ = loss.unpack(result.x)
    true_loss, _ = loss(np.log(truth).ravel())
    error = float(np.abs(transitions - truth[:-1]).max())

    print(f"{result.nit} iterations, {result.nfev} evaluations: {result.message}")
    print(f"loss per step: {losses[-1]:.5f}; of the true probabilities {true_loss:.5f}")
    print(f"largest error of a probability: {error:.3f}")
    print("transitions, learned and true:")
    print(np.hstack([transitions, truth[:-1]]).round(3))
    if plot:
        draw_losses(losses, true_loss, plot)
    return Outcome(result, losses, true_loss, error)


def draw_losses(losses: list[float], true_loss: float, path: str) -> None:
    """Plot the loss at each iteration."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.add_subplot(
        title="A hidden Markov model, trained by L-BFGS",
        xlabel="iteration",
        ylabel="negative log-likelihood per step",
    )
    axes.plot(range(1, len(losses) + 1), losses, label="model")
    axes.axhline(true_loss, color="gray", linestyle="--", label="true probabilities")
    axes.legend()
    figure.savefig(path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--plot", metavar="FILE", help="plot the loss to this file")
    main(**vars(parser.parse_args()))
