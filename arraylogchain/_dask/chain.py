"""Chains of Dask arrays, block by block: of rows, and where time is cut, of steps (see `time`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from functools import cached_property, partial
from typing import Any

import dask.array as da
import numpy as np
from dask.array.core import unify_chunks

from arraylogchain import vjp
from arraylogchain._arrays import dtype_name, is_lazy, on_host
from arraylogchain._context import DOUBLE, SINGLE, shape_of
from arraylogchain._dask import pieces, time
from arraylogchain._dask.blocks import (
    AXES,
    CORE,
    FIELD_OF,
    FIRST,
    PAIRS,
    SAMPLES,
    STATES,
    STEPS,
    Axes,
    anew,
    batch_axes,
    chain_axes,
    field,
    finite_sum,
    known,
    name_of,
    of_blocks,
    to_lazy,
)
from arraylogchain._dask.time import Extra
from arraylogchain._inputs.arguments import FINAL, TRANSITIONS
from arraylogchain._inputs.lengths import check_integers, check_lengths
from arraylogchain._inputs.paths import check_path_shape
from arraylogchain._random import check_generator
from arraylogchain._text import amount
from arraylogchain.chain import ChainPath, ChainPosterior, FilteredChain, LogChain
from arraylogchain.plan import Plan


class LazyChain(LogChain):
    """A chain of Dask arrays, whose methods return Dask arrays.

    Attributes
    ----------
    given : dict of str to (array, axes)
        The arrays, all in the same blocks. Where time is cut there is a matrix for each step, the
        first of which means nothing, or one for all; and the numbers of steps.
    cuts_time : bool
    chunks : dict of int to tuple of int
        Sizes of the blocks along the batch axes and that of steps.
    """

    def __init__(self, log_potentials: Any, **options: Any) -> None:
        for name, x in {"log_potentials": log_potentials, **options}.items():
            if is_lazy(x):
                known(name, x)
        super().__init__(log_potentials, **options)
        given, self.dtype = to_lazy(self.arrays)
        self.eps = (DOUBLE if self.dtype == "float64" else SINGLE).eps
        self.workspace_of_blocks = None if self._keeps_states else self._workspace
        self.name = name_of(given, TRANSITIONS)
        if self.name and given[self.name].ndim == 2:
            given[self.name] = given[self.name][None]
        for name, x in given.items():
            self._check_states(name, x)
        if self.lengths is not None:
            given["lengths"] = self._lazy_lengths(self.lengths)
        steps = tuple(n for n in given["log_potentials"].chunks[-2] if n)
        self.cuts_time = len(steps) > 1 and 0 not in (*self._batch, self.num_states)
        self._align(given, steps)

    def _align(self, given: dict[str, da.Array], steps: tuple[int, ...]) -> None:
        """Cut all arrays into the same blocks."""
        axes = {
            name: (*batch_axes(x.ndim - len(AXES[name])), *AXES[name]) for name, x in given.items()
        }
        sizes = dict.fromkeys((STEPS, PAIRS), steps if self.cuts_time else -1)
        if self.cuts_time:
            matrices = given[self.name]
            if matrices.shape[-3] > 1:
                given[self.name] = da.concatenate([matrices[..., :1, :, :], matrices], axis=-3)
            axes[self.name] = (*axes[self.name][:-3], STEPS, *AXES[self.name][1:])
            given.setdefault("lengths", da.from_array(np.array(self.num_steps)))
            axes.setdefault("lengths", ())
            given["steps"] = da.arange(self.num_steps, chunks=(steps,))
            axes["steps"] = (STEPS,)
        for name, x in given.items():
            own = enumerate(axes[name])
            cut = {
                i: sizes.get(axis, -1) if x.shape[i] > 1 else -1 for i, axis in own if axis >= CORE
            }
            given[name] = x.rechunk(cut)
        pairs = [part for name, x in given.items() for part in (x, axes[name])]
        self.chunks, arrays = unify_chunks(*pairs)
        self.given = dict(zip(given, zip(arrays, axes.values(), strict=True), strict=True))

    @cached_property
    def again(self) -> Extra:
        """The arrays, made anew: read twice, they need not be held meanwhile."""
        return {name: (anew(x), axes) for name, (x, axes) in self.given.items()}

    def _check_states(self, name: str, x: da.Array) -> None:
        """Refuse axes of states that are cut and too large for one chunk."""
        cuts = [axis for axis in range(x.ndim - len(AXES[name]), x.ndim) if x.numblocks[axis] > 1]
        states = [axis for axis in cuts if AXES[name][axis - x.ndim] not in (STEPS, PAIRS)]
        sides = (x.shape[i] if i in states else max(x.chunks[i], default=0) for i in range(x.ndim))
        size = math.prod(sides) * x.dtype.itemsize
        if states and size > self._workspace:
            raise ValueError(
                f"{name} is cut along its states, and blocks of all states, which every step "
                f"needs, would take {amount(size)}, more than the workspace of "
                f"{amount(self._workspace)}; cut other axes finer, or give a larger workspace"
            )

    def _lazy_lengths(self, lengths: Any) -> da.Array:
        if not is_lazy(lengths):
            check_lengths(lengths, self._batch, self.num_steps)
            return da.from_array(np.asarray(on_host("lengths", lengths)), chunks=-1)
        check_integers("lengths", lengths.dtype)
        check_lengths(np.broadcast_to(1, shape_of(lengths)), self._batch, self.num_steps)
        return lengths.map_blocks(pieces.checked_lengths, self.num_steps, dtype=lengths.dtype)

    @property
    def num_steps(self) -> int:
        return int(self.arrays["log_potentials"].shape[-2])

    @property
    def num_states(self) -> int:
        return int(self.arrays["log_potentials"].shape[-1])

    def blocks(self, task: Callable[..., Any], arrays: Extra, **options: Any) -> da.Array:
        """Return what a task makes of the arrays of each block: one object for each."""
        count = max(len(self._batch), *(sum(i < CORE for i in axes) for _, axes in arrays.values()))
        options["workspace"] = self.workspace_of_blocks
        call = partial(pieces.call, task, tuple(arrays), options)
        return of_blocks(call, chain_axes(count), list(arrays.values()), object)

    def _aligned(self, x: da.Array, *core: int) -> tuple[da.Array, Axes]:
        """Return an array with batch axes in front of others, in the blocks of the chain."""
        axes = (*batch_axes(x.ndim - len(core)), *core)
        sizes = {i: self.chunks[axis] for i, axis in enumerate(axes) if axis in self.chunks}
        return x.rechunk({i: n for i, n in sizes.items() if sum(n) == x.shape[i]}), axes

    def _field(self, packed: da.Array, i: int, core: Axes, dtype: Any) -> da.Array:
        """Return one of the arrays with axes of steps, and others, that blocks make."""
        sizes = {STATES: self.num_states}
        out = (*batch_axes(packed.ndim - 1), *core)
        return field(packed, i, out, sizes, dtype, self.given["log_potentials"][0])

    def _total(self, packed: da.Array, i: int, dtype: Any) -> da.Array:
        """Return the sums of numbers that blocks of steps make for each row."""
        out, like = chain_axes(packed.ndim - 1), self.given["log_potentials"][0]
        if packed.numblocks[-1] == 1:
            return field(packed, i, out, {STEPS: 1}, dtype, like)[..., 0]
        return field(packed, i, out, {STEPS: 1}, "float64", like).sum(axis=-1).astype(dtype)

    def _summed(self, packed: da.Array, i: int, name: str, dtype: Any) -> da.Array:
        """Return gradients with respect to an array, summed over the blocks that share entries."""
        (x, axes), core = self.given[name], AXES[name]
        own = dict(zip(axes, x.shape, strict=True))
        is_end = core == (FIRST,)
        core = core if is_end else core[1:]
        sizes = {axis: own[axis] for axis in core}
        batch = chain_axes(packed.ndim - 1)
        shared = [axis for axis in batch if own.get(axis, 1) == 1]
        if PAIRS in own:
            shared.remove(STEPS)
            sizes[STEPS] = own[PAIRS]
        sizes |= dict.fromkeys(shared, 1)
        # Sums of many blocks are rounded once.
        parts = field(packed, i, (*batch, *core), sizes, np.float64 if shared else dtype, x)
        if shared:
            parts = finite_sum(parts, tuple(map(batch.index, shared)), dtype)
        parts = parts[..., 0, :] if is_end else parts
        parts = parts[(0,) * (parts.ndim - x.ndim)]
        has_first = name == self.name and STEPS in own and own[STEPS] > 1
        return parts[..., 1:, :, :] if has_first else parts

    def _compute(self, operation: str) -> da.Array:
        if operation == "log_partition" and self.cuts_time:
            leaving = time.messages(self, pieces.sums)
            return self._total(self._at_end(pieces.total, leaving, {}), 0, self.dtype)
        packed = self._results(operation)
        if operation in ("log_partition", "entropy"):
            return self._total(packed, 0, self.dtype)
        if operation == "expected_transitions":
            return self._counts(packed, 0)
        return self._field(packed, 0, (STEPS, STATES), self.dtype)

    def _results(self, operation: str) -> da.Array:
        """Return the arrays that a method gives for each block."""
        arrays = {**self.given, **time.between(self)}
        return self.blocks(pieces.results, arrays, operation=operation)

    def _at_end(
        self, function: Callable[..., Any], leaving: da.Array, extra: Extra, **options: Any
    ) -> da.Array:
        """Return what a function makes of the messages that leave the last chunk of time."""
        arrays = {"leaving": (leaving.blocks[..., -1:], chain_axes(leaving.ndim - 1)), **extra}
        arrays |= {name: self.given[name] for name in FINAL if name in self.given}
        return self.blocks(function, arrays, **options)

    def _counts(self, packed: da.Array, i: int) -> da.Array:
        return self._like_transitions(self._summed(packed, i, self.name, self.dtype))

    def gradients(self, cotangent: da.Array, wanted: Collection[str]) -> dict[str, da.Array]:
        """Return the gradients of log Z, times a cotangent, with respect to arrays by name."""
        extra = {"cotangent": self._aligned(cotangent)}
        ends = [name for name in wanted if self.cuts_time and name in FINAL]
        names = [name for name in wanted if name not in ends]
        arrays = {**self.given, **time.between(self), **extra}
        arrays.pop("leaving", None)
        packed = self.blocks(pieces.gradients, arrays, wanted=tuple(names))
        found = {
            name: self._summed(packed, i, name, self.arrays[name].dtype)
            for i, name in enumerate(names)
        }
        if ends:
            leaving = time.messages(self, pieces.sums)
            packed = self._at_end(pieces.gradients, leaving, extra, wanted=tuple(ends))
            found[ends[0]] = self._summed(packed, 0, ends[0], self.arrays[ends[0]].dtype)
        return found

    def posterior(self) -> ChainPosterior:
        """Return log Z, marginals and counts; see `LogChain.posterior`."""
        packed = self._results("posterior")
        log_z = self.log_partition() if self.cuts_time else self._total(packed, 0, self.dtype)
        marginals = self._field(packed, 1, (STEPS, STATES), self.dtype)
        return ChainPosterior(log_z, marginals, self._counts(packed, 2) if self.name else None)

    def filtered(self) -> FilteredChain:
        """Return normalised forward messages; see `LogChain.filtered`."""
        packed = self._results("filtered")
        cores: list[Axes] = [(STEPS, STATES), (STEPS,)]
        fields = (self._field(packed, i, core, self.dtype) for i, core in enumerate(cores))
        return FilteredChain(*fields)

    def viterbi(self) -> ChainPath:
        """Return paths of largest weight; see `LogChain.viterbi`."""
        if not self.cuts_time:
            packed = self._results("viterbi")
            states = self._field(packed, 0, (STEPS,), np.int64)
            return ChainPath(states, self._total(packed, 1, self.dtype))
        packed = self._paths(pieces.largest)
        states = self._field(packed, 1, (STEPS,), np.int64)
        weight = self.log_weight(states)
        return ChainPath(self._possible(states, weight), weight)

    def _sample(self, num_samples: int, rng: Any) -> da.Array:
        # A block knows where its rows and steps begin, and with that its seed.
        count = len(self._batch)
        axes = {
            f"axis {i}": (da.arange(n, chunks=-1), (count - 1 - i,))
            for i, n in enumerate(self._batch)
        }
        starts = {name: self._aligned(x, axis) for name, (x, (axis,)) in axes.items()}
        root = int(rng.integers(1 << 63))
        packed = self._paths(pieces.sums, starts, num_samples=num_samples, root=root)
        out = (SAMPLES, *chain_axes(count))
        states = field(
            packed, 1, out, {SAMPLES: num_samples}, np.int64, self.given["log_potentials"][0]
        )
        return self._possible(states, self.log_partition()) if self.cuts_time else states

    def _paths(
        self, function: Callable[..., Any], extra: Extra | None = None, **options: Any
    ) -> da.Array:
        """Return paths of all blocks, given what messages of a kind enter these."""
        arrays = dict(extra or {})
        if self.cuts_time:
            arrays["before"] = time.entering(time.messages(self, function), 1)
        return time.leaving(self, arrays, True, function=pieces.paths, eps=0.0, **options)

    def _possible(self, states: da.Array, weight: da.Array) -> da.Array:
        """Return states, 0 where no path has a positive weight."""
        return da.where(weight[..., None] == -math.inf, da.minimum(states, 0), states)

    def sample(self, num_samples: int, rng: Any) -> da.Array:
        """Draw paths, reproducibly for a generator and a chunking; see `LogChain.sample`."""
        check_generator(rng, self.given["log_potentials"][0]._meta)
        return super().sample(num_samples, rng)

    def log_weight(self, states: Any) -> da.Array:
        """Return the log weights of given paths; see `LogChain.log_weight`."""
        if isinstance(states, ChainPath):
            return super().log_weight(states)
        states = known("states", states if is_lazy(states) else np.asarray(states))
        check_integers("states", states.dtype)
        check_path_shape(shape_of(states), self._batch, self.num_steps)
        arrays = {**self.given, "states": self._aligned(states, STEPS)}
        if self.cuts_time:
            arrays["in front"] = time.entering(self.blocks(pieces.last_states, arrays), 1)
        return self._total(self.blocks(pieces.weights, arrays), 0, self.dtype)

    def plan(self, operation: str = "log_partition") -> Plan:
        """Return how a method will compute the largest block; see `LogChain.plan`."""
        stands_for: dict[str, Any] = {}
        for name in self.arrays:
            x, _ = self.given[name]
            sizes = (max(n, default=0) for n in x.chunks)
            shape = [min(n, m) for n, m in zip(sizes, x.shape, strict=True)]
            if name == self.name and self.cuts_time and x.shape[-3] > 1:
                shape[-3] -= 1
            stands_for[name] = np.broadcast_to(np.zeros((), dtype_name(x.dtype)), shape)
        return LogChain(**stands_for, workspace=self._workspace).plan(operation)

    def __repr__(self) -> str:
        given = ((name, self.given[name][0]) for name in self.arrays)
        arrays = (f"{name}={shape_of(x)} in {x.npartitions}" for name, x in given)
        return f"LogChain({', '.join(arrays)} blocks of Dask)"


def value_and_pullback(
    chain: LogChain,
) -> tuple[da.Array, Callable[..., vjp.ChainGradients]]:
    """Return `vjp.log_partition` of Dask arrays; the pullback computes blocks anew."""
    assert isinstance(chain, LazyChain)
    value = chain.log_partition()

    def pullback(
        cotangent: Any, wanted: Collection[str] = vjp.ChainGradients._fields
    ) -> vjp.ChainGradients:
        vjp.check_wanted(wanted)
        g = cotangent if is_lazy(cotangent) else da.asarray(cotangent, like=value._meta)
        if g.shape != value.shape:
            raise ValueError(
                f"cotangent has shape {g.shape}; it must have that of the value, {value.shape}"
            )
        found = chain.gradients(g, [name for name in chain.arrays if FIELD_OF[name] in wanted])
        fields = {FIELD_OF[name]: x for name, x in found.items()}
        if "transitions" in fields:
            fields["transitions"] = chain._like_transitions(fields["transitions"])
        return vjp.ChainGradients(*map(fields.get, vjp.ChainGradients._fields))

    return value, pullback
