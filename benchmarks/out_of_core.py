"""Chains larger than memory, by Dask on worker processes: times and peak memory.

    python -m benchmarks.out_of_core batch --rows 400000
    python -m benchmarks.out_of_core time --steps 10000000

Each prints a line of JSON for each method: seconds on the workers; seconds of the same blocks one
after another in this process; and the largest sum of the workers' memory, as the system counts it.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dask
import dask.array as da
import numpy as np
import psutil
from distributed import Client, LocalCluster

import arraylogchain as alc

_STATES = {"batch": 64, "time": 16}
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
            yield name, save(found.states if name == "viterbi" else found, folder, name)


def by_hand(
    x: da.Array, transitions: np.ndarray, folder: Path, methods: list[str], in_time: bool
) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield methods with a loop over the same blocks, which are read and written as well."""
    blocks = [x.blocks[i] for i in range(x.numblocks[0])]

    def batch(name: str) -> None:
        for i, block in enumerate(blocks):
            out = getattr(alc.LogChain(read(block), transitions=transitions), name)()
            write(out, folder, f"{name}-{i}")

    def steps(name: str) -> None:
        # A block's weights are those of its first state, given what came before.
        before, messages = None, []
        for block in blocks:
            messages.append(before)
            chain = alc.LogChain(read(block), transitions=transitions, log_initial=before)
            logs = chain.forward_messages()[-1]
            before = alc.logmatmulexp((logs - logs.max())[None], np.log(transitions))[0]
        if name == "log_partition":
            return
        after = None
        for i, block in reversed(list(enumerate(blocks))):
            chain = alc.LogChain(
                read(block), transitions=transitions, log_initial=messages[i], log_final=after
            )
            out = chain.viterbi().states if name == "viterbi" else getattr(chain, name)()
            write(out, folder, f"{name}-{i}")
            logs = chain.backward_messages()[0] + chain.arrays["log_potentials"][0]
            after = alc.logmatmulexp(np.log(transitions), (logs - logs.max())[:, None])[:, 0]

    for name in methods:
        yield name, (lambda name=name: (steps if in_time else batch)(name))


def read(block: da.Array) -> np.ndarray:
    return np.asarray(block.compute(scheduler="sync"))


def write(x: np.ndarray, folder: Path, name: str) -> None:
    if x.ndim and x.size > 1000:
        import zarr

        zarr.save_array(folder / f"hand-{name}.zarr", x)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kind", choices=list(_STATES))
    parser.add_argument("--rows", type=int, default=400_000)
    parser.add_argument("--steps", type=int, default=10_000_000)
    parser.add_argument("--blocks", type=int, default=100)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--memory", default="512 MiB", help="of each worker")
    parser.add_argument("--methods", nargs="+", default=["log_partition", "marginals"])
    asked = parser.parse_args()
    states = _STATES[asked.kind]
    in_time = asked.kind == "time"
    shape = (asked.steps, states) if in_time else (asked.rows, _BATCH_STEPS, states)
    transitions = np.random.default_rng(0).dirichlet(np.ones(states), states)
    dtype = "float64" if in_time else "float32"
    transitions = transitions.astype(dtype)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        chunks = (-(-shape[0] // asked.blocks), *shape[1:])
        x = make(folder / "x.zarr", shape, chunks, dtype)
        record: dict[str, dict[str, float]] = {}
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
            client.run(_warm, x[:2].compute(scheduler="sync"), transitions, asked.methods)
            chain = alc.LogChain(x, transitions=transitions)
            for method, lazy in lazily(chain, folder, asked.methods):
                with watched(client) as record[method]:
                    dask.compute(lazy)
        _warm(x[:2].compute(scheduler="sync"), transitions, asked.methods)
        for method, call in by_hand(x, transitions, folder, asked.methods, in_time):
            begin = time.perf_counter()
            call()
            record[method]["seconds_by_hand"] = time.perf_counter() - begin
    for method, found in record.items():
        print(json.dumps({"kind": asked.kind, "shape": shape, "method": method, **found}))


def _warm(x: np.ndarray, transitions: np.ndarray, methods: list[str]) -> None:
    for name in {*methods, "forward_messages", "backward_messages"}:
        getattr(alc.LogChain(x, transitions=transitions), name)()
    if x.ndim == 2:
        lazy = alc.LogChain(da.from_array(x, chunks=(1, x.shape[1])), transitions=transitions)
        for name in methods:
            dask.compute(getattr(lazy, name)(), scheduler="sync")


if __name__ == "__main__":
    main()
