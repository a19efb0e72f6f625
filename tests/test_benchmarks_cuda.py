"""The benchmark on CUDA, run where there is none: NumPy for CuPy, torch's CPU for its CUDA device.

Every case runs, with every contestant and its reference, at small sizes and through the code that a
GPU runs: only `benchmarks.cuda_libraries` is replaced. What torch would compile runs as it is.
"""

import contextlib
import dataclasses
import gc
import json
import subprocess
import sys
import time
import tracemalloc

import numpy as np
import pytest

from benchmarks import __main__ as command
from benchmarks import (
    capacity,
    cuda_cases,
    cuda_device,
    cuda_lineups,
    report,
    runner,
    supervisor,
    tables,
)
from benchmarks import cuda_libraries as libraries
from benchmarks.cuda_device import Cuda
from benchmarks.definitions import Case, Contestant
from benchmarks.references import Reference
from tests.conftest import import_or_skip, skip_or_fail

SETTINGS = runner.Settings(
    rounds=1, input_sets=2, seconds_per_contestant=1.0, pause=0.0, quick=True
)
# At small sizes, some cases are the same.
TIMED = {
    (case.make, repr(case.quick_sizes), tuple(each.label for each in case.contestants)): case
    for case in reversed(cuda_cases.CASES)
    if not case.has_capacity
}.values()


class Host:
    """What both libraries have in common where the host is the device."""

    def __init__(self):
        self.held = 0.0

    def wait(self):
        pass

    def stamp(self):
        return time.perf_counter()

    def between(self, start, end):
        return end - start

    def hold(self, seconds):
        self.held += seconds

    def peak(self, call):
        tracemalloc.start()
        try:
            value = call()
            return tracemalloc.get_traced_memory()[1], value
        finally:
            tracemalloc.stop()

    def reserved(self):
        return 0

    def release(self):
        pass

    def limit(self, size):
        return contextlib.nullcontext()


class Arrays(Host):
    """NumPy, in place of CuPy."""

    def put(self, x):
        return x.copy()

    def copy(self, x):
        return x.copy()

    def pick(self, value, index):
        return np.asarray(value[index]).astype(np.float64)


class Tensors(Host):
    """torch on the CPU, in place of CUDA; of its memory, results are counted twice."""

    def __init__(self, torch):
        super().__init__()
        self._torch = torch

    def peak(self, call):
        value = call()
        parts = value if isinstance(value, tuple) else (value,)
        return 2 * sum(part.nbytes for part in parts), value

    def put(self, x):
        if x.dtype.name == "bfloat16":
            return self.put(x.view(np.int16)).view(self._torch.bfloat16)
        return self._torch.from_numpy(x.copy())

    def copy(self, x):
        return x.clone()

    def pick(self, value, index):
        there = libraries._map_arrays(index, self._torch.tensor)
        return value.detach()[there].double().numpy()


@pytest.fixture
def device(torch_backend, monkeypatch):
    """A device that computes on the host."""
    torch = torch_backend.xp

    def as_it_is(function, *, mode, dynamic):
        assert mode in ("default", "reduce-overhead")
        assert not dynamic
        return function

    monkeypatch.setattr(torch, "compile", as_it_is)
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: None)
    monkeypatch.setattr(runner, "_SHORTEST_TIMING", 1e-9)
    monkeypatch.setattr(gc, "collect", lambda: 0)  # takes longer than anything else here
    monkeypatch.setattr(gc, "freeze", lambda: None)
    # Of NumPy's arrays that are smaller than this, there are several copies.
    description = {"name": "none", "L2": 5000}
    return Cuda({"cupy": Arrays(), "torch": Tensors(torch)}, {}, description)


def run(case, device):
    found = runner.run_case(case, SETTINGS, lambda text: None, device)
    return json.loads(json.dumps(found))["results"]


@pytest.mark.parametrize("case", TIMED, ids=[case.name for case in TIMED])
def test_case_runs(case, device):
    if case.quick_sizes.get("dtype") == "bfloat16":
        import_or_skip("ml_dtypes")
    for result in run(case, device):
        if result["label"] in case.not_run:
            assert result["not_run"] == case.not_run[result["label"]]
            continue
        assert result["not_run"] is None
        assert min(result[name] for name in ("median", "on_device", "first_call")) > 0
        assert result["temporaries"] >= 0
        if not result["is_yardstick"]:
            assert np.isfinite(result["error"])
        if result["is_ours"] or result["label"] == cuda_lineups.IN_CUPY:
            halves = {"float16": 2e-3, "bfloat16": 2e-2}
            assert result["error"] < halves.get(case.quick_sizes.get("dtype"), 3e-5)
            assert result["wrong_infinities"] == 0


def test_names_are_unique():
    assert len({case.name for case in cuda_cases.CASES}) == len(cuda_cases.CASES)


# a contestant that fails -------------------------------------------------------------------------


