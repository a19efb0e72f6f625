"""The table of benchmark cases; cases of products are in `product_cases`."""

from __future__ import annotations

from benchmarks import inputs as make
from benchmarks.first_calls import FIRST_CALLS, IN_PROCESS
from benchmarks.in_torch import FORUM
from benchmarks.product_cases import PRODUCT_CASES, SPREADS
from benchmarks.registry import BOTH, Case

EVERYDAY, TAGGERS, LARGE = "Everyday chains", "Taggers", "Large and long chains"
FIRST = "First calls"

# T and K of single chains in float64; n, T and K of batches in float32.
SINGLE = ((100, 3), (1000, 4), (10_000, 8), (100_000, 4), (100_000, 32), (100_000, 128))
BATCHES = ((32, 50, 10), (1000, 100, 5), (8, 400, 20), (64, 200, 64), (200, 50, 50))
TAGGED = ((8, 30, 5), (16, 40, 9), (64, 100, 20))

# Operation: prefix of names, title, and other inputs than the chain.
OF_CHAINS = {
    "log_z": ("chain", "log Z of", ""),
    "gradients": ("gradients-chain-value", "log Z and gradients of", "g"),
    "marginals": ("paths-marginals", "marginals of", ""),
    "posterior": ("paths-posterior", "marginals and counts of", ""),
    "viterbi": ("paths-viterbi", "best path of", ""),
    "sample": ("paths-sample", "a sample of", "seed"),
    "entropy": ("paths-entropy", "entropy of", ""),
}
# The cases in README and the documentation: `python -m benchmarks --showcase`.
SHOWN = frozenset(
    {
        *(f"{prefix}-{T}-{K}" for T, K in SINGLE[:3] for prefix, _, _ in OF_CHAINS.values()),
        *(f"{prefix}-100000-4" for prefix in ("chain", "paths-viterbi")),
        *(f"{prefix}-1000-100-5" for prefix in ("chain", "paths-posterior", "paths-viterbi")),
        *(f"{prefix}-32-50-10" for prefix in ("chain", "paths-posterior")),
        "chain-left-to-right-20000-40",
        *("crf-loss-8-30-5", "crf-loss-64-100-20", "crf-decode-64-100-20"),
        *("logmatmulexp-8", "logmatmulexp-float32-1024", "gradients-logmatmulexp-float32-1024"),
        *(f"logmatmulexp-float32-512-sd{sd}" for sd in (20, 1000)),
        *("forum-500-1-40-200", "gradients-forum-500-1-40-200", "matmul-broadcast"),
        "first-log-z",
        *(f"range-{sd}" for sd in SPREADS),
    }
)


def _too_long(steps: int, states: int) -> dict[str, str]:
    """Say who does not take part, and why."""
    reasons = {}
    if steps >= 10_000:
        reasons["recursion in torch"] = "hundreds of thousands of small operations, traced"
    if steps * states**2 > 5e8:
        reasons["hmmlearn, log"] = f"{steps * states**2:.1e} exponentials take a minute"
    return reasons


def _chain(operation: str, size: tuple[int, ...]) -> Case:
    """Return the case of one chain, T and K, or of a batch, n, T and K."""
    prefix, title, beside = OF_CHAINS[operation]
    *batch, steps, states = size
    which = f"n, T, K = {', '.join(map(str, size))}, float32"
    if not batch:
        which = f"one chain, T = {steps:,}, K = {states}"
    options = {"batch": tuple(batch), "dtype": "float32" if batch else "float64", "beside": beside}
    return Case(
        name=f"{prefix}-{'-'.join(map(str, size))}",
        title=f"{title} {which}",
        operation=operation,
        make=make.hidden_markov,
        sizes={"steps": steps, "states": states, **options},
        group=EVERYDAY if steps <= 10_000 else LARGE,
        not_run=_too_long(steps, states),
        devices=BOTH if batch else ("cpu",),
    )


def _best_paths(steps: int, states: int) -> Case:
    return Case(
        name=f"paths-best-{steps}-{states}",
        title=f"10 best paths of one chain, T = {steps:,}, K = {states}",
        operation="best_paths",
        make=make.hidden_markov,
        sizes={"steps": steps, "states": states},
        group=EVERYDAY,
        devices=BOTH,
    )


