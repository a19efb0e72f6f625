"""What a chain prints of itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import array_api_compat
import numpy as np

from arraylogchain._arrays import namespace_of
from arraylogchain._context import Array, library_name
from arraylogchain._fold import Shape
from arraylogchain.plan import Plan


def summary(
    arrays: Mapping[str, Array],
    shapes: Mapping[str, Shape],
    lengths: Any,
    plan: Plan,
) -> str:
    """Return the shapes of a chain's arguments, the kind of its arrays and its route."""
    parts = [f"{name}={_of_shape(shape)}" for name, shape in shapes.items()]
    if lengths is not None:
        shape = np.shape(lengths)
        parts.append(f"lengths={_of_shape(shape) if shape else lengths}")
    parts += [plan.dtype, _backend(arrays["log_potentials"])]
    if any(getattr(x, "requires_grad", False) for x in arrays.values()):
        parts.append("requires_grad=True")
    return ", ".join([*parts, f"route={plan.route}"])


def _of_shape(shape: Shape) -> str:
    return f"[{', '.join(map(str, shape))}]"


def _backend(x: Array) -> str:
    """Return the library, and the device of one that has several."""
    library = library_name(namespace_of("log_potentials", x))
    return library if library == "numpy" else f"{library} {array_api_compat.device(x)}"
