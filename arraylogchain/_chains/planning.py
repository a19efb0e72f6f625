"""Sizes of shards and segments, from the workspace."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

from arraylogchain._backends.interface import Backend
from arraylogchain._select import BYTES_PER_MATRIX_ENTRY

# Most shards that are computed at a time; sizes do not depend on the number of threads.
MAX_PARALLEL = 8

# Bytes that Python takes for `Messages`, or for the scales of a step, besides their elements.
_MESSAGES_BYTES = 1 << 10


class ChainSizes(NamedTuple):
    """Sizes of a chain, as far as plans depend on them.

    Attributes
    ----------
    groups, rows : int
        Groups of rows that share matrices, and rows of each group.
    steps, states : int
        T and K.
    has_one_matrix : bool
        Whether one matrix stands for every step.
    holds_matrices : bool
        Whether prepared matrices of all groups, or of several steps, are in memory at a time.
    """

    groups: int
    rows: int
    steps: int
    states: int
    has_one_matrix: bool
    holds_matrices: bool


class ShardPlan(NamedTuple):
    """Sizes of the shards and segments of a chain.

    Attributes
    ----------
    groups, rows : int
        Most groups, and most rows of each group, of a shard.
    steps : int
        Most steps of a segment.
    store_messages : bool
        Whether the messages of all steps of a shard are stored; if not, checkpoints are.
    workspace : int
        Bytes for temporaries of a shard besides its messages.
    parallel : int
        Shards that fit the workspace at a time.
    """

    groups: int
    rows: int
    steps: int
    store_messages: bool
    workspace: int
    parallel: int


class _ShardMemory(NamedTuple):
    """Bytes of a shard, as functions of its rows and of the steps of a segment.

    Attributes
    ----------
    sizes : ChainSizes
    workspace : int
        Bytes for all of it.
    groups : int
        Most groups of a shard.
    step : int
        A step of a row in a segment: its arrays, scales, sums, factors and masks.
    stored_step : int
        A stored step of a row.
    matrix : int
        The prepared matrix of a group and step, where segments have one for each step; else 0.
    needs_history : bool
        Whether the messages of all steps, or checkpoints, outlive the segments.
    store_messages : bool
    """

    sizes: ChainSizes
    workspace: int
    groups: int
    step: int
    stored_step: int
    matrix: int
    needs_history: bool
    store_messages: bool

    def segment_step(self, rows: int) -> int:
        """Return the bytes of one step of a segment."""
        num_groups = max(1, min(self.groups, rows // self.sizes.rows))
        return rows * self.step + num_groups * self.matrix + _MESSAGES_BYTES

    def checkpoints(self, rows: int, steps: int) -> int:
        """Return the bytes of the checkpoints of segments of some steps, if there are any."""
        num_segments = -(-self.sizes.steps // max(1, steps))
        return num_segments * (rows * self.stored_step + _MESSAGES_BYTES) * self.needs_history

    def stored(self, rows: int) -> int:
        """Return the bytes of all messages if they are stored."""
        return rows * self.sizes.steps * self.stored_step * self.store_messages

    def max_segment(self, rows: int) -> int:
        """Return the number of steps of a segment that fit besides messages and checkpoints."""
        steps = self.workspace // 4 // self.segment_step(rows)
        # Stored messages repeat their checkpoint.
        held = self.stored(rows) + (1 + self.store_messages) * self.checkpoints(rows, steps)
        return (self.workspace - self.workspace // 4 - held) // self.segment_step(rows)


@lru_cache(maxsize=256)
def plan_shards(
    sizes: ChainSizes,
    backend: type[Backend],
    itemsize: int,
    workspace: int,
    needs_history: bool,
    num_arrays: int,
    elements: int,
) -> ShardPlan:
    """Choose the sizes of shards and segments, from sizes alone.

    Parameters
    ----------
    sizes : ChainSizes
    backend : type
        A class with the methods of `Backend`.
    itemsize : int
        Bytes of an element.
    workspace : int
        Bytes that all shards of a time may take.
    needs_history : bool
        Whether the messages of all steps are read after the last of them is known.
    num_arrays : int
        Arrays [steps, rows, K] of a segment.
    elements : int
        Elements of a segment: enough to amortize call overhead, few enough to stay in cache.

    Returns
    -------
    ShardPlan
    """
    total_rows = sizes.groups * sizes.rows
    max_rows = min(total_rows, backend.max_useful_rows or total_rows)
    step, stored_step = itemsize * num_arrays * sizes.states + 104, itemsize * sizes.states + 16
    # One matrix, or the matrices of four steps, may take a quarter of the workspace.
    matrix = BYTES_PER_MATRIX_ENTRY * sizes.states**2 * sizes.holds_matrices
    share = 4 if sizes.has_one_matrix else 16
    parallel = 1
    if backend.max_useful_rows:
        parallel = min(MAX_PARALLEL, -(-total_rows // max_rows))
        history = 2 * sizes.steps * stored_step * needs_history
        if max(max_rows * max(8 * step, history), share * matrix) > workspace // parallel:
            parallel = 1  # shards that do not fit side by side follow one another
    workspace //= parallel
    groups = max(1, min(sizes.groups, workspace // share // max(1, matrix)))
    # A larger matrix leaves less, but a quarter at least: array operations hold blocks of it.
    workspace -= min(3 * workspace // 4, max(0, groups * matrix - workspace // 4))
    max_rows = max(1, min(max_rows, groups * sizes.rows, workspace // 8 // step))
    enough_rows = min(max_rows, max(32, elements // 16 // sizes.states))
    stored_rows = workspace // 2 // (sizes.steps * stored_step)
    store_messages = needs_history and stored_rows >= enough_rows
    # Loops and kernels hold the matrices of a segment's steps; the bytes above are for float64.
    segment_matrix = matrix * itemsize // 8 * (backend.holds_matrices and not sizes.has_one_matrix)
    per_step = step, stored_step, segment_matrix
    memory = _ShardMemory(sizes, workspace, groups, *per_step, needs_history, store_messages)
    # Below four steps for each segment, set-up dominates; pullbacks keep the checkpoints of all
    # shards at once, so that their segments have about sqrt(T) steps.
    fewest_steps = min(sizes.steps, max(4, math.isqrt(sizes.steps) // 2))
    if segment_matrix and not backend.max_useful_rows:
        fewest_steps = 1  # fewer rows would only repeat the preparation of kernels' matrices
    while needs_history and max_rows > 1 and memory.max_segment(max_rows) < fewest_steps:
        max_rows //= 2
    rows, groups = min(sizes.rows, max_rows), max(1, min(groups, max_rows // sizes.rows))
    steps = _segment_steps(memory, groups * rows, 4 * elements // (num_arrays * sizes.states))
    return ShardPlan(groups, rows, steps, store_messages, workspace // 4, parallel)


def _segment_steps(memory: _ShardMemory, rows: int, row_elements: int) -> int:
    """Return the number of steps of a segment of a shard with some rows."""
    steps, all_checkpoints = max(4, row_elements // rows), memory.checkpoints(rows, 1)
    if memory.needs_history:
        # As many checkpoints are stored as fit.
        free = max(1, memory.workspace // 2 - memory.stored(rows))
        steps = max(steps, 2 * all_checkpoints // free, math.isqrt(memory.sizes.steps))
    # Where not even checkpoints fit, sqrt(T) steps take the least memory with them.
    least_memory = math.isqrt(all_checkpoints // memory.segment_step(rows))
    return max(1, min(memory.sizes.steps, steps, max(memory.max_segment(rows), least_memory)))
