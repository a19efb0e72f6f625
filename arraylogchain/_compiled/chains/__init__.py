"""Chains of NumPy arrays, row by row, by compiled loops.

What this exports has the names and signatures of `_array.chains`.
"""

from arraylogchain._compiled.chains.entropy import entropy
from arraylogchain._compiled.chains.messages import (
    backward_messages,
    filtered,
    forward_messages,
    last_message,
    log_partition,
)
from arraylogchain._compiled.chains.paths import best_message, log_weight, sample, viterbi
from arraylogchain._compiled.chains.posterior import (
    expected_transitions,
    marginals,
    posterior,
    value_and_pullback,
)

__all__ = [
    "backward_messages",
    "best_message",
    "entropy",
    "expected_transitions",
    "filtered",
    "forward_messages",
    "last_message",
    "log_partition",
    "log_weight",
    "marginals",
    "posterior",
    "sample",
    "value_and_pullback",
    "viterbi",
]
