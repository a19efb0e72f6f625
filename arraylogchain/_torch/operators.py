"""Operators of torch that stand for public functions in compiled and exported graphs.

An operator takes tensors, the number of paths, and words: the names of the tensors as arguments of
the function, and its other arguments as text. It calls the function, which checks them. The
gradients of all operators are one more operator, which has none itself.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial, reduce
from types import NoneType
from typing import Any, NoReturn

import numpy as np
import torch
from torch.autograd.forward_ad import unpack_dual

from arraylogchain._inputs.chain import ARGUMENTS, PARTS
from arraylogchain._products.in_memory import named
from arraylogchain._results import ChainPath, ChainPosterior, FilteredChain, MaxPlusProduct
from arraylogchain._torch import FUNCTIONS
from arraylogchain._torch.rules import Tensor, Tensors, result_dtype, scatter_optional

# Axes of results by name: batch axes B, T, K, N for `num_paths`, all axes A of the transitions.
# Other results have all axes P of a product.
AXES = dict.fromkeys(("log_partition", "entropy", "log_probability"), "B")
AXES |= dict.fromkeys(("forward_messages", "backward_messages", "marginals"), "BTK")
AXES |= {"probabilities": "BTK", "log_normalizers": "BT", "expected_transitions": "A"}
AXES |= {"states": "NBT", "log_weight": "NB"}
# Classes of several results, by the name of the function.
CLASSES: dict[str, Any] = dict.fromkeys(FUNCTIONS)
CLASSES |= {"viterbi": ChainPath, "best_paths": ChainPath, "maxplus_matmul": MaxPlusProduct}
CLASSES |= {"posterior": ChainPosterior, "filtered": FilteredChain}
# Results that hold integers, arguments of a chain that become tensors, and those that become text.
_INTEGERS, _LISTS = ("states", "indices"), (int, list, tuple, np.ndarray)
_TEXT = (int, float, bool, str, list, tuple, NoneType)
_SCHEMA = "Tensor[] tensors, SymInt? num_paths, str[] words) -> Tensor[]"


def call(name: str, names: Sequence[str], disabled: Callable[..., Any], *args: Any) -> Any:
    """Return the result of a public function for named, further, and optional arguments.

    The function itself is called without tensors, and with arguments that text cannot hold.
    """
    *positional, options = args
    values = {**dict(zip(names, positional, strict=False)), **options}
    if "self" in values:
        values = _chain_arguments(values.pop("self"), values)
    elif "matrices" in values:
        values = {**named(values.pop("matrices")), **values}
    elif "equation" in values:
        values.update({f"operands[{i}]": x for i, x in enumerate(positional[1:])})
    # It may be a symbol, which has no text.
    num_paths = values.pop("num_paths") if type(values.get("num_paths")) is int else None
    tensors = {x: y for x, y in values.items() if isinstance(y, torch.Tensor)}
    text = {x: y for x, y in values.items() if x not in tensors}
    if not tensors or not all(type(x) in _TEXT for x in text.values()):
        return disabled(*positional, **options)
    cls = CLASSES[name]
    inputs = [x.detach() if cls is ChainPath else x for x in tensors.values()]
    operator = getattr(torch.ops.arraylogchain, name)
    results = operator(inputs, num_paths, [*tensors, repr(text)])
    return cls(*results, *[None] * (len(cls._fields) - len(results))) if cls else results[0]


def _chain_arguments(chain: Any, values: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a chain and of its method, with tensors for lists."""
    values = {**chain._arguments.arrays, "lengths": chain._arguments.lengths, **values}
    like = values["log_potentials"]
    for name, x in values.items():
        if type(x) in _LISTS and name != "num_paths" and isinstance(like, torch.Tensor):
            dtype = like.dtype if name in ARGUMENTS else None
            values[name] = torch.as_tensor(x, dtype=dtype, device=like.device)
    workspace = None if chain._keeps_messages else chain._workspace
    return {**values, "workspace": workspace, "workers": chain._workers}


def _evaluate(name: str, tensors: Tensors, num_paths: Any, words: Sequence[str]) -> Tensors:
    """Return the results of the function itself."""
    args: list[Any] = list(tensors)
    values = ast.literal_eval(words[-1])
    if num_paths is not None:
        values["num_paths"] = num_paths
    if words[0] in ARGUMENTS:
        values |= dict(zip(words, tensors, strict=False))
        passed = *ARGUMENTS, "lengths", "workspace", "workers"
        package: Any = sys.modules["arraylogchain"]  # it imports this module
        args = [package.LogChain(**{x: values.pop(x) for x in passed if x in values})]
    elif "equation" in values:
        args.insert(0, values.pop("equation"))
    elif words[0] == "matrices[0]":
        args = [args]
    results = FUNCTIONS[name](*args, **values)
    return [x for x in results if x is not None] if isinstance(results, tuple) else [results]


