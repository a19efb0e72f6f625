"""Write tables and plots from results: ``python -m benchmarks.report [FILE ...] [--readme]``.

Nothing is measured here, and no figure comes from anywhere but the JSON file.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from arraylogchain._text import amount, duration

RESULTS = Path(__file__).parent / "results"
README = Path(__file__).parents[1] / "README.md"
BEGIN, END = "<!-- benchmarks:begin -->", "<!-- benchmarks:end -->"

# A result with a larger error than this is marked as wrong.
WRONG_FROM = 1e-3

Json = dict[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__)
    parser.add_argument("files", nargs="*", type=Path, help="results (default: the latest)")
    parser.add_argument("--readme", action="store_true", help="rewrite README's block as well")
    args = parser.parse_args(argv)
    paths = args.files or latest()
    if not paths:
        parser.error(f"no results in {RESULTS}; run python -m benchmarks first")
    for path in paths:
        print(write(path))
    if args.readme:
        write_readme(paths)
        print(README)
    return 0


def latest() -> list[Path]:
    """Return the newest results that are not those of a quick run, if there are any."""
    found = sorted(p for p in RESULTS.glob("*.json") if not p.stem.endswith("-quick"))
    return found[-1:]


def write(path: Path) -> str:
    """Write the table and the plot beside a JSON file; return the names of all three."""
    content = json.loads(path.read_text(encoding="utf-8"))
    table, plot = path.with_suffix(".md"), path.with_suffix(".png")
    table.write_text(full_report(content, plot.name), encoding="utf-8")
    draw(content, plot)
    return "\n".join(map(str, (path, table, plot)))


def write_readme(paths: Sequence[Path]) -> None:
    """Replace README's block between the two marks by what the files hold, one after another."""
    blocks = []
    for path in paths:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["quick"]:
            raise SystemExit(
                f"{path.name} is of a quick run; its figures do not belong into README"
            )
        if not path.resolve().is_relative_to(README.parent):
            raise SystemExit(f"{path} lies outside of the repository; README could not link to it")
        blocks.append(short_report(content, path))
    text = README.read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise SystemExit(f"README.md lacks {BEGIN} or {END}")
    block = "\n\n".join(blocks)
    README.write_text(f"{before}{BEGIN}\n{block}\n{END}{after}", encoding="utf-8")


# --- text -----------------------------------------------------------------------------------------


def full_report(content: Json, plot_name: str) -> str:
    """Return a table for every case, all contestants in it."""
    parts = ["# Benchmarks", _conditions(content), _HOW_TO_READ, f"![times]({plot_name})"]
    for case in content["cases"]:
        parts.append(f"## {case['title']}")
        parts.append("\n".join(_case_table(case)))
    return "\n\n".join(parts) + "\n"


_HOW_TO_READ = (
    "Time: median of interleaved rounds ± half the distance between the quartiles. "
    "×: time relative to this library, above 1 is slower. Temporaries: peak allocations beyond "
    "inputs, output and gradients, by tracemalloc for NumPy, and for torch by its profiler, to "
    "which NumPy's are added. Error: largest |out - exact| / max(1, |exact|) against long double "
    "at up to 2000 entries drawn at random; wrong: share of these that are infinite or NaN where "
    "they should not be, or the reverse.\n\n"
    "Cases with gradients: value and all gradients in one call. Error: the largest of the value's, "
    "as above, and of each gradient's: largest |out - exact| / largest |exact| of that gradient, "
    "against long double, or float64 where the case is in float32 and its sums are long; wrong: "
    "the largest share of any. A yardstick is of the value and gradients, or of the value alone "
    "where its row says so.\n\n"
    "Cases of paths: the error of a best path is how far its log weight, added up again in long "
    "double, lies below the largest; of marginals it is the largest |out - exact|, against long "
    "double, or float64 where the case is in float32; samples have none. Wrong: also what is no "
    "path of positive weight. All rows share their matrices: one for each step, or one for all "
    "where the title says so and in one chain. hmmlearn takes row after row in float64; dynamax is "
    "compiled before it is timed, and its temporaries are what the compiler lays out."
)


def _conditions(content: Json) -> str:
    machine, versions = content["machine"], content["versions"]
    listed = ", ".join(f"{name} {number}" for name, number in versions.items())
    threads = ", ".join(f"{name}={number}" for name, number in machine["threads"].items())
    lines = [
        f"{content['date']}, {machine['cpu']}, {machine['cores']} cores, {machine['system']}, "
        f"{machine['blas']}{', ' + threads if threads else ''}; {listed}."
    ]
    if content["quick"]:
        lines.append("**A quick run: sizes are reduced and the figures mean nothing.**")
    return "\n\n".join(lines)


def _case_table(case: Json) -> Iterator[str]:
    ours = case["results"][0]
    yield "| | time | × | temporaries | error | wrong |"
    yield "|---|--:|--:|--:|--:|--:|"
    for result in case["results"]:
        if result["not_run"]:
            yield f"| {result['label']} | not run: {_cell(result['not_run'])} | | | | |"
            continue
        spread = f" ± {duration(result['spread'])}" if result["spread"] is not None else ""
        cells = (
            result["label"],
            duration(result["median"]) + spread,
            _ratio(result, ours),
            amount(result["temporaries"]),
            "" if result["is_yardstick"] else _error(result),
            f"{100 * result['wrong_infinities']:.3g} %" if result["wrong_infinities"] else "",
        )
        yield f"| {' | '.join(cells)} |"


