"""Train a hidden Markov model on sequences that do not fit into memory.

The sequences are discrete, and lie in a Zarr array on disk; Dask hands blocks of them to workers.
An iteration of EM is one pass: each block gives expected counts, which Dask adds up in a tree, so
that no more than a few blocks are ever in memory. The example makes its data first, whose log
potentials are several times larger than what the workers may use together, and draws the
likelihood of each iteration.

    pip install "arraylogchain[cpu,dask]" zarr matplotlib
    python examples/em_out_of_core.py
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from pathlib import Path
from typing import NamedTuple

import dask
import dask.array as da
import numpy as np
from dask.diagnostics import ProgressBar

import arraylogchain as alc


class Model(NamedTuple):
    """Probabilities of the first state, of going [from, to], and of symbols in each state."""

    initial: np.ndarray
    transitions: np.ndarray
    emissions: np.ndarray


class Result(NamedTuple):
    """The likelihood per symbol before each iteration, and of the true model."""

    log_likelihoods: list[float]
    true_log_likelihood: float
    model: Model


def random_model(states: int, symbols: int, rng: np.random.Generator) -> Model:
    """Return a model that likes to stay in its state."""
    stay = 4 * np.eye(states) + rng.dirichlet(np.ones(states), states)
    return Model(
        rng.dirichlet(np.ones(states)),
        stay / stay.sum(-1, keepdims=True),
        rng.dirichlet(np.full(symbols, 0.3), states),
    )


def draw(model: Model, rows: int, steps: int, rng: np.random.Generator) -> np.ndarray:
    """Return symbols [rows, steps] of sequences that a model makes."""
    out = np.empty((rows, steps), np.uint8)
    state = rng.choice(len(model.initial), rows, p=model.initial)
    for i in range(steps):
        u = rng.random((2, rows, 1))
        out[:, i] = (np.cumsum(model.emissions, -1)[state] < u[0]).sum(-1).clip(max=255)
        state = (np.cumsum(model.transitions, -1)[state] < u[1]).sum(-1)
        state = state.clip(max=len(model.initial) - 1)
    return np.minimum(out, model.emissions.shape[-1] - 1)


def write(path: Path, model: Model, blocks: int, rows: int, steps: int) -> da.Array:
    """Write sequences to a Zarr array, block by block, and return it as a Dask array."""
    seeds = da.arange(blocks, chunks=1)
    made = da.map_blocks(
        lambda seed: draw(model, rows, steps, np.random.default_rng(int(seed[0]))),
        seeds,
        dtype=np.uint8,
        chunks=((rows,) * blocks, (steps,)),
        new_axis=1,
    )
    made.to_zarr(path)
    return da.from_zarr(path)


def count_symbols(marginals: np.ndarray, symbols: np.ndarray, kinds: int) -> np.ndarray:
    """Return how often each state is expected to have emitted each symbol, [1, states, kinds]."""
    counts = [marginals[symbols == kind].sum(0, dtype=np.float64) for kind in range(kinds)]
    return np.stack(counts, axis=-1)[None]


def expectations(symbols: da.Array, model: Model) -> tuple[da.Array, ...]:
    """Return the log likelihood and the expected counts of one pass, lazily."""
    states, kinds = model.emissions.shape
    logs = np.log(model.emissions).astype(np.float32).T
    potentials = symbols.map_blocks(
        logs.__getitem__, dtype=np.float32, chunks=(*symbols.chunks, (states,)), new_axis=2
    )
    chain = alc.LogChain(
        potentials,
        transitions=model.transitions[None].astype(np.float32),
        initial=model.initial.astype(np.float32),
    )
    log_z, pullback = alc.vjp.log_partition(chain)
    found = pullback(da.ones_like(log_z))
    emitted = da.blockwise(
        count_symbols,
        "nkv",
        found.log_potentials,
        "ntk",
        symbols,
        "nt",
        kinds=kinds,
        new_axes={"v": kinds},
        adjust_chunks={"n": 1},
        concatenate=True,
        dtype=np.float64,
        meta=np.empty((0, 0, 0)),
    ).sum(0)
    first = found.initial * chain.arrays["initial"]
    moved = found.transitions[0] * chain.arrays["transitions"][0]
    return log_z.sum(dtype=np.float64), first, moved, emitted


def normalised(counts: np.ndarray) -> np.ndarray:
    """Return counts as probabilities."""
    return np.asarray(counts / counts.sum(-1, keepdims=True), dtype=np.float64)


def main(
    blocks: int = 64,
    rows: int = 4000,
    steps: int = 500,
    states: int = 8,
    kinds: int = 16,
    iterations: int = 20,
    plot: Path | None = None,
    progress: bool = False,
) -> Result:
    """Make data, train a model from a random start, and return what it reached."""
    rng = np.random.default_rng(0)
    true, model = random_model(states, kinds, rng), random_model(states, kinds, rng)
    bar = ProgressBar if progress else contextlib.nullcontext
    with tempfile.TemporaryDirectory() as folder:
        symbols = write(Path(folder) / "symbols.zarr", true, blocks, rows, steps)
        history = []
        for iteration in range(iterations):
            with bar():
                log_z, *counts = dask.compute(*expectations(symbols, model))
            history.append(float(log_z) / symbols.size)
            model = Model(*map(normalised, counts))
            if progress:
                print(f"{iteration:3}  {history[-1]:.6f} per symbol")
        best = float(expectations(symbols, true)[0].compute()) / symbols.size
    if plot is not None:
        draw_likelihoods(history, best, plot)
    return Result(history, best, model)


def draw_likelihoods(history: list[float], best: float, path: Path) -> None:
    """Plot the likelihood of each iteration."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.5), layout="constrained")
    axes = figure.subplots()
    axes.plot(history, label="EM")
    axes.axhline(best, color="black", linestyle="--", label="the model that made the data")
    axes.set_xlabel("iteration")
    axes.set_ylabel("log likelihood per symbol")
    axes.legend()
    figure.savefig(path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--memory", default="512 MiB", help="of each worker")
    parser.add_argument("--plot", type=Path, default=Path("em_out_of_core.png"))
    asked = parser.parse_args()
    from distributed import Client

    # With the address of a scheduler, Client("tcp://..."), the same code runs on a cluster.
    with Client(n_workers=asked.workers, threads_per_worker=1, memory_limit=asked.memory):
        result = main(plot=asked.plot, progress=True)
    print(f"{result.log_likelihoods[-1]:.6f}; the true model: {result.true_log_likelihood:.6f}")
