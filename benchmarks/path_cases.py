"""The cases of what is inferred about paths, and of rows of different lengths."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks import dynamax_contestants as dynamax
from benchmarks import gradient_contestants as grad
from benchmarks import inputs as make
from benchmarks import path_contestants as run
from benchmarks import path_references as references
from benchmarks.definitions import (
    HMMLEARN,
    IN_TORCH,
    OURS,
    TORCH,
    Case,
    Contestant,
    Sizes,
    in_dynamax,
)
from benchmarks.inputs import Inputs
from benchmarks.references import AnyReference

XP = ("x", "P", "p0")
SEEDED = (*XP, "seed")
RAGGED = (*XP, "lengths")

IN_NUMPY = "recursion in NumPy"
RIVAL_IN_TORCH = "recursion in torch"

# --- contestants ----------------------------------------------------------------------------------


WIDE_VITERBI = (
    Contestant(OURS, run.viterbi, XP),
    Contestant(IN_TORCH, run.viterbi, XP, is_ours=True, **TORCH),
    Contestant("sums in NumPy, blocks", run.numpy_viterbi, XP),
    Contestant("sums in torch, blocks", run.torch_viterbi, XP, **TORCH),
    in_dynamax(dynamax.viterbi, XP),
)
VITERBI = (
    Contestant(OURS, run.viterbi, XP),
    Contestant(IN_TORCH, run.viterbi, XP, is_ours=True, **TORCH),
    Contestant(IN_NUMPY, run.numpy_viterbi, XP),
    Contestant("hmmlearn", run.hmmlearn_viterbi, XP, **HMMLEARN),
    in_dynamax(dynamax.viterbi, XP),
)
MARGINALS = (
    Contestant(OURS, run.marginals, XP),
    Contestant(IN_TORCH, run.marginals, XP, is_ours=True, **TORCH),
    Contestant(IN_NUMPY, run.numpy_marginals, XP),
    Contestant(RIVAL_IN_TORCH, run.torch_marginals, XP, **TORCH),
    Contestant("hmmlearn, log", grad.hmmlearn_posteriors_log, XP, **HMMLEARN),
    Contestant("hmmlearn, scaling", grad.hmmlearn_posteriors_scaling, XP, **HMMLEARN),
    in_dynamax(dynamax.marginals, XP),
)
SAMPLE = (
    Contestant(OURS, run.sample, SEEDED),
    Contestant(IN_TORCH, run.sample_in_torch, SEEDED, is_ours=True, **TORCH),
    Contestant("cumulative sums in NumPy", run.numpy_sample, SEEDED),
    in_dynamax(dynamax.sample, SEEDED),
)
ENTROPY = (
    Contestant(OURS, run.entropy, XP),
    Contestant(IN_TORCH, run.entropy, XP, is_ours=True, **TORCH),
    Contestant("entropy recursion in NumPy", run.numpy_entropy, XP),
    Contestant("log Z less expectation, torch", run.torch_entropy, XP, **TORCH),
)


def _ragged(
    ours: Callable[..., Any], in_numpy: Callable[..., Any], in_torch: Callable[..., Any]
) -> tuple[Contestant, ...]:
    """Return the contestants for rows of different lengths; the yardstick takes all steps."""
    return (
        Contestant(OURS, ours, RAGGED),
        Contestant(IN_TORCH, ours, RAGGED, is_ours=True, **TORCH),
        Contestant(f"{OURS}, all steps", ours, XP, is_yardstick=True),
        Contestant("padded recursion in NumPy", in_numpy, RAGGED),
        Contestant("padded recursion in torch", in_torch, RAGGED, **TORCH),
    )


# --- cases ----------------------------------------------------------------------------------------


def _batched_case(
    name: str,
    title: str,
    contestants: tuple[Contestant, ...],
    reference: Callable[[Inputs], AnyReference],
    make: Callable[..., Inputs] = make.hidden_markov,
    per_step: bool = True,
) -> Case:
    def sizes(n: int, steps: int, states: int) -> Sizes:
        shape = {"batch": (n,), "steps": steps, "states": states}
        return {**shape, "dtype": "float32", "per_step": per_step}

    matrices = "" if per_step else ", one matrix"
    return Case(
        name=f"paths-{name}-500-40-200",
        title=f"{title} n, T, K = 500, 40, 200, float32{matrices}",
        make=make,
        sizes=sizes(500, 40, 200),
        quick_sizes=sizes(8, 5, 20),
        contestants=contestants,
        reference=reference,
        has_paths=True,
    )


PATH_CASES = (
    _batched_case("viterbi", "best paths,", WIDE_VITERBI, references.viterbi),
    _batched_case("marginals", "marginals,", MARGINALS, references.marginals, per_step=False),
    _batched_case(
        "sample", "a sample each,", SAMPLE, references.sample, make.hidden_markov_and_seed
    ),
    _batched_case("entropy", "entropy,", ENTROPY, references.entropy),
    *(
        _batched_case(
            f"lengths-{name}",
            f"{title}, lengths of 1 to T,",
            _ragged(*solvers),
            reference,
            make.hidden_markov_and_lengths,
        )
        for name, title, solvers, reference in (
            (
                "value",
                "log Z",
                (run.log_partition, run.numpy_log_partition, run.torch_log_partition),
                references.log_partition,
            ),
            (
                "marginals",
                "marginals",
                (run.marginals, run.numpy_marginals, run.torch_marginals),
                references.marginals,
            ),
            (
                "viterbi",
                "best paths",
                (run.viterbi, run.numpy_viterbi, run.torch_viterbi),
                references.viterbi,
            ),
        )
    ),
)
