"""Chains larger than memory, by Dask on worker processes: times and peak memory.

    python -m benchmarks.out_of_core batch --rows 400000
    python -m benchmarks.out_of_core time --steps 10000000

Each prints a line of JSON for each method: seconds on the workers; seconds of the same blocks one
after another in this process; and the largest sum of the workers' memory, as the system counts it.
With ``--record benchmarks/results/out_of_core.json``, `benchmarks.report --readme` shows all of
this in docs/dask.md.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import dask
import dask.array as da
import numpy as np
import psutil
from distributed import Client, LocalCluster

import arraylogchain as alc
from benchmarks.machine import describe_commit, describe_machine, describe_versions

_METHODS = ("log_partition", "marginals", "viterbi")
_STATES = {"batch": 64, "time": 16}
_ROWS, _STEPS = 400_000, 10_000_000
_BATCH_STEPS = 40


@contextmanager
def watched(client: Client) -> Iterator[dict[str, float]]:
    """Measure time, and every 50 ms the workers' resident memory."""
    processes = [psutil.Process(pid) for pid in client.run(_pid).values()]
    seen, done = {"peak_bytes": 0.0}, threading.Event()

    def watch() -> None:
        while not done.wait(0.05):
            held = sum(process.memory_info().rss for process in processes)
            seen["peak_bytes"] = max(seen["peak_bytes"], held)

    thread = threading.Thread(target=watch)
    thread.start()
    begin = time.perf_counter()
    try:
        yield seen
    finally:
        seen["seconds"] = time.perf_counter() - begin
        done.set()
        thread.join()


def _pid() -> int:
    return psutil.Process().pid


def make(path: Path, shape: tuple[int, ...], chunks: tuple[int, ...], dtype: str) -> da.Array:
    """Write random potentials to a Zarr array, and return it."""
    state = da.random.default_rng(0)
    x = state.standard_normal(shape, chunks=chunks, dtype=np.float32).astype(dtype)
    with dask.config.set(scheduler="threads", num_workers=1):
        x.to_zarr(path)
    return da.from_zarr(path)


def save(x: da.Array, folder: Path, name: str) -> Any:
    return x.to_zarr(folder / f"{name}.zarr", compute=False)


def lazily(chain: alc.LogChain, folder: Path, methods: list[str]) -> Iterator[tuple[str, Any]]:
    """Yield methods with what is to be computed."""
    for name in methods:
        found = getattr(chain, name)()
        if name == "log_partition":
            yield name, found
        else:
            yield name, save(states_of(found, name), folder, name)


