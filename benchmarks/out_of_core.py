"""Chains larger than memory, by Dask on worker processes: times and peak memory.

    python -m benchmarks.out_of_core batch
    python -m benchmarks.out_of_core time --size 1000000

For each method: seconds on the workers; seconds of the same blocks one after another in this
process; and the largest sum of the workers' memory, as the system counts it. With ``--record
benchmarks/results/out_of_core.json``, `benchmarks.report --readme` shows this in docs/dask.md.
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
import zarr
from distributed import Client, LocalCluster

import arraylogchain as alc
from benchmarks.machine import describe_commit, describe_machine, describe_versions

_METHODS = ("log_partition", "marginals", "viterbi")
# Shape without the first axis, size of the first axis, and dtype.
_KINDS: dict[str, tuple[tuple[int, ...], int, str]] = {
    "batch": ((40, 64), 400_000, "float32"),
    "time": ((16,), 10_000_000, "float64"),
}
_BLOCKS, _WORKERS, _MEMORY = 100, 2, "512 MiB"


@contextmanager
def _watched(client: Client) -> Iterator[dict[str, float]]:
    """Measure time, and every 50 ms the workers' resident memory."""
    processes = [psutil.Process(pid) for pid in client.run(lambda: psutil.Process().pid).values()]
    seen, done = {"peak_bytes": 0.0}, threading.Event()

    def watch() -> None:
        while not done.wait(0.05):
            held = sum(process.memory_info().rss for process in processes)
            seen["peak_bytes"] = max(seen["peak_bytes"], held)

    thread = threading.Thread(target=watch)
    thread.start()
    start = time.perf_counter()
    try:
        yield seen
    finally:
        seen["seconds"] = time.perf_counter() - start
        done.set()
        thread.join()


def _make(path: Path, shape: tuple[int, ...], dtype: str) -> da.Array:
    """Write random potentials to a Zarr array, and return it."""
    chunks = (-(-shape[0] // _BLOCKS), *shape[1:])
    x = da.random.default_rng(0).standard_normal(shape, chunks=chunks, dtype=np.float32)
    with dask.config.set(scheduler="threads", num_workers=1):
        x.astype(dtype).to_zarr(path)
    return da.from_zarr(path)


def _lazily(chain: alc.LogChain, name: str, folder: Path) -> Any:
    """Return a lazy value, or the lazy writing of an array."""
    result = _states(getattr(chain, name)(), name)
    if name == "log_partition":
        return result
    return result.to_zarr(folder / f"{name}.zarr", compute=False)


def _rows_by_hand(blocks: list[da.Array], P: Any, folder: Path, name: str) -> None:
    """Compute a method of each block of rows."""
    for i, block in enumerate(blocks):
        out = getattr(alc.LogChain(_read(block), transitions=P), name)()
        _write(_states(out, name), folder, f"{name}-{i}")


def _steps_by_hand(blocks: list[da.Array], P: Any, folder: Path, name: str) -> None:
    """Compute a method of a chain whose blocks are steps, in one pass forward and one back.

    As fast as the public functions allow. They give the messages of all steps of a block, though
    only the last ones are needed; and of the largest weights none, so that sums stand in for
    these, and states are those of paths that take as long to find as best ones.
    """
    log_P = np.log(P)
    # The initial weights of a block come from the forward message of the previous block.
    before, entering = None, []
    for block in blocks:
        entering.append(before)
        chain = alc.LogChain(_read(block), transitions=P, log_initial=before)
        last = chain.forward_messages()[-1]
        before = alc.logmatmulexp((last - last.max())[None], log_P)[0]
    if name == "log_partition":
        return
    after = None
    for i, block in reversed(list(enumerate(blocks))):
        chain = alc.LogChain(_read(block), transitions=P, log_initial=entering[i], log_final=after)
        out = _states(getattr(chain, name)(), name)
        _write(out, folder, f"{name}-{i}")
        if name == "viterbi":
            after = log_P[:, out[0]]
        elif i:
            # The backward message of a block follows from the marginals of its first state.
            weights = np.log(out[0]) - entering[i]
            after = alc.logmatmulexp(log_P, (weights - weights.max())[:, None])[:, 0]


def _states(result: Any, name: str) -> Any:
    return result.states if name == "viterbi" else result


def _read(block: da.Array) -> Any:
    return np.asarray(block.compute(scheduler="sync"))


def _write(x: Any, folder: Path, name: str) -> None:
    if x.ndim and x.size > 1000:
        zarr.save_array(folder / f"hand-{name}.zarr", x)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.out_of_core", description=__doc__)
    parser.add_argument("kind", choices=list(_KINDS))
    parser.add_argument("--size", type=int, help="of the first axis: rows, or steps")
    parser.add_argument("--record", type=Path, help="a JSON file to add the results to")
    requested = parser.parse_args(argv)
    rest, usual, dtype = _KINDS[requested.kind]
    size = requested.size or usual
    run = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": describe_commit(),
        "quick": size < usual,
        "machine": describe_machine(),
        "versions": describe_versions(("numpy", "numba", "dask", "distributed", "zarr")),
        "kind": requested.kind,
        "shape": (size, *rest),
        "dtype": dtype,
        "blocks": _BLOCKS,
        "workers": _WORKERS,
        "memory": _MEMORY,
        "results": _measured((size, *rest), dtype),
    }
    print(json.dumps({name: run[name] for name in ("kind", "shape", "results")}))
    if requested.record:
        add(run, requested.record)


def add(run: dict[str, Any], path: Path) -> None:
    """Write a run to a file of runs, replacing the one of the same kind."""
    runs = json.loads(path.read_text("utf-8"))["runs"] if path.exists() else []
    kept = [each for each in runs if each["kind"] != run["kind"]]
    path.write_text(json.dumps({"runs": [*kept, run]}, indent=1) + "\n", encoding="utf-8")


def _measured(shape: tuple[int, ...], dtype: str) -> dict[str, dict[str, float]]:
    """Return seconds and bytes of each method, on workers and by hand."""
    P = np.random.default_rng(0).dirichlet(np.ones(shape[-1]), shape[-1]).astype(dtype)
    by_hand: Callable[..., None] = _steps_by_hand if len(shape) == 2 else _rows_by_hand
    results: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        x = _make(folder / "x.zarr", shape, dtype)
        blocks = [x.blocks[i] for i in range(x.numblocks[0])]
        warm = partial(_warm, _read(x[:2]), P)
        # First: a cluster sets variables of this process that say how many threads there are.
        warm()
        for method in _METHODS:
            start = time.perf_counter()
            by_hand(blocks, P, folder, method)
            results[method] = {"seconds_by_hand": time.perf_counter() - start}
        of_workers = {"threads_per_worker": 1, "memory_limit": _MEMORY, "local_directory": name}
        with (
            LocalCluster(n_workers=_WORKERS, dashboard_address=None, **of_workers) as cluster,
            Client(cluster) as client,
        ):
            client.run(warm)  # loops are compiled, and the library imported, before
            for method in _METHODS:
                lazy = _lazily(alc.LogChain(x, transitions=P), method, folder)
                with _watched(client) as result:
                    dask.compute(lazy)
                results[method] |= result
    return results


def _warm(x: Any, P: Any) -> None:
    for name in {*_METHODS, "forward_messages", "backward_messages"}:
        getattr(alc.LogChain(x, transitions=P), name)()
    if x.ndim == 2:
        lazy = alc.LogChain(da.from_array(x, chunks=(1, x.shape[1])), transitions=P)
        for name in _METHODS:
            dask.compute(getattr(lazy, name)(), scheduler="sync")


if __name__ == "__main__":
    main()
