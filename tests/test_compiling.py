"""Compiled loops: compilation, the disk cache, and fallbacks."""

import errno
import importlib.metadata
import logging
import pickle
import re
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import arraylogchain as alc
from arraylogchain import _numba
from arraylogchain._numba import why_not
from tests.chain_scenarios import normal, uniform
from tests.checks import run_python

if why_not() is not None:
    pytest.skip(why_not(), allow_module_level=True)

import numba

from arraylogchain._numba import compiling, disk_cache
from arraylogchain._numba.compiling import compiled
from arraylogchain._numba.intrinsics import view


def test_import_leaves_numba_alone():
    code = "import sys, arraylogchain, arraylogchain._numba; print('numba' in sys.modules)"
    assert run_python(code) == "False"


# Compiles two functions; one calls the other.
COMPILES = """
from arraylogchain._numba.elementary import exponent_of
from arraylogchain._numba.compiling import compiled
@compiled
def both(x):
    return x + exponent_of(x)
print(both(1.75))
"""


# Names of Numba, or parts of a machine, that may be missing.
OTHERWISE = {
    # Options are left out: they only make loops faster, and Numba would raise at the first call.
    "unknown options": """
from numba.core.options import DefaultOptions
for name in ("_nrt", "forceinline", "no_cfunc_wrapper"):
    delattr(DefaultOptions, name)
""",
    # Numba then compiles inner functions as usual.
    "other libraries": """
from arraylogchain._numba import code_library
class Gone:
    def __get__(self, part, owner):
        raise AttributeError
code_library.Part._get_module_for_linking = Gone()
""",
    # Numba's own cache and pipeline replace modules that cannot be imported.
    **{
        f"no {name}": f"import sys; sys.modules['arraylogchain._numba.{name}'] = None"
        for name in ("disk_cache", "code_library")
    },
    # Numba then raises when a function is decorated, and it is compiled without a cache.
    "no folder for the cache": """
from numba.core import caching
def fail(*args):
    raise RuntimeError("cannot cache function: no locator available")
caching.FunctionCache.__init__ = fail
""",
}


@pytest.mark.parametrize("code", OTHERWISE.values(), ids=list(OTHERWISE))
def test_loops_are_compiled_otherwise(code, tmp_path):
    assert run_python(f"{code}\n{COMPILES}", NUMBA_CACHE_DIR=str(tmp_path)) == "1.75"


# the cache ----------------------------------------------------------------------------------------

LOOP = '''
from arraylogchain._numba.compiling import inlined
@inlined
def double(x):
    return 2 * x
def twice(x):
    """Return 2 x; for tests."""
    return double(x)
'''


@pytest.fixture
def twice(tmp_path, monkeypatch, caplog):
    """Return a function that makes the first call of a new process, and the log."""
    monkeypatch.setattr(numba.core.config, "CACHE_DIR", "")
    (tmp_path / "loop.py").write_text(LOOP)
    namespace = {"__name__": "tests.loop"}
    exec(compile(LOOP, str(tmp_path / "loop.py"), "exec"), namespace)
    caplog.set_level(logging.INFO, "arraylogchain")

    def call():
        caplog.clear()
        assert compiled(namespace["twice"])(1.5) == 3.0
        return [record.getMessage() for record in caplog.records]

    return call


def test_compilation_is_logged_once(twice):
    start, end = twice()
    assert start == "compiling loop.twice: Return 2 x"
    assert re.fullmatch(r"compiling loop.twice took \d+\.\d s", end)
    assert twice() == []