def case_of(*calls):
    """Return a case with contestants that are called on an array of ones, and should double it."""
    return Case(
        name="a-case",
        title="a case",
        make=lambda rng, n: {"a": np.ones(n)},
        sizes={"n": 3},
        quick_sizes={"n": 3},
        contestants=tuple(
            Contestant(f"{i}", call, ("a",), requires=("cupy",)) for i, call in enumerate(calls)
        ),
        reference=lambda inputs: Reference((), 2 * inputs["a"].astype(np.longdouble)),
    )


def double(a):
    return 2 * a


def refuse(a):
    raise KeyError("compilers raise\nwhatever " + "they like " * 100)


def test_one_that_fails_does_not_stop_others(device):
    first, second = run(case_of(refuse, double), device)
    assert first["not_run"].startswith("failed: KeyError: 'compilers raise")
    assert len(first["not_run"]) < 350
    assert second["error"] == 0


def test_results_that_are_wrong_are_seen(device):
    (found,) = run(case_of(lambda a: np.where(np.arange(3) > 0, 2.5 * a, np.nan)), device)
    assert found["error"] == pytest.approx(0.25)
    assert found["wrong_infinities"] == pytest.approx(1 / 3)


def test_broken_device_ends_the_process(device, monkeypatch, tmp_path, capsys):
    """What was measured stays; the rest of the case is lost, and the next cases are not begun."""
    broken = []
    monkeypatch.setattr(device, "fault", lambda: "illegal address" if broken else None)
    case = case_of(double, lambda a: broken.append(1) or refuse(a), double)
    path = tmp_path / "found.json"
    code = command.measure([case, *TIMED], SETTINGS, path, device)
    assert code == supervisor.BROKEN_DEVICE
    content = json.loads(path.read_text())
    assert [case["name"] for case in content["cases"]] == ["a-case"]
    assert "running" not in content
    first, second, third = content["cases"][0]["results"]
    assert second["not_run"].startswith("failed")
    assert all("illegal address" in each["not_run"] for each in (first, third))


def test_library_that_is_missing(device):
    with_torch = Cuda({"torch": device.libraries["torch"]}, {"cupy": "not installed"}, {})
    (found,) = run(case_of(double), with_torch)
    assert found["not_run"] == "not installed"


# time and memory ---------------------------------------------------------------------------------


def test_device_alone_is_timed_where_the_host_is_slow(device):
    """Two marks that come before the calls have been queued tell what the device needs."""
    library = device.libraries["cupy"]
    library.between = lambda start, end: 1e-4
    contestant = case_of(double).contestants[0]
    timing = device.time(contestant, lambda turn: time.sleep(2e-3), 4)
    assert library.held > 0
    assert timing.on_device <= timing.seconds
    library.held = 0.0
    library.between = lambda start, end: 1.0
    assert device.time(contestant, lambda turn: turn, 4).on_device == 0.25
    assert library.held == 0


def test_copies_take_turns(device):
    case = case_of(double)
    inputs = case.make(None, n=50)
    copies = device.bring(case.contestants[0], inputs)
    assert len(copies) == 50  # 20 kB, of 400 B each
    assert len({id(x) for (x,) in copies}) == 50
    assert device.bring(case.contestants[0], inputs)[0][0] is copies[0][0]
    device.begin()
    assert device.bring(case.contestants[0], inputs)[0][0] is not copies[0][0]


def test_memory_that_is_kept_counts(device, monkeypatch):
    library = device.libraries["cupy"]
    calls = []
    monkeypatch.setattr(library, "reserved", lambda: 1000 * bool(calls))
    first = device.first(case_of(double).contestants[0], calls.append)
    assert first.kept == 1000
    assert calls == [0, 1, 2]


def test_capacity(device):
    (case,) = (case for case in cuda_cases.CASES if case.has_capacity)
    found = capacity.run_case(case, SETTINGS, lambda text: None, device)
    in_cupy, *others = found["results"]
    assert in_cupy["not_run"] is None
    limit, batch = case.quick_sizes["limit"], in_cupy["largest_batch"]
    assert batch * in_cupy["bytes_per_row"] == pytest.approx(limit, rel=0.1)
    x_row = 4 * case.quick_sizes["v"] * case.quick_sizes["c"]
    assert in_cupy["bytes_per_row"] > 2 * x_row  # x, and its gradient
    assert all(other["largest_batch"] > 0 for other in others)


@pytest.mark.parametrize(
    ("error", "message"), [(MemoryError, "out of memory"), (RuntimeError, "CUDA out of memory")]
)
def test_capacity_steps_back(device, error, message):
    """The pool's blocks have gaps between them: a few rows fewer than bytes suggest."""
    library = device.libraries["cupy"]

    def solve(batch):
        if batch > 950:
            raise error(message)
        return np.zeros(1000 * batch, dtype=np.uint8)

    library.limit = lambda size: contextlib.nullcontext()
    result = runner.new_result(case_of(double).contestants[0])
    library.peak = lambda call: (1000 * call.args[0], None)
    capacity._search(result, solve, library, 1_000_000)
    assert 920 < result.largest_batch <= 950
    with pytest.raises(RuntimeError, match="illegal"):
        capacity._fits(1, lambda batch: exec("raise RuntimeError('illegal')"), library, 1)


