"""What torch needs beyond values: autograd, transforms, compilation.

Imported only when a tensor arrives that needs it; importing arraylogchain does not import torch.
"""

from arraylogchain._torch.chain import (
    backward_messages,
    expected_transitions,
    forward_messages,
    log_partition,
    marginals,
)
from arraylogchain._torch.products import (
    logchainexp_sequence,
    logchainexp_stack,
    logmatmulexp,
    matmul,
    maxplus_matmul,
)

__all__ = [
    "backward_messages",
    "expected_transitions",
    "forward_messages",
    "log_partition",
    "logchainexp_sequence",
    "logchainexp_stack",
    "logmatmulexp",
    "marginals",
    "matmul",
    "maxplus_matmul",
]
