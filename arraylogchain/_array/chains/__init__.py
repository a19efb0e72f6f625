"""Chains: recursions over time, and array operations on the messages that they leave.

`pieces` cuts a chain and says what recursions, of whatever backend, hand on; `recursion` is that in
array operations. Everything else is pointwise in time and written once: `messages` runs recursions
over all pieces, `posterior` tells what both directions say together (added up in `sums`), and there
are `entropy`, `paths`, `log_weight`.
"""

from arraylogchain._array.chains.entropy import entropy
from arraylogchain._array.chains.log_weight import log_weight
from arraylogchain._array.chains.messages import (
    backward_messages,
    filtered,
    forward_messages,
    last_message,
    log_partition,
)
from arraylogchain._array.chains.paths import best_message, sample, viterbi
from arraylogchain._array.chains.posterior import (
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
