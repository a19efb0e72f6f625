"""Chains: recursions over time, and array operations on the messages that they leave.

`pieces` cuts a chain and says what recursions, of whatever backend, hand on; `recursion` is that in
array operations. Everything else is pointwise in time and written once: `messages` runs recursions
over all pieces, `posterior` tells what both directions say together (the algebra of a block is in
`shares`, and `sums` adds up), and there are `entropy`, `paths`, `log_weight`.
"""

from arraylogchain._array.chains import entropy, log_weight, messages, paths, posterior

__all__ = ["entropy", "log_weight", "messages", "paths", "posterior"]
