"""Public functions while torch compiles their callers. This module does not import torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from arraylogchain._inputs.tensors import dynamo_disabled
from arraylogchain._torch import FUNCTIONS

F = TypeVar("F", bound=Callable[..., Any])


def as_operator(function: F) -> F:
    """Replace a public function by its operator while torch compiles or exports the caller."""
    name, code, disabled = function.__name__, function.__code__, dynamo_disabled(function)
    names = code.co_varnames[: code.co_argcount]
    FUNCTIONS[name] = function

    def traced(*args: Any, **options: Any) -> Any:
        from arraylogchain._torch import operators

        return operators.call(name, names, disabled, *args, options)

    return dynamo_disabled(function, traced)
