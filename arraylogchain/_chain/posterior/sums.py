"""Where the gradients of a chain are collected: in the shapes of its arrays.

Contributions come tile by tile and step by step, for all rows of a tile or for some. Along axes
that an array was broadcast along they are summed, and nothing is expanded.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self

from arraylogchain._chain.forms.matrices import Matrix
from arraylogchain._chain.forms.states import scale_by_powers
from arraylogchain._chain.long.segments import in_segments, matrices_in_segments
from arraylogchain._chain.steps import Chain, Steps, first_matrices
from arraylogchain._context import SINGLE, Array, Context, Precision
from arraylogchain._fold import Box, within


class PosteriorSums(Protocol):
    """Sums over the posterior weights that a backward pass finds, step by step."""

    start: Array | None

    @property
    def wants_pairs(self) -> bool:
        """Whether weights of pairs of states are wanted."""

    def of_part(self, part: Chain) -> Self:
        """Return the sums for a part of the chain: what comes before its segments, or those."""

    def add_potentials(self, steps: Steps, box: Box, i: int, a: Array, b: Array) -> None:
        """Add for weights a * b, both [groups, rows, K], or [groups, rows, 1], of states i."""

    def add_start(self, steps: Steps, box: Box, a: Array, b: Array) -> None:
        """Add a * b, both [groups, rows, K], or [groups, rows, 1], derivatives by the start."""

    def add_pairs(
        self, steps: Steps, box: Box, i: int, matrix: Matrix, a: Array, b: Array, in_range: bool
    ) -> None:
        """Add for weights a_k F_kj b_j of step i, where F are the matrix's factors.

        Unless they are `in_range`, a_k b_j may overflow where the factor is zero or no path leads.
        """

    def add_pairs_by_row(
        self,
        steps: Steps,
        box: Box,
        i: int,
        j: slice,
        weights: Iterable[Array],
        edges: Array,
    ) -> None:
        """Add for weights [groups, K, cols] of each row, for columns j of step i.

        With linear transitions, `edges`, these are derivatives by them, with logs the weights of
        pairs.
        """


@dataclass(slots=True)
class GradientSums:
    """Sums of contributions to the gradients of one chain; see `PosteriorSums`.

    Attributes
    ----------
    potentials : array [..., count, K] or None
    transitions : array [..., 1 or count - 1, K, K] or None
    start : array [..., K] or None
        What gradients are added to, zeros at first; None for what is not wanted.
    as_counts : bool
        Whether `transitions` collects expected counts: derivatives by the logarithms.
    """

    ctx: Context
    chain: Chain
    potentials: Array | None = None
    transitions: Array | None = None
    start: Array | None = None
    as_counts: bool = False

    @property
    def wants_pairs(self) -> bool:
        return self.transitions is not None

    def of_part(self, part: Chain) -> Self:
        ctx, x, matrices = self.ctx, self.potentials, self.transitions
        if len(part.batch) == len(self.chain.batch):
            x = None if x is None else x[..., : part.count, :]
            matrices = None if matrices is None else first_matrices(matrices, part.count)
            return replace(self, chain=part, potentials=x, transitions=matrices)
        segments, length = part.batch[-1], part.count - 1
        if x is not None:
            x = in_segments(ctx, x[..., -segments * length :, :], segments, length, 1)
        if matrices is not None:
            matrices = matrices_in_segments(ctx, matrices, segments, length)
        return replace(self, chain=part, potentials=x, transitions=matrices, start=None)

    def add_potentials(self, steps: Steps, box: Box, i: int, a: Array, b: Array) -> None:
        at = i - self.chain.lead
        if self.potentials is None or at < 0:
            return
        view = self.chain.arrange(self.ctx.xp, self.potentials, trailing=2)
        self._add(steps, box, view[..., at, :], a, b)

    def add_start(self, steps: Steps, box: Box, a: Array, b: Array) -> None:
        if self.start is None:
            return
        view = self.chain.arrange(self.ctx.xp, self.start, trailing=1)
        self._add(steps, box, view, a, b, alone=False)

    def _add(
        self, steps: Steps, box: Box, view: Array, a: Array, b: Array, alone: bool = True
    ) -> None:
        ctx, xp = self.ctx, self.ctx.xp
        target = view[(*within(box, view.shape), slice(None))]
        shape = (*steps.shape, int(view.shape[-1]))
        precision_fits = a.dtype == b.dtype == target.dtype
        if alone and steps.picked is None and tuple(target.shape) == shape and precision_fits:
            # The only contribution, but for those of rows for which this one is zero.
            a = xp.reshape(a, (*steps.shape, a.shape[-1]))
            b = xp.reshape(b, (*steps.shape, b.shape[-1]))
            ctx.apply(xp.multiply, a, b, out=target)
            return
        add_rows(steps, target, a * b)

    def add_pairs(
        self,
        steps: Steps,
        box: Box,
        i: int,
        matrix: Matrix,
        a: Array,
        b: Array,
        in_range: bool,
    ) -> None:
        if self.transitions is None:
            return
        ctx, xp, chain = self.ctx, self.ctx.xp, self.chain
        target = self._matrix_target(box, i)
        by_logs = chain.transitions_in_logs or self.as_counts
        is_alone = (
            steps.picked is None
            and steps.rows == chain.sizes[1]
            and 1 < int(self.transitions.shape[-3]) == chain.count - 1
            and not by_logs
            and matrix.power is None
            and in_range
            and a.dtype == target.dtype
        )
        a = xp.matrix_transpose(a)
        if is_alone:
            shape = tuple(target.shape[:-2])
            a = xp.reshape(a, (*shape, *a.shape[-2:]))
            ctx.apply(xp.matmul, a, xp.reshape(b, (*shape, *b.shape[-2:])), out=target)
            return
        # Counts are zero where weights are, derivatives by linear weights are not.
        for k, j in matrix.blocks if by_logs else matrix.panels:
            part = xp.matmul(a[:, k, :], b[:, :, j])
            if not in_range:
                part = bounded(xp, part, matrix.precision)
            if by_logs:
                weighted = part * matrix.factor(k, j)
                part = weighted if in_range else xp.where(part == 0, part, weighted)
            elif matrix.power is not None:
                part = scale_by_powers(ctx, part, matrix.power, matrix.precision)
            self._add_block(steps, target[..., k, j], part)

    def add_pairs_by_row(
        self,
        steps: Steps,
        box: Box,
        i: int,
        j: slice,
        weights: Iterable[Array],
        edges: Array,
    ) -> None:
        part = sum(weights, self.ctx.xp.zeros_like(edges))
        if self.as_counts and not self.chain.transitions_in_logs:
            part = self.ctx.xp.where(part == 0, part, part * edges)
        self._add_block(steps, self._matrix_target(box, i)[..., j], part)

    def _matrix_target(self, box: Box, i: int) -> Array:
        view = self.chain.arrange(self.ctx.xp, self.transitions, trailing=3)
        at = 0 if int(view.shape[-3]) == 1 else i
        return view[(*within(box, view.shape), at, slice(None), slice(None))]

    def _add_block(self, steps: Steps, target: Array, values: Array) -> None:
        values = narrowed(self.ctx, values, target.dtype)
        if steps.select_axis:
            xp = self.ctx.xp
            target += xp.astype(xp.reshape(values, target.shape), target.dtype, copy=False)
        else:
            steps.place(target, values[:, None, ...], add=True)


def add_rows(steps: Steps, target: Array, values: Array) -> None:
    """Add values [groups, rows, n] to a view of their tile, summed where it has length 1."""
    ctx, xp, shape = steps.ctx, steps.ctx.xp, (*steps.shape, int(target.shape[-1]))
    if tuple(target.shape) == shape:
        steps.place(target, narrowed(ctx, values, target.dtype), add=True)
        return
    values = xp.reshape(in_tile(steps, values), shape)
    broadcast = tuple(axis for axis, n in enumerate(target.shape) if n == 1 < shape[axis])
    values = narrowed(ctx, xp.sum(values, axis=broadcast, keepdims=True), target.dtype)
    target += xp.astype(values, target.dtype, copy=False)


def narrowed(ctx: Context, values: Array, dtype: Any) -> Array:
    """Return values that are finite in a dtype, and sums of some of them too."""
    if values.dtype == dtype or dtype != ctx.xp.float32:
        return values
    return bounded(ctx.xp, values, SINGLE)


def bounded(xp: Any, x: Array, precision: Precision) -> Array:
    """Keep x finite in a precision, and sums of some of it too; NaN stays."""
    limit = 2.0 ** (precision.top - 4)
    return xp.clip(x, -limit, limit)


def in_tile(steps: Steps, x: Array) -> Array:
    """Return x with its rows or groups where they belong in their tile, zeros elsewhere."""
    if steps.picked is None:
        return x
    ctx = steps.ctx
    xp, axis = ctx.xp, steps.select_axis
    count = steps.rows if axis else steps.groups
    picked = int(steps.picked.shape[0])
    everyone = xp.arange(count, dtype=steps.picked.dtype, device=ctx.device)
    order = xp.argsort(steps.picked)
    ascending = xp.take(steps.picked, order)
    place = xp.clip(xp.searchsorted(ascending, everyone), 0, picked - 1)
    found = xp.take(ascending, place) == everyone
    place = xp.where(found, xp.take(order, place), xp.full_like(place, picked))
    nothing_shape = tuple(1 if a == axis else int(n) for a, n in enumerate(x.shape))
    nothing = xp.zeros(nothing_shape, dtype=x.dtype, device=ctx.device)
    return xp.take(xp.concat([x, nothing], axis=axis), place, axis=axis)
