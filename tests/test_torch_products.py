"""Derivatives of products of torch tensors: autograd, forward mode, transforms."""

import numpy as np
import pytest

import arraylogchain as alc
from tests import error_model

SHAPES = [
    ((3, 4), (4, 2)),
    ((4,), (4,)),
    ((2, 3, 4), (4, 2)),
    ((1, 3, 4), (5, 4, 2)),
    ((4,), (2, 4, 3)),
    ((2, 1, 3, 4), (3, 4, 1)),
]
IDS = [f"{a}-{b}".replace(" ", "") for a, b in SHAPES]


def maxplus(a, b):
    return alc.maxplus_matmul(a, b).values


PRODUCTS = [alc.matmul, alc.logmatmulexp, maxplus]
products = pytest.mark.parametrize("product", PRODUCTS, ids=["matmul", "logmatmulexp", "maxplus"])

# torch 2.13 warns of its own code when forward mode is first used.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")


@pytest.fixture
def torch(torch_backend):
    return torch_backend.xp


def normal(torch, *shape, seed=0, grad=True, dtype="float64"):
    x = np.random.default_rng(seed).normal(size=shape)
    return torch.from_numpy(x).to(getattr(torch, dtype)).requires_grad_(grad)


def formula(torch, product):
    """Return the product as torch operations; valid for moderate ranges."""

    def written(a, b):
        terms = a[..., :, :, None] + b[..., None, :, :]
        if product is alc.logmatmulexp:
            return torch.logsumexp(terms, -2)
        return torch.matmul(a, b) if product is alc.matmul else torch.amax(terms, -2)

    return written


@products
@pytest.mark.parametrize("shapes", SHAPES, ids=IDS)
def test_derivatives(torch, product, shapes):
    operands = [normal(torch, *shape, seed=i) for i, shape in enumerate(shapes)]
    assert torch.autograd.gradcheck(product, operands, check_forward_ad=True)
    if shapes in SHAPES[::2]:
        assert torch.autograd.gradgradcheck(product, operands, check_fwd_over_rev=True)


@products
def test_transforms(torch, product):
    func = torch.func
    a, b = normal(torch, 3, 4, grad=False), normal(torch, 4, 2, grad=False, seed=1)
    written = formula(torch, product)
    transforms = {
        "grad": func.grad,
        "forward over reverse": lambda f, argnums: func.jacfwd(func.jacrev(f, argnums), argnums),
        "reverse over reverse": lambda f, argnums: func.jacrev(func.jacrev(f, argnums), argnums),
        "reverse over forward": lambda f, argnums: func.jacrev(func.jacfwd(f, argnums), argnums),
    }
    for transform in transforms.values():
        for argnum in (0, 1):
            ours = transform(lambda a, b: product(a, b).sin().sum(), argnums=argnum)(a, b)
            theirs = transform(lambda a, b: written(a, b).sin().sum(), argnums=argnum)(a, b)
            torch.testing.assert_close(ours, theirs)


@products
def test_vmap(torch, product):
    """Values and gradients per sample, whichever operands are mapped, along whichever axis."""
    vmap, grad = torch.func.vmap, torch.func.grad
    a, b = normal(torch, 3, 5, 4, grad=False), normal(torch, 4, 2, 5, grad=False, seed=1)
    written = formula(torch, product)
    for in_dims, arguments in (
        ((1, 2), (a, b)),
        ((1, None), (a, b[..., 0])),
        ((None, 2), (a[:, 0], b)),
    ):
        for f in (product, grad(lambda a, b: product(a, b).sin().sum(), argnums=(0, 1))):
            ours = vmap(f, in_dims)(*arguments)
            if f is product:
                theirs = vmap(written, in_dims)(*arguments)
            else:
                gradient = grad(lambda a, b: written(a, b).sin().sum(), argnums=(0, 1))
                theirs = vmap(gradient, in_dims)(*arguments)
            torch.testing.assert_close(ours, theirs)
    twice = vmap(vmap(product, (0, None)), (None, 2))(a.movedim(1, 0), b)
    assert twice.shape == (5, 5, 3, 2)
    torch.testing.assert_close(twice[3, 2], product(a[:, 2], b[..., 3]))