DAMAGES = {
    "empty": lambda data: b"",
    "cut short": lambda data: data[: len(data) // 2],
    "garbage": lambda data: b"no pickle",
    "a hole of zeros": lambda data: data[: len(data) // 2] + bytes(len(data) // 2),
    "zeros within": lambda data: data.replace(data[200:300], bytes(100)),
    "classes that are gone": lambda data: (
        pickle.dumps(importlib.metadata.version("numba")) + b"cos\nno_such_class\n."
    ),
}


@pytest.mark.parametrize("suffix", ["nbi", "nbc"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_file_of_the_cache_is_compiled_again_and_rewritten(twice, tmp_path, damage, suffix):
    twice()
    (file,) = (tmp_path / "__pycache__").glob(f"*.{suffix}")
    file.write_bytes(DAMAGES[damage](file.read_bytes()))
    assert twice()[-2] == "compiling loop.twice: Return 2 x"
    assert twice() == []


def test_code_of_other_sources_beside_a_new_index_is_compiled_again(twice, monkeypatch, tmp_path):
    twice()
    (file,) = (tmp_path / "__pycache__").glob("*.nbc")
    code_of_others = file.read_bytes()
    monkeypatch.setattr(disk_cache, "STAMP", "of other sources")
    assert len(twice()) == 2
    file.write_bytes(code_of_others)
    assert "cannot be read" in twice()[0]
    assert twice() == []


def test_full_disk_is_no_error(twice, monkeypatch):
    def save(self, signature, result):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(numba.core.caching.FunctionCache, "_save_overload", save)
    assert len(twice()) == len(twice()) == 2


def test_a_change_of_any_source_is_noticed(tmp_path):
    """Numba itself checks only the file of the loop, not the files of its callees."""
    from arraylogchain._backends.compiled import recursion

    source = Path(disk_cache.__file__).read_text()
    stamps, folder = set(), tmp_path / "_numba"
    folder.mkdir()
    for other in (None, "x = 1", "x = 2"):
        if other is not None:
            (folder / "other.py").write_text(other)
        file = str(folder / "disk_cache.py")
        result = {"__file__": file, "__name__": "disk_cache"}
        exec(compile(source, file, "exec"), result)
        stamps.add(result["STAMP"])
    assert len(stamps) == 3
    assert disk_cache.STAMP in recursion.advance._cache._cache_file._version


def test_one_compilation_serves_all_kinds_of_arrays():
    """Of any dtype and layout, one row or many, read-only or not: each loop is compiled once."""
    from arraylogchain._backends.compiled import linear_space, log_space, matrices, paths, recursion
    from arraylogchain._numba import elementary, vector_sums

    def signatures():
        modules = (log_space, matrices, elementary, vector_sums, paths, recursion, linear_space)
        result = (f for m in modules for f in vars(m).values() if hasattr(f, "signatures"))
        return {(f.__name__, signature) for f in result for signature in f.signatures}

    def call_all(potentials, matrices_given, prefix=""):
        options = {f"{prefix}transitions": matrices_given, f"{prefix}final": P[0, 0]}
        for lengths in (None, 5):  # without lengths, potentials need not be copied
            chain = alc.LogChain(potentials, **options, lengths=lengths)
            chain.posterior(), chain.entropy(), chain.viterbi(), chain.sample(2)

    x, P = normal(12, 6, 4), uniform(5, 4, 4)
    read_only = x.copy()
    read_only.flags.writeable = False
    for matrices_given in (P, P[0]):  # best paths have loops of their own for one matrix
        call_all(x, matrices_given)
    after_the_first = signatures()
    for potentials in (x, x[0], x[::-2, ::-1], np.asfortranarray(x), x.astype("f4"), read_only):
        for matrices_given in (P, P[0], P.swapaxes(-1, -2), P.astype("f4")):
            for prefix in ("", "log_"):
                call_all(potentials, matrices_given, prefix)
    assert after_the_first
    assert signatures() == after_the_first


def test_view_shares_the_memory_of_an_array():
    @numba.njit(**compiling._options())
    def set_last(x, start, rows):
        y = view(x, start, (rows, 2))
        y[rows - 1, 1] = -1
        return y.shape, y.strides, y.size, y[0, 0]

    for dtype in (float, np.int8):
        x = np.arange(12, dtype=dtype).reshape(3, 4)
        y = x.reshape(-1)[3:9].reshape(3, 2)
        assert set_last(x, 3, 3) == (y.shape, y.strides, 6, 3)
        assert y[2, 1] == -1
        assert np.count_nonzero(x == -1) == 1
    x.flags.writeable = False
    with pytest.raises(numba.TypingError, match="readonly"):
        set_last(x, 0, 2)


def test_warm_call_runs_no_function_of_numba_or_of_its_cache():
    chain = alc.LogChain(normal(12, 4), transitions=uniform(4, 4))
    calls = (chain.log_partition, chain.posterior, chain.viterbi, partial(chain.sample, 2))
    for call in calls:
        call()
    files = set()
    sys.setprofile(lambda frame, event, argument: files.add(frame.f_code.co_filename))
    try:
        for call in calls:
            call()
    finally:
        sys.setprofile(None)
    assert any("arraylogchain" in file for file in files)
    assert not [file for file in files if "numba" in Path(file).parts or "progress" in file]


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("raise ModuleNotFoundError(\"No module named 'numba'\", name='numba')", "not installed"),
        ("raise ImportError('Numba needs NumPy 2.0 or less')", "NumPy 2.0 or less"),
        ("raise OSError('libLLVM\\nis broken')", "libLLVM is broken"),
        ("__version__ = '0.59.1'", "0.59.1 is too old"),
        ("__version__ = '0.61.0rc1'", None),
        ("__version__ = '0.61'\n__import__('os').environ['NUMBA_DISABLE_JIT'] = '1'", "JIT is set"),
    ],
)
def test_why_not(monkeypatch, tmp_path, code, words):
    monkeypatch.setenv("NUMBA_DISABLE_JIT", "0")
    (tmp_path / "numba.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    for name in [n for n in sys.modules if n.partition(".")[0] == "numba"]:
        monkeypatch.delitem(sys.modules, name)
    result = _numba.why_not.__wrapped__()
    assert result is None if words is None else words in result
    assert "\n" not in (result or "")


def test_array_operations_replace_loops_whose_intrinsics_cannot_be_imported():
    code = """
import sys
sys.modules["arraylogchain._numba.intrinsics"] = None
import numpy as np
import arraylogchain as alc
from arraylogchain._numba import why_not
chain = alc.LogChain(np.zeros((3, 2)), transitions=np.ones((2, 2)))
weight = float(np.exp(chain.log_partition()))
print(why_not().partition(" Numba")[0], chain.viterbi().states, round(weight, 9))
"""
    assert run_python(code) == "the intrinsics of compiled loops do not fit [0 0 0] 8.0"
