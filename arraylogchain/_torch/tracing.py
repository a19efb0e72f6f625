"""Whether the compiler traces a call, and what it is to see of it."""

from __future__ import annotations

from types import ModuleType

import torch


def is_compiling() -> bool:
    """Tell whether the compiler should see operators in this call.

    Not in forward mode, where the tangents of operators would be zero without an error, nor under
    `torch.func`, which cannot differentiate them.
    """
    return torch.compiler.is_compiling() and not (
        torch.autograd.forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active()
    )


def operators() -> ModuleType:
    """Return the operators that the compiler sees; nobody else needs them."""
    from arraylogchain._torch import compiled

    return compiled
