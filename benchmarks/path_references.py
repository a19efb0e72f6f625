"""What is inferred about paths, in long double; in float64 for marginals of cases in float32.

Paths are judged by their weights, which are added up here again: of several best paths all are
right. For samples there is no error, only whether they are paths of positive weight.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.gradient_references import forward_backward
from benchmarks.inputs import Inputs
from benchmarks.references import Reference, Wide

_ROWS = 16

Floats = NDArray[Any]
Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Lattice:
    """The first rows of a case, as logarithms: x [rows, T, K]."""

    x: Wide
    log_transitions: Wide
    log_initial: Wide
    lengths: Integers

    def log_weights(self, states: Any) -> Wide:
        """Return the log weights of the first rows' paths; NaN for what is no path."""
        rows, steps, size = self.x.shape
        found = np.asarray(states).reshape(-1, steps)[:rows]
        real = np.arange(steps) < self.lengths[:, None]
        within = (found >= 0) & (found < size)
        is_path = np.all(np.where(real, within, found == -1), axis=-1)
        path = np.where(real & within, found, 0)
        along = np.take_along_axis(self.x, path[..., None], axis=-1)[..., 0]
        which = np.minimum(np.arange(steps - 1), len(self.log_transitions) - 1)
        edges = self.log_transitions[which, path[:, :-1], path[:, 1:]]
        total = self.log_initial[path[:, 0]] + np.where(real, along, 0).sum(axis=-1)
        total += np.where(real[:, 1:], edges, 0).sum(axis=-1)
        return np.where(is_path, total, np.nan)


@dataclass(frozen=True, slots=True)
class BestWeight:
    """The largest log weights of the first rows."""

    lattice: Lattice
    exact: Reference

    def compare(self, states: Any) -> tuple[float, float]:
        """Return how far paths lie below the best ones, relative beyond 1, and what is no path."""
        return self.exact.compare(self.lattice.log_weights(states))


@dataclass(frozen=True, slots=True)
class Possible:
    """Nothing but that paths have a positive weight."""

    lattice: Lattice

    def compare(self, states: Any) -> tuple[None, float]:
        return None, float(np.mean(~np.isfinite(self.lattice.log_weights(states))))


def viterbi(inputs: Inputs) -> BestWeight:
    lattice = _lattice(inputs)
    score = lattice.log_initial + lattice.x[:, 0]
    for i in range(1, lattice.x.shape[1]):
        edges = lattice.log_transitions[min(i, len(lattice.log_transitions)) - 1]
        following = (score[:, :, None] + edges).max(axis=1) + lattice.x[:, i]
        score = np.where((lattice.lengths > i)[:, None], following, score)
    return BestWeight(lattice, Reference((), score.max(axis=-1)))


def sample(inputs: Inputs) -> Possible:
    return Possible(_lattice(inputs))


def entropy(inputs: Inputs) -> Reference:
    """Log Z less the expected log weight, both carried along with the states."""
    lattice = _lattice(inputs)
    transitions = inputs["P"].astype(np.longdouble)
    edges = transitions * lattice.log_transitions
    log_weight = lattice.log_initial + lattice.x[:, 0]
    expected = log_weight  # of the paths up to each state
    log_z = np.zeros((len(lattice.x), 1), dtype=np.longdouble)
    p, log_z = _normalised(log_weight, log_z)
    for i in range(1, lattice.x.shape[1]):
        which = min(i, len(transitions)) - 1
        total = p @ transitions[which]
        expected = ((p * expected) @ transitions[which] + p @ edges[which]) / total
        expected = expected + lattice.x[:, i]
        p, log_z = _normalised(np.log(total) + lattice.x[:, i], log_z)
    return Reference(np.s_[:_ROWS], log_z[:, 0] - (p * expected).sum(axis=-1))


def log_partition(inputs: Inputs) -> Reference:
    return Reference((), _forward_backward(inputs)[0])


def marginals(inputs: Inputs) -> Reference:
    return Reference((), _forward_backward(inputs)[1])


def _forward_backward(inputs: Inputs) -> tuple[Floats, Floats]:
    """Return log Z and marginals of all rows, those of the same length at a time."""
    wide = np.float64 if inputs["x"].dtype == np.float32 else np.longdouble
    x, transitions, initial = (inputs[name].astype(wide) for name in ("x", "P", "p0"))
    rows = x.reshape(-1, *x.shape[-2:])
    steps = x.shape[-2]
    lengths = inputs.get("lengths", np.full(len(rows), steps))
    log_z = np.empty(len(rows), dtype=wide)
    posterior = np.zeros_like(rows)
    for length in np.unique(lengths):
        these = np.flatnonzero(lengths == length)
        matrices = transitions if len(transitions) == 1 else transitions[: length - 1]
        found = forward_backward(rows[these, :length], matrices, initial)
        log_z[these], posterior[these, :length] = found[:2]
    return log_z.reshape(x.shape[:-2]), posterior.reshape(x.shape)


def _normalised(log_weight: Wide, log_scale: Wide) -> tuple[Wide, Wide]:
    top = log_weight.max(axis=-1, keepdims=True)
    weight = np.exp(log_weight - top)
    total = weight.sum(axis=-1, keepdims=True)
    return weight / total, log_scale + top + np.log(total)


def _lattice(inputs: Inputs) -> Lattice:
    x, transitions, initial = (inputs[name].astype(np.longdouble) for name in ("x", "P", "p0"))
    rows = x.reshape(-1, *x.shape[-2:])[:_ROWS]
    lengths = inputs.get("lengths", np.full(len(rows), x.shape[-2]))[:_ROWS]
    with np.errstate(divide="ignore"):
        return Lattice(rows, np.log(transitions), np.log(initial), lengths)
