"""Long chains with time cut into segments, which take max-plus steps side by side.

A segment does not know the state that it starts from: it starts from a guess. Where the best paths
from all states soon run through one and the same, what follows does not depend on the guess, but
for a constant. So every segment is taken up again from the last state of the one before, and goes
on until its states are what they were, but for a constant; that they are is checked, not supposed.
The first segment's start is known, so that by induction all states are those of the recursion.
"""

from __future__ import annotations

import math
from dataclasses import replace

from arraylogchain._chain.long.segments import in_segments, matrices_in_segments
from arraylogchain._chain.viterbi.steps import BestSteps, Place, PlainWindow
from arraylogchain._context import Array
from arraylogchain._fold import chunks

# Rough figures, see `plan`: seconds of a step's operations on little data, of each further
# operation, and of one sum and its comparison, in short rows and in long ones.
_STEP, _OPERATION, _SHORT, _LONG = 3e-5, 2e-6, 1e-9, 5e-10
# Rows that make the best use of an operation; steps in which guesses are mostly forgotten. An odd
# number: segments that are powers of two apart collide in caches.
_ROWS, _SHORTEST = 4096, 33
_FEWER = 16
# As much as all segments, computed again this often, may be spent on segments taken up again.
_PASSES = 3
# Differences of two states, in units of eps times their size, that are taken for rounding.
_ROUNDINGS = 8
# Steps between two looks whether segments are what they were.
_BETWEEN_CHECKS = 2


