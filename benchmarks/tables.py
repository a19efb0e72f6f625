"""The tables of a record: an overview of its cases, and all contestants of one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

from arraylogchain._text import amount, duration

Json = dict[str, Any]

# A result with a larger error than this is no answer; of half precisions, with a larger one than a
# few of their roundings.
_WRONG_FROM = {"float16": 4e-3, "bfloat16": 3e-2}
_WRONG_FROM_ELSE = 1e-3
# Closer times are not told apart.
_AS_FAST = 1.05


def is_wrong(result: Json, case: Json) -> bool:
    """Tell whether a result is too far from the exact one to be called an answer."""
    largest = _WRONG_FROM.get(case["sizes"].get("dtype"), _WRONG_FROM_ELSE)
    return bool(result["wrong_infinities"]) or (result["error"] or 0) > largest


def rivals(case: Json) -> list[Json]:
    """Return the timed results of other libraries, the fastest first."""
    found = [
        result
        for result in case["results"][1:]
        if result["median"] and not (result["is_ours"] or result["is_yardstick"])
    ]
    return sorted(found, key=lambda result: result["median"])


def ours(case: Json) -> Json:
    """Return the first of this library's results that has a time, else the very first."""
    found = (r for r in case["results"] if r["median"] and not r["is_yardstick"])
    first: Json = case["results"][0]
    return next((r for r in found if r is first or r["is_ours"]), first)


# --- what a record is of --------------------------------------------------------------------------


