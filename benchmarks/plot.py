"""The plot of a report: times relative to this library's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

# A result with a larger error than this is marked as wrong; of half precisions, with a larger one
# than a few of their roundings.
WRONG_FROM = {"float16": 4e-3, "bfloat16": 3e-2}
WRONG_FROM_ELSE = 1e-3

Json = dict[str, Any]


def is_wrong(result: Json, case: Json) -> bool:
    """Tell whether a result is too far from the exact one to be called an answer."""
    line = WRONG_FROM.get(case["sizes"].get("dtype"), WRONG_FROM_ELSE)
    return bool(result["wrong_infinities"]) or (result["error"] or 0) > line


def draw(content: Json, path: Path) -> None:
    """Plot every contestant's time relative to this library's, hollow where the answer is wrong."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    cases = [case for case in content["cases"] if case["results"][0]["median"]]
    rivals = [result for case in cases for result in case["results"][1:] if result["median"]]
    figure, axes = plt.subplots(figsize=(12, 2.5 + 0.32 * len(cases)), layout="constrained")
    styles = _styles(rivals)
    for row, case in enumerate(cases):
        ours, *others = case["results"]
        for result in others:
            if result["median"]:
                style = styles[result["label"]]
                face = {"markerfacecolor": "none"} if is_wrong(result, case) else {}
                axes.plot(result["median"] / ours["median"], row, **style, **face)
    for label, style in styles.items():
        axes.plot([], [], label=label, **style)
    axes.axvline(1, color="black", linewidth=1)
    axes.set_xscale("log")
    axes.set_yticks(range(len(cases)), [case["title"] for case in cases], fontsize=8)
    axes.margins(y=0.01)
    axes.invert_yaxis()
    axes.grid(axis="x", alpha=0.3)
    axes.set_xlabel("time relative to arraylogchain; hollow: wrong answers; bars: baselines")
    machine = content["machine"]
    gpu = machine.get("gpu")
    where = gpu["name"] if gpu else f"{machine['cpu']}, {machine['cores']} cores"
    reduced = "quick run, sizes reduced, " if content["quick"] else ""
    axes.set_title(f"{reduced}{where}, {content['date'][:10]}")
    figure.legend(loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _styles(results: list[Json]) -> dict[str, Json]:
    """Return a marker and a colour for each label; yardsticks are bars."""
    styles: dict[str, Json] = {}
    for result in results:
        i = len(styles)
        marker = {"marker": "|", "markersize": 11} if result["is_yardstick"] else {}
        default = {"color": f"C{i % 10}", "marker": "os^D"[i // 10 % 4], "linestyle": "none"}
        styles.setdefault(result["label"], default | marker)
    return styles
