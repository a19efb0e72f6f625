"""Apply one-line mutations to the package and run the tests that must fail.

    python -m tests.mutants                           # all: an hour or two
    python -m tests.mutants --sample 10 --seed TEXT   # ten, chosen by a text
    python -m tests.mutants --only marginals          # the files whose names contain a text

Each mutation is applied in a copy of the tree, and the tests of its area run until one fails. A
mutation survives if none does. Its place is a file, a symbol, and a text that occurs once in the
symbol's source; `tests/test_mutants.py` fails if it does not. If you edit a mutated line, update
its entry in `mutants.txt`.
"""

from __future__ import annotations

import argparse
import ast
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
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
MAX_SURVIVORS = 3
MAX_SURVIVORS_OF_SAMPLE = 1

TABLE = "tests/test_chain_table.py"
# Test commands of each area, the fastest first.
LOOPS = (
    "tests/test_compiled_recursion.py -k 'not array'",
    f"tests/test_thresholds.py {TABLE} -m chains -k numpy-float",
)
ARRAYS = (
    "tests/test_compiled_recursion.py -k array",
    "tests/test_thresholds.py -k in_single_precision",
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
    "paths": (*LOOPS, "tests/test_chain_paths.py tests/test_sampling.py"),
    "whole": ("tests/test_whole_chains.py", f"{TABLE} -m chains -k numpy-float64"),
    "arrays": ARRAYS,
    "chains": CHAINS,
    "marginals": (*CHAINS, "tests/cuda/test_public.py"),
    "products": PRODUCTS,
    "operands": (*PRODUCTS, *ARRAYS),
    "torch": (
        "tests/test_torch_chain.py tests/test_chain_derivatives.py",
        "tests/test_torch_products.py",
    ),
    "dask": ("tests/test_dask.py",),
    "einsum": ("tests/test_einsum.py",),
    "inputs": ("tests/test_errors.py tests/test_chain_paths.py", f"{TABLE} -k numpy-float"),
    "cuda": (CUDA,),
}


class Mutant(NamedTuple):
    """A replacement of a text that occurs once in the source of a symbol."""

    file: str
    symbol: str
    old: str
    new: str
    tests: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.file}: {self.symbol or 'all'}: {self.old.strip()!r} -> {self.new.strip()!r}"

    def apply(self, text: str) -> str:
        """Return the changed text of the file; raise LookupError unless the change fits once."""
        start, stop = symbol_span(text, self.symbol) if self.symbol else (0, len(text))
        source = text[start:stop]
        if source.count(self.old) != 1:
            raise LookupError(f"{source.count(self.old)} places in {self.symbol}")
        return text[:start] + source.replace(self.old, self.new) + text[stop:]


def symbol_span(text: str, symbol: str) -> tuple[int, int]:
    """Return the start and the end of the source of a class, function, method or constant."""
    nodes: list[Any] = [ast.parse(text)]
    for name in symbol.split("."):
        children = [child for node in nodes for child in getattr(node, "body", ())]
        nodes = [child for child in children if name in bound_names(child)]
    if len(nodes) != 1:
        raise LookupError(f"{len(nodes)} definitions of {symbol}")
    lines = text.splitlines(keepends=True)
    first, last = nodes[0].lineno - 1, nodes[0].end_lineno
    return sum(map(len, lines[:first])), sum(map(len, lines[:last]))


def bound_names(node: ast.stmt) -> set[str]:
    """Return the names that a definition or an assignment binds."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
        return {node.name}
    targets = getattr(node, "targets", [getattr(node, "target", None)])
    targets = [item for target in targets for item in getattr(target, "elts", [target])]
    return {target.id for target in targets if isinstance(target, ast.Name)}


def mutants() -> Iterator[Mutant]:
    """Yield the mutations of mutants.txt."""
    file = area = symbol = old = ""
    for line in Path(__file__).with_suffix(".txt").read_text("utf-8").splitlines():
        text = line[2:].replace("\\n", "\n")
        if line.startswith("["):
            file, area = line.strip("[]").split(": ")
            symbol = ""  # CUDA files have no symbols here: their texts are searched as a whole
        elif line.startswith("in "):
            symbol = line[3:]
        elif line.startswith("- "):
            old = text
        elif line.startswith("+ "):
            yield Mutant(f"arraylogchain/{file}", symbol, old, text, TESTS[area])


def copy_of_tree(folder: Path) -> Path:
    """Copy the tracked files as they are now."""
    names = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split("\n")
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


def survives(mutant: Mutant, tree: Path) -> bool:
    """Return whether all tests of a mutation's area pass."""
    file = tree / mutant.file
    text = file.read_text("utf-8")
    file.write_text(mutant.apply(text), "utf-8")
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
                # A mutation that breaks the import is killed.
                return "rror" not in result.stdout + result.stderr
        return True
    finally:
        file.write_text(text, "utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--sample", type=int, help="number of mutations")
    parser.add_argument("--seed", default="", help="text that chooses them, such as a commit")
    parser.add_argument("--only", default="", help="text that the names of files contain")
    options = parser.parse_args()
    chosen = [m for m in mutants() if options.only in m.file]
    if options.sample is not None:
        seed = int(hashlib.sha256(options.seed.encode()).hexdigest(), 16)
        chosen = random.Random(seed).sample(chosen, min(options.sample, len(chosen)))
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
        # Each thread has a tree of its own, whose Numba cache serves its next mutation.
        trees = [copy_of_tree(Path(folder) / str(n)) for n in range(os.cpu_count() or 1)]

        def is_alive(mutant: Mutant) -> bool:
            tree = trees.pop()
            try:
                lives = survives(mutant, tree)
                verdict = "SURVIVES" if lives else "killed"
            except (LookupError, FileNotFoundError) as error:
                lives, verdict = True, f"does not fit ({error})"
            trees.append(tree)
            print(verdict, mutant, flush=True)
            return lives

        alive = sum(pool.map(is_alive, chosen))
    print(f"{alive} of {len(chosen)} survive")
    return alive > (MAX_SURVIVORS if options.sample is None else MAX_SURVIVORS_OF_SAMPLE)


if __name__ == "__main__":
    sys.exit(main())
