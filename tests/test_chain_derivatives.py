"""Derivatives of what torch differentiates of a chain, second ones too, and written formulas."""

import pytest

import arraylogchain as alc
from tests.chain_checks import ChainCase
from tests.chain_scenarios import FORMS, given_as, normal, uniform
from tests.test_chain_paths import some_states
from tests.test_torch_chain import (
    INF,
    SHAPES,
    arguments,
    check_derivatives,
    linear_and_logs,
    operation,
    operations,
)

# torch 2.13 warns of its own code when forward mode is first used.
pytestmark = [
    pytest.mark.chains,
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
]


# ------------------------------------------------------------------------------------ entropy


def written_entropy(torch, x, log_transitions, log_initial):
    """Return the entropy written out over all paths; sound where no state is closed."""
    T, K = x.shape
    paths = torch.cartesian_prod(*[torch.arange(K)] * T).reshape(-1, T)
    logs = log_initial[paths[:, 0]] + x[torch.arange(T), paths].sum(-1)
    steps = torch.arange(T - 1) % len(log_transitions)
    logs = logs + log_transitions[steps, paths[:, :-1], paths[:, 1:]].sum(-1)
    logs = torch.log_softmax(logs[torch.isfinite(logs)], 0)
    return -(logs.exp() * logs).sum()


@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("offset", [0.0, 1e4])
def test_entropy_agrees_with_all_paths(torch_backend, dtype, offset, steps):
    """Also beside closed states and edges, whose gradients are 0, and for large offsets."""
    torch = torch_backend.xp
    options = arguments(torch, ((5, 3), (steps, 3, 3), (3,)), logs=True, dtype=dtype)
    x, edges, start = options.values()
    with torch.no_grad():
        x.mul_(8).round_().div_(8)  # exact with an offset, in single precision as well
        x[3, 1], edges[0, 2, 0], start[2] = -INF, -INF, -INF
    wide = [v.detach().double().requires_grad_() for v in (x, edges, start)]
    expected = torch.autograd.grad(written_entropy(torch, *wide), wide)
    with torch.no_grad():
        x.add_(offset)
    gradients = torch.autograd.grad(alc.LogChain(**options).entropy(), (x, edges, start))
    tolerance = 2e-5 if dtype == "float32" else 1e-12
    for result, exact in zip(gradients, expected, strict=True):
        torch.testing.assert_close(result.double(), exact.nan_to_num(0), rtol=0, atol=tolerance)


@linear_and_logs
def test_entropy_of_chains_without_a_path(torch_backend, logs):
    torch = torch_backend.xp
    options = arguments(torch, SHAPES["batch of initial weights"], logs)
    with torch.no_grad():
        options["log_potentials"][0, 1] = -INF
    entropy = alc.LogChain(**options).entropy()
    assert torch.all(entropy[:, 0] == 0)
    assert torch.all(entropy[:, 1] > 0)
    gradients = torch.autograd.grad(entropy[:, 0].sum(), tuple(options.values()))
    assert not any(g.any() for g in gradients)


# ----------------------------------------------------------------------------------- filtered


def test_filtered_beyond_the_range_of_linear_weights(torch_backend):
    torch = torch_backend.xp
    x = torch.tensor([[0.0, -2000.0], [-2000.0, 0.0]], dtype=torch.float64, requires_grad=True)
    chain = alc.LogChain(x, transitions=torch.eye(2, dtype=torch.float64))
    filtered = chain.filtered()
    torch.testing.assert_close(
        filtered.probabilities[1].detach(), torch.full((2,), 0.5, dtype=x.dtype)
    )
    with pytest.raises(FloatingPointError, match="filtered"):
        filtered.log_normalizers.sum().backward()


# ------------------------------------------------------------------------- log weights of paths


@linear_and_logs
def test_what_is_large_and_cancels(torch_backend, logs):
    """With gradients as without: offsets that add up to nothing leave no rounding."""
    torch = torch_backend.xp
    options = arguments(torch, ((6, 3), (5, 3, 3), (3,)), logs)
    with torch.no_grad():
        options["log_potentials"] += torch.tensor([1e15, -1e15] * 3)[:, None]
    states = torch.from_numpy(some_states(4, 6, K=3))
    detached = alc.LogChain(**{name: x.detach() for name, x in options.items()})
    result = alc.LogChain(**options).log_weight(states).detach()
    torch.testing.assert_close(result, detached.log_weight(states), rtol=1e-15, atol=1e-15)


@linear_and_logs
def test_no_gradient_where_there_is_no_weight(torch_backend, logs, dtype):
    """Paths of weight 0, through any of the arrays, beside one that has a gradient."""
    torch = torch_backend.xp
    options = arguments(torch, ((3, 2), (2, 2, 2), (2,)), logs, dtype=dtype)
    closed = -INF if logs else 0.0
    x, transitions, initial = options.values()
    with torch.no_grad():
        x[2, 1], transitions[0, 0, 1], initial[1] = -INF, closed, closed
    states = torch.tensor([[0, 0, 1], [0, 1, 0], [1, 0, 0], [1, 1, 1], [0, 0, 0]])
    weight = alc.LogChain(**options).log_weight(states)
    assert torch.isneginf(weight).tolist() == [True] * 4 + [False]
    gradients = torch.autograd.grad(weight.sum(), (x, transitions, initial))
    expected = [torch.zeros_like(v) for v in (x, transitions, initial)]
    for t in range(3):
        expected[0][t, 0] = 1
    for t in range(2):
        expected[1][t, 0, 0] = 1 if logs else 1 / transitions.detach()[t, 0, 0]
    expected[2][0] = 1 if logs else 1 / initial.detach()[0]
    for result, exact in zip(gradients, expected, strict=True):
        torch.testing.assert_close(result, exact)


# ------------------------------------------------------------------------------- several lengths


@operations
@pytest.mark.parametrize("form", FORMS)
def test_lengths(torch_backend, name, form):
    """By all that rows read; what they do not read stays NaN, and has a gradient of 0."""
    torch = torch_backend.xp
    options = given_as(form, uniform(3, 3, 2, 2), uniform(2), uniform(3, 2))
    case = ChainCase(torch_backend, "float64", normal(3, 4, 2), lengths=[3, 1, 2], **options)
    given = case.arguments
    read = {n: ~torch.isnan(a) for n, a in given.items()}
    inner = {n: a[read[n]].requires_grad_() for n, a in given.items()}

    def make(**values):
        return case.make(**{n: given[n].masked_scatter(read[n], v) for n, v in values.items()})

    # torch's masked_scatter has no forward mode over a gradient.
    check_derivatives(torch, name, make, inner, fwd_over_rev=False)
    leaves = {n: a.clone().requires_grad_() for n, a in given.items()}
    f, _ = operation(name, case.make, leaves)
    loss = sum(x.sin().sum() for x in f(*leaves.values()))
    gradients = torch.autograd.grad(loss, tuple(leaves.values()))
    for gradient, mask in zip(gradients, read.values(), strict=True):
        assert torch.all(gradient[~mask] == 0)
        assert torch.all(torch.isfinite(gradient))
