"""Structs of the kernels of chains; chain.cuh and marginals.cu document their fields."""

from __future__ import annotations

import numpy as np

from arraylogchain._cuda.kernels import Struct

ROWS = Struct((np.int64, "lengths order"), (np.int32, "groups rows steps states time chain_steps"))
STRIDES = Struct((np.int64, "group row step state"))
MESSAGES = Struct((np.int64, "logs shifts exponents step"))
WEIGHTS = Struct((np.int64, "data group row state is_log"))
MATRICES = Struct(
    (np.int64, "data order group matrix from to"), (np.int32, "count states parts is_log")
)
# Struct Chain and struct Segment without the fields of struct Rows, which come first.
CHAIN = {
    name: Struct(
        (np.int64, "potentials x_group x_row x_step x_state factors shifts logs scales"),
        (np.int64, "matrices matrix_step matrix"),
        (np.int32, "threads_per_row direction restarts_scales"),
        (np.dtype(name), "threshold"),
    )
    for name in ("float32", "float64")
}
SEGMENT = Struct((np.int32, "pairs threads_per_term has_one_matrix blocks"))
PAIR_MARGINALS = Struct(
    (np.int64, "input scales out group matrix from to out_group out_matrix"),
    (np.int32, "is_log by_logs"),
)
