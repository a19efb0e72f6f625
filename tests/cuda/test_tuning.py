"""Which of two implementations a device takes: the CPU is the device, and says what each takes."""

import json
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import arraylogchain as alc
from arraylogchain._cuda import records, self_check, tuning
from arraylogchain._cuda.chains import geometry
from tests.cuda.cpu_device import CpuDevice
from tests.cuda.product_checks import normal
from tests.test_chain import uniform

pytestmark = pytest.mark.usefixtures("compiler")


def over_tensor_cores(launches):
    names = [launch.kernel for launch in launches]
    return any(name.startswith("logmatmulexp<") and name.endswith(", true>") for name in names)


class Timed(CpuDevice):
    """Takes the given seconds for what launches nothing, or tensor cores, or other kernels."""

    def __init__(self, arrays=1.0, tensor_cores=1.0, kernels=1.0):
        super().__init__(seed=1)
        self.arrays, self.tensor_cores, self.kernels = arrays, tensor_cores, kernels
        self.timed = 0

    def seconds(self, run):
        self.timed += 1
        before = len(self.launches)
        run()
        launches = self.launches[before:]
        if not launches:
            return self.arrays
        return self.tensor_cores if over_tensor_cores(launches) else self.kernels


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    """Let devices measure what is small, and remember it in a file."""
    monkeypatch.delenv("ARRAYLOGCHAIN_AUTOTUNE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(tuning, "LARGE", 40)
    monkeypatch.setattr(tuning, "_STEPS", 6)
    return tmp_path / "arraylogchain" / "devices.jsonl"


@pytest.fixture
def use(use, monkeypatch):
    """Return what puts NumPy arrays on a device whose array operations take little."""
    monkeypatch.setattr(geometry, "ARRAY_STEP", 2 * geometry.SMALL_STEP)
    return use


def takes_tensor_cores(device, n=64):
    a, b = normal(n, n).astype("float32"), normal(n, n, seed=1).astype("float32")
    before = len(device.launches)
    found = alc.logmatmulexp(a, b)
    expected = np.log(np.exp(a.astype(float)) @ np.exp(b.astype(float)))
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    # The last is a call's own, after what is timed.
    last = [x for x in device.launches[before:] if x.kernel.startswith("logmatmulexp<")][-1:]
    return over_tensor_cores(last)


def chain(steps=8, **options):
    return alc.LogChain(normal(3, steps, 4), transitions=uniform(steps - 1, 4, 4), **options)


def test_the_faster_product_is_taken(use):
    fast, slow = Timed(tensor_cores=0.1), Timed(tensor_cores=9)
    slow.identity = "another CPU"
    assert takes_tensor_cores(use(fast))
    takes_tensor_cores(use(slow))  # both are timed
    for device, expected in ((slow, False), (fast, True)):
        timed = device.timed
        assert takes_tensor_cores(use(device)) is expected
        assert device.timed == timed
    assert not takes_tensor_cores(fast, 39)


def test_what_was_measured_is_remembered(use, cache):
    takes_tensor_cores(use(Timed(tensor_cores=0.1)))
    fact = json.loads(cache.read_text())
    assert fact["subject"] == "large log products in float32"
    assert fact["seconds"] == {"cuda": 1.0, "cuda.tensor_cores": 0.1}
    later = use(Timed(tensor_cores=9))  # another process
    assert takes_tensor_cores(later)
    assert not later.timed
    assert list(records.of_device(later.identity)) == [fact]
    for damaged in (b"{", b"[]", b"\xff"):
        cache.write_bytes(damaged)
        assert not list(records.of_device(later.identity))
        again = use(Timed(tensor_cores=9))
        takes_tensor_cores(again)
        assert again.timed


def test_devices_without_tensor_cores(use):
    device = use(Timed(tensor_cores=0.1))
    device.architecture = 75
    assert not takes_tensor_cores(device)
    assert not device.timed


@pytest.mark.parametrize("captures", [False, True])
def test_estimates_decide_where_nothing_may_be_measured(use, cache, monkeypatch, captures):
    device = use(Timed(tensor_cores=0.1, arrays=0.1))
    device.captures = captures
    device.load = lambda *_: None
    if not captures:
        records.write(device.identity, "large log products in float32", SOURCE, seconds=FAST)
        monkeypatch.setenv("ARRAYLOGCHAIN_AUTOTUNE", "0")
    assert not takes_tensor_cores(device)
    chain().log_partition()
    assert chain().plan().route == "kernel"
    assert "estimated" in chain().plan().reason
    assert not device.timed


SOURCE, FAST = "products/logmatmulexp.cu", {"cuda": 1.0, "cuda.tensor_cores": 0.1}


def test_what_fails_is_not_taken_and_not_remembered(use, cache):
    def run(launch):
        if over_tensor_cores([launch]):
            raise RuntimeError("too many resources requested for launch")
        CpuDevice.run(device, launch)

    device = use(Timed())
    device.run = run
    assert not takes_tensor_cores(device)
    assert not cache.exists()


def test_tensor_cores_that_err_are_not_taken(use, monkeypatch):
    device = use(Timed(tensor_cores=0.1))
    monkeypatch.setenv("ARRAYLOGCHAIN_SELF_CHECK", "1")
    monkeypatch.setattr(self_check, "_failed", set())
    check = self_check.check

    def fail(ctx, operation, kernels, backend):
        wrong = self_check.Finding(2, "they err by 2")
        return wrong if backend == "cuda.tensor_cores" else check(ctx, operation, kernels, backend)

    monkeypatch.setattr(self_check, "check", fail)
    with pytest.warns(RuntimeWarning, match="logmatmulexp failed"):
        takes_tensor_cores(device)
    before = len(device.launches)
    assert not takes_tensor_cores(device)
    assert len(device.launches) > before


@pytest.mark.parametrize(("arrays", "route"), [(0.6, "vector"), (60, "kernel")])
def test_a_matrix_multiply_for_each_step_may_be_faster(use, arrays, route):
    device = use(Timed(arrays=arrays, kernels=6))
    before = chain().plan("marginals")
    assert (before.route, "estimated" in before.reason) == ("kernel", True)
    expected = chain(lengths=np.array([8, 1, 5])).log_partition()
    assert device.timed
    after = chain(20).plan("marginals")
    assert after.route == route
    assert "measured on this device" in str(after)
    # Samples go forward as well; for best paths there is no matrix multiply.
    assert chain(20).plan("sample").route == route
    assert chain(20).plan("viterbi").route == "kernel"
    use(None)
    found = chain(lengths=np.array([8, 1, 5])).log_partition()
    np.testing.assert_allclose(found, expected, rtol=1e-13)


def test_estimates_of_many_states():
    """Every block of the kernel reads all of a matrix."""
    device = (132, 227 << 10)
    for states, rows, item, kernel_is_faster in [
        (200, 500, 4, True),
        (1024, 500, 4, True),
        (4096, 1, 4, True),
        (4096, 64, 4, False),
        (9000, 64, 4, False),
        (2048, 64, 8, False),
        (1024, 64, 8, True),
    ]:
        kernel = geometry.kernel_seconds(states, 1, rows, item, *device)
        arrays = geometry.array_seconds(states, 1, rows, item, device[0])
        assert (kernel < arrays) is kernel_is_faster


def test_processes_side_by_side_lose_nothing(cache):
    def write(i):
        records.write("a device", f"subject {i % 10}", SOURCE, seconds={"cuda": i})

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, range(200)))
    assert len(cache.read_text().split("\n\n")) == 200
    assert len(list(records.of_device("a device"))) == 10


def test_a_line_that_is_cut_off_is_alone_in_it(cache):
    for name in ("first", "second"):
        records.write("a device", name, SOURCE, seconds={"cuda": 1})
        cache.write_bytes(cache.read_bytes()[:-9])
    records.write("a device", "third", SOURCE, seconds={"cuda": 1})
    assert [fact["subject"] for fact in records.of_device("a device")] == ["third"]


def test_a_folder_that_cannot_be_made_is_no_error(use, cache):
    cache.parent.write_text("a file where a folder would be")
    device = use(Timed(tensor_cores=0.1))
    assert takes_tensor_cores(device)
    assert list(records.of_device(device.identity)) == []
