"""Messages and best paths of the CUDA backend, whose kernels run on the CPU."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import Any

import array_api_compat.numpy as numpy_namespace
import numpy as np

from arraylogchain._backends.cuda.backend import CudaBackend
from arraylogchain._core.context import Context
from arraylogchain._inputs import arrays
from tests import recursions
from tests.cuda.cpu_device import CpuDevice


def context(device: CpuDevice, dtype: str) -> Context:
    """Return the context of NumPy arrays whose kernels run on a device; bfloat16 is ml_dtypes'."""
    if dtype != "bfloat16":
        return replace(arrays._numpy_context(dtype), kernels=device)
    namespace = ModuleType("array_api_compat.numpy")
    vars(namespace).update(vars(numpy_namespace), bfloat16=np.dtype("bfloat16"))
    ctx = arrays._numpy_context("float32")
    return replace(ctx, kernels=device, result_name=dtype, xp=namespace)


def check_recursions(device: CpuDevice, dtype: str, x: Any, **options: Any) -> None:
    """Compare the messages of kernels, which are in log space, with the reference."""
    blocks = recursions.check_recursions(CudaBackend, context(device, dtype), x, **options)
    assert all(block.carry.is_log.all() for block in blocks)
