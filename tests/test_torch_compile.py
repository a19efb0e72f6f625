"""torch.compile and torch.export of models that use the library: every call is one operator.

Other traces, which would record results as constants, raise errors.
"""

import importlib
import io

import numpy as np
import pytest

import arraylogchain as alc
from arraylogchain._torch import FUNCTIONS
from arraylogchain.chain import PLANNED
from tests.checks import run_python

# torch's compiler and its checks warn of torch's own code.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),
    pytest.mark.filterwarnings("ignore::FutureWarning:torch"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]


@pytest.fixture
def torch(torch_backend):
    torch_backend.xp._dynamo.reset()
    return torch_backend.xp


def normal(torch, *shape, seed=0, dtype="float32"):
    x = np.random.default_rng(seed).normal(size=shape)
    return torch.from_numpy(x).to(getattr(torch, dtype)).requires_grad_()


def gradients(torch, f, *args):
    """Return a value, and gradients to all arguments."""
    value = f(*args)
    return value.detach(), *torch.autograd.grad(value.sin().sum(), args)


def test_products(torch):
    def model(a, b):
        x = alc.logmatmulexp(a, b)
        y = alc.matmul(x[0], b.T)
        best = alc.maxplus_matmul(y[0], b).values
        y = alc.logeinsumexp("ij,kj,il->kl", y, b, y)
        y = y + alc.maxplus_einsum("ij,ij->ij", y, b) + alc.logeinsumexp("ij->ij", y)
        chains = alc.logchainexp([x, b.T, b]), alc.logchainexp(alc.matmul(x, b.T).detach() + y)
        return best.sum() + sum(chain.sum((-2, -1)) for chain in chains).sum(0)

    a, b = normal(torch, 3, 4, 4), normal(torch, 4, 4, seed=1)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
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


def test_model_with_a_chain(torch):
    model = make_model(torch)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
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


KINDS = {"float16": [4, 2], "bfloat16": 3, "float32": (4, 2), "float64": None}


@pytest.mark.parametrize("kind", KINDS)
def test_methods_of_a_chain(torch, kind):
    """Methods are differentiable under compilation too; lengths are a list, a number, a tensor."""
    x, P = normal(torch, 2, 4, 3, dtype=kind), normal(torch, 3, 3, seed=1, dtype=kind)
    final, lengths = normal(torch, 2, 3, seed=2, dtype=kind), KINDS[kind]
    options = {"lengths": torch.tensor(lengths) if isinstance(lengths, tuple) else lengths}
    options |= {"initial": [0.1, 1, 2], "workers": 1, "workspace": 2**21}

    def model(x, P, final):
        chain = alc.LogChain(x, log_transitions=P, log_final=final, **options)
        parts = [*chain.posterior(), *chain.filtered(), chain.marginals(), chain.log_partition()]
        parts += [chain.expected_transitions(), chain.forward_messages(), chain.entropy()]
        parts += [chain.backward_messages(), chain.log_weight([0, 1, 2, 1]), *chain.viterbi()]
        parts += [chain.log_probability([0, 1, 2, 1])]
        return torch.cat([part.nan_to_num(neginf=0).sin().flatten() for part in parts])

    compiled = torch.compile(model, backend="eager", fullgraph=True)
    results = [gradients(torch, f, x, P, final) for f in (compiled, model)]
    # Gradients of the ten parts may be added in another order.
    torch.testing.assert_close(*results, rtol=0, atol=10 * torch.finfo(x.dtype).eps)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x, P, final), model(x, P, final))


def forward_mode(torch, a, b, da):
    return torch.func.jvp(lambda x: alc.logmatmulexp(x, b), (a,), (da,))[1]


def dual_numbers(torch, a, b, da):
    forward_ad = torch.autograd.forward_ad
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(alc.logmatmulexp(forward_ad.make_dual(a, da), b)).tangent


def mapped_chain(torch, a, b, da):
    chain = lambda x: alc.LogChain(x, log_transitions=b[None, :, :4]).log_partition()  # noqa: E731
    return torch.func.vmap(chain)(torch.stack([a, da]))


