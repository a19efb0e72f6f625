"""The lengths of a chain's rows on the device, in the kernels' order."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from arraylogchain._chain.steps import Chain
from arraylogchain._context import Array
from arraylogchain._cuda.device import Device
from arraylogchain._cuda.launch import Launch

# Of lengths.cu.
ROWS, THREADS = 1000, 256
LENGTHS = np.dtype([("at", np.int32, (ROWS,))], align=True)
INSTANTIATIONS: dict[str, list[str]] = {"chains/lengths.cu": ["chain_lengths"]}


def row_lengths(device: Device, chain: Chain, order: Sequence[int]) -> Array | None:
    """Return a chain's lengths, int64 [rows], its batch axes in the given order; None if equal."""
    if chain.lengths is None:
        return None
    rows = np.broadcast_to(chain.lengths, chain.batch).transpose(order).reshape(-1)
    out = device.empty((rows.size,), "int64")
    for first in range(0, rows.size, ROWS):
        part = rows[first : first + ROWS]
        lengths = np.zeros((), LENGTHS)
        lengths["at"][: part.size] = part
        device.run(
            Launch(
                source="chains/lengths.cu",
                kernel="chain_lengths",
                grid=1,
                block=THREADS,
                shared_memory=0,
                arguments=(lengths, np.int32(part.size), out[first:]),
            )
        )
    return out
