"""LogChain.filtered: messages that are normalised at every step."""

import numpy as np
import pytest

import arraylogchain as alc
from tests import error_model, reference
from tests.checks import CHAIN_SHAPES, Given, make_chain
from tests.error_model import assert_within
from tests.gradient_checks import _forward
from tests.test_chain import FORMS, given_as, normal, uniform, wide_log_weights

# torch 2.13 warns of its own code when forward mode is first used.
pytestmark = [
    pytest.mark.chains,
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
]

INF, NAN = np.inf, np.nan


def check_filtered(
    backend, dtype, x, *, transitions=None, log_transitions=None, initial=None, log_initial=None
):
    """Compare both results, entry by entry."""
    given = Given(backend, dtype, x, transitions, log_transitions, initial, log_initial)
    filtered = make_chain(given.arrays).filtered()
    assert isinstance(filtered, alc.FilteredChain)
    assert filtered._fields == ("probabilities", "log_normalizers")
    found = [backend.read(part, dtype) for part in filtered]
    forward = _forward(given.held, dtype)
    exact = reference.filtered(forward.messages, forward.message_gaps)
    steps, K = np.arange(1, np.shape(x)[-2] + 1), np.shape(x)[-1]
    shares, logs = error_model.filtered_bounds(exact, steps, K, dtype)
    assert_within(found[0], exact.probabilities, shares)
    assert_within(found[1], exact.log_normalizers, logs)
    given.assert_unchanged()
    return found


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("T", [1, 2, 3, 9])
def test_small_chains(backend, dtype, form, T):
    check_filtered(
        backend, dtype, normal(T, 3, sd=2), **given_as(form, uniform(T - 1, 3, 3), uniform(3))
    )


@pytest.mark.parametrize(("x", "transitions", "initial"), CHAIN_SHAPES)
def test_batch_axes(np_backend, dtype, x, transitions, initial):
    start = None if initial is None else uniform(*initial)
    shares, _ = check_filtered(
        np_backend, dtype, normal(*x), transitions=uniform(*transitions, seed=1), initial=start
    )
    batch = np.broadcast_shapes(x[:-2], transitions[:-3], () if initial is None else initial[:-1])
    assert shares.shape == (*batch, *x[-2:])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("sd", [1, 15, 30, 100, 1000])
def test_wide_potentials(backend, dtype, form, sd):
    x = normal(5, 12, 8, sd=sd)
    check_filtered(backend, dtype, x, **given_as(form, uniform(11, 8, 8), uniform(8)))


@pytest.mark.parametrize("sd", [20, 1000])
def test_wide_log_transitions(backend, dtype, sd):
    x, options = wide_log_weights(sd, 9)
    check_filtered(backend, dtype, x, **options)


@pytest.mark.parametrize("centre", [1e4, -1e4])
def test_the_size_of_log_weights_has_no_part_in_errors(backend, dtype, centre):
    """Beside normalisers of 10,000, their sum is 10^6 after a hundred steps."""
    check_filtered(backend, dtype, normal(3, 100, 5) + centre, transitions=uniform(99, 5, 5) + 0.5)


def test_sums_to_log_partition(backend, dtype):
    x, P = normal(3, 12, 4, sd=3), uniform(4, 4)
    chain = alc.LogChain(
        *(backend.asarray(y, dtype) for y in [x]), transitions=backend.asarray(P, dtype)
    )
    logs = backend.read(chain.filtered().log_normalizers, dtype).astype(float)
    found = backend.read(chain.log_partition(), dtype)
    np.testing.assert_allclose(logs.sum(-1), found, rtol=1e3 * error_model.EPS[dtype])


@pytest.mark.parametrize("form", FORMS)
def test_lengths(backend, dtype, form):
    """What lies past the ends is never read, and both results are 0 there."""
    x, lengths = normal(4, 7, 3, sd=5), [7, 1, 4, 3]
    P = uniform(4, 6, 3, 3)
    options = {k: v for k, v in given_as(form, P, uniform(3)).items() if v is not None}
    rows = [
        check_filtered(
            backend,
            dtype,
            x[i, :n],
            **{k: v if v.ndim == 1 else v[i, : n - 1] for k, v in options.items()},
        )
        for i, n in enumerate(lengths)
    ]
    for i, n in enumerate(lengths):
        x[i, n:] = NAN
        for name in ("transitions", "log_transitions"):
            if name in options:
                options[name][i, n - 1 :] = NAN
    given = {name: backend.asarray(v, dtype) for name, v in options.items()}
    chain = alc.LogChain(backend.asarray(x, dtype), **given, lengths=lengths)
    shares, logs = (backend.read(part, dtype) for part in chain.filtered())
    tolerance = 64 * error_model.EPS[dtype]
    for i, n in enumerate(lengths):
        assert not np.any(shares[i, n:])
        assert not np.any(logs[i, n:])
        np.testing.assert_allclose(shares[i, :n], rows[i][0], rtol=tolerance, atol=tolerance)
        np.testing.assert_allclose(logs[i, :n], rows[i][1], rtol=tolerance, atol=tolerance)


