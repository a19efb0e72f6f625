"""Chains: passes over time, and array operations on the messages that they return.

`planning` cuts a chain into shards and segments, and `passes` runs a backend's recursion over them.
`marginals` combines both directions (the algebra of a segment is in `segment_marginals`, sums
are in `accumulate`); the others are `messages`, `entropy`, `paths`, `log_weight`,
`log_probability`. `cuda_examples` tells the check of CUDA kernels what to compute.
"""

import arraylogchain._chains.cuda_examples  # noqa: F401  makes them known to the check
from arraylogchain._chains import entropy, log_probability, log_weight, marginals, messages, paths

__all__ = ["entropy", "log_probability", "log_weight", "marginals", "messages", "paths"]