def test_matmul_has_derivatives_of_every_order(torch):
    a, b = normal(torch, 2, 2, grad=False), normal(torch, 2, 2, grad=False, seed=1)

    def third(product):
        return torch.func.grad(
            lambda a: torch.func.grad(
                lambda a: torch.func.grad(lambda a: product(a, b).sin().sum())(a).sin().sum()
            )(a).sum()
        )(a)

    torch.testing.assert_close(third(alc.matmul), third(torch.matmul))


def test_third_derivatives_of_logmatmulexp_are_refused(torch):
    a, b = normal(torch, 2, 2), normal(torch, 2, 2)
    (first,) = torch.autograd.grad(alc.logmatmulexp(a, b).sin().sum(), a, create_graph=True)
    (second,) = torch.autograd.grad(first.sin().sum(), a, create_graph=True)
    with pytest.raises(NotImplementedError, match="third derivatives of logmatmulexp"):
        second.sum().backward()
    a = a.detach()
    with pytest.raises(NotImplementedError, match="jacfwd"):
        torch.func.jacfwd(torch.func.jacfwd(lambda a: alc.logmatmulexp(a, b.detach())))(a)


@products
def test_only_what_is_needed(torch, product):
    """Only operands that require gradients get them."""
    for need_a, need_b in ((True, False), (False, True)):
        a = normal(torch, 3, 4, grad=need_a)
        b = normal(torch, 4, 2, grad=need_b, seed=1)
        product(a, b).sin().sum().backward()
        for x, needed in ((a, need_a), (b, need_b)):
            assert (x.grad is not None) == needed
            assert not needed or x.grad.shape == x.shape
        leaf = a if need_a else b
        leaves = [x.detach().requires_grad_() for x in (a, b)]
        written = formula(torch, product)(*leaves).sin().sum()
        expected = torch.autograd.grad(written, leaves)[0 if need_a else 1]
        torch.testing.assert_close(leaf.grad, expected)


@products
def test_without_gradients(torch, product):
    a, b = normal(torch, 3, 4), normal(torch, 4, 2)
    with torch.no_grad():
        assert not product(a, b).requires_grad
    with torch.inference_mode():
        assert not product(a, b).requires_grad
    assert not product(a.detach(), b.detach()).requires_grad
    assert product(a, b).requires_grad
    assert not alc.maxplus_matmul(a, b).indices.requires_grad


@pytest.mark.parametrize("product", PRODUCTS[:2], ids=["matmul", "logmatmulexp"])
def test_changes_in_place_are_noticed(torch, product):
    a, b = normal(torch, 3, 4), normal(torch, 4, 2)
    shifted = a + 0
    out = product(shifted, b).sum()
    shifted.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()


@products
@pytest.mark.parametrize("kind", ["float32", "float16", "bfloat16"])
def test_dtypes(torch, product, kind):
    """Gradients have the dtypes of the operands, mixed ones too."""
    a, b = normal(torch, 3, 4, dtype=kind), normal(torch, 4, 2, seed=1, dtype="float32")
    product(a, b).sum().backward()
    assert a.grad.dtype == a.dtype
    assert b.grad.dtype == b.dtype
    wide = [x.detach().double().requires_grad_() for x in (a, b)]
    formula(torch, product)(*wide).sum().backward()
    tolerance = dict.fromkeys(("rtol", "atol"), 1e-05 if kind == "float32" else 0.01)
    torch.testing.assert_close(a.grad.double(), wide[0].grad, **tolerance)
    torch.testing.assert_close(b.grad.double(), wide[1].grad, **tolerance)
    (first,) = torch.autograd.grad(alc.logmatmulexp(a, a.mT).sum(), a, create_graph=True)
    assert torch.autograd.grad(first.sum(), a)[0].dtype == a.dtype


@products
def test_autocast(torch, product):
    a, b = normal(torch, 30, 40, dtype="float32"), normal(torch, 40, 20, dtype="float32", seed=1)
    half = torch.bfloat16
    expected = product(a, b)
    half_product = product(a.to(half), b)
    with torch.autocast("cpu", dtype=half):
        out = product(a, b)
        grads = torch.autograd.grad(out.sum(), (a, b))
        # bfloat16 tensors are computed by torch itself, which autocast must not reach.
        torch.testing.assert_close(product(a.to(half), b), half_product, rtol=0, atol=0)
        torch.testing.assert_close(product(a.detach(), b.detach()), out.detach(), rtol=0, atol=0)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, expected, rtol=0, atol=0)
    torch.testing.assert_close(grads, torch.autograd.grad(expected.sum(), (a, b)), rtol=0, atol=0)


