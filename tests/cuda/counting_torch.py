"""Count the operations of losses and their gradients in torch, on a CPU that passes for a GPU."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import arraylogchain as alc
from arraylogchain._inputs import arrays
from tests.cuda.counting import TALLY
from tests.cuda.cpu_device import CpuDevice

FREE = re.compile(
    r"aten\.(empty|empty_like|empty_strided|new_empty|view|_unsafe_view|expand|permute|t|mT|"
    r"transpose|slice|select|unsqueeze|squeeze|detach|alias|as_strided|_reshape_alias|unbind|"
    r"split|diagonal|is_same_size|resolve_neg|resolve_conj|lift_fresh|record_stream|numpy_T)\."
)
MULTIPLIES = ("aten.mm", "aten.bmm", "aten.addmm", "aten.baddbmm")


class CountingMode(TorchDispatchMode):
    """Record each operation that would be a launch or a wait on a device."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = str(function)
        if name.startswith("aten._local_scalar_dense"):
            TALLY.record("sync", "item")
        elif not FREE.match(name):
            TALLY.record("gemm" if name.startswith(MULTIPLIES) else "array", name)
        return function(*args, **(kwargs or {}))


class TensorDevice(CpuDevice):
    """The CPU as a device for tensors, which counts the kernels that it runs."""

    multiprocessors = 132

    def empty(self, shape: Any, dtype: str) -> Any:
        return torch.empty(shape, dtype=getattr(torch, dtype))

    def pointer(self, x: Any) -> int:
        return 0 if x is None else int(x.data_ptr())

    def strides(self, x: Any) -> tuple[int, ...]:
        return tuple(x.stride())

    def run(self, kernel: Any, grid: int, block: int, arguments: Any, *shared: int) -> None:
        TALLY.record("kernels", kernel.name.partition("<")[0])
        arguments = tuple(
            np.uint64(x.data_ptr()) if isinstance(x, torch.Tensor) else x for x in arguments
        )
        super().run(kernel, grid, block, arguments, *shared)


def cases() -> dict[str, Callable[[], None]]:
    rng = np.random.default_rng(0)

    def tensor(x: Any) -> Any:
        return torch.tensor(np.asarray(x, np.float32), requires_grad=True)

    def chain(n: int, T: int, K: int, num_matrices: int, name: str) -> Callable[[], None]:
        P = rng.random((num_matrices, K, K)) + 1e-3
        P /= P.sum(-1, keepdims=True)
        x = tensor(rng.standard_normal((n, T, K)))
        P = tensor(np.log(P) if name == "log_transitions" else P)
        return lambda: alc.LogChain(x, **{name: P}).log_partition().sum().backward()

    a, b = tensor(rng.standard_normal((64, 64))), tensor(rng.standard_normal((64, 64)))
    return {
        "torch logmatmulexp 64^3: backward": lambda: alc.logmatmulexp(a, b).sum().backward(),
        "torch forum-like 24x40x33: loss.backward": chain(24, 40, 33, 39, "transitions"),
        "torch crf 16x40x20, one logs: loss.backward": chain(16, 40, 20, 1, "log_transitions"),
    }


def measure_all(pattern: str) -> dict[str, dict[str, Any]]:
    """Return the counts of a warm call of each case whose name matches."""
    rows = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ARRAYLOGCHAIN_SELF_CHECK", "0")
        patch.setattr(torch.Tensor, "is_cpu", property(lambda x: False))
        patch.setattr(arrays, "_is_cuda", lambda device: True)
        patch.setattr(arrays, "_kernels_for", lambda xp, device: TensorDevice(seed=3))
        patch.setattr(arrays, "_known_contexts", {})
        for name, call in cases().items():
            if re.search(pattern, name):
                call()
                with CountingMode(), TALLY.recording():
                    call()
                rows[name] = TALLY.row() | {"python": None, "error": 0.0}
    return rows