# the command -------------------------------------------------------------------------------------


def test_list_needs_no_gpu(capsys):
    assert command.main(["--device", "cuda", "--list", "--only", "maxplus-*"]) == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert names == [c.name for c in cuda_cases.CASES if c.name.startswith("maxplus-")]


@pytest.mark.parametrize("only", ["forum-*", "maxplus-1024"])
def test_without_a_gpu(monkeypatch, tmp_path, capsys, only):
    """One sentence, a code of its own, and no file."""

    def find_none():
        raise RuntimeError("no driver\nis installed")

    monkeypatch.setattr(cuda_device, "Cupy", find_none)
    monkeypatch.setattr(cuda_device, "Torch", find_none)

    def run_process(arguments, check):
        return subprocess.CompletedProcess(arguments, command.main(arguments[3:]))

    monkeypatch.setattr(supervisor.subprocess, "run", run_process)
    given = ["--device", "cuda", "--output", str(tmp_path), "--only", only]
    assert command.main(given) == 2
    sentence = "no CUDA device can be used here (cupy: no driver; torch: no driver)"
    assert capsys.readouterr().err == f"benchmarks: {sentence}\n"
    assert not list(tmp_path.iterdir())


def test_run_that_was_cut_off_goes_on(device, monkeypatch, tmp_path, capsys):
    """The case that a process ended in is noted, and passed over by the next process."""
    cases = [case_of(double), *list(TIMED)[:1]]
    path = tmp_path / "found.json"
    codes = iter([-9, 0])
    begun = command._new_content(SETTINGS, device) | {"running": "a-case"}

    def run_process(arguments, check):
        assert arguments[:3] == [sys.executable, "-m", "benchmarks"]
        assert "--stop-after" in arguments
        code = next(codes)
        if code:
            supervisor.save(path, begun)
        else:
            command.measure(cases, SETTINGS, path, device)
        return subprocess.CompletedProcess(arguments, code)

    monkeypatch.setattr(supervisor.subprocess, "run", run_process)
    assert supervisor.supervise(["--into", str(path)], cases, path, 100) == 0
    content = json.loads(path.read_text())
    lost, other = content["cases"]
    assert lost["results"][0]["not_run"] == "the process ended within this case, exit code -9"
    assert other["results"][0]["median"] > 0
    # Where a process ends before it has begun a case, another one would end there as well.
    codes = iter([1])
    monkeypatch.setattr(
        supervisor.subprocess, "run", lambda a, check: subprocess.CompletedProcess(a, 1)
    )
    assert supervisor.supervise([], cases, path, None) == 1


def test_no_case_is_begun_late(device, tmp_path, capsys):
    path = tmp_path / "found.json"
    assert command.measure(list(TIMED), SETTINGS, path, device, stop_after=-1.0) == 0
    assert not path.exists()
    assert f"{len(TIMED)} cases not begun" in capsys.readouterr().err


# the report --------------------------------------------------------------------------------------


@pytest.fixture
def recorded(device, tmp_path, capsys):
    """The record of a run."""
    names = ("forum-500-1-40-200", "maxplus-1024")
    cases = [case for case in cuda_cases.CASES if case.name in names]
    (limited,) = (case for case in cuda_cases.CASES if case.has_capacity)
    first, *_ = limited.contestants
    cases += [dataclasses.replace(limited, contestants=(first,)), case_of(refuse, double)]
    path = tmp_path / "2026-01-01-0000-cuda.json"
    device._description |= {"multiprocessors": 132, "CUDA runtime": 13000, "clocks.sm": "9 MHz"}
    device._description["copy, bytes per second"] = 3.1e12
    command.measure(cases, SETTINGS, path, device)
    return path


def test_report(recorded):
    content = report.read(recorded)
    text = report.full_report(content, "plot.png")
    assert "132 multiprocessors, copies at 3.1 TB/s, CUDA 13.0" in text
    assert "| | time | × | temporaries | error | on device | first call |" in text
    assert "| | rows | a row takes |" in text
    widths = {line.count("|") for line in text.splitlines() if line.startswith("|")}
    assert widths == {4, 8, 9}
    assert "| forum-500-1-40-200, reduced |" in tables.overview(content["cases"])


def test_plot(recorded):
    import_or_skip("matplotlib")
    report.write(recorded)
    assert recorded.with_suffix(".png").stat().st_size > 10_000


def test_what_keeps_the_device_busy_compiles():
    """By CUDA's own compiler, where it is installed; it needs no device."""
    import_or_skip("cupy")
    from cupy.cuda import nvrtc

    try:
        program = nvrtc.createProgram(libraries._SPIN, "spin.cu", (), ())
    except RuntimeError as error:
        skip_or_fail("cupy", f"NVRTC cannot be loaded: {error}")
    nvrtc.compileProgram(program, ("--gpu-architecture=compute_90",))
    assert "spin" in str(nvrtc.getPTX(program))
