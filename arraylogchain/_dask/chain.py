"""Chains of Dask arrays: rows block by block, and time too, where it is cut (see `time`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import dask.array as da
import numpy as np

from arraylogchain import vjp
from arraylogchain._arrays import dtype_name, is_lazy, on_host
from arraylogchain._context import shape_of
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
    batch_axes,
    field,
    of_blocks,
    to_lazy,
    whole,
)
from arraylogchain._inputs.arguments import TRANSITIONS
from arraylogchain._inputs.lengths import check_integers, check_lengths
from arraylogchain._inputs.paths import check_path_shape
from arraylogchain._random import check_generator
from arraylogchain._text import amount
from arraylogchain.chain import ChainPath, ChainPosterior, FilteredChain, LogChain
from arraylogchain.plan import Plan

# Results without axes of their own.
_TOTALS = ("log_partition", "entropy")


class LazyChain(LogChain):
    """A chain of Dask arrays, whose methods return Dask arrays."""

    def __init__(self, log_potentials: Any, **options: Any) -> None:
        super().__init__(log_potentials, **options)
        self.given, self.dtype = to_lazy(self.arrays)
        self.cuts_time = self.given["log_potentials"].numblocks[-2] > 1 and self.num_states > 0
        if self.cuts_time and not {"final", "log_final"}.isdisjoint(self.given):
            raise self.without_cuts("weights of the last state")
        for name, x in self.given.items():
            if name in TRANSITIONS and x.ndim == 2:
                x = x[None]
            self._check_states(name, x)
            # Chunks of time make their own cuts.
            states = len(AXES[name]) - 1 if self.cuts_time and AXES[name] != (FIRST,) else 9
            self.given[name] = whole(x, min(states, len(AXES[name])))
        if self.lengths is not None:
            self.given["lengths"] = self._lazy_lengths(self.lengths)

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
        if self.cuts_time:
            raise self.without_cuts("lengths")
        if not is_lazy(lengths):
            check_lengths(lengths, self._batch, self.num_steps)
            return da.from_array(np.asarray(on_host("lengths", lengths)), chunks=-1)
        check_integers("lengths", lengths.dtype)
        check_lengths(np.broadcast_to(1, shape_of(lengths)), self._batch, self.num_steps)
        return lengths

    def without_cuts(self, what: str) -> TypeError:
        """Return the error of what takes no chunks of time."""
        return TypeError(
            f"{what} cannot be had of log_potentials that are cut along time; "
            "log_potentials.rechunk({-2: -1}) has all steps in one chunk, and other axes can be cut"
        )

    @property
    def num_steps(self) -> int:
        return int(self.arrays["log_potentials"].shape[-2])

    @property
    def num_states(self) -> int:
        return int(self.arrays["log_potentials"].shape[-1])

    def args(self) -> list[tuple[da.Array, Axes]]:
        """Return the arrays with the numbers of their axes."""
        return [
            (x, (*batch_axes(x.ndim - len(AXES[name])), *AXES[name]))
            for name, x in self.given.items()
        ]

    def _blocks(
        self, function: Callable[..., Any], extra: Sequence[tuple[da.Array, Axes]], **options: Any
    ) -> da.Array:
        """Return what a function makes of the chain of each block: tuples of arrays."""
        count = max([len(self._batch), *(sum(axis < CORE for axis in axes) for _, axes in extra)])
        return of_blocks(
            _call,
            batch_axes(count),
            [*self.args(), *extra],
            object,
            method=function,
            names=tuple(self.given),
            workspace=None if self._keeps_states else self._workspace,
            **options,
        )

    def _field(self, packed: da.Array, i: int, core: Axes, dtype: Any) -> da.Array:
        sizes = {STEPS: self.num_steps, STATES: self.num_states}
        lengths = {axis: sizes[axis] for axis in core}
        return field(packed, i, (), lengths, dtype, self.given["log_potentials"])

    def summed(self, packed: da.Array, i: int, name: str, x: da.Array, dtype: Any) -> da.Array:
        """Return gradients with respect to x, summed over the blocks that share its entries."""
        count, own = len(self._batch), x.ndim - len(AXES[name])
        shared = [j for j in range(count) if j >= own or x.shape[own - 1 - j] == 1]
        core = dict(zip(AXES[name], x.shape[own:], strict=True))
        # Sums of many blocks are rounded once.
        parts = field(packed, i, (), core, np.float64 if shared else dtype, x, shared)
        if shared:
            parts = parts.sum(axis=tuple(count - 1 - j for j in shared), keepdims=True)
        return parts[(0,) * (count - own)].astype(dtype)

    def _compute(self, operation: str) -> da.Array:
        if self.cuts_time:
            if operation not in time.OPERATIONS:
                raise self.without_cuts(f"{operation}()")
            return getattr(time, operation)(self)
        packed = self._blocks(_value, (), operation=operation)
        if operation == "expected_transitions":
            name = next(name for name in self.arrays if name in TRANSITIONS)
            return self.summed(packed, 0, name, self.given[name], self.dtype)
        core = () if operation in _TOTALS else (STEPS, STATES)
        return self._field(packed, 0, core, self.dtype)

    def posterior(self) -> ChainPosterior:
        """Return log Z, marginals and counts; see `LogChain.posterior`."""
        name = next((name for name in self.arrays if name in TRANSITIONS), None)
        if self.cuts_time:
            counts = None if name is None else self.expected_transitions()
            return ChainPosterior(self.log_partition(), self.marginals(), counts)
        packed = self._blocks(_value, (), operation="posterior")
        total, marginals = (
            self._field(packed, i, core, self.dtype) for i, core in enumerate([(), (STEPS, STATES)])
        )
        counts = None
        if name is not None:
            counts = self.summed(packed, 2, name, self.given[name], self.dtype)
            counts = self._like_transitions(counts)
        return ChainPosterior(total, marginals, counts)

    def filtered(self) -> FilteredChain:
        """Return normalised forward messages; see `LogChain.filtered`."""
        if self.cuts_time:
            raise self.without_cuts("filtered()")
        packed = self._blocks(_value, (), operation="filtered")
        cores: list[Axes] = [(STEPS, STATES), (STEPS,)]
        return FilteredChain(
            *(self._field(packed, i, core, self.dtype) for i, core in enumerate(cores))
        )

    def viterbi(self) -> ChainPath:
        """Return paths of largest weight; see `LogChain.viterbi`."""
        if self.cuts_time:
            raise self.without_cuts("viterbi()")
        packed = self._blocks(_value, (), operation="viterbi")
        states = self._field(packed, 0, (STEPS,), np.int64)
        return ChainPath(states, self._field(packed, 1, (), self.dtype))

    def _sample(self, num_samples: int, rng: Any) -> da.Array:
        if self.cuts_time:
            raise self.without_cuts("sample()")
        # A block knows where its rows begin, and with that its seed.
        starts = [
            (da.arange(n, chunks=-1), (len(self._batch) - 1 - i,))
            for i, n in enumerate(self._batch)
        ]
        root = int(rng.integers(1 << 63))
        packed = self._blocks(_samples, starts, num_samples=num_samples, root=root)
        sizes = {SAMPLES: num_samples, STEPS: self.num_steps}
        return field(packed, 0, (SAMPLES,), sizes, np.int64, self.given["log_potentials"])

    def sample(self, num_samples: int, rng: Any) -> da.Array:
        """Draw paths, reproducibly for a generator and a chunking; see `LogChain.sample`."""
        check_generator(rng, self.given["log_potentials"]._meta)
        return super().sample(num_samples, rng)

    def log_weight(self, states: Any) -> da.Array:
        """Return the log weights of given paths; see `LogChain.log_weight`."""
        if isinstance(states, ChainPath):
            return super().log_weight(states)
        states = states if is_lazy(states) else da.from_array(np.asarray(states), chunks=-1)
        check_integers("states", states.dtype)
        check_path_shape(shape_of(states), self._batch, self.num_steps)
        if self.cuts_time:
            raise self.without_cuts("log_weight()")
        states = whole(states, 1)
        extra = [(states, (*batch_axes(states.ndim - 1), STEPS))]
        return self._field(self._blocks(_weights, extra), 0, (), self.dtype)

    def plan(self, operation: str = "log_partition") -> Plan:
        """Return how a method will compute the largest block; see `LogChain.plan`."""
        chunks = self._blocks(_value, (), operation=operation).chunks
        rows = [max(sizes, default=0) for sizes in chunks]
        stands_for: dict[str, Any] = {}
        for name in self.arrays:
            x = self.given[name]
            own = x.ndim - len(AXES[name])
            lead = (
                min(n, row) for n, row in zip(x.shape[:own], rows[len(rows) - own :], strict=True)
            )
            shape = (*lead, *x.shape[own:])
            stands_for[name] = np.broadcast_to(np.zeros((), dtype_name(x.dtype)), shape)
        return LogChain(**stands_for, workspace=self._workspace).plan(operation)

    def __repr__(self) -> str:
        arrays = (f"{name}={shape_of(x)} in {x.npartitions}" for name, x in self.given.items())
        return f"LogChain({', '.join(arrays)} blocks of Dask)"


def _call(
    *blocks: Any,
    method: Callable[..., Any],
    names: Sequence[str],
    workspace: int | None,
    **options: Any,
) -> Any:
    """Call a function of the chain of a block."""
    arrays = dict(zip(names, blocks, strict=False))
    return method(LogChain(**arrays, workspace=workspace), *blocks[len(names) :], **options)


def _value(chain: LogChain, operation: str) -> tuple[Any, ...]:
    """Return the arrays that a method returns, counts with all batch axes."""
    found = getattr(chain, operation)()
    if operation == "expected_transitions":
        return (pieces.with_batch(chain, "transitions", found),)
    if operation == "posterior" and found.expected_transitions is not None:
        return (*found[:2], pieces.with_batch(chain, "transitions", found[2]))
    return tuple(found) if isinstance(found, tuple) else (found,)


def _weights(chain: LogChain, states: Any) -> tuple[Any]:
    return (chain.log_weight(states),)


def _samples(chain: LogChain, *starts: Any, num_samples: int, root: int) -> tuple[Any]:
    where = [int(x[0]) if x.size else 0 for x in starts]
    rng = np.random.default_rng(np.random.SeedSequence(root, spawn_key=where))
    return (chain.sample(num_samples, rng),)


def _gradients(chain: LogChain, g: Any, wanted: Sequence[str]) -> tuple[Any, ...]:
    """Return gradients with respect to arrays, with all batch axes."""
    _, pullback = vjp.log_partition(chain)
    found = pullback(g, [FIELD_OF[name] for name in wanted])
    return tuple(pieces.with_batch(chain, name, getattr(found, FIELD_OF[name])) for name in wanted)


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
        arrays = {name: chain.given[name] for name in chain.arrays if FIELD_OF[name] in wanted}
        extra = [(g, batch_axes(g.ndim))]
        if chain.cuts_time:
            found = time.gradients(chain, tuple(arrays), pieces.gradients, extra)
        else:
            packed = chain._blocks(_gradients, extra, wanted=tuple(arrays))
            found = {
                name: chain.summed(packed, i, name, x, x.dtype)
                for i, (name, x) in enumerate(arrays.items())
            }
        fields = {FIELD_OF[name]: x for name, x in found.items()}
        if "transitions" in fields:
            fields["transitions"] = chain._like_transitions(fields["transitions"])
        return vjp.ChainGradients(*map(fields.get, vjp.ChainGradients._fields))

    return value, pullback
