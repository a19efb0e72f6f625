"""Measure what the user guide's plots show, and draw them: ``python -m docs.plots``.

Writes ``docs/images/chain.json`` and ``product.json``, each with the machine, the versions and the
date, and draws an SVG from each; ``--draw`` draws from the files as they are. It runs on one
thread, from the root of a clone, with the extras ``bench`` and ``test``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

import arraylogchain as alc
from benchmarks import contestants
from benchmarks.inputs import forum
from benchmarks.machine import describe_machine, describe_versions
from benchmarks.memory import peak_of_numpy, peak_of_torch
from tests.reference import logmatmulexp as exact_product

IMAGES = Path(__file__).resolve().parent / "images"
ROUNDS = 7
# A timing lasts at least this long: shorter calls are repeated within it.
SHORTEST_TIMING = 0.01
# What the forum's formula may take; beyond, its lines end.
MOST_BYTES = 600e6

STEPS = 40
SIZES = {
    "c": [(20, 1, STEPS, c) for c in (8, 16, 32, 64, 128, 256)],
    "n": [(n, 1, STEPS, 64) for n in (1, 4, 16, 64, 256, 1024, 4096)],
}
OURS, PAIRS = "arraylogchain", "forum's pairs in torch"
VECTOR, VECTOR_TORCH = "vector recursion in NumPy", "vector recursion in torch"
STYLES = {
    OURS: ("C0", "o-"),
    PAIRS: ("C3", "s-"),
    VECTOR: ("C1", "^--"),
    VECTOR_TORCH: ("C2", "v--"),
    "exp, matmul, log": ("C3", "s-"),
}

SDS = [0.5, 1, 2, 5, 10, 15, 20, 25, 30, 40, 50, 70, 100, 150, 200, 300, 500, 1000]
EDGE = 96  # of the square matrices whose product is taken


def main() -> None:
    """Measure, unless told not to, and draw."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--draw", action="store_true", help="draw from the files, measure nothing")
    if not parser.parse_args().draw:
        _run_on_one_thread()
        _write("chain", measure_chain())
        _write("product", measure_product())
    draw_chain(_read("chain"))
    draw_product(_read("product"))


def _run_on_one_thread() -> None:
    """Start again if libraries may have been loaded with more threads."""
    wanted = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    if not wanted.items() <= os.environ.items():
        os.execve(sys.executable, sys.orig_argv, {**os.environ, **wanted})


# --- measurements ---------------------------------------------------------------------------------


def measure_chain() -> list[dict[str, Any]]:
    """Return time and temporaries of the forum's case against c and against n."""
    return [
        {"against": axis, "size": size, **found}
        for axis, sizes in SIZES.items()
        for size in sizes
        for found in _measure_size(size)
    ]


def _measure_size(size: tuple[int, int, int, int]) -> list[dict[str, Any]]:
    import torch

    torch.set_num_threads(1)
    inputs = forum(np.random.default_rng(0), *size)
    x, bulk, p0 = (inputs[name] for name in ("x", "bulk", "p0"))
    tensors = [torch.from_numpy(a) for a in (x, bulk, p0)]
    calls: dict[str, Callable[[], Any]] = {
        OURS: lambda: alc.LogChain(x, transitions=bulk, initial=p0).log_partition(),
        VECTOR: lambda: contestants.numpy_recursion_of_sets(x, bulk, p0),
        VECTOR_TORCH: lambda: contestants.torch_recursion(*tensors),
    }
    n, t, v, c = size
    if alc.plan.pairwise_bytes(n * t, v, c, itemsize=4) <= MOST_BYTES:
        calls[PAIRS] = lambda: contestants.torch_pairs(*tensors)
    peaks = {}
    for label, call in calls.items():
        call()  # what is imported late is no temporary
        trace = peak_of_torch if "torch" in label else peak_of_numpy
        peak, result = trace(call)
        peaks[label] = peak - result.nbytes
    seconds = _medians(calls)
    print(size, {label: f"{s * 1e3:.3g} ms" for label, s in seconds.items()}, flush=True)
    return [
        {"label": label, "seconds": seconds[label], "temporaries": peaks[label]} for label in calls
    ]


