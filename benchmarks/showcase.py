"""What ``python -m benchmarks --showcase`` measures: everyday sizes first, then the rest.

Reports show groups in this order; cases that are in none of them come last.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from benchmarks.range_cases import RANGE_CASES

# It has a plot of its own.
RANGE = "Products of a wide range"

GROUPS: dict[str, tuple[str, ...]] = {
    "Everyday chains": (
        "chain-100-3",
        "chain-1000-4",
        "chain-10000-8",
        "chain-32-50-10",
        "chain-1000-100-5",
        "gradients-chain-value-1000-4",
        "gradients-chain-value-32-50-10",
        "gradients-chain-value-1000-100-5",
        "paths-marginals-1000-4",
        "paths-marginals-32-50-10",
        "paths-viterbi-1000-4",
        "paths-viterbi-1000-100-5",
        "paths-sample-1000-4",
    ),
    "Products": (
        "logmatmulexp-8",
        "logmatmulexp-float32-256",
        "logmatmulexp-float32-1024",
        "logmatmulexp-float64-256",
        "logmatmulexp-float32-512-sd20",
        "logmatmulexp-float32-512-sd1000",
        "logmatmulexp-batch64-64",
        "logmatmulexp-thin",
        "maxplus-thin",
        "logchainexp-64",
        "matmul-broadcast",
        "einsum-product-1024",
        "einsum-3-64",
        "einsum-8-8",
        "gradients-logmatmulexp-float32-256",
        "gradients-logmatmulexp-float32-1024",
        "gradients-matmul-broadcast",
    ),
    "Large and long chains": (
        "forum-500-1-40-200",
        "gradients-forum-500-1-40-200",
        "gradients-forum-50-1-40-64",
        "chain-100000-4",
        "chain-100000-32",
        "paths-marginals-100000-32",
        "paths-viterbi-500-40-200",
        "paths-viterbi-100000-32",
        "paths-sample-100000-32",
        "paths-entropy-500-40-200",
        "paths-lengths-value-500-40-200",
        "chain-left-to-right-20000-40",
        "first-log-partition",
    ),
    RANGE: tuple(case.name for case in RANGE_CASES),
}
PATTERNS = tuple(name for names in GROUPS.values() for name in names)


def grouped(cases: Iterable[dict[str, Any]]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield titles and cases of the groups that a record has cases of."""
    rest = {case["name"]: case for case in cases}
    for title, names in GROUPS.items():
        found = [rest.pop(name) for name in names if name in rest]
        if found:
            yield title, found
    if rest:
        yield "Other cases", list(rest.values())
