"""Chains in array operations: one sweep over time, on tiles of rows.

`tiles` arranges what a sweep reads, `states` what it carries along. Steppers (`scaled`, `logs`)
take states one step further, and say which rows they did not prove; `sweep` takes a wider form for
those, and keeps the history that passes from the last step to the first need. What comes of it is
in `values`, `messages`, `posterior` (with `accumulate`), `entropy`, `viterbi`, `sampling`.
"""

from arraylogchain._array.chains.entropy import entropy
from arraylogchain._array.chains.log_weight import log_weight
from arraylogchain._array.chains.messages import (
    backward_messages,
    filtered,
    forward_messages,
    last_message,
)
from arraylogchain._array.chains.posterior import (
    expected_transitions,
    marginals,
    posterior,
    value_and_pullback,
)
from arraylogchain._array.chains.sampling import sample
from arraylogchain._array.chains.values import log_partition
from arraylogchain._array.chains.viterbi import best_message, viterbi

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
