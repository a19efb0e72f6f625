"""The lengths of a chain's rows on the device, and the order in which kernels take the rows."""

from __future__ import annotations

import numpy as np

from arraylogchain._context import Array
from arraylogchain._cuda.device import Device
from arraylogchain._cuda.launch import Launch, pack
from arraylogchain._inputs.chain import Chain

# Of lengths.cu.
COUNT, THREADS = 1000, 256
SOURCE, KERNEL = "chains/lengths.cu", "chain_lengths"
NUMBERS = np.dtype([("at", np.int32, (COUNT,))], align=True)
# More numbers than are handed over as arguments, unless there is no other way.
MOST = 8 * COUNT


def row_lengths(device: Device, chain: Chain) -> Array | None:
    """Return what kernels take for a chain's lengths, int64 [2, rows of all groups].

    The lengths, and in which order kernels take the rows: those of a group with the longest first,
    so that blocks and warps have rows that end at about the same step. None if all have every step.
    """
    if chain.lengths is None:
        return None
    order = (*chain.group_axes, *chain.row_axes)
    lengths = np.broadcast_to(chain.lengths, chain.batch).transpose(order).reshape(chain.sizes)
    # Small numbers are sorted by their digits.
    keys = (-lengths).astype(np.int16 if chain.num_steps < 1 << 15 else np.int64)
    by_length = np.argsort(keys, axis=1, kind="stable")
    numbers = by_length + lengths.shape[1] * np.arange(lengths.shape[0])[:, None]
    return sent(device, np.stack([lengths.reshape(-1), numbers.reshape(-1)]))


def sent(device: Device, values: np.ndarray) -> Array:
    """Return a copy of integers on the device, which no call waits for."""
    if values.size > MOST and not device.is_capturing():
        # While a graph is captured nothing is copied, and no kernel may be loaded.
        device.load(SOURCE, KERNEL)
        return device.copied(values)
    out = device.empty(values.shape, "int64")
    for row, of_row in zip(values, out, strict=True):
        for first in range(0, row.size, COUNT):
            part = row[first : first + COUNT]
            numbers = pack(NUMBERS, at=np.pad(part, (0, COUNT - part.size)))
            arguments = (numbers, np.int32(part.size), of_row[first:])
            device.run(Launch(SOURCE, KERNEL, 1, THREADS, arguments))
    return out
