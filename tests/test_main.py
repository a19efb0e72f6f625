"""The command `arraylogchain`, called as the function behind it."""

import argparse
import os
import re
import subprocess
import sys
import tomllib
import types
from pathlib import Path

import pytest

from arraylogchain import _cli, _numba
from arraylogchain.__main__ import main
from arraylogchain._core import threads
from arraylogchain._core.progress import LOGGER
from arraylogchain._cuda.device import NO_CUPY
from tests.checks import run_python

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]


@pytest.fixture(autouse=True)
def compiled(monkeypatch):
    """Make the workload small and replace compilation; return the calls that would compile."""
    calls = []

    def compile_all():
        calls.append(1)
        LOGGER.info("compiling a loop")

    monkeypatch.setattr(_cli, "SIZES", (20, 1, 4, 8))
    monkeypatch.setattr(_cli, "compile_all", compile_all)
    return calls


def one_sentence(capsys):
    """Return the text on stderr, which must be a single line without a traceback."""
    captured = capsys.readouterr()
    assert captured.err.startswith("arraylogchain: ")
    assert captured.err.count("\n") == 1
    return captured.err


def test_demo_shows_what_is_available_and_what_the_case_takes(capsys, compiled):
    assert main([]) == 0
    out = capsys.readouterr().out
    for name in ("numpy", "array-api-compat", "numba", "cupy", "torch", "threads"):
        assert re.search(rf"^  {name} +\S", out, re.MULTILINE)
    if _numba.why_not() is None:
        assert compiled == [1]
        assert re.search(r"^  compiling a loop\nall loops are compiled", out, re.MULTILINE)
        assert re.search(r"^all loops are compiled.*: \d.* [mµ]?s$", out, re.MULTILINE)
    assert "20 chains of 4 steps with 8 states" in out
    assert re.search(r"^  time +\d.* [mµ]?s, the best of [1-9] runs", out, re.MULTILINE)
    assert re.search(r"^  memory +\d.*B beyond .*, take 15.4 kB$", out, re.MULTILINE)
    assert float(re.search(r"^  error +(\S+)", out, re.MULTILINE)[1]) < 1e-5
    assert re.search(r"^  route +\w+: \w", out, re.MULTILINE)


def test_says_how_many_threads_there_are(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    threads.num_workers.cache_clear()
    try:
        described = _cli.describe()
    finally:
        threads.num_workers.cache_clear()
    assert re.search(rf"^  threads +1 of {os.cpu_count()} CPU cores$", described, re.M)


@pytest.mark.parametrize("reason", ["Numba is not installed", None])
def test_says_what_computes_on_the_cpu(monkeypatch, compiled, reason):
    monkeypatch.setattr("arraylogchain._numba.why_not", lambda: reason)
    monkeypatch.setitem(sys.modules, "numba", types.SimpleNamespace(__version__="0.61"))
    result = _cli.describe(), _cli.compile_loops()
    assert ("array operations (Numba is not installed)" if reason else "0.61\n") in result[0]
    assert ("nothing to compile" in result[1]) == (compiled == []) == bool(reason)


@pytest.mark.parametrize("options", [[], ["--check"]], ids=["time", "check"])
def test_cuda_without_cupy_says_why(capsys, monkeypatch, options):
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert main(["--device", "cuda", *options]) == 2
    assert NO_CUPY in one_sentence(capsys)
    assert all(extra in NO_CUPY for extra in PROJECT["optional-dependencies"] if "cuda" in extra)


@pytest.mark.parametrize(
    ("passed", "code"), [(True, 0), (False, 1), (RuntimeError("no device"), 2)]
)
def test_checks_of_kernels_tell_by_the_exit_code(monkeypatch, capsys, passed, code):
    def report():
        if isinstance(passed, Exception):
            raise passed
        return passed

    monkeypatch.setattr(_cli, "report", report, raising=False)
    assert main(["--device", "cuda", "--check"]) == code
    if code == 2:
        assert "no device" in one_sentence(capsys)


def test_checks_are_of_kernels_alone(capsys):
    with pytest.raises(SystemExit):
        main(["--check"])
    assert "--device cuda" in capsys.readouterr().err


@pytest.mark.parametrize("reason", ["CuPy is not installed", None])
def test_says_what_computes_on_a_device(monkeypatch, reason):
    """torch with a device, and the search for its kernels, are replaced by stand-ins."""
    monkeypatch.setattr(_cli, "find", lambda library, device: reason or object())
    cuda = types.SimpleNamespace(is_available=lambda: True, device_count=lambda: 1)
    torch = types.SimpleNamespace(__version__="2.6", cuda=cuda, device=str)
    monkeypatch.setitem(sys.modules, "torch", torch)
    by = "CUDA kernels" if reason is None else f"array operations ({reason})"
    assert _cli._on_device("torch") == f"2.6, {by}"


def test_progress_is_shown_by_the_command_alone(capsys):
    main(["--device", "cpu"])
    assert capsys.readouterr().out.count("  compiling a loop") == (_numba.why_not() is None)
    LOGGER.info("compiling a loop")
    assert capsys.readouterr().out == ""


def test_every_compiled_function_is_compiled_beforehand():
    """Also functions that only products of wide ranges and their gradients call."""
    if reason := _numba.why_not():
        pytest.skip(reason)
    code = """
import sys
from arraylogchain import _cli
_cli.compile_all()
from arraylogchain._numba.compiling import _progress
modules = [m for name, m in sys.modules.items() if name.startswith("arraylogchain.")]
loops = {f for m in modules for f in vars(m).values() if hasattr(f, "signatures")}
loops = [f for f in loops if f.py_func in _progress.functions]
print(len(loops) > 5, [f.__name__ for f in loops if not f.signatures])
"""
    assert run_python(code) == "True []"


def test_every_option_is_described(monkeypatch):
    options = []
    add = argparse.ArgumentParser.add_argument
    monkeypatch.setattr(
        argparse.ArgumentParser,
        "add_argument",
        lambda *args, **kwargs: options.append(add(*args, **kwargs)) or options[-1],
    )
    main([])
    assert {name for option in options for name in option.option_strings} >= {"--device", "--check"}
    assert all(option.help for option in options)


def test_as_a_module():
    command = [sys.executable, "-m", "arraylogchain", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert re.fullmatch(r"\d+\.\d+\.\d+\S*\n", done.stdout)
