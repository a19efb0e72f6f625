"""First and second derivatives of a chain by torch, and of written formulas."""

import numpy as np
import pytest

import arraylogchain as alc
from tests.chain_checks import ChainCase
from tests.chain_scenarios import FORMS, normal, uniform, weights_as
from tests.test_chain_paths import some_states
from tests.test_torch_chain import (
    INF,
    OPERATIONS,
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


@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("offset", [0.0, 1e4])
def test_entropy_agrees_with_all_paths(torch_backend, dtype, offset, steps):
    """Some states and edges are closed, with gradients of 0, and offsets may be large."""
    torch = torch_backend.xp
    options = arguments(torch, ((5, 3), (steps, 3, 3), (3,)), logs=True, dtype=dtype)
    x, edges, start = options.values()
    with torch.no_grad():
        x.mul_(8).round_().div_(8)  # exact with an offset, in single precision as well
        x[3, 1], edges[0, 2, 0], start[2] = -INF, -INF, -INF
    wide = [v.detach().double().requires_grad_() for v in (x, edges, start)]
    far = wide[0], wide[1].expand(4, 3, 3), wide[2]
    (entropy,) = by_paths(torch, "entropy", *far)
    expected = torch.autograd.grad(entropy, wide)
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
    """Offsets whose sum is 0 leave no rounding error, with gradients and without."""
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
    """Paths have weight 0 through any of the arrays, except one, which has a gradient."""
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
    """Entries that no row reads are NaN, and have gradients of 0."""
    torch = torch_backend.xp
    options = weights_as(form, uniform(3, 3, 2, 2), uniform(2), uniform(3, 2))
    case = ChainCase(torch_backend, "float64", normal(3, 4, 2), lengths=[3, 1, 2], **options)
    arrays = case.arguments
    read = {n: ~torch.isnan(a) for n, a in arrays.items()}
    inner = {n: a[read[n]].requires_grad_() for n, a in arrays.items()}

    def make(**values):
        return case.make(**{n: arrays[n].masked_scatter(read[n], v) for n, v in values.items()})

    # torch's masked_scatter has no forward mode over a gradient.
    check_derivatives(torch, name, make, inner, fwd_over_rev=False)
    leaves = {n: a.clone().requires_grad_() for n, a in arrays.items()}
    f, _ = operation(name, case.make, leaves)
    loss = sum(x.sin().sum() for x in f(*leaves.values()))
    gradients = torch.autograd.grad(loss, tuple(leaves.values()))
    for gradient, mask in zip(gradients, read.values(), strict=True):
        assert torch.all(gradient[~mask] == 0)
        assert torch.all(torch.isfinite(gradient))


# ----------------------------------------------------------------------------------- wide ranges

# Logarithms of weights that are zero, subnormal, or close to it.
MASKS = [-INF, -1000.0, -745.0, -711.0, -705.0, -600.0]


def by_paths(torch, name, x, edges, start):
    """Return the results of a method from the log weights of all paths and parts of paths.

    -inf as in the method; there and where a path has no weight, derivatives are 0.
    """
    T, K = x.shape

    def paths_of(first, stop):
        return torch.cartesian_prod(*[torch.arange(K)] * (stop - first)).reshape(-1, stop - first)

    def log_sums(logs, states):
        """Return log sums over the paths through each state."""
        each = [logs[(states == k) & torch.isfinite(logs)] for k in range(K)]
        return torch.stack([y.logsumexp(0) if len(y) else y.sum() - INF for y in each])

    def logs_of(states, first, potentials):
        times = torch.arange(first, first + states.shape[-1])
        steps = times[:-1]
        logs = potentials[times, states].sum(-1)
        return logs + edges[steps, states[:, :-1], states[:, 1:]].sum(-1)

    def forward(t):
        states = paths_of(0, t + 1)
        return log_sums(logs_of(states, 0, x) + start[states[:, 0]], states[:, -1])

    def backward(t):
        states = paths_of(t, T)
        later = torch.where(torch.arange(T)[:, None] > t, x, 0)
        return log_sums(logs_of(states, t, later), states[:, 0])

    def normalizer(t):
        logs = forward(t)
        logs = logs[torch.isfinite(logs)]
        return logs.logsumexp(0) if len(logs) else torch.tensor(-INF, dtype=x.dtype)

    paths = paths_of(0, T)
    logs = logs_of(paths, 0, x) + start[paths[:, 0]]
    paths, logs = paths[torch.isfinite(logs)], logs[torch.isfinite(logs)]
    p, one_hot = torch.softmax(logs, 0), torch.eye(K, dtype=x.dtype)[paths]
    if name == "forward_messages":
        return [torch.stack([forward(t) for t in range(T)])]
    if name == "backward_messages":
        return [torch.stack([backward(t) for t in range(T)])]
    if name == "filtered":
        sums = torch.stack([normalizer(t) for t in range(T)])
        has_path = torch.isfinite(sums)
        each = [torch.softmax(forward(t), 0) if has_path[t] else 0 * x[t] for t in range(T)]
        previous = torch.cat([sums.new_zeros(1), sums[:-1]])
        return [torch.stack(each), torch.where(has_path, sums - previous, -INF)]
    if name == "entropy":
        return [-(p * torch.log_softmax(logs, 0)).sum()]
    if name == "marginals":
        return [torch.einsum("p,ptk->tk", p, one_hot)]
    return [torch.einsum("p,ptk,ptj->tkj", p, one_hot[:, :-1], one_hot[:, 1:])]


def gradients_or_none(torch, results, cotangents, inputs):
    """Return gradients, or None if FloatingPointError is raised."""
    total = sum(
        (x.masked_fill(x.isinf(), 0) * g).sum() for x, g in zip(results, cotangents, strict=True)
    )
    try:
        return torch.autograd.grad(total, inputs, materialize_grads=True)
    except FloatingPointError:
        return None


PATH_METHODS = ["forward_messages", "backward_messages", "filtered", "entropy", "marginals"]
PATH_METHODS += ["expected_transitions"]


@pytest.mark.parametrize("offset", [0.0, 1e9], ids=["", "large offset"])
@pytest.mark.parametrize("name", PATH_METHODS)
def test_gradients_of_masked_chains_are_right_or_refused(torch_backend, name, offset):
    torch, refused, number = torch_backend.xp, 0, 25
    offsets = torch.tensor([offset, 0, -offset], dtype=torch.float64)[:, None]
    for seed in range(number):
        rng = np.random.default_rng(seed)
        inputs = []
        for shape in ((3, 2), (2, 2, 2), (2,)):
            values = rng.normal(size=shape)
            is_masked = rng.random(shape) < 0.4
            values[is_masked] = rng.choice(MASKS, size=is_masked.sum())
            inputs.append(torch.from_numpy(values))
        far = [(inputs[0] + offsets).requires_grad_(), *(y.requires_grad_() for y in inputs[1:])]
        # The same inputs after rounding together with the offsets.
        centered = [(far[0].detach() - offsets).requires_grad_(), *far[1:]]
        expected = by_paths(torch, name, *centered)
        cotangents = [torch.from_numpy(rng.normal(size=y.shape)) for y in expected]
        chain = alc.LogChain(far[0], log_transitions=far[1], log_initial=far[2])
        results = getattr(chain, name)()
        results = results if isinstance(results, tuple) else (results,)
        gradients = gradients_or_none(torch, results, cotangents, far)
        exact = gradients_or_none(torch, expected, cotangents, centered)
        refused += gradients is None
        for ours, theirs in zip(gradients or (), exact, strict=gradients is not None):
            torch.testing.assert_close(ours, theirs.nan_to_num(0), rtol=1e-11, atol=1e-11)
    assert refused < number


@pytest.mark.parametrize("offset", [0.0, 1e9], ids=["", "beside a large normalizer"])
@pytest.mark.parametrize("name", ["forward_messages", "backward_messages", "filtered", "entropy"])
def test_gradient_of_a_subnormal_weight_is_a_number_or_refused(torch_backend, name, offset):
    torch = torch_backend.xp
    for mask in (-700.0, -711.0, -730.0, -745.0):
        x = torch.tensor([[offset] * 2, [0, 0], [0, mask]], dtype=torch.float64, requires_grad=True)
        results = getattr(alc.LogChain(x, transitions=torch.eye(2, dtype=x.dtype)), name)()
        results = results if isinstance(results, tuple) else (results,)
        gradients = gradients_or_none(torch, results, [torch.ones_like(y) for y in results], (x,))
        assert gradients is None or torch.isfinite(gradients[0]).all()
        assert gradients is not None or mask < -700 or name == "forward_messages"


def test_message_that_nothing_but_its_value_lost_is_refused(torch_backend):
    """A forward message is subnormal, a backward message -inf: the reference has NaN there."""
    torch = torch_backend.xp
    x = torch.tensor([[0, 0], [0, -INF], [0, 0]], dtype=torch.float64, requires_grad=True)
    start, end = (torch.tensor(y, dtype=x.dtype) for y in ([-745.0, 0.0], [-INF, 0.0]))
    chain = alc.LogChain(
        x, transitions=torch.eye(2, dtype=x.dtype), log_initial=start, log_final=end
    )
    gradients = gradients_or_none(torch, [chain.backward_messages()], [torch.ones(3, 2)], (x,))
    assert gradients is None or torch.isfinite(gradients[0]).all()


def test_filtered_probabilities_without_a_path_have_no_gradient(torch_backend):
    torch = torch_backend.xp
    P = torch.tensor([[0.0, 0.0], [0.5, 0.5]], dtype=torch.float64, requires_grad=True)
    start = torch.tensor([1.0, 0.0], dtype=torch.float64)
    filtered = alc.LogChain(
        torch.zeros(2, 2, dtype=P.dtype), transitions=P, initial=start
    ).filtered()
    assert not filtered.probabilities[1].any()
    (gradient,) = torch.autograd.grad((filtered.probabilities[1] * torch.tensor([1, 2])).sum(), P)
    assert not gradient.any()


@pytest.mark.parametrize("name", ["marginals", "filtered", "entropy", "log_partition"])
def test_lost_path_that_a_tiny_weight_multiplies_is_refused(torch_backend, name):
    """A path of 1e-330 of the sum has a derivative of 1e-130 / 1e-200 by the weight of its edge."""
    torch = torch_backend.xp
    x = torch.tensor([[-760.0, 0.0], [0.0, -460.0]], dtype=torch.float64, requires_grad=True)
    P = torch.tensor([[1e-200, 1.0], [1e-200, 1e-200]], dtype=x.dtype, requires_grad=True)
    final = torch.tensor([-460.0, 0.0], dtype=x.dtype)
    result = getattr(alc.LogChain(x, transitions=P, log_final=final), name)()
    if name == "log_partition":
        (result,) = torch.autograd.grad(result, x, create_graph=True)
    result = result[0] if isinstance(result, tuple) else result
    cotangent = torch.arange(1, 1 + result.numel(), dtype=x.dtype).reshape(result.shape)
    with pytest.raises(FloatingPointError, match=f"{name} .* range too widely"):
        torch.autograd.grad(result, P, cotangent)


@pytest.mark.parametrize("name", [x for x in OPERATIONS if x != "expected_transitions"])
def test_unknown_row_hides_no_gradient_of_others(torch_backend, name):
    """A row with NaN makes its own gradients NaN, and raises no error."""
    torch = torch_backend.xp
    options = arguments(torch, SHAPES["one matrix"], logs=True)
    with torch.no_grad():
        options["log_potentials"][0, 1, 0] = np.nan
    f, _ = operation(name, alc.LogChain, options)
    total = sum(y[-1].sum() for y in f(*options.values()) if y.shape[0] > 1)
    (gradient,) = torch.autograd.grad(total, options["log_potentials"])
    assert torch.isfinite(gradient[1]).all()
