"""Autograd, forward mode and transforms of torch.

Imported only for tensors that need it; importing arraylogchain does not import torch.
"""

from typing import Any

# Public functions that have operators, by name.
FUNCTIONS: dict[str, Any] = {}
