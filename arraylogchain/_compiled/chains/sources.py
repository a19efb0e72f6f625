"""The arrays of a chain as loops read them: float64, contiguous, in parts where that is a copy."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np

from arraylogchain._compiled.chains.layout import Layout
from arraylogchain._compiled.loops.compiling import Floats, Integers
from arraylogchain._compiled.loops.matrices import LOGS, prepare, prepare_logs
from arraylogchain._compiled.loops.recursion import MATRICES
from arraylogchain._fold import Shape
from arraylogchain._inputs.chain import Chain

# From this many states on, and uses of a matrix, its bands are looked for.
_STATES, _USES = 8, 8


def can_be_read(array: Any) -> bool:
    """Tell whether loops read an array as it is."""
    return bool(array.dtype == np.float64 and array.flags.c_contiguous and array.flags.aligned)


def frozen(array: Any) -> Any:
    """Return a view that cannot be written to. Callers may give such, and loops take no others."""
    view = array.view()
    view.setflags(write=False)
    return view


class Rows:
    """An array [..., steps, K] of weights of the rows.

    Parameters
    ----------
    array : array
    layout : Layout or None
        None for what is read as a whole.
    kind : int
        Which map of the layout is that of the array.
    budget : int
        Bytes that a copy of all of it may take.
    """

    def __init__(self, array: Any, layout: Layout | None, kind: int, budget: int) -> None:
        self.array, self.layout, self.kind = array, layout, kind
        self.whole: tuple[Floats, int] | None = None
        self.step_bytes = 0  # what is copied for a step of a row
        if can_be_read(array) or 8 * array.size <= budget:
            whole = np.ascontiguousarray(array, np.float64)
            self.whole = frozen(whole.reshape(-1, *array.shape[-2:])), 0
        else:
            self.step_bytes = int(array.shape[-1]) * (8 + array.itemsize)

    def read(self, rows: range, steps: range, maps: Integers) -> tuple[Floats, int]:
        """Return the weights of rows and steps, with the number of the first; enter their map.

        Where there is the whole, it serves.
        """
        assert self.layout is not None
        maps[self.kind] = self.layout.local(rows.start)
        index = self.layout.index(self.array.shape[:-2], rows)
        part = self.array[..., steps.start : steps.stop, :]
        shape = (len(rows), len(steps), self.array.shape[-1])
        out = np.empty(shape)
        out[...] = part[index] if index else part
        return frozen(out), steps.start


@lru_cache(maxsize=16)
def ones(K: int) -> Rows:
    """Return weights of rows for which none are given."""
    return Rows(np.ones((1, K)), None, 0, 0)


@lru_cache(maxsize=16)
def _full_band(K: int) -> Integers:
    return np.full((1, 1, K, 2), (0, K), np.int64)


_NO_MATRICES = np.empty((0, 0, 0, 0))


class Matrices:
    """Transitions [..., 1 or T - 1, K, K] of a chain, prepared for steps.

    Parameters
    ----------
    chain : Chain
    layout : Layout
    budget : int
        Bytes that copies of all matrices may take.
    form : str
        "weights" as `recursion.forward` takes them, "transposed" ones, "logs" as
        `paths.best_weights` takes them, or as they are "given".
    more : int
        Numbers that a caller makes of each entry.
    """

    def __init__(self, chain: Chain, layout: Layout, budget: int, form: str, more: int) -> None:
        array, in_logs, K = chain.transitions, chain.transitions_in_logs, chain.num_states
        if array is None or array.shape[-3] == 0:
            array, in_logs = np.zeros((1, K, K)), False
        self.array, self.in_logs = array, in_logs
        self.form = form
        self.own: Shape = array.shape[:-3]
        steps = int(array.shape[-3])
        self.is_one = steps == 1
        is_read = can_be_read(array) and form != "transposed"
        # As given in parts, converted or transposed, exponentials, and what is known of each.
        copied = 0 if is_read else 8 + array.itemsize
        written = form == "logs" or (in_logs and form != "given")
        copied += 8 * (written + more)
        self.matrix_bytes = K**2 * copied + 16 * K + 16
        self.groups = max(1, math.prod(self.own))
        uses = layout.rows_per_group * (chain.num_steps if self.is_one else 1)
        self.with_bands = K >= _STATES and uses >= _USES
        self.whole: tuple[Any, ...] | None = None
        if self.groups * steps * self.matrix_bytes <= budget:
            self.whole = self._prepared(range(self.groups), range(steps))

    def read(self, groups: range, steps: range, maps: Integers) -> tuple[Any, ...]:
        """Return prepared matrices, with the number of the first step; enter their map.

        Where there is the whole, it serves.
        """
        maps[MATRICES, -1] = -groups.start
        return self._prepared(groups, range(1) if self.is_one else steps)

    def _prepared(self, groups: range, steps: range) -> tuple[Any, ...]:
        given, in_logs, K = self._given(groups, steps), self.in_logs, self.array.shape[-1]
        shape = given.shape[:2]
        shifts, flags = np.zeros(shape), np.zeros(shape, np.int64)
        if self.form == "given":
            flags += LOGS if in_logs else 0
            return given, given, shifts, flags, _full_band(K), steps.start
        bands = np.empty((*shape, K, 2), np.int64) if self.with_bands else _full_band(K)
        if self.form == "logs":
            P: Floats = np.empty(given.shape)
            if not in_logs:
                # NumPy's logarithms of many numbers are several times faster than those of loops.
                np.log(given, out=P)
            prepare_logs(given, in_logs, P, flags, bands, self.with_bands)
            return frozen(P), given, shifts, flags, bands, steps.start
        P = np.empty(given.shape) if in_logs else _NO_MATRICES
        prepare(given, in_logs, P, shifts, flags, bands, self.with_bands)
        return frozen(P) if in_logs else given, given, shifts, flags, bands, steps.start

    def _given(self, groups: range, steps: range) -> Floats:
        """Return matrices as they are given, [groups, steps, K, K]."""
        part = self.array
        if len(steps) < part.shape[-3]:
            part = part[..., steps.start : steps.stop, :, :]
        if len(groups) < self.groups:
            part = part[np.unravel_index(np.arange(groups.start, groups.stop), self.own)]
        if self.form == "transposed":
            part = part.swapaxes(-1, -2)
        part = np.ascontiguousarray(part, np.float64)
        shape = (len(groups), len(steps), *part.shape[-2:])
        return frozen(part.reshape(shape))  # type: ignore[no-any-return]