@pytest.mark.parametrize("f", [forward_mode, mapped_chain])
def test_transforms_within_compiled_functions_are_graph_breaks(torch, f):
    """Operators would give zeros in forward mode."""
    a, b, da = (normal(torch, 4, 4, seed=i).detach() for i in range(3))
    expected = f(torch, a, b, da)
    torch._dynamo.reset()
    with torch._dynamo.config.patch(suppress_errors=False):
        result = torch.compile(f, backend="eager")(torch, a, b, da)
        torch.testing.assert_close(result, expected)
        torch._dynamo.reset()
        with pytest.raises(torch._dynamo.exc.Unsupported, match="has no forward mode and no vmap"):
            torch.compile(f, backend="eager", fullgraph=True)(torch, a, b, da)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_dual_numbers_handed_to_a_compiled_function_are_refused(torch, backend):
    a, b, da = (normal(torch, 4, 4, seed=i).detach() for i in range(3))
    compiled = torch.compile(alc.logmatmulexp, backend=backend)
    compiled(a, b)
    forward_ad = torch.autograd.forward_ad
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="has no forward mode"):
        compiled(forward_ad.make_dual(a, da), b)
    with pytest.raises(NotImplementedError, match="has no forward mode"):
        torch.compile(dual_numbers, backend=backend)(torch, a, b, da)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_second_derivatives_get_the_error_of_torch(torch, backend):
    a, b = normal(torch, 3, 4), normal(torch, 4, 2)
    out = torch.compile(alc.logmatmulexp, backend=backend, fullgraph=True)(a, b)
    (gradient,) = torch.autograd.grad(out.sum(), a, create_graph=True)
    with pytest.raises(RuntimeError, match=r"no autograd formula|not currently .* double backward"):
        gradient.sum().backward()


def test_sequence_with_sizes_that_vary(torch):
    options = {"backend": "aot_eager", "dynamic": True, "fullgraph": True}
    compiled = torch.compile(lambda *m: alc.logchainexp(list(m)), **options)
    for n in (2, 3, 5):
        shapes = (n, 4), (4, 6), (6, 1), (1, n)
        matrices = [normal(torch, *shape, seed=i).detach() for i, shape in enumerate(shapes)]
        torch.testing.assert_close(compiled(*matrices), alc.logchainexp(matrices))


@pytest.mark.parametrize("name", ["log_partition", "logmatmulexp", "logchainexp"])
def test_pullbacks(torch, name):
    def model(x):
        chain = alc.LogChain(x[0], log_transitions=x[1])
        arguments = {
            "log_partition": [chain],
            "logmatmulexp": [x, x],
            "logchainexp": [[x[0], x[1]]],
        }
        value, pullback = getattr(alc.vjp, name)(*arguments[name])
        return pullback(torch.ones_like(value))[0]

    x = normal(torch, 2, 3, 3).detach()
    torch.testing.assert_close(torch.compile(model, backend="eager")(x), model(x))


@pytest.mark.parametrize("name", ["sample", "plan"])
def test_methods_without_operators_are_graph_breaks(torch, name):
    with pytest.raises(torch._dynamo.exc.Unsupported, match="disable"):
        torch.compile(CALLS[name], backend="eager", fullgraph=True)(normal(torch, 2, 2))
    chain = torch.compile(chain_of, backend="eager", fullgraph=True)(normal(torch, 2, 2))
    assert chain.sample(3).shape == (3, 2)
    assert chain.plan().steps == 2


def test_arrays_of_numpy_are_graph_breaks(torch):
    x = np.eye(2)
    compiled = torch.compile(lambda x: CALLS["marginals"](x) + 1, backend="eager")
    np.testing.assert_array_equal(compiled(x), CALLS["marginals"](x) + 1)


def test_methods_have_operators(torch):
    assert FUNCTIONS.keys() & set(PLANNED) == set(PLANNED) - {"sample"}


def inputs_of(torch, name):
    """Return the tensors, the number of paths, and the words that an operator takes."""
    x, P, final = normal(torch, 2, 4, 3), normal(torch, 3, 3, seed=1), normal(torch, 3, seed=2)
    if "einsum" in name:
        return [x, P, x], None, ["a", "b", "c", repr({"equation": "...ij, jk, ...lk -> k..."})]
    if name not in PLANNED:
        words = ["matrices[0]", "matrices[1]"] if name == "logchainexp" else ["a", "b"]
        return [x, P], None, [*words, "{}"]
    arguments = {"log_potentials": x, "log_transitions": P, "log_final": final}
    arguments["lengths"] = torch.tensor([4, 2])
    if name in ("log_weight", "log_probability"):
        arguments["states"] = torch.zeros(5, 1, 4, dtype=torch.int64)
    is_path = name in ("viterbi", "best_paths")
    tensors = [y.detach() if is_path else y for y in arguments.values()]
    num_paths = 3 if name == "best_paths" else None
    return tensors, num_paths, [*arguments, repr({"workers": 1})]


