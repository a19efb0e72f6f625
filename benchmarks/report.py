"""Write tables and plots from a record: ``python -m benchmarks.report [RECORD] [--readme]``.

Nothing is measured here, and no figure comes from anywhere but the record. With ``--readme``, what
stands between these marks in README and the documentation is written as well::

    <!-- benchmarks: NAME NAME -->      an overview of these cases
    <!-- /benchmarks -->
    <!-- benchmarks-all: NAME -->       all contestants of one case
    <!-- /benchmarks -->
    <!-- benchmarks-conditions: -->     machine, versions and commit
    <!-- /benchmarks -->
    <!-- benchmarks-out-of-core: -->    chains larger than memory, of a record of their own
    <!-- /benchmarks -->

and docs/images/range.svg is drawn.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import plot, tables
from benchmarks.showcase import RANGE, grouped

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
OUT_OF_CORE = RESULTS / "out_of_core.json"
BLOCK = re.compile(
    r"(?P<begin><!-- benchmarks(?P<kind>-all|-conditions|-out-of-core)?:(?P<names>[^>]*)-->\n)"
    r".*?(?P<end><!-- /benchmarks -->)",
    re.DOTALL,
)

Json = dict[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("record", nargs="?", type=Path, help="a JSON file (default: the latest)")
    parser.add_argument("--readme", action="store_true", help="write README and docs as well")
    args = parser.parse_args(argv)
    path = args.record or latest()
    if path is None:
        parser.error(f"no record in {RESULTS}; run python -m benchmarks first")
    print(write(path))
    if args.readme:
        print("\n".join(map(str, write_pages(path))))
    return 0


def latest() -> Path | None:
    """Return the newest record of the CPU that is not of a quick run, if there is any."""
    found = (p for p in RESULTS.glob("[0-9]*.json") if not p.stem.endswith(("-quick", "-cuda")))
    return max(found, default=None)


def read(path: Path) -> Json:
    content: Json = json.loads(path.read_text(encoding="utf-8"))
    return content


def write(path: Path) -> str:
    """Write the tables and the plot beside a record; return their names, or why there is none."""
    content = read(path)
    table, image = path.with_suffix(".md"), path.with_suffix(".png")
    table.write_text(full_report(content, image.name), encoding="utf-8")
    try:
        plot.draw_times(content, image)
    except ModuleNotFoundError as error:
        return f"{table}\nno plot: {error.name} is not installed"
    return f"{table}\n{image}"


def full_report(content: Json, plot_name: str) -> str:
    """Return an overview of a record, and a table for every case with all contestants in it."""
    parts = [
        "# Benchmarks",
        tables.conditions(content),
        "How to read this: [benchmarks/README.md](../README.md).",
        f"![time of other libraries in units of arraylogchain's]({plot_name})",
    ]
    for title, cases in grouped(content["cases"]):
        parts += [f"## {title}", tables.overview(cases)]
    parts.append("## All contestants")
    on_device = content["device"] == "cuda"
    for case in content["cases"]:
        parts += [f"### {case['title']}", tables.all_contestants(case, on_device=on_device)]
    return "\n\n".join(parts) + "\n"


# --- README and documentation ---------------------------------------------------------------------


def pages() -> list[Path]:
    """Return README and the pages of the documentation."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def write_pages(path: Path) -> list[Path]:
    """Write what README and the documentation show of a record; return the files."""
    content = read(path)
    if content["quick"]:
        raise SystemExit(f"{path.name} is of a quick run; its figures mean nothing")
    written = []
    for page in pages():
        text = page.read_text(encoding="utf-8")
        if BLOCK.search(text):
            page.write_text(filled(text, content), encoding="utf-8")
            written.append(page)
    spreads = dict(grouped(content["cases"])).get(RANGE)
    if spreads:
        image = ROOT / "docs" / "images" / "range.svg"
        plot.draw_range(spreads, image)
        written.append(image)
    return written


def filled(text: str, content: Json) -> str:
    """Return a page with what stands between its marks as the record has it."""
    by_name = {case["name"]: case for case in content["cases"]}

    def block(match: re.Match[str]) -> str:
        names = match["names"].split()
        missing = [name for name in names if name not in by_name]
        if missing:
            raise SystemExit(f"a page shows cases that the record lacks: {', '.join(missing)}")
        cases = [by_name[name] for name in names]
        if match["kind"] == "-conditions":
            shown = tables.conditions(content)
        elif match["kind"] == "-out-of-core":
            shown = tables.out_of_core(read(OUT_OF_CORE)) if OUT_OF_CORE.exists() else ""
        elif match["kind"] == "-all":
            on_device = content["device"] == "cuda"
            shown = "\n\n".join(tables.all_contestants(c, on_device=on_device) for c in cases)
        else:
            shown = tables.overview(cases)
        return match["begin"] + (f"{shown}\n" if shown else "") + match["end"]

    return BLOCK.sub(block, text)


if __name__ == "__main__":
    sys.exit(main())
