"""How many steps of each chain are real: checked, and brought to where decisions are taken."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from arraylogchain._arrays import Array
from arraylogchain._fold import Shape


def check_lengths(
    lengths: Array | Sequence[int] | int | None, batch: Shape, count: int
) -> np.ndarray | None:
    """Return lengths [...] as a NumPy array; None if all chains have `count` steps.

    The cost of everything depends on them, so that they are read on the host.
    """
    if lengths is None:
        return None
    found = _on_host(lengths)
    if found.dtype.kind not in "iu":
        raise TypeError(f"lengths has dtype {found.dtype}; it must hold integers")
    if found.shape != batch[len(batch) - found.ndim :] or found.ndim > len(batch):
        try:
            fits = np.broadcast_shapes(found.shape, batch) == batch
        except ValueError:
            fits = False
        if not fits:
            raise ValueError(
                f"lengths has shape {found.shape}; it must broadcast to the batch axes {batch}"
            )
    if found.size and not (found.min() >= 1 and found.max() <= count):
        raise ValueError(
            f"lengths has values from {found.min()} to {found.max()}; they must lie between 1 and "
            f"{count}, the number of steps of log_potentials"
        )
    return None if np.all(found == count) else found.astype(np.int64)


def _on_host(x: Array | Sequence[int] | int) -> np.ndarray:
    if hasattr(x, "get") and hasattr(x, "device"):  # CuPy, whose arrays do not convert themselves
        return np.asarray(x.get())
    if hasattr(x, "detach") and hasattr(x, "cpu"):
        return np.asarray(x.detach().cpu())
    if hasattr(x, "__dlpack__") and not isinstance(x, np.ndarray):
        return np.from_dlpack(x)
    try:
        return np.asarray(x)
    except ValueError as error:
        raise TypeError(f"lengths must be integers, got {x!r}: {error}") from None
