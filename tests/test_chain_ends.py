"""Weights of the last state, matrices [K, K] for all steps, and LogChain.posterior."""

import itertools

import numpy as np
import pytest

import arraylogchain as alc
from tests import error_model, gradient_reference, reference
from tests.checks import mentions
from tests.error_model import assert_within
from tests.gradient_checks import assert_gradient
from tests.test_chain import FORMS, normal, uniform

# torch 2.13 warns of its own code when forward mode is first used.
pytestmark = [
    pytest.mark.chains,
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
]

INF = np.inf
LENGTHS = [None, (3, 1, 4)]


def logs_of(weights):
    with np.errstate(divide="ignore"):
        return np.log(weights)


class Ends:
    """A chain with final weights, and each of its rows for a reference.

    Final weights multiply those of the last potentials, and so the references get them.
    """

    def __init__(self, backend, dtype, form, x, transitions, initial, final, lengths=None):
        self.backend, self.dtype = backend, dtype
        in_logs = form == "logs"
        given = {"transitions": transitions, "initial": initial, "final": final}
        if in_logs:
            given = {f"log_{name}": logs_of(weights) for name, weights in given.items()}
        self.arrays = {name: backend.asarray(a, dtype) for name, a in given.items()}
        x = backend.asarray(x, dtype)
        self.chain = alc.LogChain(x, **self.arrays, lengths=lengths)
        held = [reference.wide(backend.to_numpy(a)) for a in (x, *self.arrays.values())]
        self.x = held[0]
        P, self.initial, self.final = (w if in_logs else logs_of(w) for w in held[1:])
        n, T, K = self.x.shape
        self.edges = np.broadcast_to(P, (n, T - 1, K, K))
        self.final = np.broadcast_to(self.final, (n, K))
        self.lengths = [T] * n if lengths is None else lengths
        self.options = {
            "edges_in_logs": in_logs,
            "initial_in_logs": in_logs,
            "log_form_beyond": error_model.certificate(dtype),
        }

    def rows(self):
        """Yield numbers, lengths, and the arguments of the references."""
        for i, n in enumerate(self.lengths):
            x = self.x[i, :n].copy()
            x[-1] += self.final[i]
            yield i, n, (x, self.edges[i, : n - 1] if n > 1 else None, self.initial)

    def read(self, x, dtype=None):
        return self.backend.read(x, dtype or self.dtype)

    def check(self):
        log_z, marginals, counts = (self.read(part) for part in self.chain.posterior())
        apart = self.chain.log_partition(), self.chain.marginals()
        backward, entropy = self.chain.backward_messages(), self.chain.entropy()
        values, states, backward, entropy = (self.read(y) for y in (*apart, backward, entropy))
        K, total = self.x.shape[-1], np.zeros(self.edges.shape, np.longdouble)
        allowed = np.zeros_like(total)
        for i, n, arguments in self.rows():
            exact = reference.chain(*arguments, **self.options)
            bound = error_model.chain_bound(
                exact.log_partition, exact.partition_gap, n, K, self.dtype
            )
            posterior = gradient_reference.chain(*arguments, **self.options)
            of_states = error_model.posterior_bound(posterior.marginals, n, K, self.dtype)
            for found in (log_z, values):
                assert_within(found[i], exact.log_partition, bound)
            for found in (marginals, states):
                assert_gradient(found[i, :n], posterior.marginals, of_states)
                assert not np.any(found[i, n:])
            h = reference.entropy(*arguments, **self.options)
            assert_within(entropy[i], h.entropy, error_model.entropy_bound(*h, n, K, self.dtype))
            self.check_backward(backward[i, :n], posterior, self.final[i])
            if n > 1:
                total[i, : n - 1] = posterior.counts.exact
                allowed[i, : n - 1] = error_model.posterior_bound(
                    posterior.counts, n, K, self.dtype
                )
        self.check_counts(counts, total, allowed)
        self.check_counts(self.read(self.chain.expected_transitions()), total, allowed)

    def check_backward(self, found, posterior, final):
        n, K = found.shape
        exact = np.concatenate([posterior.backward[:-1], final[None]])
        gaps = np.concatenate([posterior.backward_gaps[:-1], np.zeros((1, K))])
        gaps = gaps + np.where(np.isfinite(final), np.abs(final), 0).max()
        bound = error_model.chain_bound(exact, gaps, np.arange(n, 0, -1)[:, None], K, self.dtype)
        assert_within(found, exact, bound)

    def check_counts(self, found, total, allowed):
        given = next(a for name, a in self.arrays.items() if name.endswith("transitions"))
        assert found.shape == tuple(given.shape)
        shared = tuple(
            axis
            for axis in range(4)
            if axis < 4 - found.ndim or found.shape[axis - 4] < total.shape[axis]
        )
        count = total.size // max(found.size, 1)
        bound = allowed.sum(shared) + error_model.eps_of(self.dtype) * count * total.sum(shared)
        assert_within(found, total.sum(shared).reshape(found.shape), bound.reshape(found.shape))

    def check_gradients(self):
        """Of the final weights, which are initial ones of the chain turned round."""
        _, pullback = alc.vjp.log_partition(self.chain)
        g = np.array([1.0, -2.0, 0.5])
        found = pullback(self.backend.asarray(g, self.dtype))
        final = self.read(found.final)
        K = self.x.shape[-1]
        parts = []
        for i, n, (x, edges, initial) in self.rows():
            x = self.x[i, :n][::-1].copy()
            x[-1] += initial
            turned = None if edges is None else np.swapaxes(edges[::-1], -1, -2)
            exact = gradient_reference.chain(x, turned, self.final[i], g[i], **self.options)
            parts.append(exact.initial)
        merge = np.sum if final.ndim == 1 else np.stack
        merged = [merge(parts_of, axis=0) for parts_of in list(zip(*parts, strict=True))[:-1]]
        expected = gradient_reference.Gradient(*merged, terms=3)
        bound = error_model.posterior_bound(expected, self.x.shape[1], K, self.dtype)
        largest = error_model.LARGEST_DERIVATIVE[error_model.compute_dtype(self.dtype)]
        assert_gradient(final, expected, bound, INF if self.options["edges_in_logs"] else largest)
        only = pullback(self.backend.asarray(g, self.dtype), {"final"})
        np.testing.assert_array_equal(self.read(only.final), final)
        assert only.log_potentials is only.transitions is only.initial is None

    def check_paths(self):
        path = self.chain.viterbi()
        states, weights = self.read(path.states, "int64"), self.read(path.log_weight)
        again = self.read(self.chain.log_weight(path.states))
        for i, n, arguments in self.rows():
            lattice = reference.lattice(*arguments)
            _, all_weights = reference.enumerate_paths(lattice)
            best = all_weights.max()
            exact, gap = reference.path_weights(states[i, :n], lattice)
            gap = gap + np.abs(np.where(np.isfinite(self.final[i]), self.final[i], 0)).max()
            bound = error_model.path_bound(exact, gap, n, self.x.shape[-1], self.dtype)
            assert_within(weights[i], exact, bound)
            assert_within(again[i], exact, bound)
            assert best == -INF or exact >= best - bound
            assert np.all(states[i, n:] == -1)


