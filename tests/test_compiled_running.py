"""Compiled loops: workspace, threads, interruption, compilation, and what happens without Numba."""

import importlib.metadata
import os
import pickle
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from arraylogchain import _compiled, _threads
from arraylogchain._compiled import why_not

if why_not() is not None:
    pytest.skip(why_not(), allow_module_level=True)

from arraylogchain._compiled.chains import sums, sweep
from arraylogchain._compiled.loops import (
    entropy,
    matrices,
    packs,
    packs_posterior,
    paths,
    posterior,
    recursion,
)
from arraylogchain.plan import least_workspace
from tests.compiled_chain import CompiledChain

OPERATIONS = (
    "log_partition",
    "forward_messages",
    "backward_messages",
    "marginals",
    "expected_transitions",
    "entropy",
    "viterbi",
)


def normal(*shape, sd=1.0, dtype="float64"):
    return np.random.default_rng(0).normal(0, sd, shape).astype(dtype)


def uniform(*shape, dtype="float64"):
    return np.random.default_rng(1).random(shape).astype(dtype)


CHAINS = {
    "long": lambda t: (normal(60_000, 3, dtype=t), {"transitions": uniform(1, 3, 3, dtype=t)}),
    "long, wide": lambda t: (
        normal(9_000, 3, sd=1000, dtype=t),
        {"transitions": uniform(1, 3, 3, dtype=t)},
    ),
    "many rows": lambda t: (
        normal(3000, 12, 5, dtype=t),
        {"transitions": uniform(11, 5, 5, dtype=t), "initial": uniform(5, dtype=t)},
    ),
    "matrices per row": lambda t: (
        normal(300, 30, 8, dtype=t),
        {"log_transitions": np.log(uniform(300, 29, 8, 8, dtype=t))},
    ),
    "groups behind rows": lambda t: (
        normal(40, 9, 20, 6, dtype=t),
        {"transitions": uniform(9, 19, 6, 6, dtype=t)},
    ),
    "shared potentials": lambda t: (
        normal(40, 12, dtype=t),
        {"transitions": uniform(100, 1, 12, 12, dtype=t)},
    ),
    "a matrix per step": lambda t: (
        normal(2, 20_000, 4, dtype=t),
        {"log_transitions": np.log(uniform(19_999, 4, 4, dtype=t))},
    ),
    "time axis first": lambda t: (
        np.moveaxis(normal(40, 700, 10, dtype=t), 0, 1),
        {"transitions": uniform(39, 10, 10, dtype=t)},
    ),
}

# Loops compute in float64 whatever they read.
PRECISIONS = pytest.mark.parametrize(
    "precision", ["float32", pytest.param("float64", marks=pytest.mark.exhaustive)]
)


def results(chain):
    """Return what all operations find, by name."""
    found = {name: chain.run(name) for name in OPERATIONS}
    found["log_weight"] = chain.log_weight(found["viterbi"])
    found["weight of the best path"] = chain.viterbi().log_weight
    found["sample"] = chain.sample(2, np.random.default_rng(0))
    value, pullback = chain.run("value_and_pullback", chain.keep)
    wanted = frozenset(
        name
        for name in ("potentials", "transitions", "initial")
        if getattr(chain.chain, name) is not None
    )
    gradients = pullback(np.random.default_rng(2).normal(size=value.shape), wanted)
    return {**found, "value": value, **{f"d {name}": x for name, x in gradients.items()}}


@PRECISIONS
@pytest.mark.parametrize("case", list(CHAINS))
def test_workspace_changes_no_answer(case, precision):
    x, options = CHAINS[case](precision)
    whole = results(CompiledChain(x, **options))
    small = results(CompiledChain(x, **options, workspace=1 << 20))
    rtol = 1e-4 if precision == "float32" else 1e-9
    for name, expected in whole.items():
        if name in ("viterbi", "sample"):
            np.testing.assert_array_equal(small[name], expected)
        else:
            np.testing.assert_allclose(small[name], expected, rtol=rtol, atol=rtol, err_msg=name)


def temporaries(call):
    call()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        result = call()
        peak = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    parts = result.values() if isinstance(result, dict) else result
    parts = (parts,) if isinstance(parts, np.ndarray) else parts
    return peak - sum(part.nbytes for part in parts)


LARGE = {
    "many states": lambda t: (
        normal(2, 3, 300, dtype=t),
        {"log_transitions": normal(2, 300, 300, dtype=t)},
    ),
    "long, many states": lambda t: (
        normal(2000, 60, dtype=t),
        {"transitions": uniform(1, 60, 60, dtype=t)},
    ),
}


