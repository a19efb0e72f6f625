"""`python -m arraylogchain --device cuda --check`: the CPU is the device."""

import re
import types

import numpy as np
import pytest

from arraylogchain import _dispatch
from arraylogchain.__main__ import main
from arraylogchain._cli import check
from arraylogchain._cuda import records, self_check
from tests.cuda.cpu_device import CpuDevice

pytestmark = pytest.mark.usefixtures("compiler")


@pytest.fixture
def device(monkeypatch, tmp_path, use):
    """Let NumPy arrays be on a device, and let what is checked and timed be little."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(check, "open_device", lambda _: types.SimpleNamespace(put=np.asarray))
    monkeypatch.setattr(check, "PRODUCTS", ((70, 70, 70),))
    monkeypatch.setattr(check, "CHAINS", ((5, 4, 3), (2, 3, 4)))
    monkeypatch.setattr(check, "DTYPES", check.TIMED)
    monkeypatch.setattr(_dispatch, "CHAINS", {})
    few = {name: _dispatch.PRODUCTS[name] for name in ("logmatmulexp", "logsumexp_where")}
    monkeypatch.setattr(_dispatch, "PRODUCTS", few)
    return use(CpuDevice(seed=1))


def rows_of(capsys):
    """Return the cells of a table's rows by their names."""
    found = (re.split(r" {2,}", line) for line in capsys.readouterr().out.splitlines())
    return {name: cells for name, *cells in found}


def test_errors_and_times_of_all_implementations(device, capsys):
    records.write(device.identity, "what is large", "products/small.cu", seconds={"cuda": 2.0})
    assert main(["--device", "cuda", "--check"]) == 0
    rows = rows_of(capsys)
    for name in ("logmatmulexp", "logmatmulexp (tensor cores)"):
        assert len(rows[name]) == 2
        assert all(0 < float(cell) < 1 for cell in rows[name])
    assert len(rows["log product 70 x 70 x 70, float32"]) == 3
    assert len(rows["log Z 5 x 4 x 3, float64"]) == 2
    assert "in use: what is large: kernel 2 s" in rows
    assert any(device.identity in name for name in rows)


def test_what_fails_is_said(device, capsys, monkeypatch):
    def fail(ctx, operation, kernels, backend):
        return self_check.Finding(np.inf, "CUDADriverError: out of resources")

    def run(launch):
        raise RuntimeError("out of resources")

    monkeypatch.setattr(self_check, "check", fail)
    device.run = run
    device.architecture = 75
    assert main(["--device", "cuda", "--check"]) == 1
    rows = rows_of(capsys)
    assert rows["logmatmulexp"] == ["inf", "inf"]
    assert "FAILED: logmatmulexp, float64: CUDADriverError: out of resources" in rows
    assert rows["log product 70 x 70 x 70, float32"][:2] == ["does not run", "does not run"]


def test_devices_without_kernels_say_why(device, use, capsys):
    use(None)
    assert main(["--device", "cuda", "--check"]) == 2
    assert "there are kernels for arrays of CuPy and torch" in capsys.readouterr().err
