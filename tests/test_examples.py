"""The examples do what they say, at small sizes."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

import arraylogchain as alc
from tests.conftest import required

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


def test_forum_model(torch_alone, picture):
    found = load("forum_model").main(n=3000, v=8, c=3, steps=100, plot=picture)
    assert found.losses[-1] < found.losses[0] - 0.1
    # The most likely model is likelier than the true one, but not by much: 44 free parameters are
    # expected to gain half a nat each, over all 3000 sequences together.
    assert -0.02 < found.losses[-1] - found.true_loss < 0
    assert found.error_at_start > 0.1
    assert found.error < 0.05
    assert_drawn(picture)


def test_forum_formulation(capsys):
    """Right where v - 1 is a power of two, and only there; the library always is."""
    errors = load("forum_formulation").main([(3, 2, v, 5) for v in (2, 3, 4, 5, 6)])
    assert max(errors["library"]) < 1e-5
    assert [error < 1e-5 for error in errors["pairs"]] == [True, True, False, True, False]
    assert len(capsys.readouterr().out.splitlines()) == 11


@pytest.mark.parametrize("size", [(5, 1, 2, 60), (10, 1, 5, 40), (10, 1, 6, 40), (4, 2, 7, 50)])
def test_memory_of_the_forum_formulation_is_counted_right(size):
    """What `Plan.pairwise_bytes` says."""
    example = load("forum_formulation")
    problem = example.random_problem(*size)
    plan = alc.LogChain(problem[0], transitions=problem[1], initial=problem[2]).plan()
    _, _, peak = example.measure(lambda: example.multiply_in_pairs(*problem))
    # The vectors that are not counted, and Python's own objects, are small beside the matrices.
    assert 1.0 <= peak / plan.pairwise_bytes < 1.1


def test_forum_model_is_a_chain(torch_alone):
    """The module's forward is the formula that the docstring names."""
    model = load("forum_model").ForumModel(t=2, v=3, c=4)
    with torch_alone.no_grad():
        for parameter in model.parameters():
            parameter.normal_(generator=torch_alone.Generator().manual_seed(0))
    x = torch_alone.linspace(-2, 1, 5 * 2 * 3 * 4).reshape(5, 2, 3, 4)
    bulk, p0 = model.bulk.softmax(-1)[0], model.p0.softmax(-1)[0]
    row = p0[None, :, None, :] @ torch_alone.diag_embed(x[..., 0, :].exp())
    for i in (1, 2):
        row = row @ bulk[:, i - 1] @ torch_alone.diag_embed(x[..., i, :].exp())
    torch_alone.testing.assert_close(model(x), row.sum((-1, -2)).log())


def test_numpy_training(picture):
    found = load("numpy_training").main(n=200, v=50, c=3, plot=picture)
    assert found.result.success
    assert np.all(np.diff(found.losses) < 0)
    assert found.losses[-1] < found.true_loss
    assert found.error < 0.05
    assert_drawn(picture)


def test_numpy_training_has_the_gradient_of_its_loss():
    module = load("numpy_training")
    rng = np.random.default_rng(0)
    loss = module.Loss(rng.normal(size=(3, 5, 2)))
    parameters, direction = rng.normal(size=(2, 6))
    _, gradient = loss(parameters)
    above, below = (loss(parameters + h * direction)[0] for h in (1e-5, -1e-5))
    # Central differences: h² of the third derivative, and eps / h of the loss.
    assert gradient @ direction == pytest.approx((above - below) / 2e-5, abs=1e-9)


def test_em_out_of_core(picture):
    dask = pytest.importorskip("dask")
    pytest.importorskip("zarr")
    with dask.config.set(scheduler="threads"):
        found = load("em_out_of_core").main(
            blocks=4, rows=50, steps=60, states=3, kinds=5, iterations=8, plot=picture
        )
    # A step of EM never makes the likelihood smaller, but for the float32 of the potentials.
    assert np.all(np.diff(found.log_likelihoods) > -1e-6)
    assert found.log_likelihoods[-1] > found.log_likelihoods[0] + 0.01
    for probabilities in found.model:
        np.testing.assert_allclose(probabilities.sum(-1), 1)
    assert_drawn(picture)


def test_batched_linear(torch_alone, picture):
    found = load("batched_linear").main(n=1024, heads=4, d=32, e=32, plot=picture)
    assert found.losses[-1] < found.losses[0] / 10
    # torch makes [n, heads, d, e] twice, d times what one result takes.
    for ours, theirs in zip(*found.peaks.values(), strict=True):
        assert ours < theirs / 8
    assert found.difference < 1e-5
    assert_drawn(picture)


def test_vowels(picture):
    pytest.importorskip("pydoc_data.topics")
    found = load("vowels").main(pieces=200, iterations=30, plot=picture)
    for name, letters in found.vowels.items():
        # y is a vowel at times, and the text is another in every version of Python.
        assert set("aeiou") <= set(letters) <= set("aeiouy") | set("hgj"), name
        assert np.all(np.diff(found.history[name]) > -1e-12), name
    ends = [history[-1] for history in found.history.values()]
    assert ends[0] == pytest.approx(ends[1], abs=0.02)
    assert_drawn(picture)
