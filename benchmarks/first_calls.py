"""First calls of a process: with nothing compiled yet, or with all of it in Numba's cache.

A process runs this file with the library of any checkout, and communicates through pipes.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

IN_PROCESS = "process_"
FIRST_CALLS = {
    f"{IN_PROCESS}log_z": "log Z of one chain",
    f"{IN_PROCESS}viterbi": "best path of one chain",
    f"{IN_PROCESS}all": "all methods of one chain and of a batch",
}


def _in_process(operation: str, cache_folder: str, *arguments: Any) -> Any:
    import arraylogchain

    library = Path(arraylogchain.__file__).parents[1]
    environment = os.environ | {"NUMBA_CACHE_DIR": cache_folder, "PYTHONPATH": str(library)}
    # Without -P, modules of this folder would shadow other modules of the same name.
    command = [sys.executable, "-P", __file__, operation]
    result = subprocess.run(
        command, input=pickle.dumps(arguments), stdout=subprocess.PIPE, env=environment, check=True
    )
    return pickle.loads(result.stdout)


@cache
def _kept_cache() -> TemporaryDirectory[str]:
    return TemporaryDirectory()


def _register() -> None:
    from benchmarks import references
    from benchmarks.registry import OURS, contestant, reference, with_parameters

    def register(operation: str, call: str, label: str, state: str, **role: bool) -> None:
        @contestant(operation, label, state=state, devices=("cpu",), **role)
        @with_parameters("x", "P", "p0")
        def run(*arguments: Any) -> Any:
            if state == "new process":
                return _in_process(call, _kept_cache().name, *arguments)
            with TemporaryDirectory() as folder:
                return _in_process(call, folder, *arguments)

    for operation in FIRST_CALLS:
        register(operation, operation, OURS, "new process", is_ours=True)
        register(operation, operation, f"{OURS}, nothing compiled", "cold", is_ours=True)
        without = "a process without the call"
        register(operation, "nothing", without, "new process", is_yardstick=True)
        of_path = operation.endswith("viterbi")
        reference(operation)(references.viterbi if of_path else references.log_z)


def _answer(operation: str, x: Any, P: Any, p0: Any) -> Any:
    import numpy as np

    import arraylogchain as alc

    chain = alc.LogChain(x, transitions=P, initial=p0)
    if operation == "nothing":
        return None
    if operation.endswith("viterbi"):
        return chain.viterbi().states
    if operation.endswith("all"):
        batch = alc.LogChain(np.stack([x] * 40)[:, :50], transitions=P, initial=p0)
        for each in (chain, batch):
            each.posterior(), each.filtered(), each.entropy(), each.backward_messages()
            each.sample(1, rng=np.random.default_rng(0))
            each.log_weight(each.viterbi().states)
            value, pullback = alc.vjp.log_partition(each)
            pullback(np.ones_like(value))
    return chain.log_partition()


if __name__ == "__main__":
    answer = _answer(sys.argv[1], *pickle.load(sys.stdin.buffer))
    pickle.dump(answer, sys.stdout.buffer)
else:
    _register()