def test_operators_obey_the_rules_of_torch(torch):
    """Results without values, gradients, and graphs of any size agree with the operators."""
    operators = importlib.import_module("arraylogchain._torch.operators")
    for name in FUNCTIONS:
        torch.library.opcheck(
            getattr(torch.ops.arraylogchain, name).default, inputs_of(torch, name)
        )
    (a, b), *options = inputs_of(torch, "logmatmulexp")
    arguments = "logmatmulexp", [torch.ones(2, 4, 3)], [1], [a.detach(), b.detach()], *options
    torch.library.opcheck(operators.gradients, arguments)


@pytest.mark.exhaustive
def test_inductor_compiles_what_surrounds_a_call(torch):
    def model(x, P):
        return alc.LogChain(2 * x, log_transitions=P.T).marginals().cumsum(-2).exp()

    x, P = normal(torch, 2, 4, 3), normal(torch, 3, 3, seed=1)
    compiled = torch.compile(model, fullgraph=True)
    torch.testing.assert_close(gradients(torch, compiled, x, P), gradients(torch, model, x, P))


def test_states_that_do_not_exist_are_refused(torch):
    x, edges = normal(torch, 3, 4), normal(torch, 1, 4, 4, seed=1)

    def model(x, edges, states):
        return alc.LogChain(x, log_transitions=edges).log_weight(states)

    compiled = torch.compile(model, backend="eager", fullgraph=True)
    states = torch.tensor([[0, 1, 3], [0, 1, 2]])
    torch.testing.assert_close(compiled(x, edges, states), model(x, edges, states))
    with pytest.raises(ValueError, match="states must be from 0 to 3, got -1"):
        compiled(x, edges, torch.tensor([0, 1, -1]))


@pytest.mark.parametrize("n", [0, -1, 2.5, True, None, "3", [2]])
def test_numbers_of_paths_are_checked_by_the_operator(torch, n):
    compiled = torch.compile(lambda x: chain_of(x).best_paths(n), backend="eager", fullgraph=True)
    with pytest.raises((TypeError, ValueError), match="num_paths must be a"):
        compiled(torch.eye(2))


def test_best_paths_and_samples(torch):
    x, edges = normal(torch, 2, 5, 3), normal(torch, 3, 3, seed=1)

    def model(x, edges):
        chain = alc.LogChain(x * 2, log_transitions=edges, lengths=[5, 3])
        return *chain.viterbi(), *chain.best_paths(2), chain.sample(4, rng=0)

    for result, expected in zip(
        torch.compile(model, backend="eager")(x, edges), model(x, edges), strict=True
    ):
        assert torch.equal(result, expected)
        assert not result.requires_grad


def chain_of(x):
    return alc.LogChain(x, log_transitions=x)


METHODS = ["log_partition", "forward_messages", "backward_messages", "marginals", "entropy"]
METHODS += ["expected_transitions", "posterior", "filtered", "viterbi", "sample", "plan"]
CALLS = {name: lambda x, name=name: getattr(chain_of(x), name)() for name in METHODS}
CALLS |= {
    "best_paths": lambda x: chain_of(x).best_paths(2),
    "log_weight": lambda x: chain_of(x).log_weight([0, 1]),
    "log_probability": lambda x: chain_of(x).log_probability([0, 1]),
    "matmul": lambda x: alc.matmul(x, x),
    "logmatmulexp": lambda x: alc.logmatmulexp(x, x),
    "maxplus_matmul": lambda x: alc.maxplus_matmul(x, x).values,
    "logchainexp": lambda x: alc.logchainexp([x, x]),
    "logeinsumexp": lambda x: alc.logeinsumexp("ij,jk->ik", x, x),
    "maxplus_einsum": lambda x: alc.maxplus_einsum("ij,jk->ik", x, x),
    "vjp.log_partition": lambda x: alc.vjp.log_partition(chain_of(x))[0],
    "vjp.matmul": lambda x: alc.vjp.matmul(x, x)[0],
    "vjp.logmatmulexp": lambda x: alc.vjp.logmatmulexp(x, x)[0],
    "vjp.maxplus_matmul": lambda x: alc.vjp.maxplus_matmul(x, x)[0].values,
    "vjp.logchainexp": lambda x: alc.vjp.logchainexp([x, x])[0],
    "vjp.logeinsumexp": lambda x: alc.vjp.logeinsumexp("ij,jk->ik", x, x)[0],
}


def jit_trace(torch, f, x):
    return torch.jit.trace(f, x, check_trace=False)


def trace_of_operators(torch, f, x):
    return importlib.import_module("torch.fx.experimental.proxy_tensor").make_fx(lambda y: f(y))(x)


def functionalized(torch, f, x):
    return torch.func.functionalize(f)(x)


