"""Steps of the max-plus recursion, and the way back along the paths that they found.

A state holds the log of the largest weight of all paths up to each state of a step. Which state a
path came from is not kept: it is found again on the way back, for the one state in question, from
the same sums. That costs K additions for a step where keeping it costs K * K comparisons more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import array_api_compat.numpy as host

from arraylogchain._chain.steps import Steps, first_of, of_units
from arraylogchain._chain.viterbi.candidates import Candidates, pays
from arraylogchain._context import Array, Context, whole_maximum
from arraylogchain._fold import chunks

# Steps of paths that are put in place together.
_TOGETHER = 256

# Puts the states number n, ... of paths, [groups, rows, steps], in place.
Place = Callable[[int, Array], None]


class BestSteps:
    """The max-plus recursion for one tile of chains.

    States are [groups, K, rows] where there are more rows than states of a chain, and [groups,
    rows, K] else: operations on the longer axis last are fastest.

    Parameters
    ----------
    ctx : Context
    steps : Steps
    workspace : int
        Bytes for all temporaries but the states that the caller keeps.
    rows_last : bool, optional
        The form of the states, where it is given by what they are compared with.
    """

    def __init__(
        self, ctx: Context, steps: Steps, workspace: int, rows_last: bool | None = None
    ) -> None:
        self.ctx, self.steps, self.workspace = ctx, steps, workspace
        self.size = steps.chain.size
        self.groups, self.rows = steps.groups_picked, steps.rows_picked
        self.rows_last = self.rows > self.size if rows_last is None else rows_last
        # Elements of matrices, as given, their logarithms, and once more transposed.
        self.limit = max(1, workspace // (8 * ctx.precision.itemsize))
        # The largest sums so far, and those of as many states before as are worth an operation.
        state, block = math.prod(self.shape), min(ctx.block, self.limit)
        some = max(1, min(self.size, block // state))
        self._largest = ctx.empty((state,), ctx.dtype(ctx.precision))
        self._terms = ctx.empty((some * state,), ctx.dtype(ctx.precision))
        # Steps whose potentials are brought into the form of states together.
        self.together = max(1, min(ctx.block, self.limit) // math.prod(self.shape))
        self._logs: Array | None = None
        self._columns: Array | None = None
        self._candidates: Candidates | None = None
        matrices = self.groups * self.size**2
        if steps.count > 1 and steps.is_one_matrix() and matrices <= self.limit:
            given = steps.matrix(0)
            logs = self._to_logs(given, self._shift(given))
            self._logs = logs
            # [groups * K, K]: what leads to each state.
            columns = ctx.transposed(logs, ctx.precision)
            self._columns = ctx.xp.reshape(columns, (-1, self.size))

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of a state."""
        inner = (self.size, self.rows) if self.rows_last else (self.rows, self.size)
        return (self.groups, *inner)

    def by_rows(self, state: Array) -> Array:
        """View a state, or an array [groups, rows, K] that becomes one, the other way round."""
        return self.ctx.xp.matrix_transpose(state) if self.rows_last else state

    def start(self, out: Array) -> None:
        """Write the first state."""
        ctx, start = self.ctx, self.steps.start_of()
        if start is None:
            out[...] = ctx.xp.zeros_like(out)
        else:
            logs = ctx.load(start, ctx.precision)
            logs = logs if self.steps.start_in_logs else ctx.xp.log(logs)
            out[...] = self.by_rows(logs - whole_maximum(ctx, logs, -1, ctx.precision))
        for x in self._potentials(slice(0, 1)):
            self._weigh(out, x)

    def run(self, states: Array, first: int) -> None:
        """Write the states number `first` + 1, ... after that one; states[0] is there already."""
        block = slice(first + 1, first + int(states.shape[0]))
        self._seek_candidates(block.stop - block.start)
        for i, x in enumerate(self._potentials(block), start=1):
            before, out, number = states[i - 1, ...], states[i, ...], first + i
            units = self.steps.units_at(number)
            here, ended = self._units(slice(0, units)), self._units(slice(units, None))
            # Chains that have ended keep their last state.
            out[ended] = before[ended]
            before, out = before[here], out[here]
            steps = self.steps.first(units)
            if not self._from_candidates(steps, before, number - 1, out):
                self._multiply(steps, before, number - 1, out)
            self._weigh(out, None if x is None else x[here])
            advancing = steps.advancing(number)
            if advancing is not None:
                out[...] = self.ctx.xp.where(self.by_rows(advancing), out, before)

    def _units(self, some: slice) -> tuple[Any, ...]:
        """Return the index of some rows, or groups, of a state."""
        axis = 0 if self.steps.select_axis == 0 else 2 if self.rows_last else 1
        return of_units(some, axis)

    def best(self, state: Array) -> tuple[Array, Array]:
        """Return the best states [groups, rows], the smallest on ties, and whether there are."""
        xp, by_rows = self.ctx.xp, self.by_rows(state)
        index = xp.argmax(by_rows, axis=-1)
        # NaN is no -inf.
        return index, xp.max(by_rows, axis=-1) != -math.inf

    def back(self, before: Array, i: int, index: Array) -> Array:
        """Return from which states those of step i, [groups, rows], come; the smallest on ties."""
        xp, axis, units = self.ctx.xp, self.steps.select_axis, self.steps.units_at(i)
        here, steps = first_of(units, axis), self.steps.first(units)
        before, own = self.by_rows(before[self._units(slice(0, units))]), index[here]
        found = xp.argmax(before + self._columns_at(steps, i - 1, own), axis=-1)
        advancing = steps.advancing(i)
        if advancing is not None:
            found = xp.where(advancing[..., 0], found, own)
        if units < self.steps.units:
            ended = index[of_units(slice(units, None), axis)]
            found = xp.concat([found, ended], axis=axis)
        return found

    def _columns_at(self, steps: Steps, i: int, index: Array) -> Array:
        """Return the logs of what leads to states [groups, rows], [groups, rows, K]."""
        ctx, xp = self.ctx, self.ctx.xp
        shape = (*index.shape, self.size)
        groups = xp.arange(shape[0], dtype=index.dtype, device=ctx.device)[:, None]
        if self._columns is not None:
            if self.groups > 1:
                index = index + groups * self.size
            return xp.reshape(xp.take(self._columns, xp.reshape(index, (-1,)), axis=0), shape)
        froms = xp.arange(self.size, dtype=index.dtype, device=ctx.device)
        given = steps.matrix(i)[groups[..., None], froms, index[..., None]]
        # A shift of its own for each column: within one, only differences count.
        shift = 0.0
        if self.steps.chain.transitions_in_logs:
            shift = whole_maximum(ctx, given, -1, ctx.precision)
        return self._to_logs(given, shift)

    def _seek_candidates(self, steps: int) -> None:
        """Prepare for products from few of the sums, where they may pay for so many steps.

        They depend on the numbers at every turn, which devices would have to be waited for.
        """
        if self._candidates is not None or self.ctx.xp is not host:
            return
        if self.groups * self.size**2 <= self.limit and pays(self.size, self.rows, steps):
            dtype = self.ctx.dtype(self.ctx.precision)
            self._candidates = Candidates(self.size, self.rows, dtype, self._logs)

    def _from_candidates(self, steps: Steps, before: Array, i: int, out: Array) -> bool:
        """Write the product from few of the sums; False where all are needed."""
        if self._candidates is None:
            return False
        if not self.rows_last:
            before, out = (self.ctx.xp.matrix_transpose(x) for x in (before, out))

        def logs() -> Array:
            given = steps.matrix(i)
            return self._to_logs(given, self._shift(given))

        return self._candidates.multiply(before, out, logs)

    def _multiply(self, steps: Steps, before: Array, i: int, out: Array) -> None:
        """Write max_k before[k] + logs of matrix[k, :], some k at a time."""
        ctx, xp = self.ctx, self.ctx.xp
        # [K, groups, 1, rows] or [K, groups, rows, 1]
        if self.rows_last:
            states = xp.permute_dims(before, (1, 0, 2))[:, :, None, :]
        else:
            states = xp.permute_dims(before, (2, 0, 1))[..., None]
        # Contiguous also for some of the rows: operations then take one loop, not many short ones.
        shape, state = tuple(out.shape), math.prod(out.shape)
        together = int(self._terms.shape[0]) // max(1, state)
        terms = xp.reshape(self._terms[: together * state], (together, *shape))
        largest = xp.reshape(self._largest[:state], shape)
        first = True
        for part, matrix in self._logs_at(steps, i):
            for k in chunks(part.stop - part.start, together):
                at = part.start + k.start
                if together == 1:
                    to = largest if first else terms[0, ...]
                    ctx.apply(xp.add, matrix[k.start, ...], states[at, ...], out=to)
                    top = to
                else:
                    some = terms[: k.stop - k.start, ...]
                    of_k = states[at : part.start + k.stop, ...]
                    ctx.apply(xp.add, matrix[k, ...], of_k, out=some)
                    top = xp.max(some, axis=0)
                if not first:
                    ctx.apply(xp.maximum, largest, top, out=largest)
                elif top is not largest:
                    largest[...] = top
                first = False
        out[...] = largest

    def _logs_at(self, steps: Steps, i: int) -> Iterator[tuple[slice, Array]]:
        """Yield the logs of some rows of product i's matrices; see `_arranged`."""
        if self._logs is not None:
            yield slice(0, self.size), self._arranged(self._logs[: steps.groups_picked, ...])
            return
        given = steps.matrix(i)
        shift = self._shift(given)
        for k in chunks(self.size, max(1, self.limit // (steps.groups_picked * self.size))):
            yield k, self._arranged(self._to_logs(given[:, k, :], shift))

    def _arranged(self, logs: Array) -> Array:
        """View [groups, some, K] as what goes with states: [some, groups, K, 1] or [..., 1, K]."""
        logs = self.ctx.xp.permute_dims(logs, (1, 0, 2))
        return logs[..., None] if self.rows_last else logs[:, :, None, :]

    def _weigh(self, out: Array, x: Array | None) -> None:
        """Add potentials, and take off the whole part of the largest sum."""
        ctx, xp = self.ctx, self.ctx.xp
        if x is not None:
            ctx.apply(xp.add, out, x, out=out)
        shift = whole_maximum(ctx, out, -2 if self.rows_last else -1, ctx.precision)
        ctx.apply(xp.subtract, out, shift, out=out)

    def _potentials(self, block: slice) -> Iterator[Array | None]:
        """Yield the potentials of each step, in the form of states, but for whole numbers."""
        ctx = self.ctx
        order, axis = ((2, 0, 3, 1), -2) if self.rows_last else ((2, 0, 1, 3), -1)
        for part in chunks(block.stop - block.start, self.together):
            count = part.stop - part.start
            of_part = slice(block.start + part.start, block.start + part.stop)
            x = None
            if of_part.start >= self.steps.first_weighed:
                units = self.steps.units_at(of_part.start)
                x = self.steps.first(units).potentials_of(of_part)
            if x is None:
                yield from [None] * count
                continue
            x = ctx.xp.permute_dims(x, order)
            own = ctx.empty(tuple(x.shape), ctx.dtype(ctx.precision))
            own[...] = ctx.load(x, ctx.precision)
            # Their own shift first, so that large potentials do not swallow small differences.
            shift = whole_maximum(ctx, own, axis, ctx.precision)
            ctx.apply(ctx.xp.subtract, own, shift, out=own)
            for n in range(count):
                yield own[n, ...]

    def _shift(self, given: Array) -> Array | float:
        """Return whole numbers to take off the logs of matrices."""
        if not self.steps.chain.transitions_in_logs:
            return 0.0
        return whole_maximum(self.ctx, given, (-2, -1), self.ctx.precision)

    def _to_logs(self, given: Array, shift: Array | float) -> Array:
        x = self.ctx.load(given, self.ctx.precision)
        return x - shift if self.steps.chain.transitions_in_logs else self.ctx.xp.log(x)


class PlainWindow:
    """The states of some steps, computed one after the other.

    Parameters
    ----------
    best : BestSteps
    window : slice
        The transitions; there is one state more.
    start : array
        The state before the first of them.
    """

    def __init__(self, best: BestSteps, window: slice, start: Array) -> None:
        self.best, self.first = best, window.start
        self.states = best.ctx.empty((window.stop - window.start + 1, *best.shape), start.dtype)
        self.states[0, ...] = start
        best.run(self.states, window.start)

    def last(self) -> Array:
        """Return the last state."""
        return self.states[-1, ...]

    def back(self, index: Array, place: Place) -> Array:
        """Place all states but the last of the paths that end in `index`; return the first."""
        best = self.best
        block = max(1, min(_TOGETHER, best.limit // (2 * best.groups * best.rows)))
        stop = int(self.states.shape[0]) - 1
        while stop > 0:
            start = max(0, stop - block)
            found = []
            for i in range(stop, start, -1):
                index = best.back(self.states[i - 1, ...], self.first + i, index)
                found.append(index)
            place(self.first + start, best.ctx.xp.stack(found[::-1], axis=-1))
            stop = start
        return index