@PRECISIONS
@pytest.mark.parametrize("case", [*CHAINS, *LARGE])
def test_workspace_is_kept(case, precision):
    x, options = {**CHAINS, **LARGE}[case](precision)
    workspace = 1 << 20 if precision == "float32" else 3_000_000
    if case in LARGE:
        workspace = least_workspace(*x.shape[-2:])
    chain = CompiledChain(x, **options, workspace=workspace)
    states = chain.run("viterbi")
    calls = {name: lambda name=name: chain.run(name) for name in OPERATIONS}
    calls |= {name: lambda name=name: chain.run(name) for name in ("posterior", "filtered")}
    calls["log_weight"] = lambda: chain.log_weight(states)

    calls["sample"] = lambda: chain.sample(2, np.random.default_rng(0))
    value, pullback = chain.run("value_and_pullback", False)
    ones = np.ones(value.shape)
    calls["pullback"] = lambda: pullback(ones, frozenset(["potentials", "transitions"]))
    used = {name: temporaries(call) for name, call in calls.items()}
    assert {name: n for name, n in used.items() if n > workspace} == {}


def test_states_that_are_kept_are_no_copies():
    """Gradients keep the forward states, and nothing else of the size of potentials."""
    x = normal(50_000, 4)
    chain = CompiledChain(x, transitions=uniform(1, 4, 4))
    chain.run("value_and_pullback", True)
    tracemalloc.start()
    try:
        kept = chain.run("value_and_pullback", True)
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert held <= 1.1 * x.nbytes
    del kept


@pytest.mark.parametrize("case", ["many rows", "matrices per row", "groups behind rows"])
def test_threads_change_no_bit(monkeypatch, case, dtype):
    x, options = CHAINS[case](dtype)
    monkeypatch.setattr(sweep, "_WORK", 1 << 15)
    found = []
    for workers in (1, 2, 5):
        with _threads.using(workers):
            found.append(results(CompiledChain(x, **options)))
    _threads._pool.shutdown()
    _threads._after_fork()
    for other in found[1:]:
        for name, expected in found[0].items():
            np.testing.assert_array_equal(other[name], expected, err_msg=name)


def test_what_rows_share_is_added_up_in_lanes(monkeypatch):
    monkeypatch.setattr(sweep, "_WORK", 1 << 15)
    x, options = CHAINS["many rows"]("float64")
    counts = CompiledChain(x, **options).expected_transitions()
    monkeypatch.setattr(sums, "_LANES", 1)
    one = CompiledChain(x, **options).expected_transitions()
    np.testing.assert_allclose(counts, one, rtol=1e-13)
    assert np.any(counts != one)


def test_interruption(monkeypatch):
    """Between two blocks; the next call finds nothing of it."""
    chain = CompiledChain(normal(100_000, 4), transitions=uniform(1, 4, 4))
    expected = chain.marginals()
    monkeypatch.setattr(sweep, "_WORK", 1 << 18)
    calls, forward = [], recursion.forward

    def interrupted(*arguments):
        calls.append(arguments[0][4])  # the span of steps
        if len(calls) == 3:
            raise KeyboardInterrupt
        return forward(*arguments)

    monkeypatch.setattr(recursion, "forward", interrupted)
    with pytest.raises(KeyboardInterrupt):
        chain.marginals()
    monkeypatch.setattr(recursion, "forward", forward)
    assert max(stop - start for start, stop in calls) < 5000
    np.testing.assert_allclose(chain.marginals(), expected, rtol=1e-12, atol=1e-15)


def test_one_compilation_for_all_kinds_of_arrays():
    """Layouts, dtypes, arrays that cannot be written to, linear or not: loops see the same."""
    for case in ("many rows", "groups behind rows", "a matrix per step", "shared potentials"):
        for dtype in ("float16", "float32", "float64"):
            x, options = CHAINS[case](dtype)
            results(CompiledChain(x, **options))
            x.flags.writeable = False
            chain = CompiledChain(x[..., :5, :], lengths=4, **first_steps(options, 4))
            states = results(chain)["viterbi"]
            states.flags.writeable = False
            chain.log_weight(states)
            value, pullback = chain.run("value_and_pullback", True)
            pullback(np.broadcast_to(np.ones(()), value.shape), frozenset(["potentials"]))
    results(CompiledChain(normal(5, 3), transitions=uniform(1, 3, 3)))
    loops = (matrices, recursion, posterior, paths, entropy)
    found = [vars(loop).values() for loop in loops]
    kernels = {f for values in found for f in values if hasattr(f, "signatures")}
    kernels |= {packs.log_totals, packs_posterior.posterior}
    assert {f.__name__: len(f.signatures) for f in kernels if len(f.signatures) > 1} == {}