SHAPES = {
    "[K, K]": (((3, 4, 3)), (3, 3), (3, 3)),
    "one matrix": ((3, 4, 3), (1, 3, 3), (3,)),
    "each step": ((3, 4, 3), (3, 3, 3), (3, 3)),
    "each row": ((3, 4, 3), (3, 3, 3, 3), (3,)),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("lengths", LENGTHS, ids=["full", "ragged"])
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=list(SHAPES))
@pytest.mark.parametrize("sd", [pytest.param(1, marks=pytest.mark.exhaustive), 30, 1000])
def test_against_references(backend, dtype, form, lengths, shapes, sd):
    x, transitions, final = shapes
    rng = np.random.default_rng(3)
    P = uniform(*transitions, seed=1) * (rng.random(transitions) < 0.8)
    weights = uniform(*final, seed=2) * (rng.random(final) < 0.8)
    ends = Ends(backend, dtype, form, normal(*x, sd=sd), P, uniform(3, seed=4), weights, lengths)
    ends.check()
    ends.check_gradients()
    ends.check_paths()


@pytest.mark.parametrize("decades", [20, 36])
def test_final_weights_of_many_magnitudes(np_backend, dtype, decades):
    final = 10.0 ** np.random.default_rng(5).uniform(-decades, decades, (3, 3))
    ends = Ends(np_backend, dtype, "linear", normal(3, 4, 3), uniform(3, 3), uniform(3), final)
    ends.check()
    ends.check_gradients()
    ends.check_paths()


