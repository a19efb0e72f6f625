"""This library, by its public functions alone: `compare` calls other versions of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import arraylogchain as alc
from benchmarks.registry import OURS, contestant, with_parameters

IN_TORCH = f"{OURS}, torch"


def register(operation: str, call: Callable[..., Any], in_torch: Any = None) -> None:
    """Register a function of arrays, and its equivalent for tensors."""
    contestant(operation, OURS, is_ours=True)(call)
    options = {"library": "torch", "requires": ("torch",), "is_ours": True}
    contestant(operation, IN_TORCH, **options)(in_torch or call)


def by_autograd(function: Callable[..., Any], *names: str) -> Callable[..., tuple[Any, ...]]:
    """Make a function of tensors return its value and all gradients; `g` is the cotangent."""

    @with_parameters(*names, "g")
    def call(*arguments: Any) -> tuple[Any, ...]:
        import torch

        *inputs, cotangent = arguments
        leaves = [x.detach().requires_grad_() for x in inputs]
        value = function(*leaves)
        return (value.detach(), *torch.autograd.grad(value, leaves, cotangent))

    return call


def by_pullback(function: Callable[..., Any], *names: str) -> Callable[..., tuple[Any, ...]]:
    """Make a function that returns a value and its pullback return the value and all gradients."""

    @with_parameters(*names, "g")
    def call(*arguments: Any) -> tuple[Any, ...]:
        *inputs, cotangent = arguments
        value, pullback = function(*inputs)
        return (value, *(x for x in pullback(cotangent) if x is not None))

    return call


# --- products -------------------------------------------------------------------------------------

register("log_product", alc.logmatmulexp)
register(
    "log_product_gradients",
    by_pullback(alc.vjp.logmatmulexp, "a", "b"),
    by_autograd(alc.logmatmulexp, "a", "b"),
)
register("maxplus", lambda a, b: alc.maxplus_matmul(a, b).values)
register("product", lambda a, b, subscripts: alc.matmul(a, b))


def _product_gradients(a: Any, b: Any, g: Any, subscripts: str) -> tuple[Any, ...]:
    return by_pullback(alc.vjp.matmul)(a, b, g)


def _product_gradients_in_torch(a: Any, b: Any, g: Any, subscripts: str) -> tuple[Any, ...]:
    return by_autograd(alc.matmul)(a, b, g)


register("product_gradients", _product_gradients, _product_gradients_in_torch)
contestant("matrix_chain", OURS, is_ours=True)(alc.logchainexp)


@contestant("einsum", OURS, is_ours=True, devices=("cpu",))
def log_einsum(equation: str, operands: Any) -> Any:
    return alc.logeinsumexp(equation, *operands)


# --- chains ---------------------------------------------------------------------------------------


def chain(x: Any, P: Any, p0: Any, lengths: Any = None) -> alc.LogChain:
    return alc.LogChain(x, transitions=P, initial=p0, lengths=lengths)


def log_z(x: Any, P: Any, p0: Any, lengths: Any = None) -> Any:
    return chain(x, P, p0, lengths).log_partition()


def marginals(x: Any, P: Any, p0: Any, lengths: Any = None) -> Any:
    return chain(x, P, p0, lengths).marginals()


def posterior(x: Any, P: Any, p0: Any, lengths: Any = None) -> tuple[Any, ...]:
    return tuple(chain(x, P, p0, lengths).posterior())


def viterbi(x: Any, P: Any, p0: Any, lengths: Any = None) -> Any:
    return chain(x, P, p0, lengths).viterbi().states


def best_paths(x: Any, P: Any, p0: Any) -> Any:
    return chain(x, P, p0).best_paths(10).states


def entropy(x: Any, P: Any, p0: Any, lengths: Any = None) -> Any:
    return chain(x, P, p0, lengths).entropy()


def sample(x: Any, P: Any, p0: Any, seed: int) -> Any:
    return chain(x, P, p0).sample(1, rng=np.random.default_rng(seed))[0]


def sample_in_torch(x: Any, P: Any, p0: Any, seed: int) -> Any:
    import torch

    rng = torch.Generator(device=x.device).manual_seed(seed)
    return chain(x, P, p0).sample(1, rng=rng)[0]


def pullback(x: Any, P: Any, p0: Any) -> Any:
    return alc.vjp.log_partition(chain(x, P, p0))


def forum(x: Any, bulk: Any, p0: Any) -> Any:
    return log_z(x, bulk, p0)


register("log_z", log_z)
register("marginals", marginals)
register("posterior", posterior)
register("viterbi", viterbi)
register("best_paths", best_paths)
register("entropy", entropy)
register("sample", sample, sample_in_torch)
register("gradients", by_pullback(pullback, "x", "P", "p0"), by_autograd(log_z, "x", "P", "p0"))
register("forum", forum)
register(
    "forum_gradients",
    by_pullback(pullback, "x", "bulk", "p0"),
    by_autograd(forum, "x", "bulk", "p0"),
)


@contestant("forum_gradients_bounded", OURS, is_ours=True)
def within_workspace(x: Any, bulk: Any, p0: Any, g: Any) -> tuple[Any, ...]:
    """Less memory than all messages take."""
    chain = alc.LogChain(x, transitions=bulk, initial=p0, workspace=max(x.nbytes // 4, 2**20))
    return by_pullback(alc.vjp.log_partition)(chain, g)


def _crf_loss(loss_of: Callable[[Any, Any], Any]) -> Callable[..., tuple[Any, ...]]:
    """Make a loss of a chain and tags return its value, and its gradients by everything else."""

    def crf_loss(emissions: Any, log_P: Any, start: Any, end: Any, tags: Any) -> tuple[Any, ...]:
        import torch

        x, *others = leaves = [p.detach().requires_grad_() for p in (emissions, log_P, start, end)]
        chain = alc.LogChain(x, **dict(zip(_LOG_PARTS, others, strict=True)))
        loss = loss_of(chain, tags).sum()
        return (loss.detach(), *torch.autograd.grad(loss, leaves))

    return crf_loss


for _name, _loss in {
    OURS: lambda chain, y: -chain.log_probability(y),
    "log_partition - log_weight": lambda chain, y: chain.log_partition() - chain.log_weight(y),
}.items():
    contestant("crf_loss", _name, library="torch", requires=("torch",), is_ours=True)(
        _crf_loss(_loss)
    )


@contestant("crf_decode", OURS, library="torch", requires=("torch",), is_ours=True)
def crf_decode(emissions: Any, log_P: Any, start: Any, end: Any) -> Any:
    others = dict(zip(_LOG_PARTS, (log_P, start, end), strict=True))
    return alc.LogChain(emissions, **others).viterbi().states


_LOG_PARTS = ("log_transitions", "log_initial", "log_final")
