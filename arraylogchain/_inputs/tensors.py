"""Which tensors have values that can be read; torch is not imported for that."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any


def check_tensors(arguments: Mapping[str, Any]) -> None:
    """Raise for tensors that are not dense, or whose values cannot be read.

    Inside transforms of `torch.func` tensors pass: differentiable functions have rules for these.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return
    tensors = {name: x for name, x in arguments.items() if isinstance(x, torch.Tensor)}
    trace = _trace(torch) if tensors else None
    for name, x in tensors.items():
        if unreadable := trace or _unreadable(torch, name, x):
            actual, instead = unreadable
            raise ValueError(f"{name} must be a dense tensor with values, got {actual}; {instead}")


def _trace(torch: Any) -> tuple[str, str] | None:
    """Return what traces calls and would record their results as constants, if anything does."""
    if torch.jit.is_tracing():
        return "one that torch.jit.trace traces", "call this outside of the trace"
    proxies = sys.modules.get("torch.fx.experimental.proxy_tensor")
    if proxies is not None and proxies.get_proxy_mode() is not None:
        return "one that make_fx or torch.export traces", "call this outside of the trace"
    return None


def _unreadable(torch: Any, name: str, x: Any) -> tuple[str, str] | None:
    """Return what kind of tensor cannot be read, and what to do instead; None for others."""
    if is_fake(x):
        return "a fake tensor, as torch.export makes", "call this outside of the export"
    if is_instance(x, "torch.masked.maskedtensor.core", "MaskedTensor"):
        return "a masked tensor", f"fill it first, by {name}.to_tensor(...)"
    if x.is_meta:
        return "one on the meta device", "move it to a device that has its values"
    if x.is_nested:
        return "a nested tensor", "torch.nested.to_padded_tensor makes a dense one"
    if x.layout != torch.strided:
        layout = str(x.layout).removeprefix("torch.").removeprefix("_")
        return f"one of layout {layout}", f"{name}.to_dense() makes a dense one"
    with suppress(RuntimeError):  # inside other transforms
        if x.numel() and not x.data_ptr():
            return "one that torch.func.functionalize wraps", "call this outside of it"
    return None


def is_fake(x: Any) -> bool:
    return is_instance(x, "torch._subclasses.fake_tensor", "FakeTensor")


def is_instance(x: Any, module: str, name: str) -> bool:
    """Tell whether an object is of a class of a module that may not have been imported."""
    return module in sys.modules and isinstance(x, getattr(sys.modules[module], name))
