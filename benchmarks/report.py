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
from benchmarks import texts
from benchmarks.plot import draw

RESULTS = Path(__file__).parent / "results"
README = Path(__file__).parents[1] / "README.md"
MARKS = {
    "cpu": ("<!-- benchmarks:begin -->", "<!-- benchmarks:end -->"),
    "cuda": ("<!-- benchmarks-cuda:begin -->", "<!-- benchmarks-cuda:end -->"),
}

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
    """Replace what stands between README's marks by what the files hold, one after another.

    There is a block for each device. That of CUDA says so where no GPU has run anything yet. Of
    cases that several files have, the last is shown.
    """
    blocks: dict[str, list[str]] = {device: [] for device in MARKS}
    contents = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    for number, (path, content) in enumerate(zip(paths, contents, strict=True)):
        later = {case["name"] for other in contents[number + 1 :] for case in other["cases"]}
        content["cases"] = [case for case in content["cases"] if case["name"] not in later]
        if content["quick"]:
            raise SystemExit(
                f"{path.name} is of a quick run; its figures do not belong into README"
            )
        if not path.resolve().is_relative_to(README.parent):
            raise SystemExit(f"{path} lies outside of the repository; README could not link to it")
        blocks[_device(content)].append(short_report(content, path))
    text = README.read_text(encoding="utf-8")
    if not blocks["cuda"] and MARKS["cuda"][0] in text and not any(RESULTS.glob("*-cuda.json")):
        blocks["cuda"] = [texts.NO_GPU_YET]
    for device, parts in blocks.items():
        if parts:
            text = _between(text, *MARKS[device], "\n\n".join(parts))
    README.write_text(text, encoding="utf-8")


def _between(text: str, begin: str, end: str, block: str) -> str:
    """Return a text with the block between two marks replaced."""
    before, found_begin, rest = text.partition(begin)
    _, found_end, after = rest.partition(end)
    if not (found_begin and found_end):
        raise SystemExit(f"README.md lacks {begin} or {end}")
    return f"{before}{begin}\n{block}\n{end}{after}"


def _device(content: Json) -> str:
    """Return the device of a run; earlier ones do not name theirs."""
    return str(content.get("device", "cpu"))


# --- text -----------------------------------------------------------------------------------------


def full_report(content: Json, plot_name: str) -> str:
    """Return a table for every case, all contestants in it."""
    how = texts.HOW_TO_READ[_device(content)]
    parts = ["# Benchmarks", _conditions(content), how, f"![times]({plot_name})"]
    for case in content["cases"]:
        parts.append(f"## {case['title']}")
        if case.get("has_capacity"):
            parts += [texts.CAPACITY, "\n".join(_capacity_table(case))]
        else:
            parts.append("\n".join(_case_table(case, on_device=_device(content) == "cuda")))
    return "\n\n".join(parts) + "\n"


def _conditions(content: Json) -> str:
    machine, versions = content["machine"], content["versions"]
    listed = ", ".join(f"{name} {number}" for name, number in versions.items())
    threads = ", ".join(f"{name}={number}" for name, number in machine["threads"].items())
    blas = "; ".join(machine.get("blas kernels") or [machine["blas"]])
    overrides = ", ".join(f"{k}={v}" for k, v in machine.get("blas overrides", {}).items())
    gpu = f"{_gpu(machine['gpu'])}, " if "gpu" in machine else ""
    lines = [
        f"{content['date']}, {gpu}{machine['cpu']}, {machine['cores']} cores, "
        f"{machine['system']}, {blas}{', ' + threads if threads else ''}; {listed}."
    ]
    if overrides:
        lines.append(f"**{overrides}: NumPy's matrix multiplies are not what they usually are.**")
    if content["quick"]:
        lines.append("**A quick run: sizes are reduced and the figures mean nothing.**")
    if "running" in content:
        lines.append(f"**The run ended within the case {content['running']}.**")
    return "\n\n".join(lines)


def _gpu(gpu: Json) -> str:
    """Describe a GPU; what could not be read is missing."""
    speed = gpu.get("copy, bytes per second")
    parts = (
        gpu["name"],
        f"{gpu['multiprocessors']} multiprocessors" if "multiprocessors" in gpu else "",
        f"up to {gpu['clocks.max.sm']}" if "clocks.max.sm" in gpu else "",
        f"copies at {amount(round(speed))}/s" if speed else "",
        f"driver {gpu['driver_version']}" if "driver_version" in gpu else "",
        f"CUDA {_dotted(gpu['CUDA runtime'])}" if "CUDA runtime" in gpu else "",
        *(f"{key}: {gpu[key]}" for key in gpu if key.startswith("road of")),
    )
    return ", ".join(filter(None, parts))


