"""Derivatives of chains of several lengths: nothing flows from past the ends, NaN least of all."""

import pytest

import arraylogchain as alc
from tests.conftest import make_backend
from tests.test_chain import normal
from tests.test_lengths import FEW, SHAPES, ragged
from tests.test_torch_chain import in_logs

# torch 2.13 warns of its own code when forward mode is first used.
pytestmark = [
    pytest.mark.chains,
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
]


def torch_case(torch, shapes, logs, dtype="float64"):
    case = ragged(make_backend("torch"), dtype, shapes, ("logs" if logs else "linear",) * 2)
    names = ("log_potentials", "transitions", "log_transitions", "initial", "log_initial")
    given = {
        name: a.requires_grad_()
        for name, a in zip(names, case.given.arrays, strict=True)
        if a is not None
    }
    return case, given, shapes[3]


@pytest.mark.parametrize("name", FEW)
@in_logs
def test_autograd_is_vjp(torch_backend, name, logs, dtype):
    torch = torch_backend.xp
    case, given, lengths = torch_case(torch, SHAPES[name], logs, dtype)
    g = torch.from_numpy(normal(*case.batch)).to(getattr(torch, dtype))
    out = alc.LogChain(**given, lengths=lengths).log_partition()
    found = torch.autograd.grad((out * g).sum(), tuple(given.values()))
    detached = {key: a.detach() for key, a in given.items()}
    _, pullback = alc.vjp.log_partition(alc.LogChain(**detached, lengths=lengths))
    for ours, expected in zip(found, (e for e in pullback(g) if e is not None), strict=True):
        torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize(
    "method", ["log_partition", "marginals", "expected_transitions", "entropy", "log_weight"]
)
@in_logs
def test_derivatives(torch_backend, method, logs):
    """By all that rows read; what they do not read stays garbage, and has a gradient of 0."""
    torch = torch_backend.xp
    shapes = ((3, 4, 2), (3, 3, 2, 2), (2,), [3, 1, 2])
    _, given, lengths = torch_case(torch, shapes, logs)
    states = torch.zeros(3, 4, dtype=torch.int64)
    read = [torch.isfinite(a.detach()) | torch.isneginf(a.detach()) for a in given.values()]
    inner = tuple(a.detach()[m].requires_grad_() for a, m in zip(given.values(), read, strict=True))

    def call(*values):
        arrays = [
            a.detach().masked_scatter(m, v)
            for a, m, v in zip(given.values(), read, values, strict=True)
        ]
        chain = alc.LogChain(**dict(zip(given, arrays, strict=True)), lengths=lengths)
        return chain.log_weight(states) if method == "log_weight" else getattr(chain, method)()

    assert torch.autograd.gradcheck(call, inner)
    if method == "log_partition":
        assert torch.autograd.gradgradcheck(call, inner)
    chain = alc.LogChain(**given, lengths=lengths)
    out = chain.log_weight(states) if method == "log_weight" else getattr(chain, method)()
    gradients = torch.autograd.grad((out * torch.randn_like(out)).sum(), tuple(given.values()))
    for gradient, mask in zip(gradients, read, strict=True):
        assert torch.all(gradient[~mask] == 0)
        assert torch.all(torch.isfinite(gradient))