def by_hand(
    x: da.Array, transitions: np.ndarray, folder: Path, methods: list[str], in_time: bool
) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield methods with a loop over the same blocks, which are read and written as well."""
    blocks = [x.blocks[i] for i in range(x.numblocks[0])]
    loop = of_steps if in_time else of_rows
    for name in methods:
        yield name, partial(loop, blocks, transitions, folder, name)


def of_rows(blocks: list[da.Array], transitions: np.ndarray, folder: Path, name: str) -> None:
    """Compute a method of each block of rows."""
    for i, block in enumerate(blocks):
        out = getattr(alc.LogChain(read(block), transitions=transitions), name)()
        write(states_of(out, name), folder, f"{name}-{i}")


def of_steps(blocks: list[da.Array], transitions: np.ndarray, folder: Path, name: str) -> None:
    """Compute a method of a chain whose blocks are steps, in one pass forward and one back.

    As fast as the public functions allow. They give the messages of all steps of a block, though
    only the last ones are needed; and of the largest weights none, so that sums stand in for
    these, and states are those of paths that take as long to find as best ones.
    """
    log_transitions = np.log(transitions)
    # A block's weights are those of its first state, given what came before.
    before, entering = None, []
    for block in blocks:
        entering.append(before)
        chain = alc.LogChain(read(block), transitions=transitions, log_initial=before)
        before = alc.logmatmulexp(normalized(chain.forward_messages()[-1])[None], log_transitions)[
            0
        ]
    if name == "log_partition":
        return
    after = None
    for i, block in reversed(list(enumerate(blocks))):
        chain = alc.LogChain(
            read(block), transitions=transitions, log_initial=entering[i], log_final=after
        )
        out = states_of(getattr(chain, name)(), name)
        write(out, folder, f"{name}-{i}")
        if name == "viterbi":
            after = log_transitions[:, out[0]]
        elif i:
            # What leaves a block backward follows from the probabilities of its first state.
            weights = normalized(np.log(out[0]) - entering[i])
            after = alc.logmatmulexp(log_transitions, weights[:, None])[:, 0]


def normalized(logs: np.ndarray) -> np.ndarray:
    return logs - logs.max()


def states_of(found: Any, name: str) -> Any:
    return found.states if name == "viterbi" else found


def read(block: da.Array) -> np.ndarray:
    return np.asarray(block.compute(scheduler="sync"))


def write(x: np.ndarray, folder: Path, name: str) -> None:
    if x.ndim and x.size > 1000:
        import zarr

        zarr.save_array(folder / f"hand-{name}.zarr", x)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kind", choices=list(_STATES))
    parser.add_argument("--rows", type=int, default=_ROWS)
    parser.add_argument("--steps", type=int, default=_STEPS)
    parser.add_argument("--blocks", type=int, default=100)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--memory", default="512 MiB", help="of each worker")
    parser.add_argument("--methods", nargs="+", choices=_METHODS, default=list(_METHODS))
    parser.add_argument("--record", type=Path, help="a JSON file to add the results to")
    asked = parser.parse_args(argv)
    states, in_time = _STATES[asked.kind], asked.kind == "time"
    shape = (asked.steps, states) if in_time else (asked.rows, _BATCH_STEPS, states)
    dtype = "float64" if in_time else "float32"
    run = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": describe_commit(),
        "quick": asked.rows < _ROWS or asked.steps < _STEPS,
        "machine": describe_machine(),
        "versions": describe_versions(("numpy", "numba", "dask", "distributed", "zarr")),
        "kind": asked.kind,
        "shape": shape,
        "dtype": dtype,
        "blocks": asked.blocks,
        "workers": asked.workers,
        "memory": asked.memory,
    }
    results = measured(asked, shape, dtype)
    for method, found in results.items():
        print(json.dumps({"kind": asked.kind, "shape": shape, "method": method, **found}))
    if asked.record:
        add({**run, "results": results}, asked.record)


def add(run: dict[str, Any], path: Path) -> None:
    """Write a run to a file of runs, in the place of one of its kind."""
    runs = json.loads(path.read_text("utf-8"))["runs"] if path.exists() else []
    kept = [each for each in runs if each["kind"] != run["kind"]]
    path.write_text(json.dumps({"runs": [*kept, run]}, indent=1) + "\n", encoding="utf-8")


def measured(
    asked: argparse.Namespace, shape: tuple[int, ...], dtype: str
) -> dict[str, dict[str, float]]:
    """Return seconds and bytes of each method, on workers and by hand."""
    states, methods = shape[-1], asked.methods
    transitions = np.random.default_rng(0).dirichlet(np.ones(states), states).astype(dtype)
    results: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        x = make(folder / "x.zarr", shape, (-(-shape[0] // asked.blocks), *shape[1:]), dtype)
        some = x[:2].compute(scheduler="sync")
        # First: a cluster sets variables of this process that say how many threads there are.
        _warm(some, transitions, methods)
        for method, call in by_hand(x, transitions, folder, methods, len(shape) == 2):
            begin = time.perf_counter()
            call()
            results[method] = {"seconds_by_hand": time.perf_counter() - begin}
        with (
            LocalCluster(
                n_workers=asked.workers,
                threads_per_worker=1,
                memory_limit=asked.memory,
                dashboard_address=None,
                local_directory=name,
            ) as cluster,
            Client(cluster) as client,
        ):
            # Loops are compiled, and the library imported, before.
            client.run(_warm, some, transitions, methods)
            for method, lazy in lazily(alc.LogChain(x, transitions=transitions), folder, methods):
                with watched(client) as found:
                    dask.compute(lazy)
                results[method] |= found
    return results


def _warm(x: np.ndarray, transitions: np.ndarray, methods: list[str]) -> None:
    for name in {*methods, "forward_messages", "backward_messages"}:
        getattr(alc.LogChain(x, transitions=transitions), name)()
    if x.ndim == 2:
        lazy = alc.LogChain(da.from_array(x, chunks=(1, x.shape[1])), transitions=transitions)
        for name in methods:
            dask.compute(getattr(lazy, name)(), scheduler="sync")


if __name__ == "__main__":
    main()
