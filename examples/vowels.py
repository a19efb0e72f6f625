"""Find the vowels of English with nothing but a text: a hidden Markov model with two states.

In 1913 A. A. Markov counted by hand how vowels and consonants follow each other in 20,000 letters
of Eugene Onegin. Here the model is not told which letters are vowels. It has two hidden states, a
matrix of transitions, and a probability of each letter in each state, and makes the text as likely
as it can, in two ways:

- by EM: what is expected to happen under the posterior, normalised, is the next model;
- by the gradient of the log-likelihood, with L-BFGS.

Both need the same posterior: `LogChain.marginals` and `expected_transitions` are also the gradients
by log potentials and log transitions. The text is cut into pieces, which are one batch.

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
    """Logarithms of probabilities."""

    transitions: np.ndarray  # [2, 2]
    emission: np.ndarray  # [2, letters]
    initial: np.ndarray  # [2]

    def chain(self, letters: np.ndarray) -> alc.LogChain:
        """Return the paths of hidden states that may have shown the letters of each piece."""
        return alc.LogChain(
            self.emission.T[letters],  # [pieces, length, 2]
            log_transitions=self.transitions[None],
            log_initial=self.initial,
        )


def normalised(counts: Model) -> Model:
    """Return a model whose probabilities are in proportion to counts."""
    return Model(*(np.log(x / x.sum(axis=-1, keepdims=True)) for x in counts))


def random_model(seed: int) -> Model:
    """Return a start: letters nearly as likely in both states, for two equal ones would stay so."""
    rng = np.random.default_rng(seed)
    return normalised(Model(*(1 + 0.1 * rng.random(shape) for shape in [(2, 2), (2, 26), 2])))


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
        chain = model.chain(letters)
        marginals = chain.marginals()
        counts = Model(
            transitions=chain.expected_transitions()[0],
            emission=count_letters(letters, marginals),
            initial=marginals[:, 0].sum(axis=0),
        )
        model = normalised(counts)
        history.append(float(model.chain(letters).log_partition().sum()) / letters.size)
    return model, history


def train_by_gradient(
    model: Model, letters: np.ndarray, iterations: int
) -> tuple[Model, list[float]]:
    """Return what `train_by_em` does, found with L-BFGS over the logits of the probabilities."""
    shapes = [x.shape for x in model]
    ends = np.cumsum([x.size for x in model])[:-1]
    history = []

    def unpack(parameters: np.ndarray) -> Model:
        parts = np.split(parameters, ends)
        return Model(
            *(log_softmax(x.reshape(shape), -1) for x, shape in zip(parts, shapes, strict=True))
        )

    def loss(parameters: np.ndarray) -> tuple[float, np.ndarray]:
        model = unpack(parameters)
        log_z, pullback = alc.vjp.log_partition(model.chain(letters))
        by_arrays = pullback(np.full_like(log_z, -1 / letters.size))
        by_logs = Model(
            by_arrays.transitions[0],
            count_letters(letters, by_arrays.log_potentials),
            by_arrays.initial,
        )
        # Through log_softmax: the total of a row moves in proportion to its probabilities.
        by_logits = [
            g - np.exp(x) * g.sum(axis=-1, keepdims=True)
            for g, x in zip(by_logs, model, strict=True)
        ]
        return -float(log_z.sum()) / letters.size, np.concatenate([g.ravel() for g in by_logits])

    def record(intermediate_result: OptimizeResult) -> None:
        history.append(-float(intermediate_result.fun))

    start = np.concatenate([x.ravel() for x in model])
    options = {"maxiter": iterations, "ftol": 0.0}
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
    pieces: int = 1500, length: int = 200, iterations: int = 100, plot: str | None = None
) -> Outcome:
    """Train both ways from the same start and print what they found."""
    letters = read_pieces(pieces, length)
    print(f"{len(letters)} pieces of {length} letters")
    ways = {"EM": train_by_em, "gradient": train_by_gradient}
    models, history = {}, {}
    for name, train in ways.items():
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
    """Write a picture: the share that the state of e has in each letter, and the likelihoods."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    state = int(np.argmax(model.emission[:, ALPHABET.index("e")]))
    bars = np.exp(model.emission[[state, 1 - state]])
    for offset, label, heights in zip((-0.2, 0.2), ("state of e", "other"), bars, strict=True):
        left.bar(np.arange(26) + offset, heights, 0.4, label=label)
    left.set(xticks=range(26), xticklabels=ALPHABET, ylabel="probability of the letter")
    left.legend()
    for name, values in history.items():
        right.plot(range(1, len(values) + 1), values, label=name)
    right.set(xlabel="iteration", ylabel="log-likelihood per letter")
    right.legend()
    figure.savefig(path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--plot", metavar="FILE", help="write a picture of letters and likelihoods")
    main(**vars(parser.parse_args()))
