"""The figures of README: a posterior, and products whose entries spread ever further."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

# For each line: color (from Okabe and Ito's color-blind safe palette) and marker.
STYLES = {
    "arraylogchain": ("#000000", "o"),
    "exp, matmul, log": ("#E69F00", "s"),
    "logsumexp in blocks": ("#0072B2", "D"),
}


def draw_range(cases: Sequence[dict[str, Any]], path: Path) -> None:
    """Plot errors and times of products against the spread of their entries."""
    plt = _pyplot()
    figure, (errors, times) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    for label, (colour, marker) in STYLES.items():
        points = [(case["sizes"]["sd"], _result(case, label)) for case in cases]
        # A result that is infinite where it should not be is off by more than any error.
        off = [(sd, 1.0 if r["wrong"] else max(r["error"], 1e-9)) for sd, r in points]
        style: dict[str, Any] = {"color": colour, "markersize": 5}
        errors.loglog(*zip(*off, strict=True), f"{marker}-", **style)
        at = [(sd, r["median"] * 1e3) for sd, r in points]
        times.loglog(*zip(*at, strict=True), f"{marker}-", label=label, **style)
    errors.set_title("largest error of log values (relative above 1)", fontsize=10)
    errors.set_ylim(1e-8, 3)
    errors.set_yticks([1, 1e-2, 1e-4, 1e-6, 1e-8], ["infinite", "1e-2", "1e-4", "1e-6", "1e-8"])
    times.set_title("time, ms", fontsize=10)
    times.yaxis.set_major_formatter("{x:g}")
    for axes in (errors, times):
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set_xlabel("standard deviation of the entries")
        axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=len(STYLES), fontsize=9, frameon=False)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def draw_posterior(dice: Sequence[int], loaded: Sequence[float], path: Path) -> None:
    """Plot the probability of the loaded die at each roll, and when it was thrown."""
    plt = _pyplot()
    figure, axes = plt.subplots(figsize=(9, 2.2), layout="constrained")
    rolls = range(len(dice))
    axes.fill_between(
        rolls, dice, step="mid", color="#E69F00", alpha=0.35, linewidth=0, label="loaded die thrown"
    )
    axes.plot(rolls, loaded, color="#000000", linewidth=1.2, label="its posterior probability")
    axes.set(xlabel="roll", ylabel="probability", ylim=(0, 1), xlim=(0, len(dice) - 1))
    figure.legend(loc="outside upper center", ncols=2, fontsize=9, frameon=False)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def _result(case: dict[str, Any], label: str) -> dict[str, Any]:
    result: dict[str, Any] = next(r for r in case["results"] if r["label"] == label)
    return result


def _pyplot() -> Any:
    import matplotlib as mpl

    mpl.use("agg")
    # The same data give the same file.
    mpl.rcParams.update(
        {"svg.hashsalt": "arraylogchain", "svg.fonttype": "none", "savefig.dpi": 100}
    )
    from matplotlib import pyplot

    return pyplot
