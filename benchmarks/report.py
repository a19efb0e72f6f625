"""Write tables from a record: ``python -m benchmarks.report [RECORD] [--readme]``.

Nothing is measured here, and all figures come from the record. With ``--readme``, the text between
these marks in README and the documentation is replaced as well::

    <!-- benchmarks: NAME NAME -->      an overview of these cases
    <!-- /benchmarks -->
    <!-- benchmarks-short: NAME -->     the same in three columns
    <!-- /benchmarks -->
    <!-- benchmarks-cuda: NAME -->      the same, of the record of a GPU
    <!-- /benchmarks -->
    <!-- benchmarks-all: NAME -->       all contestants of one case
    <!-- /benchmarks -->
    <!-- benchmarks-conditions: -->     machine, versions and commit
    <!-- /benchmarks -->
    <!-- benchmarks-out-of-core: -->    chains larger than memory, of a record of their own
    <!-- /benchmarks -->

and the images in docs/images are drawn. Without a record nothing stands there.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.plot import draw_posterior, draw_range

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
OUT_OF_CORE = RESULTS / "out_of_core.json"
BLOCK = re.compile(
    r"(?P<begin><!-- benchmarks(?P<kind>-[a-z-]+)?:(?P<names>[^>]*)-->\n)"
    r".*?(?P<end><!-- /benchmarks -->)",
    re.DOTALL,
)
_EDGE = re.compile(r"(?<!\\)\|")
# A result with a larger error is no answer; of half precision, one of a few of its roundings.
_WRONG_FROM = {"float16": 4e-3, "bfloat16": 3e-2}
_WRONG_FROM_ELSE = 1e-3
# Times within this ratio count as equal.
_AS_FAST = 1.05

Json = dict[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.report", description=__doc__, formatter_class=raw
    )
    parser.add_argument("record", nargs="?", type=Path, help="a JSON file (default: the latest)")
    parser.add_argument("--readme", action="store_true", help="write README and docs as well")
    args = parser.parse_args(argv)
    path = args.record or latest()
    if path is not None:
        print(write(path))
    if args.readme:
        print("\n".join(map(str, write_pages(path))))
    return 0


def latest(device: str = "cpu") -> Path | None:
    """Return the newest record of a device that is not of a quick run, if there is any."""
    records = (p for p in RESULTS.glob("[0-9]*.json") if not p.stem.endswith("-quick"))
    is_cuda = device == "cuda"
    return max((p for p in records if p.stem.endswith("-cuda") == is_cuda), default=None)


def read(path: Path) -> Json:
    content: Json = json.loads(path.read_text(encoding="utf-8"))
    return content


def save(path: Path, content: Json) -> None:
    """Write a record, a case on each line; it is whole at any moment."""
    part = path.with_suffix(".part")
    rest = {key: value for key, value in content.items() if key != "cases"}
    cases = ",\n".join(json.dumps(case, ensure_ascii=False) for case in content["cases"])
    head = json.dumps(rest, indent=1, ensure_ascii=False).removesuffix("\n}")
    part.write_text(f'{head},\n "cases": [\n{cases}\n]}}\n', encoding="utf-8")
    part.replace(path)


def write(path: Path) -> Path:
    """Write the page of a record to the folder of the record."""
    page = path.with_suffix(".md")
    page.write_text(full_report(read(path)), encoding="utf-8")
    return page


def full_report(content: Json) -> str:
    """Return an overview of a record, and a table for every case with all contestants in it."""
    parts = ["# Benchmarks", conditions(content)]
    parts.append("How to read this: [benchmarks/README.md](../README.md).")
    for title, cases in grouped(content["cases"]):
        parts += [f"## {title}", overview(cases)]
    parts.append("## All contestants")
    for case in content["cases"]:
        parts += [f"### {case['title']}", all_contestants(case)]
    return "\n\n".join(parts) + "\n"


def grouped(cases: Iterable[Json]) -> Iterator[tuple[str, list[Json]]]:
    """Yield the titles of groups, and their cases."""
    groups: dict[str, list[Json]] = {}
    for case in cases:
        groups.setdefault(case["group"], []).append(case)
    yield from groups.items()


# --- README and documentation ---------------------------------------------------------------------


def pages() -> list[Path]:
    """Return README and the pages of the documentation."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def write_pages(path: Path | None) -> list[Path]:
    """Write the tables in README and the documentation; return the files."""
    content = read(path) if path else None
    if content and content["quick"]:
        raise SystemExit(f"{path} is of a quick run; its figures mean nothing")
    written = []
    for page in pages():
        text = page.read_text(encoding="utf-8")
        if BLOCK.search(text):
            page.write_text(filled(text, content), encoding="utf-8")
            written.append(page)
    readme, results = (ROOT / "README.md").read_text(encoding="utf-8"), {}
    exec(re.findall(r"^```python\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)[0], results)
    image = ROOT / "docs" / "images" / "posterior.svg"
    draw_posterior(results["dice"], results["loaded"], image)
    written.append(image)
    spreads = [c for c in content["cases"] if c["name"].startswith("range-")] if content else []
    if spreads:
        image = ROOT / "docs" / "images" / "range.svg"
        draw_range(spreads, image)
        written.append(image)
    return written


def filled(text: str, content: Json | None) -> str:
    """Return a page with the text between its marks replaced by tables of the record."""
    cuda = latest("cuda")
    on_cuda = read(cuda) if cuda else None

    def block(match: re.Match[str]) -> str:
        names, record = match["names"].split(), content
        if match["kind"] == "-cuda":
            record = on_cuda
        by_name = {case["name"]: case for case in record["cases"]} if record else {}
        missing = [name for name in names if name not in by_name]
        if record and missing:
            raise SystemExit(f"a page shows cases that the record lacks: {', '.join(missing)}")
        shown = ""
        if match["kind"] == "-out-of-core":
            shown = out_of_core(read(OUT_OF_CORE)) if OUT_OF_CORE.exists() else ""
        elif record and match["kind"] == "-conditions":
            shown = conditions(record)
        elif record:
            cases = [by_name[name] for name in names]
            if match["kind"] == "-all":
                shown = "\n\n".join(map(all_contestants, cases))
            else:
                is_short = match["kind"] in ("-short", "-cuda")
                shown = short(cases) if is_short else overview(cases)
        return match["begin"] + (f"{shown}\n" if shown else "") + match["end"]

    return BLOCK.sub(block, text)


# --- conditions of a record -----------------------------------------------------------------------


def conditions(content: Json) -> str:
    """Describe date, commit, machine and versions of a record, and its caveats."""
    machine, versions = content["machine"], content["versions"]
    where = [
        *([machine["gpu"]] if "gpu" in machine else []),
        f"{machine['cpu']}, {machine['cores']} cores",
        machine["system"],
        *(machine.get("blas kernels") or [machine["blas"]]),
        *(f"{name}={number}" for name, number in machine["threads"].items()),
    ]
    listed = ", ".join(f"{name} {number}" for name, number in versions.items())
    lines = [f"{content['date'][:10]}, commit {content['commit']}; {', '.join(where)}; {listed}."]
    overrides = ", ".join(f"{k}={v}" for k, v in machine.get("blas overrides", {}).items())
    if overrides:
        lines.append(f"**{overrides}: NumPy's matrix multiplies are not what they usually are.**")
    if content["quick"]:
        lines.append("**A quick run: sizes are reduced and the figures mean nothing.**")
    return "\n\n".join(lines)


# --- tables ---------------------------------------------------------------------------------------


def is_wrong(result: Json, case: Json) -> bool:
    """Return whether a result is too far from the exact one to be called an answer."""
    largest = _WRONG_FROM.get(case["sizes"].get("dtype"), _WRONG_FROM_ELSE)
    return bool(result["wrong"]) or (result["error"] or 0) > largest


def rivals(case: Json) -> list[Json]:
    """Return the timed results of others, the fastest first."""
    others = (r for r in case["results"] if not (r["is_ours"] or r["is_yardstick"]))
    return sorted((r for r in others if r["median"]), key=lambda result: result["median"])


def ours(case: Json) -> Json:
    """Return the first of this library's results that has a time, else the very first."""
    first: Json = case["results"][0]
    return next((r for r in case["results"] if r["median"] and r["is_ours"]), first)


def overview(cases: Iterable[Json]) -> str:
    """Return one row per case: this library and the fastest of the others."""
    head = (
        "| | arraylogchain | error | fastest other | time | error | arraylogchain is "
        "| faster, but wrong |\n|---|--:|--:|---|--:|--:|---|---|"
    )
    return "\n".join([head, *map(_overview_row, cases)])


def _overview_row(case: Json) -> str:
    mine = ours(case)
    if not mine["median"]:
        return f"| {case['title']} | {_cell(mine['not_run'] or '')} | | | | | | |"
    right = next((r for r in rivals(case) if not is_wrong(r, case)), None)
    slowest = right["median"] if right else math.inf
    wrong = [r for r in rivals(case) if is_wrong(r, case) and r["median"] < slowest]
    cells = (
        case["title"],
        _time(mine),
        _error(mine),
        *((right["label"], _time(right), _error(right)) if right else ("", "", "")),
        comparison(right["median"] / mine["median"]) if right else "",
        "; ".join(f"{r['label']}: {_time(r)}, {_error(r)}" for r in wrong[:1]),
    )
    return f"| {' | '.join(cells)} |"


def short(cases: Iterable[Json]) -> str:
    """Return three columns, narrow enough for a telephone."""
    lines = ["| | ours | fastest other |", "|---|--:|---|"]
    for case in cases:
        right = next((r for r in rivals(case) if not is_wrong(r, case)), None)
        other = f"{_time(right)}, {right['label'].removesuffix(', compiled')}" if right else ""
        lines.append(f"| {case['title']} | {_time(ours(case))} | {other} |")
    return "\n".join(lines)


def comparison(ratio: float) -> str:
    """Describe the ratio of another time to ours in words.

    Examples
    --------
    >>> comparison(13.4), comparison(0.5), comparison(1.03)
    ('13 × faster', '2 × slower', 'as fast')
    """
    if max(ratio, 1 / ratio) < _AS_FAST:
        return "as fast"
    return f"{_two_digits(ratio)} × faster" if ratio > 1 else f"{_two_digits(1 / ratio)} × slower"


def all_contestants(case: Json) -> str:
    """Return a row per contestant."""
    mine = ours(case)
    lines = ["| | time | × | temporaries | error | |", "|---|--:|--:|--:|--:|---|"]
    for result in case["results"]:
        if result["not_run"]:
            lines.append(f"| {result['label']} | not run: {_cell(result['not_run'])} | | | | |")
            continue
        spread = f" ± {duration(result['spread'])}" if result["spread"] is not None else ""
        ratio = f"{result['median'] / mine['median']:.2f}" if mine["median"] else ""
        size = "" if result["temporaries"] is None else amount(result["temporaries"])
        cells = (result["label"], _time(result) + spread, ratio, size, _error(result))
        lines.append(f"| {' | '.join(cells)} | {result['state']} |")
    return "\n".join(lines)


def out_of_core(content: Json) -> str:
    """Return a table of the record of `benchmarks.out_of_core`, and its conditions."""
    lines = [
        "| potentials | method | on workers | the same blocks in a loop | memory of all workers |",
        "|---|---|--:|--:|--:|",
    ]
    for run in content["runs"]:
        size = amount(math.prod(run["shape"]) * int(run["dtype"][-2:]) // 8)
        shape = " × ".join(f"{n:,}" for n in run["shape"])
        for method, result in run["results"].items():
            times = (duration(result[name]) for name in ("seconds", "seconds_by_hand"))
            of = f"{shape}, {run['dtype']}, {size}"
            cells = (of, f"`{method}`", *times, amount(int(result["peak_bytes"])))
            lines.append(f"| {' | '.join(cells)} |")
    setups = (
        f"{run['blocks']} blocks, {run['workers']} worker processes of {run['memory']} each; "
        + conditions(run)
        for run in content["runs"]
    )
    return "\n\n".join(["\n".join(lines), *dict.fromkeys(setups)])


def aligned(table: str) -> str:
    """Return a table with columns of even width, for a terminal."""
    rows = [[cell.strip() for cell in _EDGE.split(line)[1:-1]] for line in table.splitlines()]
    del rows[1]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


# --- cells ----------------------------------------------------------------------------------------


def duration(seconds: float) -> str:
    """Return a time with three digits and its unit."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= 0.9995 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"


def amount(size: int) -> str:
    """Return a number of bytes with three digits and its unit."""
    for unit, each in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= 0.9995 * each:
            return f"{size / each:.3g} {unit}"
    return f"{size} B"


def _two_digits(value: float) -> str:
    return f"{value:.2g}" if value < 100 else f"{float(f'{value:.2g}'):,.0f}"


def _time(result: Json) -> str:
    return duration(result["median"]) if result["median"] else ""


def _error(result: Json) -> str:
    parts = (
        f"{result['error']:.0e}" if result["error"] is not None else "",
        f"{100 * result['wrong']:.3g} % wrong" if result["wrong"] else "",
    )
    return ", ".join(filter(None, parts))


def _cell(text: str) -> str:
    """Make a text safe for a cell of a table."""
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(main())