@pytest.mark.parametrize("lengths", LENGTHS, ids=["full", "ragged"])
def test_final_weights_that_vanish_beside_others(backend, dtype, lengths):
    """Their exponentials, relative to the largest, underflow at once; rows begin one by one."""
    final = 10.0 ** np.random.default_rng(5).uniform(-300, 300, (3, 3))
    x = normal(3, 4, 3)
    x[:, ::2, np.argmin(final[0])] = -INF
    ends = Ends(backend, dtype, "logs", x, uniform(3, 3), uniform(3), final, lengths)
    ends.check()
    ends.check_paths()


def test_by_mpmath(backend, dtype):
    """Final weights are potentials of one more step that every state leads to itself."""
    x, P, initial, final = normal(4, 3), uniform(3, 3), uniform(3), uniform(3, seed=9)
    names = {"transitions": P, "initial": initial, "final": final}
    given = {name: backend.asarray(a, dtype) for name, a in names.items()}
    found = backend.read(alc.LogChain(backend.asarray(x, dtype), **given).log_partition(), dtype)
    longer = np.concatenate([x, np.log(final)[None]])
    exact = reference.all_paths(longer, np.concatenate([[P] * 3, [np.eye(3)]]), initial)
    assert float(found) == pytest.approx(float(exact), rel=1e3 * error_model.EPS[dtype])


@pytest.mark.parametrize("form", FORMS)
def test_samples(np_backend, form):
    """Frequencies of all paths; those of weight 0 never come."""
    x, P, final = normal(3, 2), uniform(2, 2), np.array([0.2, 0.0])
    ends = Ends(np_backend, "float64", form, np.stack([x] * 3), P, uniform(2), final, (3, 2, 1))
    count = 20_000
    samples = ends.chain.sample(count, np.random.default_rng(0))
    for i, n, arguments in ends.rows():
        _, weights = reference.enumerate_paths(reference.lattice(*arguments))
        p = np.exp((weights - reference.logsumexp(weights, axis=-1)).astype(float))
        number = samples[:, i, :n] @ (2 ** np.arange(n)[::-1])
        found = np.bincount(number, minlength=2**n) / count
        assert np.all(found[p == 0] == 0)
        np.testing.assert_allclose(found, p, atol=5 / np.sqrt(count))


@pytest.mark.parametrize("name", ["transitions", "log_transitions"])
def test_one_matrix_is_that_of_every_step(backend, dtype, name):
    """[K, K], [1, K, K] and its copies for all steps give the same."""
    x, P = normal(2, 5, 3), uniform(3, 3)
    P = np.log(P) if name.startswith("log") else P
    plain, one = (
        alc.LogChain(backend.asarray(x, dtype), **{name: backend.asarray(p, dtype)})
        for p in (P, P[None])
    )
    for method in ("log_partition", "marginals", "forward_messages", "entropy"):
        found, expected = (backend.read(getattr(c, method)(), dtype) for c in (plain, one))
        np.testing.assert_array_equal(found, expected)
    for c, shape in ((plain, (3, 3)), (one, (1, 3, 3))):
        assert tuple(c.expected_transitions().shape) == shape
        assert tuple(c.posterior().expected_transitions.shape) == shape
        _, pullback = alc.vjp.log_partition(c)
        assert tuple(pullback(backend.asarray(np.ones(2), dtype)).transitions.shape) == shape
    assert "[3, 3]" in repr(plain)


@pytest.mark.parametrize("shape", [(2, 2), (1, 2, 2), (0, 2, 2), None])
def test_posterior_of_one_step(backend, dtype, shape):
    options = {} if shape is None else {"transitions": backend.asarray(np.ones(shape), dtype)}
    chain = alc.LogChain(backend.asarray(np.zeros((3, 1, 2)), dtype), **options)
    posterior = chain.posterior()
    assert posterior._fields == ("log_partition", "marginals", "expected_transitions")
    np.testing.assert_allclose(backend.read(posterior.log_partition, dtype), np.log(2.0), rtol=1e-3)
    assert np.all(backend.read(posterior.marginals, dtype) == 0.5)
    if shape is None:
        assert posterior.expected_transitions is None
    else:
        assert not np.any(backend.read(posterior.expected_transitions, dtype))
        assert tuple(posterior.expected_transitions.shape) == shape


