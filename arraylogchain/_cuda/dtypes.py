"""Dtypes as kernels have them: their names in CUDA, and what they are computed in."""

from __future__ import annotations

C_TYPES = {
    "float16": "__half",
    "bfloat16": "__nv_bfloat16",
    "float32": "float",
    "float64": "double",
}


def compute_type(dtype: str) -> str:
    """Return the dtype that entries of `dtype` are computed in."""
    return "float64" if dtype == "float64" else "float32"


def itemsize(dtype: str) -> int:
    return {"float64": 8, "float32": 4}.get(dtype, 2)
