"""torch.compile of models that use the library, and the operators that it sees."""

import importlib

import numpy as np
import pytest

import arraylogchain as alc

# torch's compiler and its checks warn of torch's own code.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),
    pytest.mark.filterwarnings("ignore::FutureWarning:torch"),
]


@pytest.fixture
def torch(torch_backend):
    torch_backend.xp._dynamo.reset()
    # Operators are not there before something is compiled.
    importlib.import_module("arraylogchain._torch.compiled")
    return torch_backend.xp


def normal(torch, *shape, seed=0, dtype="float32"):
    x = np.random.default_rng(seed).normal(size=shape)
    return torch.from_numpy(x).to(getattr(torch, dtype)).requires_grad_()


def gradients(torch, f, *args):
    """Return a value, and gradients to all arguments."""
    value = f(*args)
    return value.detach(), *torch.autograd.grad(value.sin().sum(), args)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_products(torch, backend):
    def model(a, b):
        x = alc.logmatmulexp(a, b)
        y = alc.matmul(x[0], b.T)
        best = alc.maxplus_matmul(y[0], b).values
        chains = alc.logchainexp([x, b.T, b]), alc.logchainexp(alc.matmul(x, b.T).detach() + y)
        return best.sum() + sum(chain.sum((-2, -1)) for chain in chains).sum(0)

    a, b = normal(torch, 3, 4, 4), normal(torch, 4, 4, seed=1)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    torch.testing.assert_close(gradients(torch, compiled, a, b), gradients(torch, model, a, b))


def make_model(torch):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.emit = torch.nn.Linear(5, 3)
            self.move = torch.nn.Parameter(torch.zeros(1, 3, 3))

        def forward(self, x):
            chain = alc.LogChain(self.emit(x), transitions=torch.softmax(self.move, -1))
            return chain.log_partition()

    torch.manual_seed(0)
    return Model()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_model_with_a_chain(torch, backend):
    model = make_model(torch)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    for batch in (2, 4):  # another size of batch, by which torch makes shapes dynamic
        x = normal(torch, batch, 6, 5).detach()
        grads = []
        for f in (model, compiled):
            model.zero_grad()
            f(x).mean().backward()
            grads.append([p.grad.clone() for p in model.parameters()])
        torch.testing.assert_close(*grads)
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), model(x))


