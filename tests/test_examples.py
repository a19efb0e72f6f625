"""The examples run and are right at small sizes."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import import_or_skip, required

EXAMPLES = Path(__file__).parents[1] / "examples"


def load(name):
    """Return an example as a module; it is a script and not part of a package."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def picture(tmp_path):
    """Return where to draw, or None without matplotlib, unless it is required."""
    if "matplotlib" not in required() and importlib.util.find_spec("matplotlib") is None:
        return None
    return tmp_path / "picture.png"


@pytest.fixture
def torch_alone(torch_backend):
    """Return torch on one thread: threads that wait for a busy machine cost more than they save."""
    torch = torch_backend.xp
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield torch
    torch.set_num_threads(threads)


def assert_drawn(picture):
    assert picture is None or picture.read_bytes().startswith(b"\x89PNG")


def test_hmm():
    model = load("hmm").main()
    np.testing.assert_allclose(np.sort(model.means[:, 0]), [-1.0, 1.5], atol=0.05)
    np.testing.assert_allclose(np.sort(np.diag(model.transitions)), [0.9, 0.95], atol=0.02)


def test_gaussian_hmm_is_that_of_hmmlearn():
    """EM from the same start, sequence by sequence and with all of them."""
    theirs = import_or_skip("hmmlearn.hmm")
    rng = np.random.default_rng(1)
    observations, lengths = rng.normal(size=(4, 60, 2)), np.array([60, 20, 1, 33])
    ours = load("hmm").GaussianHMM(rng.normal(size=(3, 2)), rng)
    other = theirs.GaussianHMM(
        3, "diag", init_params="", n_iter=20, tol=-np.inf, min_covar=0, covars_prior=0
    )
    other.covars_weight = 0
    other.startprob_, other.transmat_ = ours.initial.copy(), ours.transitions.copy()
    other.means_, other.covars_ = ours.means.copy(), ours.variances.copy()
    real = np.concatenate([row[:n] for row, n in zip(observations, lengths, strict=True)])
    history = ours.fit(observations, lengths, rounds=20)
    other.fit(real, lengths)
    assert np.all(np.diff(history) > -1e-9)
    np.testing.assert_allclose(history, other.monitor_.history, rtol=1e-9)
    np.testing.assert_allclose(ours.means, other.means_, rtol=1e-6)
    np.testing.assert_allclose(ours.transitions, other.transmat_, atol=1e-9)
    assert ours.score(observations, lengths) == pytest.approx(other.score(real, lengths))
    result = ours.predict(observations, lengths)
    assert np.array_equal(result[result >= 0], other.predict(real, lengths))


def test_categorical_hmm():
    example, rng = load("hmm"), np.random.default_rng(0)
    model = example.CategoricalHMM(2, 4, rng)
    observations = np.array([[0, 1, 0, 1, 2, 3, 2, 3] * 5, [2, 3, 2, 3, 0, 1, 0, 1] * 5])
    history = model.fit(observations, lengths=np.array([40, 24]))
    assert np.all(np.diff(history) > -1e-9)
    assert history[-1] > history[0] + 10
    np.testing.assert_allclose(model.emissions.sum(-1), 1)


def test_gaussian_hmm_with_unvisited_state_keeps_its_parameters():
    example, rng = load("hmm"), np.random.default_rng(0)
    model = example.GaussianHMM(np.array([[0.0], [1.0], [5.0]]), rng)
    model.initial = np.array([0.5, 0.5, 0.0])
    model.transitions = np.array([[0.9, 0.1, 0.0], [0.2, 0.8, 0.0], [0.3, 0.3, 0.4]])
    history = model.fit(rng.normal(size=(4, 20, 1)), rounds=10)
    assert np.all(np.diff(history) > -1e-9)
    np.testing.assert_array_equal(model.transitions[2], [0.3, 0.3, 0.4])
    assert (model.means[2], model.variances[2]) == (5.0, 1.0)


def test_crf(torch_alone):
    assert load("crf").main(num_sentences=128, epochs=8) > 0.97


def test_crf_is_that_of_pytorch_crf(torch_alone):
    torchcrf = import_or_skip("torchcrf")
    torch, ours = torch_alone, load("crf").CRF(4)
    theirs = torchcrf.CRF(4, batch_first=True)
    theirs.transitions.data, theirs.start_transitions.data = ours.transitions.data, ours.start.data
    theirs.end_transitions.data = ours.end.data
    scores, tags = torch.randn(3, 6, 4), torch.randint(4, (3, 6))
    mask = torch.arange(6) < torch.tensor([[6], [1], [4]])
    expected = -theirs(scores, tags, mask=mask, reduction="mean")
    torch.testing.assert_close(ours(scores, tags, mask), expected)
    result = ours.decode(scores, mask)
    assert [row[row >= 0].tolist() for row in result] == theirs.decode(scores, mask=mask)


def test_numpy_training(picture):
    result = load("numpy_training").main(n=200, v=50, c=3, plot=picture)
    assert result.result.success
    assert np.all(np.diff(result.losses) < 0)
    assert result.losses[-1] < result.true_loss
    assert result.error < 0.05
    assert_drawn(picture)


def test_em_out_of_core():
    dask = pytest.importorskip("dask")
    pytest.importorskip("zarr")
    with dask.config.set(scheduler="threads"):
        history, best = load("em_out_of_core").main(
            blocks=4, rows=50, steps=60, states=3, kinds=5, rounds=8
        )
    # A step of EM never makes the likelihood smaller, but for the float32 of the potentials.
    assert np.all(np.diff(history) > -1e-6)
    assert history[0] + 0.01 < history[-1] < best + 0.01


def test_batched_linear(torch_alone, picture):
    result = load("batched_linear").main(n=1024, heads=4, d=32, e=32, plot=picture)
    assert result.losses[-1] < result.losses[0] / 10
    # torch makes [n, heads, d, e] twice, d times what one result takes.
    for ours, theirs in zip(*result.peaks.values(), strict=True):
        assert ours < theirs / 8
    assert result.difference < 1e-5
    assert_drawn(picture)