INF = float("inf")


def masked(torch):
    """Return operands where rows, columns and whole sums are -inf."""
    a, b = normal(torch, 4, 5, grad=False), normal(torch, 5, 3, grad=False, seed=1)
    a[1] = -INF
    a[2, ::2] = b[1::2, 1] = -INF  # every term of entry (2, 1) is zero
    b[:, 2] = -INF
    return a.requires_grad_(), b.requires_grad_()


def test_minus_infinity(torch):
    """Gradients to -inf, and through it, are 0; others equal gradients without these terms."""
    a, b = masked(torch)
    out = alc.logmatmulexp(a, b)
    assert (out.isinf().sum(), out.isnan().sum()) == (7, 0)
    alive = torch.isfinite(out)
    loss = torch.where(alive, out, 0).sin().sum()
    grads = torch.autograd.grad(loss, (a, b), create_graph=True)
    # In weights instead of logarithms there are no infinities.
    weights = [x.detach().exp().requires_grad_() for x in (a, b)]
    product = weights[0] @ weights[1]
    logs = torch.where(alive, torch.where(alive, product, 1).log(), 0)
    weight_gradients = torch.autograd.grad(logs.sin().sum(), weights, create_graph=True)
    for x, w, grad, grad_w in zip((a, b), weights, grads, weight_gradients, strict=True):
        torch.testing.assert_close(grad, grad_w * w)
        assert (grad[x.isinf()] == 0).all()
    # The same for second derivatives, with all terms.
    seconds = torch.autograd.grad(sum(x.cos().sum() for x in grads), (a, b))
    products = [
        (grad_w * w).cos().sum() for grad_w, w in zip(weight_gradients, weights, strict=True)
    ]
    expected = torch.autograd.grad(sum(products), weights)
    for x, w, second, grad_w in zip((a, b), weights, seconds, expected, strict=True):
        torch.testing.assert_close(second, grad_w * w)
        assert (second[x.isinf()] == 0).all()


def test_minus_infinity_is_never_nan(torch):
    """Cotangents and tangents of 1 everywhere, entries that are -inf included."""
    a, b = masked(torch)
    out = alc.logmatmulexp(a, b)
    grads = torch.autograd.grad(out, (a, b), torch.ones_like(out), create_graph=True)
    seconds = torch.autograd.grad(grads, (a, b), [torch.ones_like(x) for x in grads])
    _, tangent = torch.func.jvp(
        alc.logmatmulexp, (a.detach(), b.detach()), (torch.ones_like(a), torch.ones_like(b))
    )
    for x in (*grads, *seconds, tangent):
        assert torch.isfinite(x).all()
    assert (tangent[out.isinf()] == 0).all()
    torch.testing.assert_close(tangent[out.isfinite()], torch.full_like(out, 2)[out.isfinite()])
    no_term = torch.full((2, 2), -INF, requires_grad=True)
    alc.logmatmulexp(no_term, no_term).sum().backward()
    assert (no_term.grad == 0).all()


def test_where_exponentials_underflow(torch):
    """Softmax weights are right for terms whose exponentials underflow in float32."""
    a = torch.tensor([[0.0, -110.0]], requires_grad=True)
    b = torch.tensor([[-110.0], [0.0]], requires_grad=True)
    out = alc.logmatmulexp(a, b)
    (grad_a,) = torch.autograd.grad(out.sum(), a, create_graph=True)
    torch.testing.assert_close(grad_a, torch.full((1, 2), 0.5))
    (second,) = torch.autograd.grad(grad_a[0, 0], a)
    torch.testing.assert_close(second, torch.tensor([[0.25, -0.25]]))


