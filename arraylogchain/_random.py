"""Random numbers from the caller's generator, as arrays of the library that computes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from arraylogchain._context import Array, Context


def check_generator(rng: Any, x: Array) -> None:
    """Raise TypeError unless `rng` is NumPy's or CuPy's generator, or torch's and x a tensor."""
    library = _package_of(rng) if type(rng).__name__ == "Generator" else ""
    if library == "torch" and _package_of(x) != "torch":
        raise TypeError(
            f"rng is a torch.Generator, which is for tensors only, and log_potentials is a "
            f"{type(x).__name__}; np.random.default_rng(seed) makes a generator for any array"
        )
    if library not in ("cupy", "torch") and not isinstance(rng, np.random.Generator):
        raise TypeError(
            f"rng must be a numpy.random.Generator, a cupy.random.Generator or a torch.Generator, "
            f"got {type(rng).__name__}; np.random.default_rng(seed) makes one"
        )


def uniforms(rng: Any, ctx: Context) -> Callable[[tuple[int, ...]], Array]:
    """Return a function from shapes to arrays of numbers in [0, 1), in the widest precision."""
    dtype = ctx.dtype(ctx.widest)

    def draw(shape: tuple[int, ...]) -> Array:
        if _package_of(rng) == "torch":
            torch = sys.modules["torch"]
            x = torch.rand(shape, generator=rng, dtype=torch.float64, device=rng.device)
            # For tensors on a CPU it is NumPy that computes.
            x = x if ctx.xp.__name__.endswith("torch") else x.cpu().numpy()
        else:
            x = rng.random(shape)
        if ctx.xp.__name__.endswith("cupy") == (_package_of(x) == "cupy"):
            return ctx.xp.asarray(x, dtype=dtype, device=ctx.device)
        return ctx.xp.asarray(x.get() if hasattr(x, "get") else x, dtype=dtype, device=ctx.device)

    return draw


def _package_of(x: Any) -> str:
    return type(x).__module__.partition(".")[0] if hasattr(type(x), "__module__") else ""