def _separate(results: Tensors, *inputs: Tensor) -> list[Tensor]:
    """Return contiguous results that share no memory with each other or with the inputs."""
    addresses = [x.untyped_storage().data_ptr() for x in (*results, *inputs)]
    is_shared = (addresses.count(x) > 1 for x in addresses)
    return [(x.clone() if y else x).contiguous() for x, y in zip(results, is_shared, strict=False)]


def _compute(name: str, tensors: Tensors, num_paths: Any, words: Sequence[str]) -> Tensors:
    _check_plain(name, tensors)
    results = _evaluate(name, [x.detach() for x in tensors], num_paths, words)
    return _separate(results, *tensors)


def _fake(name: str, tensors: Tensors, num_paths: Any, words: Sequence[str]) -> Tensors:
    """Return results without values, of sizes that may be symbols."""
    _check_plain(name, tensors)
    shapes = {x: y.shape for x, y in zip(words, tensors, strict=False)}
    is_chain = "log_potentials" in shapes
    axes = _chain_axes(shapes) if is_chain else {"P": _product_axes(tensors, words)}
    # The operator raises for numbers of paths that are no sizes.
    axes["N"] = () if num_paths is None else (max(0, num_paths),)
    dtype = result_dtype(*(x for x in tensors if x.is_floating_point()))
    results = []
    for field in getattr(CLASSES[name], "_fields", [name]):
        letters = AXES.get(field, "P")
        if axes.keys() >= set(letters):
            shape = [n for letter in letters for n in axes[letter]]
            field_dtype = torch.int64 if field in _INTEGERS else dtype
            results.append(tensors[0].new_empty(shape, dtype=field_dtype))
    return results


def _chain_axes(shapes: dict[str, Any]) -> dict[str, Any]:
    """Return the sizes of the axes of `AXES`, without A if there are no transitions."""
    num_axes = {name: len(PARTS[part].axes) for name, part in ARGUMENTS.items()} | {"states": 1}
    batches = [x[: max(0, len(x) - num_axes[n])] for n, x in shapes.items() if n in num_axes]
    *_, T, K = shapes["log_potentials"]
    axes = {"B": torch.broadcast_shapes(*batches), "T": (T,), "K": (K,)}
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
    has_tangents = True
    # Compiled graphs hide tangents, and raise; operators run without autograd, which knows them.
    with suppress(RuntimeError), torch.inference_mode(False):
        has_tangents = any(unpack_dual(x).tangent is not None for x in tensors)
    if has_tangents:
        _raise_unsupported(name)


def _raise_unsupported(name: str, *_: Any) -> NoReturn:
    # torch.compile then runs the function without compiling it, unless it needs a full graph.
    raise NotImplementedError(
        f"{name} has no forward mode and no vmap inside torch.compile and torch.export; "
        "torch.compiler.disable excludes a function from compilation"
    )


def _gradients(
    name: str, cotangents: Tensors, positions: Sequence[int], tensors: Tensors, *args: Any
) -> list[Tensor]:
    """Return the gradients with respect to the tensors at some positions."""
    # Operators run without autograd, which leaving inference mode turns on.
    with torch.inference_mode(False), torch.enable_grad():
        leaves = [x.detach().requires_grad_(i in positions) for i, x in enumerate(tensors)]
        results = _evaluate(name, leaves, *args)
        pairs = [(x, g) for x, g in zip(results, cotangents, strict=True) if x.requires_grad]
        outputs, weights = zip(*pairs, strict=True)
        requested = [leaves[i] for i in positions]
        results = torch.autograd.grad(outputs, requested, weights, materialize_grads=True)
    return _separate(results, *tensors, *weights)


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    tensors, ctx.num_paths, ctx.words = inputs
    ctx.save_for_backward(*tensors)


def _pull(name: str, ctx: Any, cotangents: Tensors) -> Any:
    needs, tensors = ctx.needs_input_grad[0], list(ctx.saved_tensors)
    positions = [i for i, is_needed in enumerate(needs) if is_needed]
    results = gradients(name, cotangents, positions, tensors, ctx.num_paths, ctx.words)
    return list(scatter_optional(results, needs)), None, None


gradients = torch.library.custom_op(
    "arraylogchain::gradients",
    _gradients,
    mutates_args=(),
    schema=f"(str name, Tensor?[] cotangents, SymInt[] positions, {_SCHEMA}",
)
gradients.register_fake(lambda _, __, places, x, *___: [x[i].new_empty(x[i].shape) for i in places])
for _name in FUNCTIONS:
    _operator = torch.library.custom_op(
        f"arraylogchain::{_name}", partial(_compute, _name), mutates_args=(), schema=f"({_SCHEMA}"
    )
    _operator.register_fake(partial(_fake, _name))
    _operator.register_vmap(partial(_raise_unsupported, _name))
    if CLASSES[_name] is not ChainPath:
        _operator.register_autograd(partial(_pull, _name), setup_context=_save)