def conditions(content: Json) -> str:
    """Describe when, where and of what a record is, and what must be known to trust it."""
    machine, versions = content["machine"], content["versions"]
    gpu = [_gpu(machine["gpu"])] if "gpu" in machine else []
    where = [
        *gpu,
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
    if "running" in content:
        lines.append(f"**The run ended within the case {content['running']}.**")
    return "\n\n".join(lines)


def _gpu(gpu: Json) -> str:
    """Describe a GPU; what could not be read is missing."""
    speed = gpu.get("copy, bytes per second")
    cuda = gpu.get("CUDA runtime")
    parts = (
        gpu["name"],
        f"{gpu['multiprocessors']} multiprocessors" if "multiprocessors" in gpu else "",
        f"up to {gpu['clocks.max.sm']}" if "clocks.max.sm" in gpu else "",
        f"copies at {amount(round(speed))}/s" if speed else "",
        f"driver {gpu['driver_version']}" if "driver_version" in gpu else "",
        f"CUDA {cuda // 1000}.{cuda % 1000 // 10}" if cuda else "",
        *(f"{key}: {gpu[key]}" for key in gpu if key.startswith("road of")),
    )
    return ", ".join(filter(None, parts))


# --- overview -------------------------------------------------------------------------------------


def overview(cases: Iterable[Json]) -> str:
    """Return one row per case: this library beside the fastest of the others."""
    head = (
        "| | arraylogchain | error | fastest other | time | error | arraylogchain is "
        "| faster, but wrong |\n|---|--:|--:|---|--:|--:|---|---|"
    )
    timed = (case for case in cases if not case["has_capacity"])
    return "\n".join([head, *map(_overview_row, timed)])


def _overview_row(case: Json) -> str:
    mine = ours(case)
    if not mine["median"]:
        return f"| {case['title']} | {_cell(mine['not_run'] or '')} | | | | | | |"
    right = next((r for r in rivals(case) if not is_wrong(r, case)), None)
    slowest = right["median"] if right else float("inf")
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


def comparison(ratio: float) -> str:
    """Say in words what the time of another in units of ours means.

    Examples
    --------
    >>> comparison(13.4), comparison(0.5), comparison(1.03)
    ('13 × faster', '2 × slower', 'as fast')
    """
    if max(ratio, 1 / ratio) < _AS_FAST:
        return "as fast"
    return f"{two_digits(ratio)} × faster" if ratio > 1 else f"{two_digits(1 / ratio)} × slower"


def two_digits(value: float) -> str:
    return f"{value:.2g}" if value < 100 else f"{float(f'{value:.2g}'):,.0f}"


# --- all contestants of a case --------------------------------------------------------------------


def all_contestants(case: Json, *, on_device: bool = False) -> str:
    """Return a row per contestant, or how much fits into memory where the case asks for that."""
    table = _capacity_rows(case) if case["has_capacity"] else _rows(case, on_device=on_device)
    return "\n".join(table)


def _rows(case: Json, *, on_device: bool) -> Iterator[str]:
    mine = ours(case)
    more = ("on device", "first call") if on_device else ()
    yield f"| | time | × | temporaries | error |{''.join(f' {name} |' for name in more)}"
    yield f"|---|--:|--:|--:|--:|{'--:|' * len(more)}"
    for result in case["results"]:
        if result["not_run"]:
            reason = f"not run: {_cell(result['not_run'])}"
            yield f"| {result['label']} | {reason} | | | |{' |' * len(more)}"
            continue
        spread = f" ± {duration(result['spread'])}" if result["spread"] is not None else ""
        routes = ", ".join(result["routes"])
        cells = [
            result["label"] + (f" ({routes})" if routes else ""),
            duration(result["median"]) + spread,
            f"{result['median'] / mine['median']:.2f}" if mine["median"] else "",
            amount(result["temporaries"]),
            "" if result["is_yardstick"] else _error(result),
        ]
        if on_device:
            cells += [duration(result["on_device"]), duration(result["first_call"])]
        yield f"| {' | '.join(cells)} |"


def _capacity_rows(case: Json) -> Iterator[str]:
    yield "| | rows | a row takes |"
    yield "|---|--:|--:|"
    for result in case["results"]:
        if result["not_run"]:
            yield f"| {result['label']} | not run: {_cell(result['not_run'])} | |"
        else:
            size = amount(round(result["bytes_per_row"]))
            yield f"| {result['label']} | {result['largest_batch']:,} | {size} |"


# --- cells ----------------------------------------------------------------------------------------


def _time(result: Json) -> str:
    alone = result["on_device"]
    # Less than a tenth is no difference to speak of.
    device = f" ({duration(alone)})" if alone and alone < 0.9 * result["median"] else ""
    return duration(result["median"]) + device


def _error(result: Json) -> str:
    wrong = result["wrong_infinities"]
    parts = (
        f"{result['error']:.0e}" if result["error"] is not None else "",
        f"{100 * wrong:.3g} % wrong" if wrong else "",
    )
    return ", ".join(filter(None, parts))


def _cell(text: str) -> str:
    """Make a text safe for a cell of a table."""
    return " ".join(text.split()).replace("|", "\\|")


# --- chains larger than memory --------------------------------------------------------------------


def out_of_core(content: Json) -> str:
    """Return a table of the record of `benchmarks.out_of_core`, and what it is of."""
    lines = [
        "| potentials | method | on workers | the same blocks in a loop | memory of all workers |",
        "|---|---|--:|--:|--:|",
    ]
    for run in content["runs"]:
        size = amount(math.prod(run["shape"]) * int(run["dtype"][-2:]) // 8)
        shape = " × ".join(f"{n:,}" for n in run["shape"])
        of = f"{shape}, {run['dtype']}, {size}"
        for method, found in run["results"].items():
            times = (duration(found[name]) for name in ("seconds", "seconds_by_hand"))
            cells = (of, f"`{method}`", *times, amount(int(found["peak_bytes"])))
            lines.append(f"| {' | '.join(cells)} |")
    setups = (
        f"{run['blocks']} blocks, {run['workers']} worker processes of {run['memory']} each; "
        for run in content["runs"]
    )
    pairs = zip(setups, map(conditions, content["runs"]), strict=True)
    return "\n\n".join(["\n".join(lines), *dict.fromkeys(map("".join, pairs))])


def aligned(table: str) -> str:
    """Return a table with columns of even width, for a terminal."""
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table.splitlines()]
    del rows[1]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )
