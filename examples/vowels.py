"""Find the vowels of English with nothing but a text: a hidden Markov model with two states.

In 1913 A. A. Markov counted by hand how vowels and consonants follow each other in 20,000 letters
of Eugene Onegin. Here the model is not told which letters are vowels. It has two hidden states, a
matrix of transitions, and a probability of each letter in each state, and makes the text as likely
as it can, in two ways:

- by EM: what is expected to happen under the posterior, normalised, is the next model;
- by the gradient of the log-likelihood, with L-BFGS.

Both need the same posterior: marginals and expected transitions are also the gradients with respect
to log potentials and log transitions. The text is cut into pieces, which are one batch.

    python examples/vowels.py --plot vowels.png
"""

from __future__ import annotations

import argparse
import string
from pydoc_data.topics import topics
from typing import NamedTuple

import numpy as np
from scipy.optimize import OptimizeResult, minimize
from scipy.special import log_softmax

import arraylogchain as alc

ALPHABET = string.ascii_lowercase


def read_pieces(pieces: int, length: int) -> np.ndarray:
    """Return the letters of Python's own manual as numbers, cut into pieces: [pieces, length]."""
    text = "".join(topics[name] for name in sorted(topics)).lower()
    letters = np.array([ALPHABET.index(letter) for letter in text if letter in ALPHABET])
    pieces = min(pieces, len(letters) // length)
    return letters[: pieces * length].reshape(pieces, length)


class Model(NamedTuple):
    """Logarithms of probabilities. The text is cut anywhere: pieces start in either state."""

    transitions: np.ndarray  # [2, 2]
    emission: np.ndarray  # [2, letters]

    def chain(self, letters: np.ndarray) -> alc.LogChain:
        """Return the paths of hidden states that may have shown the letters of each piece."""
        return alc.LogChain(
            self.emission.T[letters],  # [pieces, length, 2]
            log_transitions=self.transitions,
            initial=np.array([0.5, 0.5]),
        )


def random_model(seed: int) -> Model:
    """Return a start where states tend to alternate, and letters are likely at random.

    Two equal states would stay equal. Alternation is what sounds do; without that hint some starts
    end at another division of the letters, of lower likelihood.
    """
    logits = 0.5 * np.random.default_rng(seed).normal(size=(2, len(ALPHABET)))
    return Model(np.log([[0.3, 0.7], [0.7, 0.3]]), log_softmax(logits, axis=-1))


def count_letters(letters: np.ndarray, marginals: np.ndarray) -> np.ndarray:
    """Return how often each state is expected to show each letter, [2, letters]."""
    flat = letters.ravel()
    return np.stack(
        [np.bincount(flat, marginals[..., k].ravel(), minlength=len(ALPHABET)) for k in range(2)]
    )


def train_by_em(model: Model, letters: np.ndarray, iterations: int) -> tuple[Model, list[float]]:
    """Return the model and the log-likelihood per letter after each iteration."""
    history = []
    for _ in range(iterations):
        posterior = model.chain(letters).posterior()
        counts = posterior.expected_transitions, count_letters(letters, posterior.marginals)
        model = Model(*(np.log(x / x.sum(axis=-1, keepdims=True)) for x in counts))
        history.append(float(model.chain(letters).log_partition().sum()) / letters.size)
    return model, history


def train_by_gradient(
    model: Model, letters: np.ndarray, iterations: int
) -> tuple[Model, list[float]]:
    """Return what `train_by_em` does, found with L-BFGS over the logits of the probabilities."""
    history = []

    def unpack(parameters: np.ndarray) -> Model:
        transitions, emission = np.split(parameters.reshape(2, -1), [2], axis=-1)
        return Model(log_softmax(transitions, axis=-1), log_softmax(emission, axis=-1))

    def loss(parameters: np.ndarray) -> tuple[float, np.ndarray]:
        model = unpack(parameters)
        log_z, pullback = alc.vjp.log_partition(model.chain(letters))
        by_potentials, by_transitions, *_ = pullback(np.full_like(log_z, -1 / letters.size))
        by_logs = (by_transitions, count_letters(letters, by_potentials))
        # Through log_softmax: the total of a row moves in proportion to its probabilities.
        by_logits = [
            g - np.exp(x) * g.sum(axis=-1, keepdims=True)
            for g, x in zip(by_logs, model, strict=True)
        ]
        return -float(log_z.sum()) / letters.size, np.hstack(by_logits).ravel()

    def record(intermediate_result: OptimizeResult) -> None:
        history.append(-float(intermediate_result.fun))

    options = {"maxiter": iterations, "ftol": 0.0}
    start = np.hstack(model).ravel()
    found = minimize(loss, start, jac=True, method="L-BFGS-B", callback=record, options=options)
    return unpack(found.x), history


def vowels(model: Model) -> str:
    """Return the letters that are likelier in the state of e than in the other."""
    state = int(np.argmax(model.emission[:, ALPHABET.index("e")]))
    is_vowel = model.emission[state] > model.emission[1 - state]
    return "".join(letter for letter, yes in zip(ALPHABET, is_vowel, strict=True) if yes)


class Outcome(NamedTuple):
    """The letters in the state of e, and the log-likelihood per letter after each iteration."""

    vowels: dict[str, str]
    history: dict[str, list[float]]


def main(
    pieces: int = 1000, length: int = 100, iterations: int = 100, plot: str | None = None
) -> Outcome:
    """Train both ways from the same start and print what they found."""
    letters = read_pieces(pieces, length)
    print(f"{len(letters)} pieces of {length} letters")
    trainers = {"EM": train_by_em, "gradient": train_by_gradient}
    models, history = {}, {}
    for name, train in trainers.items():
        models[name], history[name] = train(random_model(0), letters, iterations)
        print(
            f"by {name}: {history[name][-1]:.5f} per letter after {len(history[name])} iterations"
        )
        print(f"  in the state of e: {vowels(models[name])}")
        print(f"  transitions:\n{np.exp(models[name].transitions).round(3)}")
    if plot:
        draw(models["EM"], history, plot)
    return Outcome({name: vowels(model) for name, model in models.items()}, history)


def draw(model: Model, history: dict[str, list[float]], path: str) -> None:
    """Write a picture: the letters that each state shows, and the likelihoods."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    state = int(np.argmax(model.emission[:, ALPHABET.index("e")]))
    bars = np.exp(model.emission[[state, 1 - state]])
    for offset, label, heights in zip((-0.2, 0.2), ("state of e", "other"), bars, strict=True):
        left.bar(np.arange(len(ALPHABET)) + offset, heights, 0.4, label=label)
    left.set(
        title="What each state shows",
        xticks=range(len(ALPHABET)),
        xticklabels=ALPHABET,
        ylabel="probability of the letter",
    )
    left.legend()
    for name, values in history.items():
        right.plot(range(1, len(values) + 1), values, label=name)
    right.set(title="Training", xlabel="iteration", ylabel="log-likelihood per letter")
    right.legend()
    figure.savefig(path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--plot", metavar="FILE", help="write a picture of letters and likelihoods")
    main(**vars(parser.parse_args()))
