"""The cases of README's picture: products whose entries spread ever further."""

from __future__ import annotations

import arraylogchain as alc
from benchmarks import contestants as run
from benchmarks import inputs as make
from benchmarks import references
from benchmarks.definitions import OURS, PLAIN, TORCH, Case, Contestant
from benchmarks.gradient_contestants import torch_logsumexp

TORCH_LSE = "logsumexp in torch"
SPREADS = (1, 3, 10, 20, 30, 50, 100, 300, 1000)
_AB = ("a", "b")
_CONTESTANTS = (
    Contestant(OURS, alc.logmatmulexp, _AB),
    Contestant(PLAIN, run.exp_matmul_log, _AB),
    Contestant(TORCH_LSE, torch_logsumexp, _AB, **TORCH),
)

RANGE_CASES = tuple(
    Case(
        name=f"range-{sd}",
        title=f"logmatmulexp 256³, float32, sd {sd}",
        make=make.normal_pair,
        sizes={"a": (256, 256), "b": (256, 256), "sd": sd},
        quick_sizes={"a": (16, 16), "b": (16, 16), "sd": sd},
        contestants=_CONTESTANTS,
        reference=references.log_product,
    )
    for sd in SPREADS
)