def best_segments(length: int, rows: int, size: int) -> int:
    """Return the number of segments for chains of `length` transitions; 1 if none pay.

    Examples
    --------
    >>> best_segments(100_000, 1, 32), best_segments(100, 1, 32), best_segments(100_000, 5000, 32)
    (3030, 1, 1)
    """
    segments = min(length // _SHORTEST, _ROWS // rows)
    if segments < 4:
        return 1
    work = length * rows * size * size
    plain = length * _STEP + work * _SHORT
    # Most steps are computed twice at the worst, and compared.
    cut = 2 * (length // segments * (_STEP + size * _OPERATION) + work * _LONG)
    return segments if cut < plain else 1


def fewer_segments(segments: int) -> int:
    """Return the number of segments to go on with where guesses are not forgotten in time."""
    return segments // _FEWER if segments >= 4 * _FEWER else 1


class SegmentedWindow:
    """The states of a window of time, cut into segments after a front of what does not fill one.

    Parameters
    ----------
    whole : BestSteps
        Of all time, for a whole tile of chains that have the same length.
    window : slice
        The transitions; there is one state more.
    start : array
        The state before the first of them.
    segments : int
    workspace : int
    """

    def __init__(
        self, whole: BestSteps, window: slice, start: Array, segments: int, workspace: int
    ) -> None:
        self.whole, self.segments = whole, segments
        ctx, steps = whole.ctx, whole.steps
        self.ctx, self.length = ctx, (window.stop - window.start) // segments
        # Number of the segments' first start.
        self.first = window.stop - segments * self.length
        self.front = PlainWindow(whole, slice(window.start, self.first), start)
        matrices, potentials = steps.transitions, steps.potentials
        if not steps.is_one_matrix():
            matrices = matrices[..., self.first : window.stop, :, :]
        if potentials is not None:
            potentials = potentials[..., self.first + 1 : window.stop + 1, :]
            potentials = in_segments(ctx, potentials, segments, self.length, 1)
        chain = replace(
            steps.chain,
            batch=(*steps.shape, segments),
            count=self.length + 1,
            transitions=matrices_in_segments(ctx, matrices, segments, self.length),
            potentials=potentials,
            start=None,
            lead=1,
        )
        ((_, own),) = chain.tiles(ctx, *chain.sizes)
        self.best = BestSteps(ctx, own, workspace // 4)
        # Segments with matrices of their own are groups: [groups, segments, rows], else [groups,
        # rows, segments].
        if steps.is_one_matrix():
            self.split, self.segment_axis = (steps.groups, steps.rows, segments), 2
        else:
            self.split, self.segment_axis = (steps.groups, segments, steps.rows), 1
        # What is taken up again is picked along this axis of a state: segments, or groups of them.
        self.axis = 0 if own.select_axis == 0 else 2 if self.best.rows_last else 1
        self.states = ctx.empty((self.length + 1, *self.best.shape), start.dtype)

    def solve(self) -> bool:
        """Compute all states; False if that takes longer than it should."""
        best, states, xp = self.best, self.states, self.ctx.xp
        guess = xp.zeros(best.shape, dtype=states.dtype, device=self.ctx.device)
        states[0, ...] = self._starts_after(guess)
        best.run(states, 0)
        lanes = best.groups * best.rows
        allowed = _PASSES * lanes * self.length
        first = True
        while True:
            starts = self._starts_after(states[-1, ...])
            wrong = ~self._same(starts, states[0, ...])
            count = int(xp.count_nonzero(wrong))
            if count == 0:
                return True
            # Guesses that last through most segments last through more than one.
            if not first and (count > lanes // 4 or allowed <= 0):
                return False
            allowed -= self._take_up(starts, self._units(wrong, self.axis))
            first = False

    def last(self) -> Array:
        """Return the last state."""
        ends = self.best.by_rows(self.states[-1, ...])
        return self.whole.by_rows(self._segment(ends, -1))

    def back(self, index: Array, place: Place) -> Array:
        """Place all states but the last of the paths that end in `index`; return the first."""
        best, xp = self.best, self.ctx.xp
        paths = self._guessed_paths(index)
        while True:
            # A segment's paths have to end where the next one's start.
            ends = self._ends(paths[0, ...], slice(1, None), index)
            wrong = ends != paths[-1, ...]
            if not bool(xp.any(wrong)):
                break
            self._follow_again(paths, ends, self._units(wrong[..., None], min(self.axis, 1)))
        # To [groups, rows, segments, length], where time is in order.
        order = (1, 3, 2, 0) if self.segment_axis == 1 else (1, 2, 3, 0)
        paths = xp.reshape(paths, (self.length + 1, *self.split))
        ordered = xp.permute_dims(paths[:-1, ...], order)
        rows = int(ordered.shape[0] * ordered.shape[1])
        for part in chunks(self.segments, max(1, best.limit // (2 * rows * self.length))):
            values = xp.astype(ordered[:, :, part, :], index.dtype)
            values = xp.reshape(values, (*values.shape[:2], -1))
            place(self.first + part.start * self.length, values)
        first = xp.reshape(paths[0, ...], (best.groups, best.rows))
        return self.front.back(xp.astype(self._segment(first, 0), index.dtype), place)

    def _segment(self, x: Array, number: int) -> Array:
        """Return what one segment has of an array [groups, rows, ...] of all."""
        x = self.ctx.xp.reshape(x, (*self.split, *x.shape[2:]))
        return x[:, number, ...] if self.segment_axis == 1 else x[:, :, number, ...]

    def _starts_after(self, ends: Array) -> Array:
        """Return the states that segments start from where the ones before them end in `ends`."""
        xp, best, axis = self.ctx.xp, self.best, self.segment_axis
        first = xp.expand_dims(self.whole.by_rows(self.front.last()), axis=axis)
        ends = best.by_rows(ends)
        split = xp.reshape(ends, (*self.split, best.size))
        others = split[:, :-1, ...] if axis == 1 else split[:, :, :-1, ...]
        return best.by_rows(xp.reshape(xp.concat([first, others], axis=axis), ends.shape))

    def _ends(self, index: Array, others: slice, last: Array) -> Array:
        """Return the given states of other segments, in order, and of the last one `last`."""
        xp, axis = self.ctx.xp, self.segment_axis
        split = xp.reshape(index, self.split)
        kept = split[:, others, :] if axis == 1 else split[:, :, others]
        last = xp.astype(xp.expand_dims(last, axis=axis), index.dtype)
        return xp.reshape(xp.concat([kept, last], axis=axis), index.shape)

    def _same(self, a: Array, b: Array) -> Array:
        """Tell which states [.., 1, ..] differ by a constant and roundings alone.

        A step rounds sums as large as the state's entries by eps / 2 of them, and what a constant
        adds to a state is rounded differently. Max-plus steps never make differences of states
        grow, so that what is let pass here adds to the roundings of all steps no more than a few
        steps' worth for each segment. Entries of -inf must be the same ones.
        """
        xp, axis = self.ctx.xp, 1 if self.best.rows_last else 2
        top = xp.max(a, axis=axis, keepdims=True)
        constant = top - xp.max(b, axis=axis, keepdims=True)
        dead = xp.maximum(a, b) == -math.inf
        allowed = (1.0 + xp.abs(a)) * (_ROUNDINGS * self.ctx.precision.eps)
        # Of two infinities, `allowed` is one, and never less than itself.
        close = xp.abs(a - b - constant) < allowed
        return xp.all(close | dead, axis=axis, keepdims=True)

    def _units(self, mask: Array, axis: int) -> Array:
        """Return the numbers of what is picked along an axis [groups, rows, 1] or transposed."""
        others = tuple(n for n in range(3) if n != axis)
        return self.ctx.xp.nonzero(self.ctx.xp.any(mask, axis=others))[0]

    def _picked(self, units: Array) -> BestSteps:
        best = self.best
        return BestSteps(self.ctx, best.steps.pick(units), best.workspace, best.rows_last)

    def _put(self, at: Array, axis: int, units: Array, values: Array) -> None:
        """Write values for some units of an array; along its first axis, as `Context.put` asks."""
        xp = self.ctx.xp
        order = (axis, *(n for n in range(at.ndim) if n != axis))
        target = xp.permute_dims(at, order)
        self.ctx.put(target, (units, ...), xp.permute_dims(values, order), False)

    def _take_up(self, starts: Array, units: Array) -> int:
        """Compute units again from other starts, until their states are what they were.

        Returns
        -------
        int
            How many steps that took, those of all segments counted.
        """
        ctx, xp, axis, spent = self.ctx, self.ctx.xp, self.axis, 0
        best, state = self._picked(units), xp.take(starts, units, axis=axis)
        self._put(self.states[0, ...], axis, units, state)
        for i in range(1, self.length + 1):
            pair = ctx.empty((2, *best.shape), state.dtype)
            pair[0, ...] = state
            best.run(pair, i - 1)
            state, spent = pair[1, ...], spent + best.groups * best.rows
            checked = i % _BETWEEN_CHECKS == 0 or i == self.length
            left = units
            if checked:
                same = self._same(state, xp.take(self.states[i, ...], units, axis=axis))
                left = self._units(~same, axis)
            self._put(self.states[i, ...], axis, units, state)
            if not int(left.shape[0]):
                break
            if checked and int(left.shape[0]) <= int(units.shape[0]) // 2:
                units, state = xp.take(units, left), xp.take(state, left, axis=axis)
                best = self._picked(units)
        return spent

    def _guessed_paths(self, last: Array) -> Array:
        """Return paths [length + 1, groups, rows] through all segments, from their best ends."""
        ctx, best = self.ctx, self.best
        index = self._ends(best.best(self.states[-1, ...])[0], slice(0, -1), last)
        paths = ctx.empty((self.length + 1, best.groups, best.rows), ctx.xp.int32)
        paths[-1, ...] = ctx.xp.astype(index, paths.dtype)
        for i in range(self.length, 0, -1):
            index = best.back(self.states[i - 1, ...], i, index)
            paths[i - 1, ...] = ctx.xp.astype(index, paths.dtype)
        return paths

    def _follow_again(self, paths: Array, ends: Array, units: Array) -> None:
        """Follow paths of units from other ends, until they meet those that are there."""
        xp, axis = self.ctx.xp, min(self.axis, 1)
        best, index = self._picked(units), xp.take(ends, units, axis=axis)
        self._put(paths[-1, ...], axis, units, index)
        index = xp.astype(index, self.ctx.index_dtype)
        for i in range(self.length, 0, -1):
            index = best.back(xp.take(self.states[i - 1, ...], units, axis=self.axis), i, index)
            values = xp.astype(index, paths.dtype)
            other = values != xp.take(paths[i - 1, ...], units, axis=axis)
            self._put(paths[i - 1, ...], axis, units, values)
            left = self._units(other[..., None], axis)
            if not int(left.shape[0]):
                break
            if int(left.shape[0]) <= int(units.shape[0]) // 2:
                units, index = xp.take(units, left), xp.take(index, left, axis=axis)
                best = self._picked(units)