def test_steps_that_no_state_can_explain(backend, dtype):
    x = np.zeros((2, 4, 2))
    x[0, 2] = -INF
    chain = alc.LogChain(
        backend.asarray(x, dtype), transitions=backend.asarray(np.eye(2), dtype), lengths=[4, 2]
    )
    shares, logs = (backend.read(part, dtype) for part in chain.filtered())
    assert shares.tolist() == [
        [[0.5, 0.5], [0.5, 0.5], [0, 0], [0, 0]],
        [[0.5, 0.5], [0.5, 0.5], [0, 0], [0, 0]],
    ]
    assert logs[0, 2:].tolist() == [-INF, -INF]
    assert logs[1, 1:].tolist() == [0, 0, 0]


def test_infinities_and_nan(backend, dtype):
    x = np.zeros((2, 3, 2))
    x[0, 1, 0], x[1, 1, 0] = INF, NAN
    chain = alc.LogChain(
        backend.asarray(x, dtype), transitions=backend.asarray(np.ones((2, 2)), dtype)
    )
    shares, logs = (backend.read(part, dtype) for part in chain.filtered())
    assert shares[:, 0].tolist() == [[0.5, 0.5]] * 2
    assert np.all(shares[0, 1:] == 0)
    assert np.all(logs[0, 1:] == INF)
    assert np.all(np.isnan(logs[1, 1:]))
    assert np.all(np.isnan(shares[1, 1:]))


@pytest.mark.parametrize("kind", ["float32", "float64"])
def test_long_chains(np_backend, kind):
    """Errors do not grow with the length: those of steps long ago are forgotten."""
    if np_backend.name.endswith("array"):
        pytest.skip("array operations take seconds")
    T, K = 100_000, 4
    x = normal(T, K).astype(kind)
    # The least entry is half of the largest: a step reduces differences to a sixth or less.
    P, initial = (0.5 + 0.5 * uniform(K, K)).astype(kind), uniform(K).astype(kind)
    found = alc.LogChain(x, transitions=P, initial=initial).filtered()
    exact = reference.long_filtered(x, P, initial)
    shares, logs = error_model.filtered_bounds(exact, 2, K, kind)
    assert_within(found.probabilities, exact.probabilities, shares)
    assert_within(found.log_normalizers, exact.log_normalizers, logs)


def test_without_states_or_rows(np_backend, dtype):
    for shape in ((2, 3, 0), (0, 3, 2)):
        K = shape[-1]
        chain = alc.LogChain(np.zeros(shape, dtype), transitions=np.ones((K, K), dtype))
        shares, logs = chain.filtered()
        assert shares.shape == shape
        assert logs.shape == shape[:-1]
        assert np.all(logs == -INF)
    chain = alc.LogChain(np.zeros((2, 3, 0)), transitions=np.ones((0, 0)), lengths=[3, 1])
    assert chain.filtered().log_normalizers.tolist() == [[-INF] * 3, [-INF, 0, 0]]


def test_derivatives(torch_backend):
    torch = torch_backend.xp
    P = uniform(4, 4)
    P[0, 1] = 0
    x, P, initial = (torch.from_numpy(a).requires_grad_() for a in (normal(2, 5, 4), P, uniform(4)))

    def written(x, P, initial):
        state, shares, logs = initial, [], []
        for i in range(5):
            state = (state if i == 0 else state @ P) * x[:, i].exp()
            total = state.sum(-1, keepdim=True)
            state = state / total
            shares.append(state)
            logs.append(total.log()[..., 0])
        return torch.stack(shares, -2), torch.stack(logs, -1)

    def ours(x, P, initial):
        return tuple(alc.LogChain(x, transitions=P, initial=initial).filtered())

    leaves = x, P, initial
    torch.testing.assert_close(ours(*leaves), written(*leaves))
    weights = [torch.rand(2, 5, 4, dtype=x.dtype), torch.rand(2, 5, dtype=x.dtype)]

    def loss(f):
        return lambda *given: sum(
            (w * y.sin()).sum() for w, y in zip(weights, f(*given), strict=True)
        )

    expected = torch.autograd.grad(loss(written)(*leaves), leaves)
    torch.testing.assert_close(torch.autograd.grad(loss(ours)(*leaves), leaves), expected)
    mapped = torch.func.vmap(torch.func.grad(loss(ours)), (0, None, None))
    rows = torch.stack([x, x + 1])
    again = torch.stack([torch.func.grad(loss(written))(row, P, initial) for row in rows])
    torch.testing.assert_close(mapped(rows, P, initial), again)
    tangent = torch.func.jvp(ours, leaves, leaves)[1]
    torch.testing.assert_close(tangent, torch.func.jvp(written, leaves, leaves)[1])
    lengths = torch.tensor([5, 2])
    f = lambda *given: tuple(  # noqa: E731
        alc.LogChain(given[0], transitions=P, log_initial=given[1], lengths=lengths).filtered()
    )
    torch.autograd.gradcheck(f, (x, initial.detach().log().requires_grad_()))


def test_derivatives_beyond_the_range_of_linear_weights(torch_backend):
    torch = torch_backend.xp
    x = torch.tensor([[0.0, -2000.0], [-2000.0, 0.0]], dtype=torch.float64, requires_grad=True)
    chain = alc.LogChain(x, transitions=torch.eye(2, dtype=torch.float64))
    filtered = chain.filtered()
    torch.testing.assert_close(
        filtered.probabilities[1].detach(), torch.full((2,), 0.5, dtype=x.dtype)
    )
    with pytest.raises(FloatingPointError, match="filtered"):
        filtered.log_normalizers.sum().backward()
