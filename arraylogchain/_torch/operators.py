"""Operators of torch that stand for public functions in compiled and exported graphs.

An operator takes tensors, integers, and words: the names of both as arguments of the function, and
its other arguments as text. It calls the function, which checks them. The gradients of all
operators are one more operator, which has none itself.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from torch.autograd.forward_ad import unpack_dual

from arraylogchain._inputs.chain import ARGUMENTS, PARTS
from arraylogchain._products.in_memory import named
from arraylogchain._results import ChainPath, ChainPosterior, FilteredChain, MaxPlusProduct
from arraylogchain._torch.rules import Tensor, Tensors, result_dtype


class Operator(NamedTuple):
    """Axes of each result of a function, and the class of several results.

    The letters are batch axes B, T, K, N for `num_paths`, all axes A of the transitions, and those
    of a product P.
    """

    axes: str
    kind: type[Any] | None = None


METHODS = {
    "log_partition": Operator("B"),
    "forward_messages": Operator("BTK"),
    "backward_messages": Operator("BTK"),
    "marginals": Operator("BTK"),
    "entropy": Operator("B"),
    "viterbi": Operator("BT B", ChainPath),
    "best_paths": Operator("NBT NB", ChainPath),
    "log_weight": Operator("B"),
    "log_probability": Operator("B"),
    "expected_transitions": Operator("A"),
    "posterior": Operator("B BTK A", ChainPosterior),
    "filtered": Operator("BTK BT", FilteredChain),
}
PRODUCTS = ("matmul", "logmatmulexp", "logchainexp", "logeinsumexp", "maxplus_einsum")
OPERATORS = METHODS | dict.fromkeys(PRODUCTS, Operator("P"))
OPERATORS["maxplus_matmul"] = Operator("P P", MaxPlusProduct)
# Results that hold integers, and classes of arguments of a chain that become tensors.
_INTEGERS, _LISTS = ("states", "indices"), (int, list, tuple, np.ndarray)
_SCHEMA = "Tensor[] tensors, SymInt[] numbers, str[] words) -> Tensor[]"


def call(name: str, names: Sequence[str], disabled: Callable[..., Any], *args: Any) -> Any:
    """Return the result of a public function for named, further, and optional arguments.

    The function itself is called without tensors, and with arguments that text cannot hold.
    """
    *given, options = args
    kind, values = OPERATORS[name].kind, {**dict(zip(names, given, strict=False)), **options}
    if "self" in values:
        values = _chain_arguments(values.pop("self"), values)
    elif "matrices" in values:
        values = {**named(values.pop("matrices")), **values}
    elif "equation" in values:
        values.update({f"operands[{i}]": x for i, x in enumerate(given[1:])})
    tensors = {x: y for x, y in values.items() if isinstance(y, torch.Tensor)}
    others = {x: y for x, y in values.items() if y is not None and x not in tensors}
    if not tensors or not all(type(y) in (int, bool, str, list, tuple) for y in others.values()):
        return disabled(*given, **options)
    numbers = {x: others.pop(x) for x in tuple(others) if type(others[x]) is int}
    inputs = [x.detach() if kind is ChainPath else x for x in tensors.values()]
    words = [*tensors, *numbers, repr(others)]
    results = getattr(torch.ops.arraylogchain, name)(inputs, list(numbers.values()), words)
    return kind(*results, *[None] * (len(kind._fields) - len(results))) if kind else results[0]


def _chain_arguments(chain: Any, values: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a chain and those of its method, with tensors for lists."""
    values = {**chain._arguments.arrays, "lengths": chain._arguments.lengths, **values}
    like = values["log_potentials"]
    for name, x in values.items():
        if type(x) in _LISTS and name != "num_paths" and isinstance(like, torch.Tensor):
            dtype = like.dtype if name in ARGUMENTS else None
            values[name] = torch.as_tensor(x, dtype=dtype, device=like.device)
    workspace = None if chain._keeps_messages else chain._workspace
    return {**values, "workspace": workspace, "workers": chain._workers}


def _evaluate(name: str, tensors: Tensors, numbers: Sequence[int], words: Sequence[str]) -> Tensors:
    """Return the results of the function itself."""
    package: Any = sys.modules["arraylogchain"]  # it imports this module
    values = dict(zip(words[len(tensors) :], numbers, strict=False)) | ast.literal_eval(words[-1])
    args: list[Any] = list(tensors)
    if name in METHODS:
        values |= dict(zip(words, tensors, strict=False))
        passed = *ARGUMENTS, "lengths", "workspace", "workers"
        args = [package.LogChain(**{x: values.pop(x) for x in passed if x in values})]
    elif "equation" in values:
        args.insert(0, values.pop("equation"))
    elif words[0] == "matrices[0]":
        args = [args]
    owner = package.LogChain if name in METHODS else package
    results = getattr(owner, name).__wrapped__(*args, **values)
    return [x for x in results if x is not None] if isinstance(results, tuple) else [results]


def _own(results: Tensors, *others: Tensor) -> list[Tensor]:
    """Return contiguous results that share no memory with each other or with other tensors."""
    addresses = [x.untyped_storage().data_ptr() for x in (*results, *others)]
    copied = (addresses.count(x) > 1 for x in addresses)
    return [(x.clone() if y else x).contiguous() for x, y in zip(results, copied, strict=False)]


def _compute(name: str, tensors: Tensors, *others: Any) -> Tensors:
    _check_plain(name, tensors)
    plain = [x.detach() for x in tensors]
    return _own(_evaluate(name, plain, *others), *plain)


