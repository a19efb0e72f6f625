"""The representation of a chain."""

import numpy as np

import arraylogchain as alc
from tests.chain_scenarios import normal, uniform


def test_print_of_arrays():
    x, options = np.zeros((5, 6, 4), np.float32), {"transitions": np.ones((1, 4, 4), np.float32)}
    chain = alc.LogChain(x, **options)
    assert repr(chain) == (
        "LogChain(log_potentials=[5, 6, 4], transitions=[1, 4, 4], float32, numpy)"
    )
    chain = alc.LogChain(x, **options, log_initial=np.zeros(4), lengths=[6, 1, 2, 3, 4])
    assert repr(chain) == (
        "LogChain(log_potentials=[5, 6, 4], transitions=[1, 4, 4], log_initial=[4], lengths=[5], "
        "float64, numpy)"
    )


def test_print_elsewhere(backend):
    x, transitions = (backend.asarray(a, "float32") for a in (normal(3, 2), uniform(1, 2, 2)))
    text = repr(alc.LogChain(x, transitions=transitions))
    assert all(x in text for x in ("float32", backend.xp.__name__, str(backend.device or "")))


def test_print_of_tensors_that_require_grad(torch_backend):
    """Nothing is computed, and no values are read: arrays inside a transform have none."""
    torch = torch_backend.xp
    x, transitions = torch.zeros(5, 3, 2, requires_grad=True), torch.ones(1, 2, 2)
    chain = alc.LogChain(x, transitions=transitions)
    expected = (
        "LogChain(log_potentials=[5, 3, 2], transitions=[1, 2, 2], float32, torch cpu, "
        "requires_grad=True)"
    )
    assert repr(chain) == expected
    seen = []

    def value(x):
        seen.append(repr(alc.LogChain(x, transitions=transitions)))
        return x.sum()

    torch.func.vmap(value)(x.detach())
    within = expected.replace("[5, 3, 2]", "[3, 2]").replace(", requires_grad=True", "")
    assert seen == [within]
