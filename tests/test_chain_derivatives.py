"""Derivatives of what torch differentiates of a chain, second ones too, and written formulas."""

import numpy as np
import pytest

import arraylogchain as alc
from tests.chain_checks import ChainCase
from tests.chain_scenarios import FORMS, given_as, normal, uniform
from tests.test_torch_chain import INF, SHAPES, arguments, chains, in_logs, method

# torch 2.13 warns of its own code when forward mode is first used.
pytestmark = [
    pytest.mark.chains,
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
]


# ------------------------------------------------------------------------------------ entropy


@chains
@in_logs
def test_entropy(torch_backend, shapes, logs):
    torch = torch_backend.xp
    given = arguments(torch, shapes, logs)
    entropy, args = method("entropy", given), tuple(given.values())
    detached = alc.LogChain(**{name: v.detach() for name, v in given.items()})
    torch.testing.assert_close(entropy(*args).detach(), detached.entropy())
    assert torch.autograd.gradcheck(entropy, args)


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
    given = arguments(torch, ((5, 3), (steps, 3, 3), (3,)), logs=True, dtype=dtype)
    x, edges, start = given.values()
    with torch.no_grad():
        x.mul_(8).round_().div_(8)  # exact with an offset, in single precision as well
        x[3, 1], edges[0, 2, 0], start[2] = -INF, -INF, -INF
    wide = [v.detach().double().requires_grad_() for v in (x, edges, start)]
    expected = torch.autograd.grad(written_entropy(torch, *wide), wide)
    with torch.no_grad():
        x.add_(offset)
    gradients = torch.autograd.grad(alc.LogChain(**given).entropy(), (x, edges, start))
    tolerance = 2e-5 if dtype == "float32" else 1e-12
    for found, exact in zip(gradients, expected, strict=True):
        torch.testing.assert_close(found.double(), exact.nan_to_num(0), rtol=0, atol=tolerance)


@in_logs
def test_entropy_of_chains_without_a_path(torch_backend, logs):
    torch = torch_backend.xp
    given = arguments(torch, SHAPES["batch of initial weights"], logs)
    with torch.no_grad():
        given["log_potentials"][0, 1] = -INF
    entropy = alc.LogChain(**given).entropy()
    assert torch.all(entropy[:, 0] == 0)
    assert torch.all(entropy[:, 1] > 0)
    gradients = torch.autograd.grad(entropy[:, 0].sum(), tuple(given.values()))
    assert not any(g.any() for g in gradients)


# ----------------------------------------------------------------------------------- filtered


def test_filtered(torch_backend):
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


def some_states(*shape, K, seed=3):
    return np.random.default_rng(seed).integers(0, K, shape)


@in_logs
def test_what_is_large_and_cancels(torch_backend, logs):
    """With gradients as without: offsets that add up to nothing leave no rounding."""
    torch = torch_backend.xp
    given = arguments(torch, ((6, 3), (5, 3, 3), (3,)), logs)
    with torch.no_grad():
        given["log_potentials"] += torch.tensor([1e15, -1e15] * 3)[:, None]
    states = torch.from_numpy(some_states(4, 6, K=3))
    detached = alc.LogChain(**{name: x.detach() for name, x in given.items()})
    found = alc.LogChain(**given).log_weight(states).detach()
    torch.testing.assert_close(found, detached.log_weight(states), rtol=1e-15, atol=1e-15)


@chains
@in_logs
@pytest.mark.parametrize("more", [(), (5,)])
def test_log_weight(torch_backend, shapes, logs, more):
    torch = torch_backend.xp
    given = arguments(torch, shapes, logs)
    K = shapes[0][-1]
    batch = alc.LogChain(**{n: v.detach() for n, v in given.items()}).log_partition().shape
    states = torch.from_numpy(some_states(*more, *batch, shapes[0][-2], K=K))

    def weight(*args):
        return alc.LogChain(**dict(zip(given, args, strict=True))).log_weight(states)

    assert torch.autograd.gradcheck(weight, tuple(given.values()))
    assert torch.autograd.gradgradcheck(weight, tuple(given.values()))


@in_logs
def test_no_gradient_where_there_is_no_weight(torch_backend, logs, dtype):
    """Paths of weight 0, through any of the arrays, beside one that has a gradient."""
    torch = torch_backend.xp
    given = arguments(torch, ((3, 2), (2, 2, 2), (2,)), logs, dtype=dtype)
    closed = -INF if logs else 0.0
    x, transitions, initial = given.values()
    with torch.no_grad():
        x[2, 1], transitions[0, 0, 1], initial[1] = -INF, closed, closed
    states = torch.tensor([[0, 0, 1], [0, 1, 0], [1, 0, 0], [1, 1, 1], [0, 0, 0]])
    weight = alc.LogChain(**given).log_weight(states)
    assert torch.isneginf(weight).tolist() == [True] * 4 + [False]
    gradients = torch.autograd.grad(weight.sum(), (x, transitions, initial))
    expected = [torch.zeros_like(v) for v in (x, transitions, initial)]
    for t in range(3):
        expected[0][t, 0] = 1
    for t in range(2):
        expected[1][t, 0, 0] = 1 if logs else 1 / transitions.detach()[t, 0, 0]
    expected[2][0] = 1 if logs else 1 / initial.detach()[0]
    for found, exact in zip(gradients, expected, strict=True):
        torch.testing.assert_close(found, exact)


