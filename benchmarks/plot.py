"""The plots of a record. Every library has one colour and one marker in all of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.showcase import RANGE, grouped
from benchmarks.tables import Json, is_wrong, ours, rivals, two_digits

OURS = "arraylogchain"
# Of each library: colour (Okabe and Ito's, which colour-blind readers tell apart) and marker.
STYLES = {
    OURS: ("#000000", "o"),
    "NumPy": ("#E69F00", "s"),
    "SciPy": ("#A08F00", "P"),
    "torch": ("#D55E00", "^"),
    "torch-semiring-einsum": ("#CC79A7", "v"),
    "hmmlearn": ("#0072B2", "D"),
    "dynamax": ("#009E73", "X"),
    "forum's code": ("#56B4E9", "*"),
}
# Parts of contestants' labels, where these do not begin with the library's name.
_SIGNS = {"np.": "NumPy", "scipy": "SciPy", "torch": "torch", "NumPy": "NumPy"}
_LIMITS = (1 / 50, 500)


def library(label: str) -> str | None:
    """Return the library that a contestant's label names; None for one without a style.

    Examples
    --------
    >>> library("hmmlearn, log"), library("vector recursion in torch"), library("cuBLAS")
    ('hmmlearn', 'torch', None)
    """
    longest_first = sorted(STYLES, key=len, reverse=True)
    named = next((name for name in longest_first if label.startswith(name)), None)
    return named or next((name for sign, name in _SIGNS.items() if sign in label), None)


def draw_times(content: Json, path: Path) -> None:
    """Plot each library's fastest time relative to ours, hollow where the answer is wrong."""
    plt = _pyplot()
    cases = [case for case in content["cases"] if ours(case)["median"] and rivals(case)]
    groups = [(title, some) for title, some in grouped(cases) if title != RANGE]
    figure, all_axes = plt.subplots(
        len(groups),
        figsize=(8, 1.6 + sum(0.6 + 0.27 * len(some) for _, some in groups)),
        height_ratios=[1 + len(some) for _, some in groups],
        sharex=True,
        squeeze=False,
        layout="constrained",
    )
    shown: set[str] = set()
    for axes, (title, some) in zip(all_axes[:, 0], groups, strict=True):
        shown |= _draw_group(axes, title, some)
    _label(figure, all_axes[-1, 0], shown)
    figure.suptitle(_where(content), fontsize=9)
    figure.savefig(path)
    plt.close(figure)


def _draw_group(axes: Any, title: str, cases: Sequence[Json]) -> set[str]:
    """Draw a row for each case; return the libraries in it."""
    shown = set()
    for row, case in enumerate(cases):
        told: set[float] = set()  # limits where a number says how far beyond them points lie
        for name, result in _points(case):
            colour, marker = STYLES[name]
            ratio = result["median"] / ours(case)["median"]
            held = min(max(ratio, _LIMITS[0]), _LIMITS[1])
            face = "none" if is_wrong(result, case) else colour
            axes.plot(
                held, row, marker, color=colour, markerfacecolor=face, clip_on=False, zorder=3
            )
            if held != ratio and held not in told:
                told.add(held)
                axes.annotate(
                    f"{two_digits(ratio)} ×",
                    (held, row),
                    textcoords="offset points",
                    fontsize=7,
                    va="center",
                    xytext=(6, 0),
                )
            shown.add(name)
    axes.set_title(title, loc="left", fontsize=10, weight="bold")
    axes.axvline(1, color=STYLES[OURS][0], linewidth=1.2)
    axes.set_xscale("log")
    axes.set_xlim(*_LIMITS)
    axes.set_ylim(len(cases) - 0.4, -0.6)
    axes.set_yticks(range(len(cases)), [case["title"] for case in cases], fontsize=8)
    axes.grid(alpha=0.3)
    return shown


def _points(case: Json) -> list[tuple[str, Json]]:
    """Return each library's fastest right result, and its fastest wrong one if that is faster."""
    found: dict[tuple[str, bool], Json] = {}
    for result in rivals(case):  # the fastest first
        name = library(result["label"])
        if name and (name, False) not in found:
            found.setdefault((name, is_wrong(result, case)), result)
    return [(name, result) for (name, _), result in found.items()]


def _label(figure: Any, axes: Any, shown: set[str]) -> None:
    ticks = (0.1, 1, 10, 100)
    axes.set_xticks(ticks, [f"{tick:g} ×" for tick in ticks])
    axes.set_xlabel("time in units of arraylogchain's", labelpad=18)
    below = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points", "va": "top"}
    axes.annotate("◀ faster", (1, 0), (-6, -20), ha="right", **below)
    axes.annotate("slower than arraylogchain ▶", (1, 0), (6, -20), **below)
    for name in (name for name in STYLES if name in shown):
        colour, marker = STYLES[name]
        axes.plot([], [], marker, color=colour, label=name)
    axes.plot([], [], "o", color="grey", markerfacecolor="none", label="hollow: wrong answers")
    figure.legend(loc="outside lower center", ncols=4, fontsize=9, frameon=False)


def draw_range(cases: Sequence[Json], path: Path) -> None:
    """Plot errors and times of products against the spread of their entries."""
    plt = _pyplot()
    figure, (errors, times) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    labels = [result["label"] for result in cases[0]["results"] if result["median"]]
    for label in labels:
        colour, marker = STYLES[library(label) or OURS]
        points = [(case["sizes"]["sd"], _result(case, label)) for case in cases]
        # A result that is infinite where it should not be is off by more than any error.
        off = [(sd, 1.0 if r["wrong_infinities"] else max(r["error"], 1e-9)) for sd, r in points]
        errors.loglog(*zip(*off, strict=True), f"{marker}-", color=colour, markersize=5)
        at = [(sd, r["median"] * 1e3) for sd, r in points]
        times.loglog(*zip(*at, strict=True), f"{marker}-", color=colour, markersize=5, label=label)
    errors.set_title("largest error of log values (relative above 1)", fontsize=10)
    errors.set_ylim(1e-8, 3)
    errors.set_yticks([1, 1e-2, 1e-4, 1e-6, 1e-8], ["infinite", "1e-2", "1e-4", "1e-6", "1e-8"])
    times.set_title("time, ms", fontsize=10)
    times.yaxis.set_major_formatter("{x:g}")
    for axes in (errors, times):
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set_xlabel("standard deviation of the entries")
        axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=len(labels), fontsize=9, frameon=False)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def _result(case: Json, label: str) -> Json:
    return next(result for result in case["results"] if result["label"] == label)


def _where(content: Json) -> str:
    machine = content["machine"]
    gpu = machine.get("gpu")
    where = gpu["name"] if gpu else f"{machine['cpu']}, {machine['cores']} cores"
    reduced = "quick run, sizes reduced, " if content["quick"] else ""
    return f"{reduced}{where}, {content['date'][:10]}"


def _pyplot() -> Any:
    import matplotlib as mpl

    mpl.use("agg")
    # The same data give the same file.
    mpl.rcParams.update(
        {"svg.hashsalt": "arraylogchain", "svg.fonttype": "none", "savefig.dpi": 100}
    )
    from matplotlib import pyplot

    return pyplot
