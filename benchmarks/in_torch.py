"""The formulations of torch users, on the CPU and on a CUDA device, there compiled as well."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from benchmarks.ours import by_autograd
from benchmarks.registry import contestant, with_parameters

TORCH = {"library": "torch", "requires": ("torch",)}
SEMIRING = {
    "library": "torch",
    "requires": ("torch", "torch_semiring_einsum"),
    "devices": ("cpu",),
}
FORUM = "forum's code"


def _register(operation: str, label: str, call: Callable[..., Any], *names: str) -> None:
    """Register a function of tensors; compiled as well on a device, and with gradients."""
    contestant(operation, label, **TORCH)(with_parameters(*names)(call))
    contestant(f"{operation}_gradients", label, **TORCH)(by_autograd(call, *names))
    on_device: dict[str, Any] = {**TORCH, "devices": ("cuda",)}
    compiled = with_parameters(*names)(_compiled(call))
    contestant(operation, f"{label}, compiled", **on_device)(compiled)
    contestant(f"{operation}_gradients", f"{label}, compiled", **on_device)(
        by_autograd(_compiled(call), *names)
    )


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile for the shapes of the first call."""

    @cache
    def compile_it() -> Any:
        import torch

        return torch.compile(function, dynamic=False)

    return lambda *arguments: compile_it()(*arguments)


# --- products -------------------------------------------------------------------------------------


def logsumexp(a: Any, b: Any) -> Any:
    """The definition, with all terms in memory unless a compiler keeps them out."""
    import torch

    return torch.logsumexp(a[..., :, :, None] + b[..., None, :, :], dim=-2)


def exp_matmul_log(a: Any, b: Any) -> Any:
    """Subtract row and column maxima, exponentiate, multiply; the maxima cancel in gradients."""
    a_max = a.detach().amax(-1, keepdim=True)
    b_max = b.detach().amax(-2, keepdim=True)
    return ((a - a_max).exp() @ (b - b_max).exp()).log() + a_max + b_max


_register("log_product", "logsumexp in torch", logsumexp, "a", "b")
_register("log_product", "exp, matmul, log in torch", exp_matmul_log, "a", "b")


@contestant("log_product", "torch-semiring-einsum", **SEMIRING)
def semiring_product(a: Any, b: Any) -> Any:
    from torch_semiring_einsum import log_einsum

    return log_einsum(_equation("ik,kj->ij" if a.ndim == 2 else "bik,bkj->bij"), a, b)


contestant("log_product_gradients", "torch-semiring-einsum", **SEMIRING)(
    by_autograd(semiring_product, "a", "b")
)


@contestant("maxplus", "torch-semiring-einsum", **SEMIRING)
def semiring_maximum(a: Any, b: Any) -> Any:
    from torch_semiring_einsum import log_viterbi_einsum_forward

    return log_viterbi_einsum_forward(_equation("ik,kj->ij"), a, b)[0]


@contestant("einsum", "torch-semiring-einsum", **SEMIRING)
def semiring_einsum(equation: str, operands: Any) -> Any:
    from torch_semiring_einsum import AutomaticBlockSize, log_einsum

    return log_einsum(_equation(equation), *operands, block_size=AutomaticBlockSize())


@cache
def _equation(text: str) -> Any:
    from torch_semiring_einsum import compile_equation

    return compile_equation(text)


@contestant("product", "matmul in torch", **TORCH)
def matmul(a: Any, b: Any, subscripts: str) -> Any:
    return a @ b


@contestant("product", "einsum in torch", **TORCH)
def einsum(a: Any, b: Any, subscripts: str) -> Any:
    import torch

    return torch.einsum(subscripts, a, b)


@contestant("product_gradients", "matmul in torch", **TORCH)
def matmul_gradients(a: Any, b: Any, g: Any, subscripts: str) -> Any:
    return by_autograd(lambda a, b: a @ b)(a, b, g)


@contestant("product_gradients", "einsum in torch", **TORCH)
def einsum_gradients(a: Any, b: Any, g: Any, subscripts: str) -> Any:
    return by_autograd(lambda a, b: einsum(a, b, subscripts))(a, b, g)


# --- the forum's chain ----------------------------------------------------------------------------


def forum_recursion(x: Any, bulk: Any, p0: Any) -> Any:
    """A vector of logarithms per row."""
    import torch

    log_alpha = p0.log() + x[..., 0, :]
    for i in range(1, x.shape[-2]):
        top = log_alpha.detach().amax(-1, keepdim=True)
        alpha = (log_alpha - top).exp().transpose(0, 1) @ bulk[0, :, i - 1]
        log_alpha = alpha.transpose(0, 1).log() + top + x[..., i, :]
    return torch.logsumexp(log_alpha, -1)


def forum_pairs(x: Any, bulk: Any, p0: Any) -> Any:
    """The forum's own code: expanded matrices, multiplied in pairs, filled up with zeros."""
    import torch

    stack = x[..., :-1, :, None] + bulk.log()
    while stack.shape[-3] > 1:
        if stack.shape[-3] % 2:
            stack = torch.cat([stack, torch.zeros_like(stack[..., :1, :, :])], -3)
        left, right = stack[..., 0::2, :, :], stack[..., 1::2, :, :]
        left_max, right_max = left.amax(-1, keepdim=True), right.amax(-2, keepdim=True)
        product = (left - left_max).exp().clamp(1e-10) @ (right - right_max).exp().clamp(1e-10)
        stack = left_max + right_max + product.log()
    tail = torch.logsumexp(stack.squeeze(-3) + x[..., -1, None, :], -1)
    return torch.logsumexp(p0.log() + tail, -1)


_register("forum", "vector recursion in torch", forum_recursion, "x", "bulk", "p0")
contestant("forum", FORUM, **TORCH)(forum_pairs)
contestant("forum_gradients", FORUM, **TORCH)(by_autograd(forum_pairs, "x", "bulk", "p0"))


# --- chains ---------------------------------------------------------------------------------------


def _at(P: Any, step: int) -> Any:
    return P if P.ndim == 2 else P[step - 1]


@contestant("log_z", "recursion in torch", **TORCH)
def log_z(x: Any, P: Any, p0: Any, lengths: Any = None) -> Any:
    """A vector of logarithms per row, which stays as it is past the row's end."""
    import torch

    log_alpha = p0.log() + x[..., 0, :]
    for i in range(1, x.shape[-2]):
        top = log_alpha.detach().amax(-1, keepdim=True)
        following = ((log_alpha - top).exp() @ _at(P, i)).log() + top + x[..., i, :]
        if lengths is not None:
            following = torch.where((lengths > i)[:, None], following, log_alpha)
        log_alpha = following
    return torch.logsumexp(log_alpha, -1)


contestant("gradients", "recursion in torch", **TORCH)(by_autograd(log_z, "x", "P", "p0"))


@contestant("marginals", "recursion in torch", **TORCH)
def marginals(x: Any, P: Any, p0: Any) -> Any:
    """The derivative of log Z by the potentials."""
    return by_autograd(lambda x: log_z(x, P, p0).sum())(x, x.new_ones(()))[1]
