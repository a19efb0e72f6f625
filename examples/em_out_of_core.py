"""Train a hidden Markov model on sequences that do not fit into memory.

The sequences are discrete and stored on disk in a Zarr array; Dask distributes blocks of them to
workers. A round of EM is one pass: each block yields expected counts, and Dask sums them, so only a
few blocks are in memory at a time. The example writes its data first.

    pip install ".[dask]" zarr
    python examples/em_out_of_core.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import NamedTuple

import dask
import dask.array as da
import numpy as np
import zarr

import arraylogchain as alc


class Model(NamedTuple):
    """Probabilities of the first state, of transitions [from, to], and of symbols by state."""

    initial: np.ndarray
    transitions: np.ndarray
    emissions: np.ndarray


def random_model(states: int, symbols: int, rng: np.random.Generator) -> Model:
    """Return a random model that mostly stays in its state."""
    stay = 4 * np.eye(states) + rng.dirichlet(np.ones(states), states)
    return Model(
        rng.dirichlet(np.ones(states)),
        stay / stay.sum(-1, keepdims=True),
        rng.dirichlet(np.full(symbols, 0.3), states),
    )


def write(path: Path, model: Model, blocks: int, rows: int, steps: int) -> da.Array:
    """Sample sequences from a model, write them to a Zarr array by blocks, and return it."""
    shape = (blocks * rows, steps)
    array = zarr.create_array(path, shape=shape, chunks=(rows, steps), dtype=np.uint8)
    # With zero log potentials, samples follow the model alone.
    states = len(model.initial)
    prior = alc.LogChain(
        np.zeros((rows, steps, states)), transitions=model.transitions, initial=model.initial
    )
    thresholds = model.emissions.cumsum(-1)[:, :-1]
    rng = np.random.default_rng(0)
    for block in range(blocks):
        path_of_states = prior.sample(rng=rng)[0]
        above = rng.random((rows, steps, 1)) >= thresholds[path_of_states]
        array[block * rows : (block + 1) * rows] = above.sum(-1)
    return da.from_zarr(path)


def count_symbols(marginals: np.ndarray, symbols: np.ndarray, kinds: int) -> np.ndarray:
    """Return the expected count of each symbol in each state, [1, states, kinds]."""
    counts = [marginals[symbols == kind].sum(0, dtype=np.float64) for kind in range(kinds)]
    return np.stack(counts, axis=-1)[None]


def expectations(symbols: da.Array, model: Model) -> tuple[da.Array, ...]:
    """Return the log-likelihood and the expected counts of one pass, lazily."""
    states, kinds = model.emissions.shape
    logs = np.log(model.emissions).astype(np.float32).T
    potentials = symbols.map_blocks(
        logs.__getitem__, dtype=np.float32, chunks=(*symbols.chunks, (states,)), new_axis=2
    )
    chain = alc.LogChain(
        potentials,
        transitions=model.transitions.astype(np.float32),
        initial=model.initial.astype(np.float32),
    )
    log_z, marginals, moved = chain.posterior()
    shown = da.blockwise(
        count_symbols,
        "nkv",
        marginals,
        "ntk",
        symbols,
        "nt",
        kinds=kinds,
        new_axes={"v": kinds},
        adjust_chunks={"n": 1},
        concatenate=True,
        dtype=np.float64,
        meta=np.empty((0, 0, 0)),
    )
    return log_z.sum(dtype=np.float64), marginals[:, 0].sum(axis=0), moved, shown.sum(axis=0)


def normalized(counts: np.ndarray, old: np.ndarray) -> np.ndarray:
    """Return counts as probabilities; a row without counts keeps its old ones."""
    totals = counts.sum(axis=-1, keepdims=True)
    return np.divide(counts, totals, out=old.copy(), where=totals > 0)


def main(
    blocks: int = 10,
    rows: int = 1000,
    steps: int = 250,
    states: int = 6,
    kinds: int = 12,
    rounds: int = 8,
) -> tuple[list[float], float]:
    """Write data and train; return the log-likelihood of each round and of the true model."""
    rng = np.random.default_rng(0)
    true, model = random_model(states, kinds, rng), random_model(states, kinds, rng)
    history = []
    with tempfile.TemporaryDirectory() as folder:
        symbols = write(Path(folder) / "symbols.zarr", true, blocks, rows, steps)
        for number in range(rounds):
            log_z, *counts = dask.compute(*expectations(symbols, model))
            history.append(float(log_z) / symbols.size)
            model = Model(*map(normalized, counts, model))
            print(f"round {number + 1}: {history[-1]:.6f} per symbol")
        best = float(expectations(symbols, true)[0].compute()) / symbols.size
    print(f"the model that made the data: {best:.6f}")
    return history, best


if __name__ == "__main__":
    from distributed import Client

    # With the address of a scheduler, Client("tcp://..."), the same code runs on a cluster.
    with Client(n_workers=2, threads_per_worker=1, memory_limit="1 GiB", dashboard_address=None):
        main()