def short_report(content: Json, path: Path) -> str:
    """Return one row per case: this library, the yardstick, and the fastest of the others."""
    name = path.resolve().relative_to(README.parent).with_suffix("").as_posix()
    gradients = [case for case in content["cases"] if case.get("has_gradients")]
    of_paths = [case for case in content["cases"] if case.get("has_paths")]
    values = [case for case in content["cases"] if case not in gradients + of_paths]
    parts = [
        _conditions(content),
        "Medians of interleaved rounds; temporaries beyond inputs and output; errors against "
        "long double, relative beyond 1, with the share of wrong infinities and NaN where "
        "there are any. × yardstick: our time in units of the bare matrix multiplies of the "
        "same shapes. Fastest other: of all that were run, right or wrong. × ours: its time in "
        "units of ours; below 1 it is faster. All contestants, with spread and memory: "
        f"[{path.stem}.md]({name}.md).",
    ]
    if values:
        parts.append("\n".join(_short_table(values)))
    if gradients:
        parts += [_GRADIENTS, "\n".join(_short_table(gradients))]
    if of_paths:
        parts += [_PATHS, "\n".join(_short_table(of_paths))]
    parts.append(f"![times relative to this library]({name}.png)")
    return "\n\n".join(parts)


_GRADIENTS = (
    "Values and all gradients in one call. Our figures are for NumPy, through `vjp` / for torch, "
    "through autograd. Temporaries are beyond gradients, too. The error is the largest of the "
    "value's, as above, and of each gradient's, relative to the largest entry of that gradient, "
    "against long double or float64. × yardstick: for `logmatmulexp` in units of three "
    "bare matrix multiplies, for chains in units of those of the value alone."
)

_PATHS = (
    "What is inferred about paths. Our figures are for NumPy / for torch. The error of a best path "
    "is how far its log weight lies below the largest, relative beyond 1; that of marginals is "
    "absolute, against long double or float64; samples have none. × yardstick: rows of different "
    "lengths in units of our time for all steps of the padded rows. hmmlearn takes row after row "
    "in float64; dynamax was compiled before."
)


def _short_table(cases: Sequence[Json]) -> Iterator[str]:
    yield (
        "| case | time | temporaries | error | × yardstick | fastest other | × ours | its error "
        "| temporaries of others |"
    )
    yield "|---|--:|--:|--:|--:|---|--:|--:|--:|"
    for case in cases:
        first, *rest = case["results"]
        if first["not_run"]:
            yield f"| {case['title']} | {_cell(first['not_run'])} | | | | | | | |"
            continue
        ours = [first, *(result for result in rest if result.get("is_ours"))]
        others = [result for result in rest if not (result.get("is_ours") or result["not_run"])]
        yardstick = next((result for result in others if result["is_yardstick"]), None)
        rivals = [result for result in others if not result["is_yardstick"]]
        cells = (
            case["title"],
            _each(ours, lambda result: duration(result["median"])),
            _each(ours, lambda result: amount(result["temporaries"])),
            _each(ours, _error),
            _each(ours, partial(_ratio, unit=yardstick)) if yardstick else "",
            *_rival_cells(rivals, ours),
        )
        yield f"| {' | '.join(cells)} |"


def _rival_cells(rivals: Sequence[Json], ours: Sequence[Json]) -> tuple[str, ...]:
    """Return the cells of the fastest of the others, and what all of them hold."""
    if not rivals:
        return ("",) * 4
    fastest = min(rivals, key=lambda result: result["median"])
    held = sorted(result["temporaries"] for result in rivals)
    bounds = dict.fromkeys((amount(held[0]), amount(held[-1])))
    ratios = _each(ours, partial(_ratio, fastest))
    return fastest["label"], ratios, _error(fastest), " to ".join(bounds)


def _each(results: Sequence[Json], text: Callable[[Json], str]) -> str:
    """Return a figure of each of our results, in one cell."""
    texts = ["not run" if result["not_run"] else text(result) for result in results]
    return " / ".join(texts) if any(texts) else ""


def _error(result: Json) -> str:
    wrong = result["wrong_infinities"]
    parts = (
        f"{result['error']:.1e}" if result["error"] is not None else "",
        f"{100 * wrong:.3g} % wrong" if wrong else "",
    )
    return ", ".join(filter(None, parts))


def _ratio(result: Json, unit: Json) -> str:
    return f"{result['median'] / unit['median']:.2f}" if unit["median"] else ""


def _cell(text: str) -> str:
    """Make a text safe for a cell of a table."""
    return " ".join(text.split()).replace("|", "\\|")


def is_wrong(result: Json) -> bool:
    """Tell whether a result is too far from the exact one to be called an answer."""
    return bool(result["wrong_infinities"]) or (result["error"] or 0) > WRONG_FROM


# --- plot -----------------------------------------------------------------------------------------


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
                face = {"markerfacecolor": "none"} if is_wrong(result) else {}
                axes.plot(result["median"] / ours["median"], row, **style, **face)
    for label, style in styles.items():
        axes.plot([], [], label=label, **style)
    axes.axvline(1, color="black", linewidth=1)
    axes.set_xscale("log")
    axes.set_yticks(range(len(cases)), [case["title"] for case in cases], fontsize=8)
    axes.margins(y=0.01)
    axes.invert_yaxis()
    axes.grid(axis="x", alpha=0.3)
    axes.set_xlabel("time relative to arraylogchain; hollow: wrong answers; bars: yardsticks")
    machine = content["machine"]
    reduced = "quick run, sizes reduced, " if content["quick"] else ""
    axes.set_title(f"{reduced}{machine['cpu']}, {machine['cores']} cores, {content['date'][:10]}")
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


if __name__ == "__main__":
    sys.exit(main())