def not_finite(torch):
    """Return operands with a sum without terms, a sum that is NaN, and others."""
    a = torch.tensor([[-INF, -INF], [INF, 0.0], [1.0, 2.0]])
    return a, torch.tensor([[0.0, -INF], [0.0, 0.0]])


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_maxplus_through_what_is_not_finite(torch, compiled):
    """Gradients are 0 there, as in the pullback; the returned indices do not change."""
    a, b = not_finite(torch)
    plain, pullback = alc.vjp.maxplus_matmul(a, b)
    product = torch.compile(alc.maxplus_matmul, backend="eager") if compiled else alc.maxplus_matmul
    arguments = [x.clone().requires_grad_() for x in (a, b)]
    out = product(*arguments)
    assert out.indices.tolist() == plain.indices.tolist()
    grads = torch.autograd.grad(out.values.sum(), arguments)
    torch.testing.assert_close(grads, pullback(torch.ones(3, 2)))
    assert [x.tolist() for x in grads] == [[[0, 0], [0, 0], [0, 2]], [[0, 0], [1, 1]]]


def test_maxplus_through_what_is_not_finite_in_transforms(torch):
    func, (a, b) = torch.func, not_finite(torch)
    tangents = torch.ones_like(a), torch.full_like(b, 3.0)
    expected = torch.tensor([[0.0, 0.0], [0.0, 0.0], [4.0, 4.0]])
    torch.testing.assert_close(func.jvp(maxplus, (a, b), tangents)[1], expected)
    for transform in (func.jacrev, func.jacfwd):
        summed = transform(maxplus)(a, b).sum((0, 1))
        assert summed.tolist() == [[0, 0], [0, 0], [0, 2]]
    mapped = func.vmap(func.grad(lambda a, b: maxplus(a, b).sum()), (0, None))(a.expand(2, 3, 2), b)
    assert mapped.tolist() == [[[0, 0], [0, 0], [0, 2]]] * 2

    def squared_gradient(a):
        return func.grad(lambda a: (maxplus(a, b)[2] ** 2).sum())(a).sum()

    second = func.grad(squared_gradient)(a)
    assert second.tolist() == [[0, 0], [0, 0], [0, 4]]
    a = a.requires_grad_()
    values = maxplus(a, b)
    weights = torch.ones_like(values).requires_grad_()
    (a_gradient,) = torch.autograd.grad(values, a, weights, create_graph=True)
    (weight_gradients,) = torch.autograd.grad(a_gradient.sum(), weights)
    assert weight_gradients.tolist() == [[0, 0], [0, 0], [1, 1]]


@pytest.mark.parametrize("name", ["float32", "float64"])
@pytest.mark.parametrize("offset", [1e4, 1e6])
def test_tangent_of_wide_entries_far_from_zero(torch, name, offset):
    """A common offset must not add rounding errors to entries that are recomputed."""
    a, b = (normal(torch, *s, seed=i, grad=False) for i, s in enumerate(((9, 12), (12, 7))))
    dtype = getattr(torch, name)
    a, b = (a * 1000 + offset).to(dtype), (b * 1000 - offset / 3).to(dtype)
    da, db = (normal(torch, *x.shape, seed=2, grad=False).to(dtype) for x in (a, b))
    _, result = torch.func.jvp(alc.logmatmulexp, (a, b), (da, db))

    def wide(x):
        return x.numpy().astype(np.longdouble)

    terms = wide(a)[:, :, None] + wide(b)
    below = terms - terms.max(axis=1, keepdims=True)
    p = np.exp(below)
    p /= p.sum(axis=1, keepdims=True)
    tangents = wide(da)[:, :, None] + wide(db)
    exact = (p * tangents).sum(axis=1)
    # The relative error of p is eps G, with G the distance of entries to the maxima.
    a_below, b_below = wide(a) - wide(a).max(1)[:, None], wide(b) - wide(b).max(0)
    gap = 2 * np.abs(a_below[:, :, None] + b_below)
    count = error_model.roundings(12) + 32
    # The tangents of both operands are summed separately.
    size = np.abs(wide(da))[:, :, None] + np.abs(wide(db))
    bound = error_model.EPS[name] * (p * size * (gap + count) + 2).sum(axis=1)
    error_model.assert_within(result.numpy(), exact, bound)


@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_chain_of_matrices(torch, count):
    stack = normal(torch, 2, count, 3, 3)
    torch.testing.assert_close(alc.logchainexp(stack), alc.logchainexp(stack.detach()))
    if count:
        assert torch.autograd.gradcheck(alc.logchainexp, (stack,), check_forward_ad=True)
        assert torch.autograd.gradgradcheck(alc.logchainexp, (stack,), check_fwd_over_rev=True)
    mapped = torch.func.vmap(alc.logchainexp)(stack.detach())
    torch.testing.assert_close(mapped, alc.logchainexp(stack.detach()))


