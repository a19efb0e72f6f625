"""The reference of chains: all results of `LogChain` in long double, row by row.

Batch axes are merged, each row gets a matrix for every step, and beyond its length the identity
and potentials of 0: so rows of all lengths are computed together. The recursion works on logs
relative to the largest of each step, whose sum is carried exactly in two numbers. Every sum has
its G: see `error_model.chain_bound`.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from tests.gradient_reference import Gradient, finite, finite_max, softmax, sum_to
from tests.reference import wide

PARTS = ("log_potentials", "transitions", "initial", "final")
AXES = {"log_potentials": 2, "transitions": 3, "initial": 1, "final": 1}


class Messages(NamedTuple):
    """Log messages of one direction, relative to offsets [rows, T, 1], and their G."""

    bare: np.ndarray  # predicted: without the potential of the state
    full: np.ndarray  # updated
    bare_gaps: np.ndarray
    full_gaps: np.ndarray
    bare_offset: np.ndarray
    offset: np.ndarray
    steps: np.ndarray  # contribution of each step to `offset`


# The largest G of an entry that a product certifies in float64; others are recomputed.
LARGEST_CERTIFIED = 672.0


class Exact:
    """A chain of given arrays, in numbers that hold them exactly.

    Parameters
    ----------
    arrays : dict
        The arguments of `LogChain`, by name; infinities and NaN are allowed.
    lengths : array or None
    """

    def __init__(self, arrays: dict[str, np.ndarray], lengths: Any = None) -> None:
        self.shapes, self.is_log, logs, self.linear = {}, {}, {}, {}
        for part in PARTS:
            name = next((n for n in (part, f"log_{part}") if n in arrays), None)
            self.is_log[part] = name is not None and name.startswith("log_")
            if name is None:
                continue
            array = wide(arrays[name])
            self.shapes[part] = array.shape
            array = array[None] if part == "transitions" and array.ndim == 2 else array
            with np.errstate(divide="ignore", invalid="ignore"):
                logs[part] = array if self.is_log[part] else np.log(array)
        self.batch = np.broadcast_shapes(*(x.shape[: x.ndim - AXES[p]] for p, x in logs.items()))
        self.original_shapes = {p: x.shape for p, x in logs.items()}
        T, K = self.T, self.K = logs["log_potentials"].shape[-2:]
        rows = self.rows = int(np.prod(self.batch))
        lengths = np.broadcast_to(T if lengths is None else lengths, self.batch)
        self.lengths = np.asarray(lengths, np.int64).reshape(rows)
        self.valid_steps = np.arange(T) < self.lengths[:, None]
        has_transition = self.valid_steps[:, 1:, None, None]
        edges = logs.get("transitions", np.zeros((1, K, K), np.longdouble))
        at = np.minimum(np.arange(T - 1), max(edges.shape[-3] - 1, 0))
        edges, edge_gaps = edges[..., at, :, :], below_largest(edges, (-2, -1))[..., at, :, :]
        with np.errstate(divide="ignore"):
            stay = np.log(np.eye(K, dtype=np.longdouble))
        self.edges = np.where(has_transition, self._per_row(edges, 3), stay)
        self.edge_gaps = np.where(has_transition, self._per_row(edge_gaps, 3), 0)
        x = self._per_row(logs["log_potentials"], 2)
        self.x = np.where(self.valid_steps[..., None], x, 0)
        self.x_gaps = below_largest(self.x, (-1,))
        zeros = np.zeros(K, np.longdouble)
        self.boundaries = {p: self._per_row(logs.get(p, zeros), 1) for p in ("initial", "final")}

    def _per_row(self, x: np.ndarray, axes: int) -> np.ndarray:
        core_shape = x.shape[x.ndim - axes :]
        return np.broadcast_to(x, (*self.batch, *core_shape)).reshape(self.rows, *core_shape)

    def _gaps(self, part: str, gaps: np.ndarray) -> np.ndarray:
        """Return G of log weights, and zeros for linear weights, which are used unchanged."""
        return gaps if self.is_log[part] else np.zeros_like(gaps)

    @cached_property
    def forward(self) -> Messages:
        return self._messages("initial", self.edges, self._gaps("transitions", self.edge_gaps), 1)

    @cached_property
    def backward(self) -> Messages:
        turned = (np.swapaxes(e, -1, -2) for e in (self.edges, self.edge_gaps))
        edges, gaps = turned
        return self._messages("final", edges, self._gaps("transitions", gaps), -1)

    def _messages(self, end: str, edges: np.ndarray, edge_gaps: np.ndarray, way: int) -> Messages:
        first = finite_max(self.boundaries[end], (-1,))
        bare, offset, remainder = self.boundaries[end] - first, first, np.zeros_like(first)
        gaps = self._gaps(end, below_largest(bare, (-1,)))
        predicted_gap = below_largest(bare, (-1,))
        # The largest of a step is subtracted first, so that sums round near 0.
        x_shifts, edge_shifts = finite_max(self.x, (-1,)), finite_max(edges, (-2, -1))
        x, edges = self.x - x_shifts, edges - edge_shifts
        result: list[Messages] = []
        order = range(self.T)[::way]
        for n, t in enumerate(order):
            if n:
                at = t - 1 if way == 1 else t
                offset, remainder = add_exactly(offset, edge_shifts[:, at, 0], remainder)
                terms = result[-1].full[..., :, None] + edges[:, at]
                along = result[-1].full_gaps[..., :, None] + edge_gaps[:, at]
                softmax_weights, bare = softmax(terms, (-2,))
                bare, gaps = bare[..., 0, :], np.sum(finite(softmax_weights) * along, axis=-2)
                with np.errstate(invalid="ignore"):
                    below_shifts = finite(-bare)
                predicted_gap = np.maximum(below_largest(bare, (-1,)), below_shifts)
            with np.errstate(invalid="ignore"):
                full = bare + x[:, t]
            top, before = finite_max(full, (-1,)), offset + remainder
            offset, remainder = add_exactly(offset, x_shifts[:, t], remainder)
            offset, remainder = add_exactly(offset, top, remainder)
            is_valid = self.valid_steps[:, t, None]
            # Predicted messages are rounded relative to the shifts, updated ones to their largest.
            bare_gaps = gaps + np.where(is_valid, predicted_gap, 0)
            updated_gap = np.where(is_valid, predicted_gap + below_largest(full, (-1,)) / 2, 0)
            full_gaps = gaps + self.x_gaps[:, t] + updated_gap
            full = full - top
            now, added = (
                offset + remainder,
                x_shifts[:, t] + top + (edge_shifts[:, at, 0] if n else first),
            )
            result.append(Messages(bare, full, bare_gaps, full_gaps, before, now, added))
        return Messages(*(np.stack(parts, axis=1) for parts in zip(*result[::way], strict=True)))

    # ---------------------------------------------------------------- sums over all paths

    @cached_property
    def log_partition(self) -> tuple[np.ndarray, np.ndarray]:
        """Return log Z of each row, and its G."""
        last, end = self.forward.full[:, -1], self.boundaries["final"]
        with np.errstate(invalid="ignore"):
            softmax_weights, total = softmax(last + end, (-1,))
        gaps = self.forward.full_gaps[:, -1] + below_largest(end, (-1,))
        return total[:, 0] + self.forward.offset[:, -1, 0], np.sum(
            finite(softmax_weights) * gaps, -1
        )

    @cached_property
    def broken(self) -> np.ndarray:
        """Tell which rows have a weight that is NaN."""
        initial, final = (np.isnan(x).any(axis=-1) for x in self.boundaries.values())
        x, edges = np.isnan(self.x).any((1, 2)), np.isnan(self.edges).any((1, 2, 3))
        return x | edges | initial | final

    def normalized(self, terms: np.ndarray, axes: tuple[int, ...]):
        """Return the softmax of terms, and the log of their sum; 0 where Z is infinite."""
        broken = self.broken.reshape(-1, *(1,) * (terms.ndim - 1))
        p, log_sum = softmax(terms, axes)
        ended = ~np.isfinite(self.log_partition[0]).reshape(broken.shape)
        return np.where(broken, np.nan, np.where(ended, 0, p)), log_sum

    @cached_property
    def states(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the posterior of states [rows, T, K], its G, and the part of G of the normalizers.

        A normalizer has the average error of its terms, or that of Z, whichever is larger. The
        posterior of pairs has the same normalizers.
        """
        with np.errstate(invalid="ignore"):
            p, _ = self.normalized(self.forward.full + self.backward.bare, (-1,))
        gaps = self.forward.full_gaps + self.backward.bare_gaps
        sum_gaps = np.sum(finite(p) * gaps, axis=-1, keepdims=True)
        sum_gaps = np.maximum(sum_gaps, self.log_partition[1][:, None, None])
        return np.where(self.valid_steps[..., None], p, 0), gaps + sum_gaps, sum_gaps

    @cached_property
    def pairs(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the posterior of pairs, the derivatives by linear weights, and the G of both."""
        f, b = self.forward, self.backward
        with np.errstate(invalid="ignore"):
            outer = f.full[:, :-1, :, None] + b.full[:, 1:, None, :]
            terms = outer + self.edges
        gaps = f.full_gaps[:, :-1, :, None] + b.full_gaps[:, 1:, None, :]
        gaps = gaps + self.edge_gaps + self.states[2][:, :-1, :, None]
        p, log_sum = self.normalized(terms, (-2, -1))
        # Rows that share a matrix are summed in one product, with the same shifts.
        if int(np.prod(self.original_shapes["transitions"][:-3])) < self.rows:
            with np.errstate(invalid="ignore"):
                maxima = finite_max(b.full[:, 1:, None, :] - log_sum, (0,))
                below = finite_max(f.full[:, :-1, :, None], (0,)) + maxima - (outer - log_sum)
            gaps = gaps + np.clip(finite(below), 0, LARGEST_CERTIFIED)
        has_transition = self.valid_steps[:, 1:, None, None]
        derivatives = np.where(has_transition, self._over(outer, log_sum), 0)
        return np.where(has_transition, p, 0), derivatives, gaps

    def _over(self, terms: np.ndarray, log_sum: np.ndarray) -> np.ndarray:
        """Return exp(terms - log_sum), which may exceed 1, up to exp(2000)."""
        valid = np.isfinite(log_sum)
        with np.errstate(invalid="ignore"):
            p = np.where(valid, np.exp(np.minimum(terms - np.where(valid, log_sum, 0), 2000)), 0)
        return np.where(self.broken.reshape(-1, *(1,) * (p.ndim - 1)), np.nan, p)

    def marginals(self) -> Gradient:
        p, gaps, _ = self.states
        return self._gradient("log_potentials", p, gaps, 1, None, (*self.batch, self.T, self.K))

    def counts(self) -> Gradient:
        p, _, gaps = self.pairs
        return self._gradient("transitions", p, gaps, 1, None)

    def gradient(self, part: str, g: np.ndarray) -> Gradient:
        """Return the gradient of sum(g * log Z) with respect to one array of the arguments."""
        _, *terms = self._derivatives(part)
        return self._gradient(part, *terms, g)

    def _derivatives(self, part: str) -> tuple[np.ndarray, ...]:
        """Return probabilities, derivatives of log Z of each row, their G, and their unit."""
        if part == "log_potentials":
            p, gaps, _ = self.states
            return p, p, gaps, 1
        if part == "transitions":
            p, derivatives, gaps = self.pairs
            if self.is_log[part]:
                return p, p, gaps, 1
            unit = unit_of(self.edges, (-2,))
            unit = np.where(np.isfinite(unit), unit, unit_of(self.edges, (-2, -1)))
            return p, derivatives, gaps, unit
        (p, gaps, _), messages, t = self.states, self.forward, self.lengths - 1
        if part == "initial":
            messages, t = self.backward, np.zeros(self.rows, np.int64)
        p, gaps, logs = (
            np.take_along_axis(x, t[:, None, None], 1)[:, 0] for x in (p, gaps, messages.full)
        )
        unit = 1
        gaps = gaps + self._gaps(part, below_largest(self.boundaries[part], (-1,)))
        derivatives = p
        if not self.is_log[part]:
            with np.errstate(invalid="ignore"):
                log_sum = softmax(logs + self.boundaries[part], (-1,))[1]
            derivatives, unit = self._over(logs, log_sum), unit_of(self.boundaries[part], (-1,))
        return p, derivatives, gaps, unit

    def path_gradient(self, part: str, g: np.ndarray, states: np.ndarray) -> Gradient:
        """Return the gradient of sum(g * log p) of paths [rows, T], without a difference."""
        p, derivatives, gaps, unit = self._derivatives(part)
        row, last = np.arange(self.rows)[:, None], self.lengths[:, None] - 1
        index = {
            "log_potentials": (row, np.arange(self.T), states),
            "transitions": (row, np.arange(self.T - 1), states[:, :-1], states[:, 1:]),
            "initial": (row, states[:, :1]),
            "final": (row, np.take_along_axis(states, last, -1)),
        }[part]
        # All axes of a step are summed: states, or pairs.
        axes = (-2, -1) if part == "transitions" else (-1,)
        weights = 1
        if not (part == "log_potentials" or self.is_log[part]):
            logs = self.edges if part == "transitions" else self.boundaries[part]
            with np.errstate(over="ignore"):
                weights = np.exp(logs[index])
        others = np.array(p)
        others[index] = 0
        total, gap = others.sum(axes), np.sum(others * gaps, axes)
        derivatives, gaps = -derivatives, np.broadcast_to(gaps, p.shape).copy()
        with np.errstate(invalid="ignore", divide="ignore"):
            gaps[index] = np.where(total > 0, gap / total, 0).reshape(gaps[index].shape)
            own = total.reshape(derivatives[index].shape)
            derivatives[index] = np.where((own == 0) | (weights == 0), 0, own / weights)
        return self._gradient(part, derivatives, gaps, unit, g)

    def _gradient(self, part: str, p: Any, gaps: Any, unit: Any, g: Any, shape: Any = None):
        """Sum over the rows, and steps, that share an array."""
        g = np.ones(self.rows) if g is None else wide(g).reshape(self.rows)
        g = g.reshape(-1, *(1,) * (p.ndim - 1))
        size = np.abs(g)
        unit = np.broadcast_to(np.where(np.isfinite(unit), unit, 0) * size, p.shape)
        unit = np.where(self._is_real(part), unit, 0)
        sums = (g * p, size * np.abs(p), size * np.abs(p) * gaps, unit)
        shape_of_part = self.original_shapes[part] if shape is None else shape
        sums = [x.reshape(*self.batch, *x.shape[1:]) for x in sums]
        terms = sums[0].size // max(int(np.prod(shape_of_part)), 1)
        shape = self.shapes[part] if shape is None else shape
        return Gradient(
            *(sum_to(x, shape_of_part).reshape(shape) for x in sums), terms=max(terms, 1)
        )

    def _is_real(self, part: str) -> np.ndarray:
        if part == "log_potentials":
            return self.valid_steps[..., None]
        return (
            self.valid_steps[:, 1:, None, None] if part == "transitions" else np.ones((1, 1), bool)
        )

    # ---------------------------------------------------------------- filtered, entropy

    @cached_property
    def filtered(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return state probabilities given the steps so far, log normalisers, G of the messages."""
        full = self.forward.full
        with np.errstate(invalid="ignore"):
            filtered, sums = softmax(full, (-1,))
            logs = np.diff(sums[..., 0], axis=1, prepend=0) + self.forward.steps[..., 0]
        normalizers = self.forward.offset[..., 0] + sums[..., 0]
        logs = np.where(np.isfinite(normalizers), logs, normalizers)
        missing = np.isnan(normalizers)[..., None]
        filtered = np.where(
            missing, np.nan, np.where(np.isfinite(normalizers)[..., None], filtered, 0)
        )
        return (
            np.where(self.valid_steps[..., None], filtered, 0),
            np.where(self.valid_steps, logs, 0),
            self.forward.full_gaps,
        )

    @cached_property
    def entropy(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the entropy of the posterior over paths, its G, and its depth.

        It is that of the last state, and of each state given the next one, averaged over the
        posterior of that: a sum of nonnegative terms, none larger than log K. The depth sums, over
        steps, how far forward weights and matrix entries on the paths lie below the largest.
        """
        f, b = self.forward, self.backward
        with np.errstate(invalid="ignore"):
            p, _ = softmax(f.full[:, -1] + self.boundaries["final"], (-1,))
        total = entropy_of(p, -1)
        gap = np.sum(p * np.abs(log_of(p) + total[..., None]) * f.full_gaps[:, -1], -1)
        with np.errstate(invalid="ignore"):
            terms = f.full[:, :-1, :, None] + self.edges
            q, sums = softmax(terms, (-2,))
            p, _ = softmax(sums[..., 0, :] + b.full[:, 1:], (-1,))
        inner = entropy_of(q, -2)
        q_gaps = f.full_gaps[:, :-1, :, None] + self._gaps("transitions", self.edge_gaps)
        inner_gap = np.sum(q * np.abs(log_of(q) + inner[..., None, :]) * q_gaps, axis=-2)
        p_gaps = np.sum(q * q_gaps, axis=-2) + b.full_gaps[:, 1:]
        p_gaps = p_gaps + np.sum(p * p_gaps, axis=-1, keepdims=True)
        total = total + np.sum(p * inner, axis=(1, 2))
        gap = gap + np.sum(p * (inner_gap + inner * p_gaps), axis=(1, 2))
        below = below_largest(f.full[:, :-1], (-1,))[..., None] + self.edge_gaps
        depth = np.sum(p * np.sum(q * below, axis=-2), axis=-1)
        depth = np.sum(np.where(self.valid_steps[:, 1:], depth, 0), axis=-1)
        log_z = self.log_partition[0]
        special = ~np.isfinite(log_z) & (log_z != -np.inf)
        total = np.where(special | self.broken, np.nan, np.where(log_z == -np.inf, 0, total))
        return total, gap, depth

    # ---------------------------------------------------------------- single paths

    @cached_property
    def path_gaps(self) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
        """Return G of sums of log weights, where logs of linear weights are rounded."""
        boundaries = {p: below_largest(e, (-1,)) for p, e in self.boundaries.items()}
        edges = self.edge_gaps
        if not self.is_log["transitions"]:
            edges = edges + np.abs(finite(self.edges))
        for p, e in self.boundaries.items():
            if not self.is_log[p]:
                boundaries[p] = boundaries[p] + np.abs(finite(e))
        return self.x_gaps, edges, boundaries

    def path_weights(self, states: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return log weights of paths [..., rows, T], and their G."""
        x_gaps, edge_gaps, end_gaps = self.path_gaps
        real = np.where(self.valid_steps, states, -1)
        # Past its end a path stays where it is.
        states = np.where(
            real < 0,
            np.take_along_axis(
                states, np.broadcast_to(self.lengths[:, None] - 1, (*states.shape[:-1], 1)), -1
            ),
            states,
        )
        weights = self._along(states, self.x, self.edges, self.boundaries)
        gaps = self._along(states, x_gaps, edge_gaps, end_gaps)
        return weights, np.where(np.isfinite(weights), gaps, 0)

    def log_probabilities(self, states: np.ndarray) -> tuple[np.ndarray, ...]:
        """Return log probabilities of paths [rows, T], their G, and the steps of their errors.

        A step adds -log1p(r), with r the weight of all other states over that of the path's. Errors
        of r, and of its logarithm, count by the share of r / (1 + r).
        """
        row, step, b = np.arange(self.rows)[:, None], np.arange(self.T), self.backward
        states = np.where(self.valid_steps, states, 0)
        before = self.edges[row, step[:-1], states[:, :-1]]
        logs = np.concatenate([self.boundaries["initial"][:, None], before], axis=1)
        edge_gaps = self._gaps("transitions", self.edge_gaps)[row, step[:-1], states[:, :-1]]
        gaps = b.full_gaps + np.pad(edge_gaps, ((0, 0), (1, 0), (0, 0)))
        with np.errstate(invalid="ignore"):
            logs = logs + b.full
            own = logs[row, step, states][..., None]
            ratios = logs - own
            gaps = gaps + np.abs(finite(ratios))
            ratios[row, step, states] = -np.inf
            top = np.maximum(ratios.max(-1), 0)
            r = np.exp(ratios - top[..., None])
            losses = np.where(top > 0, top + np.log(r.sum(-1) + np.exp(-top)), np.log1p(r.sum(-1)))
        losses = np.where(own[..., 0] == -np.inf, np.inf, losses)
        losses = np.where(self.valid_steps, losses, 0)
        z = self.log_partition[0]
        result = np.where(z < np.inf, 0 - losses.sum(-1), np.nan)
        r = finite(r)
        gap = np.sum(r * gaps, -1) / np.maximum(r.sum(-1), np.finfo(np.longdouble).tiny)
        gap = gap + gaps[row, step, states]
        share = np.where(self.valid_steps, -np.expm1(-losses), 0)
        steps = np.where(self.valid_steps, self.lengths[:, None] - step, 0)
        return result, np.sum(finite(share * gap), -1), np.sum(finite(share * steps), -1)

    def weights_in_recursion(self, states: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return log weights of paths, and the G of the recursion's numbers for them."""
        states = np.maximum(states, 0)
        weights, gap = self.path_weights(states)
        depth = np.take_along_axis(self.best[2], states[..., None], axis=-1)[..., 0]
        return weights, np.where(np.isfinite(weights), gap + np.sum(depth, axis=-1), 0)

    def _along(self, states: np.ndarray, x: Any, edges: Any, boundaries: Any) -> np.ndarray:
        row, step = np.arange(self.rows), np.arange(self.T)
        total = boundaries["initial"][row, states[..., 0]]
        total = total + boundaries["final"][row, states[..., -1]]
        total = total + np.sum(x[row[:, None], step, states], axis=-1)
        transitions = edges[row[:, None], step[:-1], states[..., :-1], states[..., 1:]]
        return total + np.sum(transitions, axis=-1)

    @cached_property
    def best(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return a best path, its log weight, and how far each state lies below its step's best.

        Of several it is the one with the smallest last state, and so on. The recursion's numbers
        are relative to the best state of a step, and are rounded to eps of their size: so a path's
        G counts how far the path lies below the best one at each step.
        """
        score = self.boundaries["initial"] + self.x[:, 0]
        depths, origins = [below_largest(score, (-1,))], []
        for t in range(self.T - 1):
            terms = score[..., :, None] + self.edges[:, t]
            origins.append(np.argmax(terms, axis=-2))
            score = np.max(terms, axis=-2) + self.x[:, t + 1]
            score = score - finite_max(score, (-1,))
            depths.append(
                np.where(self.valid_steps[:, t + 1, None], below_largest(score, (-1,)), 0)
            )
        score = score + self.boundaries["final"]
        states = [np.argmax(score, axis=-1)]
        for origin in reversed(origins):
            states.append(np.take_along_axis(origin, states[-1][..., None], axis=-1)[..., 0])
        possible = np.max(score, axis=-1) > -np.inf
        path = np.where(possible[:, None], np.stack(states[::-1], axis=-1), 0)
        weight = np.where(possible, self.path_weights(path)[0], -np.inf)
        return np.where(self.valid_steps, path, -1), weight, np.stack(depths, axis=1)


def below_largest(x: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    """Return how far each finite entry lies below the largest finite one; 0 for others."""
    with np.errstate(invalid="ignore"):
        return np.where(np.isfinite(x), finite_max(x, axes) - x, 0)


def add_exactly(total: np.ndarray, x: np.ndarray, remainder: np.ndarray):
    """Return total + x, and the remainder plus its rounding error (Knuth's two-sum)."""
    s = total + x
    v = s - total
    return s, remainder + ((total - (s - v)) + (x - v))


def unit_of(log_weights: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    """Return one over the largest weight, the unit of errors of a derivative."""
    return np.exp(-np.max(log_weights, axis=axes, keepdims=True, initial=-np.inf))


def log_of(p: np.ndarray) -> np.ndarray:
    return np.log(np.where(p > 0, p, 1))


def entropy_of(p: np.ndarray, axis: int) -> np.ndarray:
    return -np.sum(p * log_of(p), axis=axis)


def all_paths(chain: Exact) -> tuple[np.ndarray, np.ndarray]:
    """Return all K**T paths of a chain in the order of their states, and their log weights."""
    paths = np.array(list(np.ndindex(*[chain.K] * chain.T)), np.int64)
    return paths, chain.path_weights(
        np.broadcast_to(paths[:, None], (len(paths), chain.rows, chain.T))
    )[0]
