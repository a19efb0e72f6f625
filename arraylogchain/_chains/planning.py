"""Sizes of shards and segments, from the workspace."""

from __future__ import annotations

import math
from functools import lru_cache

from arraylogchain._backends.interface import Backend
from arraylogchain._select import BYTES_PER_MATRIX_ENTRY

# So many threads share pieces at the most: sizes do not depend on how many there are.
THREADS = 8

# Bytes that Python takes for `Messages`, or for the scales of a step, beside their numbers.
_MESSAGES_BYTES = 1 << 10


@lru_cache(maxsize=256)
def plan_shards(
    sizes: tuple[int, int, int, int, bool, bool],
    backend: type[Backend],
    item: int,
    workspace: int,
    history: bool,
    arrays: int,
    numbers: int,
) -> tuple[int, int, int, bool, int, int]:
    """Choose pieces and blocks, from sizes alone.

    Parameters
    ----------
    sizes : tuple
        Groups, rows, steps, states, whether one matrix stands for every step, and whether those
        of all groups, or of a block of steps, are in memory at a time.
    item : int
        Bytes of a number.
    history : bool
        Whether the messages of all steps are wanted, after the last of them is known.
    arrays : int
        How many arrays like messages a block of steps takes.
    numbers : int
        How many numbers a block takes which are worth array operations, and stay in caches.

    Returns
    -------
    groups, rows : int
        Of a piece, at most.
    steps : int
        Of a block, at most.
    store_messages : bool
        Whether the messages of all steps of a piece fit beside it; else those between blocks do.
    workspace : int
        Bytes for what a piece takes besides.
    parallel : int
        How many pieces fit at a time.
    """
    groups, rows, count, size, has_one_matrix, holds_matrices = sizes
    max_rows = min(groups * rows, backend.max_useful_rows or groups * rows)
    # Bytes of a step of a row: in a block, where arrays in float32 may be widened, with what it has
    # no K of (scales of both directions, sums, factors, masks); and in what is kept. And of a
    # group's matrix: one, or those of four steps, may take a quarter of the workspace.
    step, kept_bytes = item * arrays * size + 104, item * size + 16
    matrix, parts = (
        BYTES_PER_MATRIX_ENTRY * size * size * holds_matrices,
        4 if has_one_matrix else 16,
    )
    # Pieces that fit side by side are taken at once, others one after another.
    threads = min(THREADS, -(-groups * rows // max_rows)) if backend.max_useful_rows else 1
    if (
        max(max_rows * max(8 * step, 2 * count * kept_bytes * history), parts * matrix)
        > workspace // threads
    ):
        threads = 1
    workspace //= threads
    groups = max(1, min(groups, workspace // parts // max(1, matrix)))
    workspace -= max(0, groups * matrix - workspace // 4)  # a larger one leaves less
    max_rows = max(1, min(max_rows, groups * rows, workspace // 8 // step))

    def bytes_per_step(num_rows: int) -> int:
        # Loops have the matrices of a block's steps together, others those of a few.
        has_many = backend.max_useful_rows and not has_one_matrix
        matrix_bytes = matrix * max(1, min(groups, num_rows // rows)) if has_many else 0
        return num_rows * step + matrix_bytes + _MESSAGES_BYTES

    def between(num_rows: int, steps: int) -> int:
        return -(-count // max(1, steps)) * (num_rows * kept_bytes + _MESSAGES_BYTES)

    half, enough = workspace // 2, min(max_rows, max(32, numbers // 16 // size))
    store_messages = history and half // (count * kept_bytes) >= enough

    def held(num_rows: int) -> int:
        # Blocks keep what they begin with twice, beside what they leave.
        checkpoint_bytes = between(num_rows, half // 2 // bytes_per_step(num_rows))
        return (
            num_rows * count * kept_bytes + 2 * checkpoint_bytes
            if store_messages
            else checkpoint_bytes
        )

    def at_most(num_rows: int) -> int:
        # Steps that fit beside what is kept, and what a piece takes besides.
        return (workspace - workspace // 4 - held(num_rows) * history) // bytes_per_step(num_rows)

    # Blocks of fewer than four steps would spend their time on what they begin with; and pullbacks
    # keep that of all pieces at once, of each row about one state in sqrt(T).
    fewest = min(count, max(4, math.isqrt(count) // 2))
    while history and max_rows > 1 and at_most(max_rows) < fewest:
        max_rows //= 2
    rows_per_shard, groups_per_shard = min(rows, max_rows), max(1, min(groups, max_rows // rows))
    num_rows = groups_per_shard * rows_per_shard
    steps = max(4, 4 * numbers // (arrays * num_rows * size))
    if history:
        # There are as many messages between blocks as fit.
        free_bytes = max(1, half - num_rows * count * kept_bytes * store_messages)
        steps = max(steps, 2 * between(num_rows, 1) // free_bytes, math.isqrt(count))
    # Where not even the messages between blocks fit, both together take least.
    most_steps = max(
        at_most(num_rows), math.isqrt(history * between(num_rows, 1) // bytes_per_step(num_rows))
    )
    return (
        groups_per_shard,
        rows_per_shard,
        max(1, min(count, steps, most_steps)),
        store_messages,
        workspace // 4,
        threads,
    )