def test_other_methods_of_a_chain(torch):
    """What a chain expects is differentiable under compilation too, messages are values."""
    x, P = normal(torch, 2, 4, 3), normal(torch, 1, 3, 3, seed=1)

    def expectations(x, P):
        chain = alc.LogChain(x, log_transitions=P)
        return chain.marginals().sin().sum(-1).sum(-1) + chain.expected_transitions().sum()

    compiled = torch.compile(expectations, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(
        gradients(torch, compiled, x, P), gradients(torch, expectations, x, P)
    )

    def messages(x, P):
        chain = alc.LogChain(x, log_transitions=P)
        return chain.forward_messages() + chain.backward_messages()

    compiled = torch.compile(messages, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(x, P), messages(x, P))
    plain = x.detach(), P.detach()
    torch.testing.assert_close(compiled(*plain), messages(*plain))
    with pytest.raises(RuntimeError, match="no autograd formula was registered"):
        torch.compile(messages, fullgraph=True, backend="eager")(x, P).sum().backward()


def test_posterior_and_filtered(torch):
    x, P = normal(torch, 2, 4, 3), normal(torch, 3, 3, seed=1)
    final = normal(torch, 2, 3, seed=2)
    lengths = torch.tensor([4, 2])

    def model(x, P, final):
        chain = alc.LogChain(x, log_transitions=P, log_final=final, lengths=lengths)
        posterior, filtered = chain.posterior(), chain.filtered()
        parts = (*posterior, *filtered, chain.log_weight(torch.zeros(4, dtype=torch.int64)))
        return torch.cat([part.sin().flatten() for part in parts])

    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    expected = gradients(torch, model, x, P, final)
    torch.testing.assert_close(gradients(torch, compiled, x, P, final), expected)


def chain_inputs(torch):
    x = normal(torch, 2, 1, 4, 3, dtype="float64")
    P = normal(torch, 1, 5, 1, 3, 3, dtype="float64")
    return x, P, None, normal(torch, 3, dtype="float64")


@pytest.mark.parametrize("name", ["matmul", "logmatmulexp", "maxplus_matmul"])
@pytest.mark.parametrize("dtypes", [("float32", "float32"), ("bfloat16", "float64")])
def test_operators_of_products(torch, name, dtypes):
    # The operators are made when the first tensor that needs them arrives.
    import arraylogchain._torch  # noqa: F401

    ops = torch.ops.arraylogchain
    a = normal(torch, 2, 1, 3, 4, dtype=dtypes[0])
    b = normal(torch, 1, 5, 4, 2, seed=1, dtype=dtypes[1])
    torch.library.opcheck(getattr(ops, name), (a, b, 1 << 20))
    out = kept = getattr(ops, name)(a, b, 1 << 20)
    if name == "maxplus_matmul":
        out, kept = out
    given = (a, b, None if name == "matmul" else kept.detach(), torch.ones_like(out))
    for wanted in ([True, False], [True, True]):
        torch.library.opcheck(getattr(ops, f"{name}_gradients"), (*given, wanted, 1 << 20))
    plain = [x if x is None else x.detach() for x in (*given, *given[:2])]
    arguments = (*plain[:4], [True, False, True], *plain[4:], 1 << 20)
    torch.library.opcheck(getattr(ops, f"{name}_second"), arguments)


def test_operators_of_chains(torch):
    import arraylogchain._torch  # noqa: F401

    ops = torch.ops.arraylogchain
    inputs, options = chain_inputs(torch), ([True, False, True], None, None)
    torch.library.opcheck(ops.log_partition, (*inputs, *options))
    g = torch.ones(2, 5, dtype=torch.float64, requires_grad=True)
    wanted = [True, True, False, True]
    torch.library.opcheck(ops.log_partition_gradients, (*inputs, None, g, wanted, *options))
    plain = [x if x is None else x.detach() for x in inputs]
    arguments = (*plain, None, g.detach(), [True, True, True, False, True], *plain, *options)
    torch.library.opcheck(ops.log_partition_second, arguments)
    torch.library.opcheck(ops.filtered, (*inputs, *options))
    for name in ("forward_messages", "backward_messages"):
        torch.library.opcheck(getattr(ops, name), (*plain, *options))


def forward_mode(torch, a, b, da):
    return torch.func.jvp(lambda x: alc.logmatmulexp(x, b), (a,), (da,))[1]


def dual_numbers(torch, a, b, da):
    forward_ad = torch.autograd.forward_ad
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(alc.logmatmulexp(forward_ad.make_dual(a, da), b)).tangent


def mapped_chain(torch, a, b, da):
    chain = lambda x: alc.LogChain(x, log_transitions=b[None, :, :4]).log_partition()  # noqa: E731
    return torch.func.vmap(torch.func.grad(chain))(torch.stack([a, da]))


@pytest.mark.parametrize("f", [forward_mode, dual_numbers, mapped_chain])
def test_transforms_within_compiled_functions_are_right(torch, f):
    """The compiler leaves them alone; as operators, forward mode would give zeros."""
    a, b, da = (normal(torch, 4, 4, seed=i).detach() for i in range(3))
    expected = f(torch, a, b, da)
    torch._dynamo.reset()
    with torch._dynamo.config.patch(suppress_errors=False):
        found = torch.compile(f, backend="eager")(torch, a, b, da)
    torch.testing.assert_close(found, expected)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(f, backend="eager", fullgraph=True)(torch, a, b, da)


def test_dual_numbers_handed_to_a_compiled_function(torch):
    a, b, da = (normal(torch, 4, 4, seed=i).detach() for i in range(3))
    compiled = torch.compile(alc.logmatmulexp, backend="eager")
    compiled(a, b)
    forward_ad = torch.autograd.forward_ad
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(compiled(forward_ad.make_dual(a, da), b)).tangent
    torch.testing.assert_close(tangent, forward_mode(torch, a, b, da))


def test_sequence_with_sizes_that_vary(torch):
    compiled = torch.compile(
        lambda *m: alc.logchainexp(list(m)), fullgraph=True, backend="eager", dynamic=True
    )
    for n in (2, 3, 5):
        shapes = (n, 4), (4, 6), (6, 1), (1, n)
        matrices = [normal(torch, *shape, seed=i).detach() for i, shape in enumerate(shapes)]
        torch.testing.assert_close(compiled(*matrices), alc.logchainexp(matrices))


def test_weights_of_states_that_do_not_exist(torch):
    """Compiled code cannot look at values, so that it raises nothing; no other state is taken."""
    x, edges = normal(torch, 3, 4), normal(torch, 1, 4, 4, seed=1)

    def model(x, edges, states):
        return alc.LogChain(x, log_transitions=edges).log_weight(states)

    states = torch.tensor([[0, 1, 3], [0, 1, -1], [0, 1, 4], [-4, 1, 2]])
    compiled = torch.compile(model, fullgraph=True, backend="eager")(x, edges, states)
    assert compiled.isnan().tolist() == [False, True, True, True]
    torch.testing.assert_close(compiled[0], model(x, edges, states[0]))
