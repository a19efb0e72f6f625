"""`python -m arraylogchain`, called as the function behind it."""

import os
import re
import stat
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest
from scipy.special import logsumexp

from arraylogchain import LogChain, _dispatch, _threads
from arraylogchain.__main__ import main
from arraylogchain._cli import demo, environment
from arraylogchain._cuda.device import Unavailable
from tests.conftest import import_or_skip

T, K = 4, 3


@pytest.fixture
def arrays():
    rng = np.random.default_rng(0)
    return {
        "x": rng.normal(size=(2, T, K)),
        "P": rng.random((T - 1, K, K)),
        "p0": rng.random(K),
    }


@pytest.fixture
def files(arrays, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, array in arrays.items():
        np.save(f"{name}.npy", array)
    return tmp_path


def sum_over_paths(x, P, p0):
    total = np.full(x.shape[0], -np.inf)
    for path in np.ndindex(*(K,) * T):
        weight = np.log(p0[path[0]]) + sum(x[:, i, k] for i, k in enumerate(path))
        weight = weight + sum(np.log(P[i, path[i], path[i + 1]]) for i in range(T - 1))
        total = np.logaddexp(total, weight)
    return total


def one_sentence(capsys):
    """Return what was written to stderr, which must be a single line without a traceback."""
    captured = capsys.readouterr()
    assert captured.err.startswith("arraylogchain: ")
    assert captured.err.count("\n") == 1
    return captured.err


# --- the forum's case -----------------------------------------------------------------------------


def test_demo_shows_what_is_available_and_what_the_case_takes(capsys):
    assert main(["--size", "20,1,4,8", "--seed", "3"]) == 0
    out = capsys.readouterr().out
    for name in ("numpy", "array-api-compat", "numba", "cupy", "torch", "threads"):
        assert re.search(rf"^  {name} +\S", out, re.MULTILINE)
    assert "20 chains of 4 steps with 8 states" in out
    assert re.search(r"^  time +\d.* [mµ]?s, median", out, re.MULTILINE)
    assert re.search(r"^  memory +\d.*B beyond .* in pairs, take \d+ kB$", out, re.MULTILINE)
    assert float(re.search(r"^  error +(\S+)", out, re.MULTILINE)[1]) < 1e-5


@pytest.mark.parametrize("has_loops", [True, False])
def test_demo_shows_the_route(capsys, monkeypatch, has_loops):
    if has_loops:
        import_or_skip("numba")
    monkeypatch.setattr(_dispatch, "COMPILED", has_loops)
    assert main(["--size", "10,1,5,40"]) == 0
    route = "compiled" if has_loops else "vector"
    assert re.search(rf"^  route +{route}: \w", capsys.readouterr().out, re.MULTILINE)


def test_says_how_many_threads_there_are(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    _threads.num_workers.cache_clear()
    try:
        described = environment.describe()
    finally:
        _threads.num_workers.cache_clear()
    assert re.search(rf"^  threads +1 of {os.cpu_count()} CPU cores$", described, re.M)


def test_demo_of_a_single_step_has_nothing_to_multiply(capsys):
    assert main(["--size", "2,1,1,8"]) == 0
    assert "in pairs" not in capsys.readouterr().out


@pytest.mark.parametrize("size", ["1,2,3", "1,2,3,x", "0,1,4,8", ""])
def test_bad_size(size, capsys):
    with pytest.raises(SystemExit) as exit_info:
        main(["--size", size])
    assert exit_info.value.code == 2
    assert "four integers" in capsys.readouterr().err


@pytest.mark.parametrize("reason", ["Numba is not installed", None])
def test_says_what_computes_on_the_cpu(monkeypatch, reason):
    monkeypatch.setattr("arraylogchain._compiled.why_not", lambda: reason)
    monkeypatch.setitem(sys.modules, "numba", types.SimpleNamespace(__version__="0.60"))
    expected = f"array operations ({reason})" if reason else "0.60, compiled loops for chains"
    assert environment._describe_numba() == expected


def test_cuda_without_cupy_says_why(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    for options in (["--size", "2,1,3,4"], ["--check"]):
        assert main(["--device", "cuda", *options]) == 2
        assert "cupy" in one_sentence(capsys).lower()


@pytest.mark.parametrize("options", [["--check"], ["--check", "--device", "cuda", "--seed", "1"]])
def test_checks_are_of_kernels_alone(capsys, options):
    with pytest.raises(SystemExit):
        main(options)
    assert "--device cuda" in capsys.readouterr().err


@pytest.mark.parametrize("reason", ["CuPy is not installed", None])
def test_says_what_computes_on_a_device(monkeypatch, reason):
    """With stand-ins for a torch that has a device, and for what is found about it."""
    found = object() if reason is None else Unavailable(reason)
    monkeypatch.setattr(environment, "find", lambda library, device: found)
    cuda = types.SimpleNamespace(
        is_available=lambda: True, device_count=lambda: 1, get_device_name=lambda: "NVIDIA X"
    )
    torch = types.SimpleNamespace(__version__="2.6", cuda=cuda, device=str)
    monkeypatch.setitem(sys.modules, "torch", torch)
    by = "CUDA kernels" if reason is None else f"array operations ({reason})"
    assert environment._describe_torch() == f"2.6, NVIDIA X, {by}"


def test_reference_recursion_sums_over_all_paths(arrays):
    found = demo.recursion_in_float64(
        arrays["x"][:, None], arrays["P"][None, None], arrays["p0"][None, None]
    )
    np.testing.assert_allclose(found[:, 0], sum_over_paths(**arrays), rtol=1e-13)


# --- the user's own arrays ------------------------------------------------------------------------


def test_solves_files(files, arrays, capsys):
    command = ["x.npy", "--transitions", "P.npy", "--initial", "p0.npy", "-o", "out.npy"]
    assert main(command) == 0
    expected = sum_over_paths(**arrays)
    np.testing.assert_allclose(np.load("out.npy"), expected, rtol=1e-13)
    out = capsys.readouterr().out
    assert f"{expected[0]:.7g}"[:-1] in out
    assert sorted(p.name for p in files.iterdir()) == ["P.npy", "out.npy", "p0.npy", "x.npy"]


def test_solves_files_of_logarithms(files, arrays):
    np.save("log_P.npy", np.log(arrays["P"]))
    np.save("log_p0.npy", np.log(arrays["p0"]))
    command = ["x.npy", "--log-transitions", "log_P.npy", "--log-initial", "log_p0.npy"]
    assert main([*command, "-o", "out.npy"]) == 0
    np.testing.assert_allclose(np.load("out.npy"), sum_over_paths(**arrays), rtol=1e-12)


@pytest.mark.parametrize("option", ["marginals", "viterbi"])
def test_other_operations_of_files(files, arrays, capsys, option):
    lengths, final = np.full(len(arrays["x"]), 2), np.arange(1.0, 1 + K)
    np.save("n.npy", lengths)
    np.save("p1.npy", final)
    command = ["x.npy", "--transitions", "P.npy", "--initial", "p0.npy", "--final", "p1.npy"]
    assert main([*command, "--lengths", "n.npy", f"--{option}", "-o", "out.npy"]) == 0
    chain = LogChain(
        arrays["x"], transitions=arrays["P"], initial=arrays["p0"], final=final, lengths=lengths
    )
    expected = chain.viterbi().states if option == "viterbi" else chain.marginals()
    np.testing.assert_array_equal(np.load("out.npy"), expected)
    assert ("states" if option == "viterbi" else option) in capsys.readouterr().out


def test_operations_need_files(capsys):
    with pytest.raises(SystemExit):
        main(["--viterbi"])
    assert "--viterbi needs a file" in capsys.readouterr().err


def test_initial_weights_may_be_left_out(files, arrays):
    assert main(["x.npy", "--transitions", "P.npy", "-o", "out.npy"]) == 0
    expected = sum_over_paths(arrays["x"], arrays["P"], np.ones(K))
    np.testing.assert_allclose(np.load("out.npy"), expected, rtol=1e-13)


def test_one_step_needs_no_transitions_to_be_read(files, arrays):
    np.save("P.npy", np.ones((0, K, K)))
    np.save("x.npy", arrays["x"][:, :1])
    assert main(["x.npy", "--transitions", "P.npy", "-o", "out.npy"]) == 0
    np.testing.assert_allclose(np.load("out.npy"), logsumexp(arrays["x"][:, 0], axis=-1))


def test_large_results_are_summarised(files, capsys):
    x = np.zeros((20, T, K))
    x[3, 1] = -np.inf
    x[4, 1] = np.nan
    np.save("x.npy", x)
    assert main(["x.npy", "--transitions", "P.npy"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^-inf +1 of 20$", out, re.MULTILINE)
    assert re.search(r"^NaN +1 of 20$", out, re.MULTILINE)
    assert "+inf" not in out


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "x.npy cannot be read: No such file"),
        (b"", "x.npy is not a .npy file"),
        (b"a table of numbers", "x.npy is not a .npy file"),
        (b"\x93NUMPY\x01\x00v\x00{'descr': nonsense", "x.npy is not a .npy file"),
    ],
)
def test_unreadable_files(files, capsys, content, expected):
    Path("x.npy").unlink()
    if content is not None:
        Path("x.npy").write_bytes(content)
    assert main(["x.npy", "--transitions", "P.npy", "-o", "out.npy"]) == 2
    assert expected in one_sentence(capsys)
    assert not Path("out.npy").exists()


def test_truncated_file(files, capsys):
    Path("x.npy").write_bytes(Path("x.npy").read_bytes()[:-1])
    assert main(["x.npy", "--transitions", "P.npy"]) == 2
    assert "x.npy is not a .npy file" in one_sentence(capsys)


def test_file_of_objects_is_not_unpickled(files, capsys):
    np.save("x.npy", np.array([None, {}], dtype=object), allow_pickle=True)
    assert main(["x.npy", "--transitions", "P.npy"]) == 2
    assert "x.npy" in one_sentence(capsys)


@pytest.mark.parametrize(
    ("name", "option", "array"),
    [
        ("log_potentials", "x", np.zeros((2, T, K), dtype=np.int64)),
        ("log_potentials", "x", np.zeros(())),
        ("transitions", "P", np.ones((T - 1, K + 1, K + 1))),
        ("transitions", "P", np.ones((T + 1, K, K))),
        ("initial", "p0", np.ones(K + 2)),
    ],
)
def test_wrong_arrays_are_named(files, capsys, name, option, array):
    np.save(f"{option}.npy", array)
    Path("out.npy").write_bytes(b"what was there before")
    command = ["x.npy", "--transitions", "P.npy", "--initial", "p0.npy", "-o", "out.npy"]
    assert main(command) == 2
    assert name in one_sentence(capsys)
    assert Path("out.npy").read_bytes() == b"what was there before"


@pytest.mark.parametrize(("name", "option"), [("P", "--transitions"), ("p0", "--initial")])
def test_logarithms_given_as_weights(files, arrays, capsys, name, option):
    np.save(f"{name}.npy", np.log(arrays[name]))
    extra = [] if name == "P" else ["--transitions", "P.npy"]
    assert main(["x.npy", option, f"{name}.npy", *extra]) == 2
    assert f"--log-{option[2:]}" in one_sentence(capsys)


@pytest.mark.parametrize(
    "command",
    [
        ["--transitions", "P.npy"],
        ["-o", "out.npy"],
        ["x.npy", "--transitions", "P.npy", "--size", "1,1,2,2"],
        ["x.npy", "--transitions", "P.npy", "--seed", "1"],
        ["x.npy", "--transitions", "P.npy", "--log-transitions", "P.npy"],
    ],
)
def test_options_that_do_not_go_together(files, capsys, command):
    with pytest.raises(SystemExit) as exit_info:
        main(command)
    assert exit_info.value.code == 2
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("output", ["folder", "missing/out.npy", os.devnull])
def test_impossible_outputs_are_refused_before_the_work(files, capsys, monkeypatch, output):
    Path("folder").mkdir()
    monkeypatch.setattr(
        "arraylogchain._cli.files._read", lambda path: pytest.fail("read before the check")
    )
    assert main(["x.npy", "--transitions", "P.npy", "-o", output]) == 2
    assert "cannot be written" in one_sentence(capsys)


@pytest.mark.parametrize("failure", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_failed_write_leaves_the_old_file(files, monkeypatch, failure):
    Path("out.npy").write_bytes(b"what was there before")

    def write_half(file, array, **_):
        file.write(b"half")
        raise failure

    monkeypatch.setattr(np.lib.format, "write_array", write_half)
    code = main(["x.npy", "--transitions", "P.npy", "-o", "out.npy"])
    assert code == (2 if isinstance(failure, OSError) else 130)
    assert Path("out.npy").read_bytes() == b"what was there before"
    assert sorted(p.name for p in files.iterdir()) == ["P.npy", "out.npy", "p0.npy", "x.npy"]


@pytest.mark.skipif(os.name != "posix", reason="POSIX permissions and links")
def test_output_keeps_permissions_and_links(files):
    Path("real.npy").write_bytes(b"")
    Path("real.npy").chmod(0o640)
    Path("out.npy").symlink_to("real.npy")
    assert main(["x.npy", "--transitions", "P.npy", "-o", "out.npy"]) == 0
    assert Path("out.npy").is_symlink()
    assert stat.S_IMODE(Path("real.npy").stat().st_mode) == 0o640
    assert np.load("real.npy").shape == (2,)


def test_not_enough_memory(files, capsys, monkeypatch):
    def too_large(path):
        raise MemoryError("Unable to allocate 1.00 TiB")

    monkeypatch.setattr("arraylogchain._cli.files._read", too_large)
    assert main(["x.npy", "--transitions", "P.npy"]) == 2
    assert "not enough memory" in one_sentence(capsys)


def test_as_a_module(files):
    paths = [str(files / "x.npy"), "--transitions", str(files / "missing.npy")]
    command = [sys.executable, "-m", "arraylogchain", *paths]
    root = Path(__file__).parents[1]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