@pytest.mark.parametrize("shape", [(0, 3, 2), (2, 3, 0)])
def test_posterior_of_nothing(np_backend, shape):
    K = shape[-1]
    found = alc.LogChain(np.zeros(shape), transitions=np.ones((K, K))).posterior()
    assert found.marginals.shape == shape
    assert np.all(found.log_partition == -INF)
    assert found.expected_transitions.shape == (K, K)
    assert not np.any(found.expected_transitions)


@pytest.mark.parametrize("workspace", [1 << 20, 1 << 22])
def test_workspace_changes_no_answer(np_backend, workspace):
    x, P, final = normal(20, 300, 16), uniform(16, 16), uniform(20, 16)
    results = [
        alc.LogChain(x, transitions=P, final=final, workspace=size) for size in (None, workspace)
    ]
    found = [(*c.posterior(), *c.filtered(), c.marginals()) for c in results]
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-14)


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


def test_padded_states_have_final_weights(backend, dtype):
    xs = [normal(2, seed=1), normal(3, seed=2)]
    edges, final = uniform(2, 3), uniform(3, seed=5)
    as_given = [[backend.asarray(a, dtype) for a in arrays] for arrays in (xs, [edges], [final])]
    padded = alc.pad_states(as_given[0], transitions=as_given[1], final=as_given[2][0])
    assert tuple(padded.final.shape) == (3,)
    chain = alc.LogChain(padded.log_potentials, transitions=padded.transitions, final=padded.final)
    exact = np.exp(xs[0]) @ edges @ (np.exp(xs[1]) * final)
    found = float(backend.read(chain.log_partition(), dtype))
    assert found == pytest.approx(np.log(exact), rel=1e2 * error_model.EPS[dtype])
    turned = alc.pad_states(
        as_given[0][::-1],
        log_transitions=[backend.asarray(np.log(edges.T), dtype)],
        log_final=as_given[0][0],
    )
    assert np.isneginf(backend.read(turned.final, dtype)).tolist() == [False, False, True]


def test_final_weights_are_printed():
    chain = alc.LogChain(np.zeros((2, 4, 3)), transitions=np.ones((3, 3)), final=np.ones((2, 3)))
    assert "final=[2, 3]" in repr(chain)
    for operation in ("posterior", "filtered"):
        assert chain.plan(operation).operation == operation
    with pytest.raises(ValueError, match=mentions("posterior", "filtered")):
        chain.plan("smoothed")


def test_all_paths_by_enumeration():
    """Everything at once, from the weights of all paths."""
    x, P, initial, final = normal(4, 3), uniform(3, 3), uniform(3), np.array([0.3, 0.0, 2.0])
    chain = alc.LogChain(x, transitions=P, initial=initial, final=final)
    paths = np.array(list(itertools.product(range(3), repeat=4)))
    weights = initial[paths[:, 0]] * np.exp(x[np.arange(4), paths].sum(1)) * final[paths[:, 3]]
    weights = weights * np.prod(P[paths[:, :-1], paths[:, 1:]], axis=1)
    p = weights / weights.sum()
    marginals = [[p[paths[:, t] == k].sum() for k in range(3)] for t in range(4)]
    counts = np.zeros((3, 3))
    for path, q in zip(paths, p, strict=True):
        np.add.at(counts, (path[:-1], path[1:]), q)
    posterior = chain.posterior()
    np.testing.assert_allclose(posterior.log_partition, np.log(weights.sum()), rtol=1e-13)
    np.testing.assert_allclose(posterior.marginals, marginals, atol=1e-14)
    np.testing.assert_allclose(posterior.expected_transitions, counts, rtol=1e-12)
    with np.errstate(divide="ignore"):
        np.testing.assert_allclose(chain.log_weight(paths), np.log(weights), rtol=1e-12)
    filtered = chain.filtered()
    total = filtered.log_normalizers.sum() + np.log(filtered.probabilities[-1] @ final)
    np.testing.assert_allclose(total, posterior.log_partition, rtol=1e-13)
