"""Changes of one line that the tests must notice, and a command that tries them.

    python -m tests.mutants                           # all: an hour or two
    python -m tests.mutants --sample 10 --seed TEXT   # some, which depend on a text
    python -m tests.mutants --only marginals          # those of files whose names have this in them

Each is applied in a copy of the tree, in which the tests that its area names run until one fails.
What no test notices has survived; a change that fits no line any longer is an error. Who rewrites a
line rewrites its change, or leaves another one in its place.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
MOST_SURVIVORS = 3  # of all; of a sample 1

TABLE = "tests/test_chain_table.py"
# Which tests are to notice a change, by areas: the fastest first.
LOOPS = (
    "tests/test_compiled_recursion.py -k Loops",
    f"tests/test_thresholds.py {TABLE} -m chains -k numpy-float",
)
ARRAYS = (
    "tests/test_compiled_recursion.py tests/test_thresholds.py -k 'Array or in_single_precision'",
    f"tests/test_thresholds.py {TABLE} tests/test_chain_gradients.py -m chains -k numpy-array",
    f"{TABLE} -k strict-no_float64",
)
CHAINS = (
    f"{TABLE} -k numpy-float",
    *ARRAYS,
    "tests/test_chain_gradients.py tests/test_chain_paths.py tests/test_workspace.py -k numpy",
    "tests/test_sampling.py tests/test_chain_long.py tests/test_threads.py tests/test_state.py",
)
PRODUCTS = (
    "tests/test_product_table.py -k numpy",
    "tests/test_thresholds.py tests/test_products.py -k 'not chains'",
    "tests/test_product_table.py -k 'torch or strict'",
)
CUDA = "tests/cuda/test_products.py tests/cuda/test_recursions.py tests/cuda/test_public.py"
TESTS = {
    "loops": LOOPS,
    "walks": (*LOOPS, "tests/test_chain_paths.py tests/test_sampling.py"),
    "arrays": ARRAYS,
    "chains": CHAINS,
    "shares": (*CHAINS, "tests/cuda/test_public.py"),
    "products": PRODUCTS,
    "factors": (*PRODUCTS, *ARRAYS),
    "torch": (
        "tests/test_torch_chain.py tests/test_chain_derivatives.py",
        "tests/test_torch_products.py",
    ),
    "dask": ("tests/test_dask.py",),
    "einsum": ("tests/test_einsum.py",),
    "inputs": ("tests/test_errors.py tests/test_chain_paths.py", f"{TABLE} -k numpy-float"),
    "state": ("tests/test_threads.py", "tests/test_state.py"),
    "cuda": (CUDA,),
}


class Mutant(NamedTuple):
    """A change of a line of a file: what is replaced, which is there once, and by what."""

    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.file}: {self.old.strip()!r} -> {self.new.strip()!r}"


def mutants() -> Iterator[Mutant]:
    """Read the list beside this file."""
    file = area = old = ""
    for line in Path(__file__).with_suffix(".txt").read_text("utf-8").splitlines():
        if line.startswith("["):
            file, area = line.strip("[]").split(": ")
        elif line.startswith("- "):
            old = line[2:].replace("\\n", "\n")
        elif line.startswith("+ "):
            new = line[2:].replace("\\n", "\n")
            yield Mutant(f"arraylogchain/{file}", old, new, TESTS[area])


def copy_of_tree(folder: Path) -> Path:
    """Copy the files that git knows, as they are now."""
    names = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split("\n")
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


def survives(mutant: Mutant, tree: Path) -> bool:
    """Tell whether no test notices a change."""
    file = tree / mutant.file
    text = file.read_text("utf-8")
    if text.count(mutant.old) != 1:
        raise LookupError(f"{mutant}: {text.count(mutant.old)} places")
    file.write_text(text.replace(mutant.old, mutant.new), "utf-8")
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        for tests in mutant.tests:
            command = f"{sys.executable} -m pytest -x -q -p no:cacheprovider {tests}"
            result = subprocess.run(
                command, shell=True, cwd=tree, env=environment, capture_output=True, text=True
            )
            if result.returncode == pytest.ExitCode.TESTS_FAILED:
                return False
            if result.returncode not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
                # A change that cannot be imported is noticed.
                return "rror" not in result.stdout + result.stderr
        return True
    finally:
        file.write_text(text, "utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--sample", type=int, help="try so many")
    parser.add_argument("--seed", default="", help="a text that chooses them, such as a commit")
    parser.add_argument("--only", default="", help="a part of the names of files")
    options = parser.parse_args()
    chosen = [m for m in mutants() if options.only in m.file]
    if options.sample is not None:
        seed = int(hashlib.sha256(options.seed.encode()).hexdigest(), 16)
        chosen = random.Random(seed).sample(chosen, min(options.sample, len(chosen)))
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
        # One for each thread; what Numba has compiled there serves the next.
        trees = [copy_of_tree(Path(folder) / str(n)) for n in range(os.cpu_count() or 1)]

        def is_alive(mutant: Mutant) -> bool:
            tree = trees.pop()
            try:
                lives = survives(mutant, tree)
                said = "SURVIVES" if lives else "killed"
            except (LookupError, FileNotFoundError) as error:
                lives, said = True, f"fits no place: {error}"
            trees.append(tree)
            print(said, mutant, flush=True)
            return lives

        alive = sum(pool.map(is_alive, chosen))
    print(f"{alive} of {len(chosen)} survive")
    return alive > (MOST_SURVIVORS if options.sample is None else 1)


if __name__ == "__main__":
    sys.exit(main())