def test_sequence_of_matrices(torch):
    shapes = ((2, 3), (4, 3, 5), (5, 5), (5, 1))
    arguments = [normal(torch, *shape, seed=i) for i, shape in enumerate(shapes)]

    def product(*matrices):
        return alc.logchainexp(matrices)

    expected = alc.logchainexp([x.detach() for x in arguments])
    torch.testing.assert_close(product(*arguments), expected)
    assert torch.autograd.gradcheck(product, arguments, check_forward_ad=True)


def test_chain_of_matrices_far_from_zero(torch):
    """The integer parts of logarithms do not enter rounding errors."""
    stack = normal(torch, 64, 3, 3, dtype="float32", grad=False)
    far = (stack + 1_000_003).requires_grad_()
    rounded = (far.detach().double() - 1_000_003).requires_grad_()
    out, expected = alc.logchainexp(far), alc.logchainexp(rounded) + 64 * 1_000_003
    torch.testing.assert_close(out.double(), expected, rtol=2**-24, atol=0)
    grad, exact = (torch.autograd.grad(y.sum(), x)[0] for y, x in ((out, far), (expected, rounded)))
    torch.testing.assert_close(grad.double(), exact, rtol=1e-4, atol=1e-5)


def test_errors(torch):
    """Errors are as without autograd; test_errors.py has more."""
    a, b = normal(torch, 3, 4), normal(torch, 4, 2)
    for error, word, call in (
        (TypeError, "library", lambda: alc.logmatmulexp(a, b.detach().numpy())),
        (ValueError, r"\(4, 2\) and b of shape \(4, 2\) do not fit", lambda: alc.matmul(b, b)),
        (TypeError, "b must have dtype .* int64", lambda: alc.logmatmulexp(a, b.detach().long())),
        (TypeError, r"s\[1\] must .* int64", lambda: alc.logchainexp([a, b.detach().long()])),
        (ValueError, "sparse", lambda: alc.logeinsumexp("ij,jk->ik", a, b.detach().to_sparse())),
        (ValueError, "does not fit the matrix before", lambda: alc.logchainexp([a, a])),
        (ValueError, "n, K, K", lambda: alc.logchainexp(a)),
    ):
        with pytest.raises(error, match=word):
            call()
    batched = torch.ones(2, 3, 2, dtype=a.dtype)
    with pytest.raises(NotImplementedError, match="is_grads_batched"):
        torch.autograd.grad(alc.logmatmulexp(a, b), a, batched, is_grads_batched=True)


@products
@pytest.mark.parametrize("shapes", [((0, 3), (3, 2)), ((3, 0), (0, 2)), ((0, 2, 3), (3, 1))])
def test_zero_sizes(torch, product, shapes):
    a, b = (normal(torch, *shape) for shape in shapes)
    grads = torch.autograd.grad(product(a, b).sum(), (a, b))
    assert [x.shape for x in grads] == [a.shape, b.shape]
    assert not any(x.any() for x in grads)


def log_partition(x, log_transitions):
    return alc.LogChain(x, log_transitions=log_transitions).log_partition()


@pytest.mark.parametrize("operation", [*PRODUCTS, log_partition], ids=lambda f: f.__name__)
def test_checkpoints_let_go(torch, operation):
    """Tensors that a checkpoint recomputes are not kept, and gradients are the same."""
    stored = []

    def compute(a, b):
        doubled = a * 2
        stored.append(doubled.untyped_storage()._weak_ref())
        return operation(doubled, b)

    a, b = normal(torch, 6, 4), normal(torch, 4, 4, seed=1)
    out = torch.utils.checkpoint.checkpoint(compute, a, b, use_reentrant=False)
    assert torch.UntypedStorage._expired(stored[0])
    expected = torch.autograd.grad(compute(a, b).sum(), (a, b))
    for result, right in zip(torch.autograd.grad(out.sum(), (a, b)), expected, strict=True):
        assert torch.equal(result, right)
    # Inputs that were saved as copies are not read from their original memory.
    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        doubled = a.detach() * 2
        out = operation(doubled, b)
        doubled.zero_()
        assert torch.equal(torch.autograd.grad(out.sum(), b)[0], expected[1])