def _wide(operation: str, beside: str = "", *, per_step: bool = True) -> Case:
    """Return a case of the forum's size."""
    _, title, own = OF_CHAINS[operation]
    ragged = beside == "lengths"
    sizes = {"steps": 40, "states": 200, "batch": (500,), "dtype": "float32"}
    return Case(
        name=f"paths-{'lengths-' * ragged}{operation.replace('_', '-')}-500-40-200",
        title=f"{title} n, T, K = 500, 40, 200, float32{', lengths of 1 to T' * ragged}",
        operation=operation,
        make=make.hidden_markov,
        sizes={**sizes, "per_step": per_step, "beside": beside or own},
        group=LARGE,
        devices=BOTH,
    )


def _left_to_right(operation: str) -> Case:
    prefix, title, _ = OF_CHAINS[operation]
    return Case(
        name=f"{prefix}-left-to-right-20000-40",
        title=f"{title} one chain from left to right, T = 20,000, K = 40",
        operation=operation,
        make=make.left_to_right,
        sizes={"steps": 20_000, "states": 40},
        group=LARGE,
        not_run=_too_long(20_000, 40),
    )


def _forum(operation: str, *size: int) -> Case:
    gradients, bounded = operation.startswith("forum_gradients"), operation.endswith("bounded")
    name = f"{'gradients-' * gradients}forum-{'-'.join(map(str, size))}"
    title = f"forum's case n, t, v, c = {', '.join(map(str, size))}"
    too_large = {FORUM: "needs 14.3 GB (179 arrays of [500, 200, 200])"}
    return Case(
        name=f"{name}{'-workspace' * bounded}",
        title=f"{title}{', with gradients' * gradients}{' in little memory' * bounded}",
        operation=operation,
        make=make.forum_and_ones if gradients else make.forum,
        sizes=dict(zip("ntvc", size, strict=True)),
        group=LARGE,
        not_run=too_large if size[0] == 500 else {},
        devices=BOTH,
    )


def _tagger(operation: str, title: str, size: tuple[int, int, int]) -> Case:
    sentences, words, tags = size
    return Case(
        name=f"{operation.replace('_', '-')}-{sentences}-{words}-{tags}",
        title=f"{title}, {sentences} sentences of {words} words, {tags} tags, float32",
        operation=operation,
        make=make.tagger,
        sizes={"n": sentences, "steps": words, "tags": tags, "gold": operation == "crf_loss"},
        group=TAGGERS,
        devices=BOTH,
    )


def _first(operation: str, title: str) -> Case:
    return Case(
        name=f"first-{operation.removeprefix(IN_PROCESS).replace('_', '-')}",
        title=f"{title} in a process of its own, T = 1,000, K = 4",
        operation=operation,
        make=make.hidden_markov,
        sizes={"steps": 1000, "states": 4},
        group=FIRST,
    )


CASES = (
    *(_chain(operation, size) for size in SINGLE for operation in OF_CHAINS),
    *(_chain(operation, size) for size in BATCHES for operation in OF_CHAINS),
    *(_best_paths(*size) for size in ((40, 20), (1000, 50))),
    *(_tagger("crf_loss", "CRF loss and backward", size) for size in TAGGED),
    *(_tagger("crf_decode", "CRF decoding", size) for size in TAGGED),
    *(_left_to_right(operation) for operation in ("log_z", "posterior", "viterbi")),
    *(_forum("forum", *size) for size in ((500, 1, 40, 200), (10, 1, 6, 40))),
    *(
        _forum("forum_gradients", *size)
        for size in ((500, 1, 40, 200), (50, 1, 40, 64), (10, 1, 6, 40))
    ),
    _forum("forum_gradients_bounded", 500, 1, 40, 200),
    _wide("marginals", per_step=False),
    *(_wide(operation) for operation in ("viterbi", "sample", "entropy")),
    *(_wide(operation, "lengths") for operation in ("log_z", "marginals", "viterbi")),
    *PRODUCT_CASES,
    *(_first(operation, title) for operation, title in FIRST_CALLS.items()),
)
