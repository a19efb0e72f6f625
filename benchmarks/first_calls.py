"""First calls of a process: with nothing compiled yet, or with all of it in Numba's cache.

A process runs this file, from whatever checkout the library comes. What it is given and what it
returns goes through its pipes.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

import arraylogchain as alc

OPERATIONS: dict[str, Callable[..., Any]] = {
    "log_partition": lambda chain: chain.log_partition(),
    "marginals": lambda chain: chain.marginals(),
    "viterbi": lambda chain: chain.viterbi().states,
    "sample": lambda chain, seed: chain.sample(1, np.random.default_rng(int(seed)))[0],
    "value_and_gradients": lambda chain, g: _value_and_gradients(chain, g),
    "nothing": lambda chain, *_: None,
}


def _value_and_gradients(chain: alc.LogChain, cotangent: Any) -> tuple[Any, ...]:
    value, pullback = alc.vjp.log_partition(chain)
    return (value, *(x for x in pullback(cotangent) if x is not None))


def cold(operation: str) -> Callable[..., Any]:
    """Make a contestant of a process that compiles all that an operation needs."""

    def call(*given: Any) -> Any:
        with TemporaryDirectory() as folder:
            return _in_process(operation, folder, given)

    return call


def warm(operation: str) -> Callable[..., Any]:
    """Make a contestant of a process that finds what earlier ones have compiled."""

    def call(*given: Any) -> Any:
        return _in_process(operation, _kept_cache().name, given)

    return call


@cache
def _kept_cache() -> TemporaryDirectory[str]:
    return TemporaryDirectory()


def _in_process(operation: str, cache_folder: str, given: tuple[Any, ...]) -> Any:
    library = Path(alc.__file__).parents[1]
    environment = os.environ | {"NUMBA_CACHE_DIR": cache_folder, "PYTHONPATH": str(library)}
    # Without -P modules of this folder could be taken for those of others.
    command = [sys.executable, "-P", __file__, operation]
    found = subprocess.run(
        command, input=pickle.dumps(given), stdout=subprocess.PIPE, env=environment, check=True
    )
    return pickle.loads(found.stdout)


def _serve() -> None:
    x, transitions, initial, *others = pickle.load(sys.stdin.buffer)
    chain = alc.LogChain(x, transitions=transitions, initial=initial)
    pickle.dump(OPERATIONS[sys.argv[1]](chain, *others), sys.stdout.buffer)


if __name__ == "__main__":
    _serve()