def _medians(calls: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Return the median of interleaved rounds, in seconds."""
    repeats = {}
    for label, call in calls.items():
        once = _seconds(call, 1)
        repeats[label] = max(1, min(200, int(SHORTEST_TIMING / once)))
    found: dict[str, list[float]] = {label: [] for label in calls}
    for _ in range(ROUNDS):
        for label, call in calls.items():
            found[label].append(_seconds(call, repeats[label]))
    return {label: statistics.median(times) for label, times in found.items()}


def _seconds(call: Callable[[], Any], repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - start) / repeats


def measure_product() -> list[dict[str, Any]]:
    """Return the largest errors of float32 products, against the spread of their entries."""
    found = []
    calls = {OURS: alc.logmatmulexp, "exp, matmul, log": contestants.exp_matmul_log}
    for sd in SDS:
        rng = np.random.default_rng(0)
        a, b = ((sd * rng.standard_normal((EDGE, EDGE))).astype(np.float32) for _ in range(2))
        exact = exact_product(a, b)
        for label, call in calls.items():
            with np.errstate(divide="ignore"):
                out = call(a, b)
            finite = np.isfinite(out)
            error = np.abs(out - exact)[finite] / np.maximum(1, np.abs(exact))[finite]
            found.append(
                {
                    "label": label,
                    "sd": sd,
                    "error": float(error.max()) if error.size else None,
                    "wrong": float(1 - finite.mean()),
                }
            )
    return found


def _write(name: str, found: list[dict[str, Any]]) -> None:
    record = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": describe_machine(),
        "versions": describe_versions(),
        "results": found,
    }
    (IMAGES / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def _read(name: str) -> list[dict[str, Any]]:
    record = json.loads((IMAGES / f"{name}.json").read_text(encoding="utf-8"))
    results: list[dict[str, Any]] = record["results"]
    return results


# --- drawings -------------------------------------------------------------------------------------


def draw_chain(found: list[dict[str, Any]]) -> None:
    """Draw temporaries and time of the forum's case."""
    plt = _pyplot()
    fig, axes = plt.subplots(2, 2, figsize=(9, 6.5), sharey="row", layout="constrained")
    for column, (against, titles) in enumerate(
        {"c": f"n = 20, v = {STEPS}", "n": f"c = 64, v = {STEPS}"}.items()
    ):
        for row, (key, unit) in enumerate({"temporaries": 1e6, "seconds": 1e-3}.items()):
            ax = axes[row, column]
            for label in (PAIRS, VECTOR_TORCH, VECTOR, OURS):
                some = [r for r in found if r["against"] == against and r["label"] == label]
                at = [r["size"][3 if against == "c" else 0] for r in some]
                colour, style = STYLES[label]
                ax.loglog(at, [r[key] / unit for r in some], style, color=colour, label=label)
            ax.set_xscale("log", base=2)
            ax.grid(alpha=0.3)
            ax.set_xlabel(against)
        axes[0, column].set_title(titles)
    axes[0, 0].set_ylabel("temporaries, MB")
    axes[1, 0].set_ylabel("time, ms")
    axes[0, 0].legend(fontsize="small")
    _save(fig, "chain")


def draw_product(found: list[dict[str, Any]]) -> None:
    """Draw the largest errors of products, and how many entries are lost altogether."""
    plt = _pyplot()
    fig, (upper, lower) = plt.subplots(
        2, 1, figsize=(7, 5.5), sharex=True, layout="constrained", height_ratios=(2, 1)
    )
    eps = float(np.finfo(np.float32).eps)
    for label in ("exp, matmul, log", OURS):
        some = [r for r in found if r["label"] == label]
        colour, style = STYLES[label]
        errors = [(r["sd"], r["error"] / eps) for r in some if r["error"] is not None]
        upper.loglog(*zip(*errors, strict=True), style, color=colour, label=label)
        lower.semilogx(
            [r["sd"] for r in some], [100 * r["wrong"] for r in some], style, color=colour
        )
    upper.set_ylabel("largest error, in eps of max(1, |exact|)")
    lower.set_ylabel("infinite entries, %")
    lower.set_xlabel(f"standard deviation of the entries ({EDGE} × {EDGE}, float32)")
    for ax in (upper, lower):
        ax.grid(alpha=0.3)
    upper.legend()
    _save(fig, "product")


def _pyplot() -> Any:
    import matplotlib as mpl

    mpl.use("Agg")
    # The same data give the same file.
    mpl.rcParams["svg.hashsalt"] = "arraylogchain"
    mpl.rcParams["svg.fonttype"] = "none"
    import matplotlib.pyplot as plt

    return plt


def _save(fig: Any, name: str) -> None:
    path = IMAGES / f"{name}.svg"
    fig.savefig(path, metadata={"Date": None})
    # Matplotlib ends lines of path data with blanks.
    lines = path.read_text(encoding="utf-8").splitlines()
    path.write_text("\n".join(line.rstrip() for line in lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
