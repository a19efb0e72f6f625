"""The cases of chains from everyday sizes to very long ones: log Z, gradients, paths, first calls.

Our time includes making the `LogChain`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from benchmarks import contestants as run
from benchmarks import dynamax_contestants as dynamax
from benchmarks import first_calls, gradient_references, path_references, references
from benchmarks import gradient_contestants as grad
from benchmarks import inputs as make
from benchmarks import path_contestants as paths
from benchmarks.definitions import (
    HMMLEARN,
    IN_TORCH,
    OURS,
    TORCH,
    Case,
    Contestant,
    in_dynamax,
)
from benchmarks.inputs import Inputs
from benchmarks.path_cases import MARGINALS, RIVAL_IN_TORCH, SAMPLE, VITERBI, XP
from benchmarks.references import AnyReference

XPG = (*XP, "g")

EMPTY_CACHE = f"{OURS}, nothing compiled yet"
WITHOUT_CALL = "a process without the call"

LOG_Z = (
    Contestant(OURS, run.chain, XP),
    Contestant(IN_TORCH, run.chain, XP, is_ours=True, **TORCH),
    Contestant("vector recursion in NumPy", run.numpy_recursion, XP),
    Contestant("hmmlearn, log", run.hmmlearn_log, XP, **HMMLEARN),
    Contestant("hmmlearn, scaling", run.hmmlearn_scaling, XP, **HMMLEARN),
    in_dynamax(dynamax.log_partition, XP),
)
GRADIENTS = (
    Contestant(OURS, grad.by_pullback(grad.chain), XPG),
    Contestant(IN_TORCH, grad.by_autograd(run.chain), XPG, is_ours=True, **TORCH),
    Contestant("recursion in NumPy", grad.numpy_chain, XPG),
    Contestant(RIVAL_IN_TORCH, grad.by_autograd(paths.torch_log_partition), XPG, **TORCH),
    Contestant("hmmlearn, log", grad.hmmlearn_log, XPG, **HMMLEARN),
    Contestant("hmmlearn, scaling", grad.hmmlearn_scaling, XPG, **HMMLEARN),
    in_dynamax(dynamax.value_and_gradients, XPG),
)


class Operation(NamedTuple):
    """What is computed of a chain of any size."""

    name: str
    prefix: str  # of the cases' names
    title: str
    contestants: tuple[Contestant, ...]
    reference: Callable[[Inputs], AnyReference]
    make: Callable[..., Inputs] = make.hidden_markov

    @property
    def table(self) -> dict[str, Any]:
        """Return in which of the report's tables the cases are."""
        return {
            "has_gradients": self.name == "value_and_gradients",
            "has_paths": self.prefix.startswith("paths"),
        }


OF_VALUE = Operation("log_partition", "chain", "log Z of", LOG_Z, references.chain)
OF_GRADIENTS = Operation(
    "value_and_gradients",
    "gradients-chain-value",
    "log Z and gradients of",
    GRADIENTS,
    gradient_references.chain,
    make.hidden_markov_and_ones,
)
OF_VITERBI = Operation("viterbi", "paths-viterbi", "best path of", VITERBI, path_references.viterbi)
OF_MARGINALS = Operation(
    "marginals", "paths-marginals", "marginals of", MARGINALS, path_references.marginals
)
OF_SAMPLE = Operation(
    "sample",
    "paths-sample",
    "a sample of",
    SAMPLE,
    path_references.sample,
    make.hidden_markov_and_seed,
)
OPERATIONS = (OF_VALUE, OF_GRADIENTS, OF_VITERBI, OF_MARGINALS, OF_SAMPLE)

# T and K of single chains in float64; those from 20,000 steps on are without gradients.
SINGLE = (
    (100, 3),
    (1000, 4),
    (10_000, 8),
    (10_000, 16),
    *((100_000, states) for states in (4, 8, 32, 128)),
)
# n, T and K of batches in float32.
BATCHES = ((32, 50, 10), (1000, 100, 5))


def _not_run(steps: int, states: int) -> dict[str, str]:
    """Return who does not take part, and why."""
    reasons = {}
    if steps >= 10_000:
        reasons[RIVAL_IN_TORCH] = "hundreds of thousands of small operations, too many to trace"
    if steps * states**2 > 1e9:
        reasons["hmmlearn, log"] = f"{steps * states**2:.1e} exponentials take a minute"
    return reasons


def _single_case(operation: Operation, steps: int, states: int) -> Case:
    return Case(
        name=f"{operation.prefix}-{steps}-{states}",
        title=f"{operation.title} one chain, T = {steps:,}, K = {states}, float64",
        make=operation.make,
        sizes={"steps": steps, "states": states},
        quick_sizes={"steps": min(steps // 10, 200), "states": states},
        contestants=operation.contestants,
        reference=operation.reference,
        not_run=_not_run(steps, states),
        **operation.table,
    )


def _batched_case(operation: Operation, n: int, steps: int, states: int) -> Case:
    def sizes(n: int, steps: int) -> dict[str, Any]:
        return {"batch": (n,), "steps": steps, "states": states, "dtype": "float32"}

    return Case(
        name=f"{operation.prefix}-{n}-{steps}-{states}",
        title=f"{operation.title} n, T, K = {n}, {steps}, {states}, float32, one matrix",
        make=operation.make,
        sizes=sizes(n, steps),
        quick_sizes=sizes(8, steps // 10),  # which loops take as they take many rows
        contestants=operation.contestants,
        reference=operation.reference,
        **operation.table,
    )


def _left_to_right_case(operation: Operation) -> Case:
    first, *_ = operation.contestants
    dense = Contestant(f"{OURS}, dense matrix", first.call, ("x", "dense", "p0"), is_yardstick=True)
    return Case(
        name=f"{operation.prefix}-left-to-right-20000-40",
        title=f"{operation.title} one chain from left to right, T = 20,000, K = 40, float64",
        make=make.left_to_right,
        sizes={"steps": 20_000, "states": 40},
        quick_sizes={"steps": 200, "states": 40},
        contestants=(*operation.contestants, dense),
        reference=operation.reference,
        **operation.table,
    )


def _first_call_case(operation: Operation) -> Case:
    """Return the case of whole processes, with the time that one takes without the call."""
    takes = operation.contestants[0].takes
    processes = (
        Contestant(OURS, first_calls.warm(operation.name), takes),
        Contestant(EMPTY_CACHE, first_calls.cold(operation.name), takes, is_ours=True),
        Contestant(WITHOUT_CALL, first_calls.warm("nothing"), takes, is_yardstick=True),
    )
    return Case(
        name=f"first-{operation.name.replace('_', '-')}",
        title=f"{operation.title} one chain in a process of its own, T = 1,000, K = 4, float64",
        make=operation.make,
        sizes={"steps": 1000, "states": 4},
        quick_sizes={"steps": 100, "states": 4},
        contestants=processes,
        reference=operation.reference,
        **operation.table,
    )


CHAIN_CASES = (
    *(
        _single_case(operation, steps, states)
        for operation in OPERATIONS
        for steps, states in SINGLE
        if not (operation is OF_GRADIENTS and steps > 10_000)
    ),
    _single_case(OF_VALUE, 50_000, 4),
    *(_batched_case(operation, *size) for operation in OPERATIONS for size in BATCHES),
    *(_left_to_right_case(operation) for operation in (OF_VALUE, OF_VITERBI)),
    *(_first_call_case(operation) for operation in OPERATIONS),
)