@pytest.mark.filterwarnings("ignore:Converting a tensor:")
@pytest.mark.parametrize("trace", [jit_trace, trace_of_operators, functionalized])
@pytest.mark.parametrize("name", CALLS)
def test_trace_of_a_call_raises_instead_of_recording_constants(torch, trace, name):
    for grad in (False, True):
        x = torch.tensor([[1.0, 0.0], [0.0, 1.0]], requires_grad=grad)
        with pytest.raises(ValueError, match=r"must be a dense tensor with values, got one that"):
            trace(torch, CALLS[name], x)


@pytest.mark.parametrize("name", ["viterbi", "log_partition"])
def test_trace_of_a_method_of_a_chain_from_outside_raises(torch, name):
    chain = chain_of(torch.eye(2))
    with pytest.raises(ValueError, match=r"log_potentials must be .* torch\.jit\.trace traces"):
        torch.jit.trace(lambda x: x + getattr(chain, name)()[0].sum(), torch.eye(2))


@pytest.mark.parametrize("word", ["lengths", "states", "cotangent"])
def test_trace_of_another_argument_raises(torch, word):
    """The other arguments may be NumPy arrays, which are constants of a trace."""
    zeros = np.zeros((2, 2))
    pullback = alc.vjp.logmatmulexp(torch.eye(2), torch.eye(2))[1]
    call = {
        "lengths": lambda n: alc.LogChain(zeros, log_transitions=zeros, lengths=n[0]),
        "states": lambda n: alc.LogChain(zeros, log_transitions=zeros).log_weight(n),
        "cotangent": lambda n: pullback(n * torch.eye(2)),
    }[word]
    with pytest.raises(ValueError, match=rf"{word} must be .* torch\.jit\.trace traces"):
        torch.jit.trace(lambda n: (call(n), n)[1], torch.ones(2, dtype=torch.int64))


def test_trace_around_arrays_of_numpy_records_them(torch):
    x = np.eye(2)
    traced = torch.jit.trace(lambda y: y + float(alc.logmatmulexp(x, x)[0, 0]), torch.eye(2))
    expected = alc.logmatmulexp(x, x)[0, 0] + 2 * np.eye(2)
    np.testing.assert_allclose(traced(2 * torch.eye(2)), expected, rtol=1e-6)


class Tagger:
    """The forward pass of a module with a loss, marginals and a path."""

    def forward(self, x, P, tags, lengths):
        chain = alc.LogChain(x, log_transitions=P, lengths=lengths)
        loss = chain.log_partition() - chain.log_weight(tags)
        return loss, chain.marginals(), chain.viterbi().states


@pytest.mark.parametrize("strict", [False, True])
def test_exported_program_runs_on_other_sizes(torch, strict):
    def inputs(rows, steps):
        x, P = normal(torch, rows, steps, 3), normal(torch, 3, 3, seed=1)
        tags = torch.arange(rows * steps).reshape(rows, steps) % 3
        return x, P, tags, torch.arange(rows) % steps + 1

    model = type("Model", (Tagger, torch.nn.Module), {})()
    rows, steps = torch.export.Dim("rows"), torch.export.Dim("steps")
    sizes = {0: rows, 1: steps}
    shapes = sizes, None, sizes, {0: rows}
    program = torch.export.export(model, inputs(3, 5), dynamic_shapes=shapes, strict=strict)
    stream = io.BytesIO()
    torch.export.save(program, stream)
    stream.seek(0)
    exported = torch.export.load(stream).module()
    args = inputs(4, 7)
    torch.testing.assert_close(exported(*args), model(*args))
    results = [torch.autograd.grad(f(*args)[0].sum(), args[:2]) for f in (exported, model)]
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("name", ["log_partition", "viterbi", "logmatmulexp"])
def test_symbolic_trace_says_what_it_lacks(torch, name):
    model = type("Model", (torch.nn.Module,), {"forward": lambda self, x: CALLS[name](x)})
    with pytest.raises(TypeError, match=r"got a proxy of torch\.fx; let torch\.fx\.wrap"):
        torch.fx.symbolic_trace(model())


def test_exported_program_needs_one_import(torch, tmp_path):
    """Another process registers the operators by it."""
    model = type("Model", (torch.nn.Module,), {"forward": lambda self, x: CALLS["marginals"](x)})
    path = tmp_path / "model.pt2"
    torch.export.save(torch.export.export(model(), (torch.eye(2),)), path)
    code = f"""
import torch, arraylogchain.operators
print(torch.export.load({str(path)!r}).module()(torch.eye(2)).shape)
"""
    assert run_python(code).strip() == "torch.Size([2, 2])"