def first_steps(options, count):
    """Return options for the first steps of a chain."""
    return {
        name: w if w.ndim < 3 or w.shape[-3] == 1 else w[..., :count, :, :]
        for name, w in options.items()
    }


def run_python(code, **environment):
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, **environment},
        cwd=Path(__file__).parents[1],
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


def test_import_leaves_numba_alone():
    code = "import sys, arraylogchain, arraylogchain._compiled; print('numba' in sys.modules)"
    assert run_python(code) == "False"


# Of two functions, one of which calls the other.
COMPILES = """
from arraylogchain._compiled.loops.numbers import split
from arraylogchain._compiled.loops.compiling import compiled
@compiled
def both(x):
    m, e = split(x)
    return m + e
print(both(6.0))
"""


def test_options_that_this_numba_does_not_know():
    """They are left out, as they only make loops faster; Numba would raise at the first call."""
    code = """
from numba.core.options import DefaultOptions
for name in ("_nrt", "forceinline", "no_cfunc_wrapper"):
    delattr(DefaultOptions, name)
"""
    assert run_python(code + COMPILES) == "3.75"


def test_libraries_that_this_numba_makes_otherwise():
    """Inner functions are then compiled as Numba does it."""
    code = """
from arraylogchain._compiled.loops import compiling
class Gone:
    def __get__(self, part, owner):
        raise AttributeError
compiling._Part._get_module_for_linking = Gone()
"""
    assert run_python(code + COMPILES) == "3.75"


def test_without_a_folder_for_the_cache():
    """Numba then raises where a function is decorated: it is compiled without a cache."""
    code = """
from numba.core import caching
def fail(*args):
    raise RuntimeError("cannot cache function: no locator available")
caching.FunctionCache.__init__ = fail
"""
    assert run_python(code + COMPILES) == "3.75"


def test_a_cache_that_cannot_be_read(tmp_path):
    """As one that an older version has left, whose classes are elsewhere now."""
    (tmp_path / "loop.py").write_text("""
from arraylogchain._compiled.loops.compiling import compiled
@compiled
def twice(x):
    return 2 * x
""")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import loop; print(loop.twice(1.5))"
    assert run_python(code, NUMBA_CACHE_DIR="") == "3.0"
    (index,) = (tmp_path / "__pycache__").glob("*.nbi")
    readable = index.read_bytes()
    index.write_bytes(pickle.dumps(importlib.metadata.version("numba")) + b"cos\nno_such_class\n.")
    assert run_python(code, NUMBA_CACHE_DIR="") == "3.0"
    assert index.read_bytes() == readable


def test_a_change_of_any_source_is_noticed(tmp_path):
    """Numba alone asks only for the file of the loop itself, not for those it has compiled in."""
    from arraylogchain._compiled.loops import compiling

    source = Path(compiling.__file__).read_text()
    stamps = set()
    for other in (None, "x = 1", "x = 2"):
        if other is not None:
            (tmp_path / "other.py").write_text(other)
        file = str(tmp_path / "compiling.py")
        found = {"__file__": file, "__name__": "compiling"}
        exec(compile(source, file, "exec"), found)
        stamps.add(found["_STAMP"])
    assert len(stamps) == 3
    assert compiling._STAMP in recursion.forward._cache._cache_file._version


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("raise ModuleNotFoundError(\"No module named 'numba'\", name='numba')", "not installed"),
        ("raise ImportError('Numba needs NumPy 2.0 or less')", "NumPy 2.0 or less"),
        ("raise OSError('libLLVM\\nis broken')", "libLLVM is broken"),
        ("__version__ = '0.59.1'", "0.59.1 is too old"),
        ("__version__ = '0.60.0rc1'", None),
    ],
)
def test_why_not(monkeypatch, tmp_path, code, words):
    (tmp_path / "numba.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    for name in [n for n in sys.modules if n.partition(".")[0] == "numba"]:
        monkeypatch.delitem(sys.modules, name)
    found = _compiled.why_not.__wrapped__()
    assert found is None if words is None else words in found
    assert "\n" not in (found or "")