def _fake(name: str, tensors: Tensors, numbers: Sequence[int], words: Sequence[str]) -> Tensors:
    """Return results without values, of sizes that may be symbols."""
    _check_plain(name, tensors)
    values = dict(zip(words, [*tensors, *numbers], strict=False))
    axes = _chain_axes(values) if name in METHODS else {"P": _product_axes(tensors, words)}
    dtype = result_dtype(*(x for x in tensors if x.is_floating_point()))
    letters, kind = OPERATORS[name]
    own = [x for x in letters.split() if axes.keys() >= set(x)]
    shapes = [[n for letter in x for n in axes[letter]] for x in own]
    dtypes = [torch.int64 if x in _INTEGERS else dtype for x in (kind._fields if kind else [name])]
    return [tensors[0].new_empty(x, dtype=y) for x, y in zip(shapes, dtypes, strict=False)]


def _chain_axes(values: dict[str, Any]) -> dict[str, Any]:
    """Return the sizes of the axes of `Operator`, without A if there are no transitions."""
    own = {name: len(PARTS[part].axes) for name, part in ARGUMENTS.items()} | {"states": 1}
    shapes = {name: values[name].shape for name in own if name in values}
    *_, T, K = shapes["log_potentials"]
    batch = torch.broadcast_shapes(*(x[: max(0, len(x) - own[n])] for n, x in shapes.items()))
    axes = {"B": batch, "T": (T,), "K": (K,), "N": (values.get("num_paths"),)}
    transitions = shapes.get("transitions", shapes.get("log_transitions"))
    return axes if transitions is None else axes | {"A": transitions}


def _product_axes(tensors: Tensors, words: Sequence[str]) -> Sequence[Any]:
    """Return the shape of a product."""
    shapes = [tuple(x.shape) for x in tensors]
    if words[0] == "matrices":
        return (*shapes[0][:-3], *shapes[0][-2:])
    equation = ast.literal_eval(words[-1]).get("equation")
    if equation is None:
        operands = (x.new_empty(x.shape, dtype=torch.float32) for x in tensors)
        return tuple(reduce(torch.matmul, operands).shape)
    from opt_einsum.parser import parse_einsum_input

    inputs, output, _ = parse_einsum_input((equation, *tensors))
    sizes: dict[str, Any] = {}
    for letter, n in zip(inputs.replace(",", ""), sum(shapes, ()), strict=True):
        sizes[letter] = n if sizes.get(letter, 1) == 1 else sizes[letter]
    return [sizes[letter] for letter in output]


def _check_plain(name: str, tensors: Tensors) -> None:
    """Raise NotImplementedError for tensors with tangents, which operators would lose."""
    try:
        with torch.inference_mode(False):  # operators run without autograd, which knows tangents
            has_tangents = any(unpack_dual(x).tangent is not None for x in tensors)
    except RuntimeError:  # in compiled graphs, which hide them
        has_tangents = True
    if has_tangents:
        _refuse(name)


def _refuse(name: str, *_: Any) -> NoReturn:
    # torch.compile then runs the function without compiling it, unless it needs a full graph.
    raise NotImplementedError(
        f"{name} has no forward mode and no vmap inside torch.compile and torch.export; "
        "torch.compiler.disable excludes a function from compilation"
    )


def _gradients(
    name: str, cotangents: Tensors, places: Sequence[int], tensors: Tensors, *others: Any
) -> list[Tensor]:
    """Return the gradients with respect to the tensors at some places."""
    # Operators run without autograd, which leaving inference mode turns on.
    with torch.inference_mode(False), torch.enable_grad():
        leaves = [x.detach().requires_grad_(i in places) for i, x in enumerate(tensors)]
        results = _evaluate(name, leaves, *others)
        pairs = [(x, g) for x, g in zip(results, cotangents, strict=True) if x.requires_grad]
        outputs, weights = zip(*pairs, strict=True)
        wanted = [leaves[i] for i in places]
        found = torch.autograd.grad(outputs, wanted, weights, materialize_grads=True)
    return _own(found, *tensors, *weights)


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    tensors, *ctx.others = inputs
    ctx.save_for_backward(*tensors)


def _pull(name: str, ctx: Any, cotangents: Tensors) -> Any:
    (needs, *_), (numbers, _) = ctx.needs_input_grad, ctx.others
    places = [i for i, is_needed in enumerate(needs) if is_needed]
    found = iter(gradients(name, cotangents, places, list(ctx.saved_tensors), *ctx.others))
    # An empty list counts as one of tensors.
    return [next(found) if x else None for x in needs], None if numbers else [], None


gradients = torch.library.custom_op(
    "arraylogchain::gradients",
    _gradients,
    mutates_args=(),
    schema=f"(str name, Tensor?[] cotangents, SymInt[] places, {_SCHEMA}",
)
gradients.register_fake(lambda _, __, places, x, *___: [x[i].new_empty(x[i].shape) for i in places])
for _name in OPERATORS:
    _operator = torch.library.custom_op(
        f"arraylogchain::{_name}", partial(_compute, _name), mutates_args=(), schema=f"({_SCHEMA}"
    )
    _operator.register_fake(partial(_fake, _name))
    _operator.register_vmap(partial(_refuse, _name))
    if OPERATORS[_name].kind is not ChainPath:
        _operator.register_autograd(partial(_pull, _name), setup_context=_save)
