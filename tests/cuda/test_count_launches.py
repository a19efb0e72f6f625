"""Launches and waits are counted without a device."""

import json

import numpy as np
import pytest

from arraylogchain._cuda.device import Device
from tests.cuda import count_launches
from tests.cuda.counting import (
    COUNTED_METHODS,
    FREE_METHODS,
    KINDS,
    TALLY,
    CountingDevice,
    DeviceArray,
    counting,
)

pytestmark = pytest.mark.usefixtures("compiler")


def test_row_of_a_case_has_counts_time_and_error(tmp_path, monkeypatch, capsys):
    file = tmp_path / "rows.json"
    arguments = ["count_launches", "--only", "^logmatmulexp 8x8$", "--json", str(file)]
    monkeypatch.setattr("sys.argv", arguments)
    assert count_launches.main() == 0
    (name, row), *others = json.loads(file.read_text("utf-8")).items()
    assert (name, others) == ("logmatmulexp 8x8", [])
    assert row.keys() == {*KINDS, "launches", "top", "python", "error"}
    assert row["kernels"] == 2
    assert row["launches"] == row["kernels"] + row["gemm"] + row["array"] + row["h2d"]
    assert row["error"] < 1e-6
    assert name in capsys.readouterr().out


LIMITS = {
    "logmatmulexp 64^3": 2,
    "logmatmulexp 64^3 sd 1000, vjp": 9,
    "logmatmulexp large 648x640x656": 3,
    "logmatmulexp batch 6x1,1x5, vjp": 12,
    "forum-like 8x40x200, own linear: log_partition": 4,
    "forum-like 8x40x200, own linear: gradients": 13,
    "forum-like 8x40x200, own linear: posterior": 9,
    "forum-like 8x40x200, own linear: viterbi": 6,
    "hmm 40x60x5, one linear: sample": 5,
    "hmm 40x60x5, one linear: entropy": 8,
    "hmm 40x60x5, one linear: filtered": 3,
    "hmm 40x60x5, one linear: forward_messages": 9,
    "crf 16x40x20, one logs, final, ragged: log_partition": 5,
    "crf 16x40x20, one logs, final, ragged: gradients": 19,
    "crf 16x40x20, one logs, final, ragged: posterior": 12,
}


@pytest.mark.parametrize("name", LIMITS)
def test_call_takes_few_launches_and_never_waits(name):
    with counting(CountingDevice(seed=3)):
        row, *_ = count_launches.count(dict(count_launches.operations())[name])
    limit = {"launches": LIMITS[name], "sync": 0}
    assert count_launches.exceeded({name: row}, {name: limit}) == []


def test_row_of_torch_has_the_same_keys():
    pytest.importorskip("torch")
    from tests.cuda import counting_torch

    (row,) = counting_torch.measure_all("logmatmulexp").values()
    assert row.keys() == {*KINDS, "launches", "top", "python", "error"}
    assert row["kernels"] > 0


def test_methods_of_a_device_are_counted_or_free():
    methods = {name for name in dir(Device) if callable(getattr(Device, name))}
    methods = {name for name in methods if not name.startswith("_")}
    assert methods == COUNTED_METHODS | FREE_METHODS
    assert vars(CountingDevice).keys() >= COUNTED_METHODS


@pytest.mark.parametrize(
    ("operation", "expected"),
    [
        (lambda x: x + 1, {"array": 1}),
        (lambda x: x @ x.T, {"gemm": 1}),
        (lambda x: x[:1].T, {}),
        (lambda x: x[np.array([0])], {"array": 1}),
        (lambda x: x[x > 0], {"array": 2, "sync": 1}),
        (lambda x: float(np.max(x)), {"array": 1, "sync": 1}),
        (lambda x: (x[:0] + 1).copy(), {}),
        (lambda x: x.T.reshape(-1), {"array": 1}),
        (lambda x: x.astype(x.dtype, copy=False), {}),
        (lambda x: CountingDevice().multiply(x, x), {"gemm": 1}),
    ],
    ids=[
        "elementwise",
        "multiply",
        "view",
        "gather",
        "mask",
        "read",
        "empty",
        "copy",
        "cast to the same",
        "multiply of the device",
    ],
)
def test_operation_of_device_arrays_is_counted(operation, expected):
    x = np.eye(3).view(DeviceArray)
    with TALLY.recording():
        operation(x)
    assert {kind: n for kind, n in TALLY.kinds.items() if n} == expected


def test_limits_of_a_case_name_what_exceeds_them():
    rows = {"a": {"launches": 5, "sync": 0}, "b": {"failed": "ValueError: text"}}
    limits = {"a": {"launches": 4, "sync": 0}, "c": {"launches": 1}}
    assert count_launches.exceeded(rows, limits) == [
        "b: ValueError: text",
        "a: {'launches': (5, 4)}",
        "c: not measured",
    ]
    assert count_launches.exceeded({"a": rows["a"]}, {"a": {"launches": 5}}) == []