def _dotted(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


def _case_table(case: Json, *, on_device: bool) -> Iterator[str]:
    ours = next((r for r in case["results"] if not r["not_run"]), case["results"][0])
    more = ("on device", "first call") if on_device else ()
    yield f"| | time | × | temporaries | error | wrong |{''.join(f' {name} |' for name in more)}"
    yield f"|---|--:|--:|--:|--:|--:|{'--:|' * len(more)}"
    for result in case["results"]:
        if result["not_run"]:
            reason = f"not run: {_cell(result['not_run'])}"
            yield f"| {result['label']} | {reason} | | | | |{' |' * len(more)}"
            continue
        spread = f" ± {duration(result['spread'])}" if result["spread"] is not None else ""
        routes = ", ".join(result.get("routes", ()))
        cells = [
            result["label"] + (f" ({routes})" if routes else ""),
            duration(result["median"]) + spread,
            _ratio(result, ours),
            amount(result["temporaries"]),
            "" if result["is_yardstick"] else _error(result),
            f"{100 * result['wrong_infinities']:.3g} %" if result["wrong_infinities"] else "",
        ]
        if on_device:
            cells += [duration(result["on_device"]), duration(result["first_call"])]
        yield f"| {' | '.join(cells)} |"


def _capacity_table(case: Json) -> Iterator[str]:
    yield "| | rows | a row takes |"
    yield "|---|--:|--:|"
    for result in case["results"]:
        if result["not_run"]:
            yield f"| {result['label']} | not run: {_cell(result['not_run'])} | |"
        else:
            size = amount(round(result["bytes_per_row"]))
            yield f"| {result['label']} | {result['largest_batch']:,} | {size} |"


def short_report(content: Json, path: Path) -> str:
    """Return one row per case: this library, the yardstick, and the fastest of the others."""
    name = path.resolve().relative_to(README.parent).with_suffix("").as_posix()
    device = _device(content)
    of_capacity = [case for case in content["cases"] if case.get("has_capacity")]
    timed = [case for case in content["cases"] if case not in of_capacity]
    gradients = [case for case in timed if case.get("has_gradients")]
    of_paths = [case for case in timed if case.get("has_paths")]
    values = [case for case in timed if case not in gradients + of_paths]
    parts = [
        _conditions(content),
        f"{texts.SHORT[device]}[{path.stem}.md]({name}.md).",
    ]
    if values:
        parts.append("\n".join(_short_table(values)))
    if gradients:
        parts += [texts.GRADIENTS[device], "\n".join(_short_table(gradients))]
    if of_paths:
        parts += [texts.PATHS, "\n".join(_short_table(of_paths))]
    for case in of_capacity:
        table = "\n".join(_capacity_table(case))
        parts += [f"{case['title'][0].upper()}{case['title'][1:]}. {texts.CAPACITY}", table]
    parts.append(f"![times relative to this library]({name}.png)")
    return "\n\n".join(parts)


def _short_table(cases: Sequence[Json]) -> Iterator[str]:
    yield (
        "| case | time | temporaries | error | × baseline | fastest other | × ours | its error "
        "| temporaries of others |"
    )
    yield "|---|--:|--:|--:|--:|---|--:|--:|--:|"
    for case in cases:
        first, *rest = case["results"]
        ours = [first, *(result for result in rest if result.get("is_ours"))]
        if all(result["not_run"] for result in ours):
            yield f"| {case['title']} | {_cell(first['not_run'])} | | | | | | | |"
            continue
        others = [result for result in rest if not (result.get("is_ours") or result["not_run"])]
        yardstick = next((result for result in others if result["is_yardstick"]), None)
        rivals = [result for result in others if not result["is_yardstick"]]
        cells = (
            case["title"],
            _each(ours, _time),
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


def _time(result: Json) -> str:
    alone = result.get("on_device")
    # Less than a tenth is no difference to speak of.
    device = f" ({duration(alone)})" if alone and alone < 0.9 * result["median"] else ""
    return duration(result["median"]) + device


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


if __name__ == "__main__":
    sys.exit(main())