# --------------------------------------------------------------------- final weights, posterior


def test_posterior_is_differentiable(torch_backend):
    torch = torch_backend.xp
    leaves = [
        torch.from_numpy(a).requires_grad_()
        for a in (normal(2, 4, 3), uniform(3, 3), uniform(2, 3))
    ]

    def f(x, P, final):
        return tuple(alc.LogChain(x, transitions=P, final=final).posterior())

    def apart(x, P, final):
        chain = alc.LogChain(x, transitions=P, final=final)
        return chain.log_partition(), chain.marginals(), chain.expected_transitions()

    torch.testing.assert_close(f(*leaves), apart(*leaves))
    assert torch.autograd.gradcheck(f, leaves)
    mapped = torch.func.vmap(f, (0, None, 0))(leaves[0], leaves[1], leaves[2])
    torch.testing.assert_close(mapped[:2], f(*leaves)[:2])
    assert mapped[2].shape == (2, 3, 3)
    found = torch.func.grad(
        lambda final: (
            alc.LogChain(leaves[0].detach(), transitions=leaves[1].detach(), final=final)
            .log_partition()
            .sum()
        )
    )(leaves[2].detach())
    _, pullback = alc.vjp.log_partition(
        alc.LogChain(leaves[0].detach(), transitions=leaves[1].detach(), final=leaves[2].detach())
    )
    torch.testing.assert_close(found, pullback(torch.ones(2, dtype=found.dtype)).final)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("lengths", [None, [4, 2]])
def test_derivatives_to_final_weights(torch_backend, form, lengths):
    torch = torch_backend.xp
    weights = [uniform(3, 3), uniform(3), uniform(2, 3, seed=4)]
    weights = [np.log(w) for w in weights] if form == "logs" else weights
    prefix = "log_" if form == "logs" else ""
    leaves = [torch.from_numpy(a).requires_grad_() for a in (normal(2, 4, 3), *weights)]
    states = torch.tensor([[0, 1, 2, 1], [2, 0, 0, 0]])

    def f(x, P, initial, final):
        chain = alc.LogChain(
            x,
            **{f"{prefix}transitions": P, f"{prefix}initial": initial, f"{prefix}final": final},
            lengths=lengths,
        )
        return chain.log_partition(), chain.entropy(), chain.log_weight(states), chain.marginals()

    assert torch.autograd.gradcheck(f, leaves)


@pytest.mark.parametrize("lengths", [None, [4, 2]])
def test_forward_mode(torch_backend, lengths):
    torch = torch_backend.xp
    arrays = normal(2, 4, 3), uniform(3, 3), uniform(2, 3, seed=4)
    leaves = [torch.from_numpy(a).requires_grad_() for a in arrays]

    def f(x, P, final):
        return alc.LogChain(x, transitions=P, log_final=final, lengths=lengths).log_partition()

    assert torch.autograd.gradcheck(f, leaves, check_forward_ad=True)


# ------------------------------------------------------------------------------- several lengths


@pytest.mark.parametrize(
    "name", ["log_partition", "marginals", "expected_transitions", "entropy", "log_weight"]
)
@pytest.mark.parametrize("form", FORMS)
def test_lengths(torch_backend, name, form):
    """By all that rows read; what they do not read stays NaN, and has a gradient of 0."""
    torch = torch_backend.xp
    options = given_as(form, uniform(3, 3, 2, 2), uniform(2), uniform(3, 2))
    case = ChainCase(torch_backend, "float64", normal(3, 4, 2), lengths=[3, 1, 2], **options)
    given, states = case.given, torch.zeros(3, 4, dtype=torch.int64)
    read = {n: ~torch.isnan(a) for n, a in given.items()}
    inner = tuple(a[read[n]].requires_grad_() for n, a in given.items())

    def call(*values):
        pairs = zip(given.items(), values, strict=True)
        chain = case.make(**{n: a.masked_scatter(read[n], v) for (n, a), v in pairs})
        return chain.log_weight(states) if name == "log_weight" else getattr(chain, name)()

    assert torch.autograd.gradcheck(call, inner)
    if name == "log_partition":
        assert torch.autograd.gradgradcheck(call, inner)
    leaves = {n: a.clone().requires_grad_() for n, a in given.items()}
    chain = case.make(**leaves)
    out = chain.log_weight(states) if name == "log_weight" else getattr(chain, name)()
    gradients = torch.autograd.grad((out * torch.randn_like(out)).sum(), tuple(leaves.values()))
    for gradient, mask in zip(gradients, read.values(), strict=True):
        assert torch.all(gradient[~mask] == 0)
        assert torch.all(torch.isfinite(gradient))
