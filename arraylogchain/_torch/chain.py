"""The methods of `LogChain` on tensors that take part in autograd, transforms or compilation."""

from __future__ import annotations

from collections.abc import Callable
from itertools import compress
from typing import Any

import array_api_compat.torch as torch_namespace
import torch

from arraylogchain import _inputs, _threads
from arraylogchain._array import chains
from arraylogchain._arrays import has_values, native_context
from arraylogchain._context import Array, Context
from arraylogchain._inputs import ARGUMENTS, PARTS, Chain
from arraylogchain._torch import calls, recursion
from arraylogchain._torch.calls import Tensor, Tensors, Value, Wanted, call
from arraylogchain._torch.products import entries, through_finite

# How far the recursion that gives second derivatives may be off before it is refused.
_TOLERANCE = 1e-6
# Axes of the parts that are not batch axes.
OWN_AXES = tuple(len(part.axes) for part in PARTS.values())


class ChainOperation(calls.Operation):
    """Of a chain's log potentials, transitions, initial and final weights, or None.

    Derivatives that are not certified are those of a recursion in float64, which autograd follows.

    Parameters
    ----------
    given : LogChain
    names : sequence of str
        The inputs' names as its arguments.
    compute : callable
        Takes a context, a chain and a workspace to the value.
    written : callable
        Takes a chain of tensors to the value, by the recursion.
    """

    def __init__(self, given: Any, names: Any, compute: Any, written: Any) -> None:
        super().__init__()
        self.names, self.compute, self.written = names, compute, written
        self.name = written.__name__
        # Not the chain itself: checkpoints let its tensors go.
        self.lengths, self.workspace = given._lengths, given._workspace
        self.keeps_messages, self.workers = given._keeps_messages, given._workers

    def value(self, *inputs: Tensor) -> Tensor:
        ctx, chain = _inputs.enter_chain(self._named(inputs), self.lengths)
        with ctx.computing():
            return ctx.leave(self.compute(ctx, chain, self.workspace))

    def known(self, inputs: Tensors) -> Any:
        """Return the value and what it leaves to gradients, where these can take it."""

    def agrees(self, inputs: Tensors, g: Tensor, out: Tensor, gradients: Tensors) -> bool:
        """Tell whether what the recursion makes of wide inputs is what is certified."""
        return _agree(self.value(*inputs), out, 1.0)

    def gradients(self, left: Any, wanted: Wanted, out: Tensor, g: Tensor, *inputs: Any) -> Tensors:
        with torch.enable_grad():
            leaves, weights = _leaves((*inputs, g))[:-1], g.detach().double()
            found = self._gradients(leaves, self._record(leaves), weights)
        return calls.cast(found, inputs)

    def second(self, wanted: Wanted, out: Tensor, g: Tensor, *rest: Tensor) -> Tensors:
        inputs, cotangents = rest[: len(PARTS)], rest[len(PARTS) :]
        with torch.enable_grad():
            leaves = _leaves(inputs)
            written = self._record(leaves)
            like = written.new_ones((), dtype=calls.result_dtype(*inputs)) if g is None else g
            (weights,) = _leaves([like.expand(written.shape)])
            gradients = self._gradients(leaves, written, weights, create_graph=True)
            product = 0 * weights.sum()
            for x, direction in zip(gradients, cotangents, strict=True):
                if direction is not None:
                    product = product + (x * direction.detach()).sum()
            asked = tuple(compress((weights, *leaves), wanted))
            found = torch.autograd.grad(product, asked, materialize_grads=True)
        return calls.cast(found, tuple(compress((like, *inputs), wanted)))

    def _gradients(self, leaves: Tensors, out: Tensor, g: Tensor, **options: Any) -> Tensors:
        """Return the recursion's gradients, having checked them."""
        given = [x is not None for x in leaves]
        asked = tuple(compress(leaves, given))
        found = torch.autograd.grad(out, asked, g, materialize_grads=True, **options)
        gradients = calls.spread(found, given)
        if not self.agrees(leaves, g.detach(), out.detach(), gradients):
            raise FloatingPointError(
                f"this derivative of {self.name} is computed on float64 weights without "
                "logarithms, and the weights of this chain range too widely for that (beyond "
                "1e300 at one step); first derivatives of log_partition by backward() are right "
                "on any range"
            )
        return gradients

    def _record(self, leaves: Tensors) -> Tensor:
        """Return what the recursion makes of the inputs, part of autograd in any case."""
        chain = _inputs.make_chain(self._named(leaves), self.lengths)
        return self.written(chain) + leaves[0].flatten()[:0].sum()

    def _named(self, inputs: Tensors) -> dict[str, Tensor]:
        return {n: x for n, x in zip(self.names, inputs, strict=True) if x is not None}


class ExpectedTransitions(ChainOperation):
    """The sums over rows of what each is expected to take, in the shape of the transitions."""

    sums_rows = True


class Partition(ChainOperation):
    """The logs of the sums over all paths."""

    def known(self, inputs: Tensors) -> Any:
        can_leave = torch.is_grad_enabled() and has_values(*inputs)
        return self.value_and_left(inputs) if can_leave else None

    def value_and_left(self, inputs: Tensors) -> tuple[Tensor, Any]:
        """Return the value, where the inputs lie, and what makes gradients of a cotangent."""
        ctx, chain = _inputs.enter_chain(self._named(inputs), self.lengths)
        with ctx.computing():
            options = self.workspace, self.keeps_messages
            found, pull = chains.posterior.value_and_pullback(ctx, chain, *options)

        def pullback(g: Tensor, wanted: Wanted) -> Tensors:
            (g,) = calls.read(ctx, g)
            ctx.uses(g)
            with ctx.computing():
                found = pull(g, frozenset(compress(PARTS, wanted)))
                return [ctx.leave(found[part]) if part in found else None for part in PARTS]

        return ctx.leave(found), (_places(inputs), pullback)

    def gradients(self, left: Any, wanted: Wanted, out: Tensor, g: Tensor, *inputs: Any) -> Tensors:
        # Hooks may have saved copies, and the memory may hold other numbers now.
        if left is None or left[0] != _places(inputs):
            _, left = self.value_and_left(inputs)
        return left[1](g, wanted)  # type: ignore[no-any-return]

    def agrees(self, inputs: Tensors, g: Tensor, out: Tensor, gradients: Tensors) -> bool:
        value, (_, pullback) = self.value_and_left(inputs)
        pairs = zip(pullback(g, [x is not None for x in inputs]), gradients, strict=True)
        return _agree(value, out, 1.0) and all(x is None or _agree(x, y.detach()) for x, y in pairs)


def log_partition(chain: Any, known: Tensor | None = None) -> Tensor:
    return _value(chain, chains.messages.log_partition, recursion.log_partition, known, Partition)


def marginals(chain: Any, known: Tensor | None = None) -> Tensor:
    return _value(chain, chains.posterior.marginals, recursion.marginals, known)


def expected_transitions(chain: Any, known: Tensor | None = None) -> Tensor:
    functions = chains.posterior.expected_transitions, recursion.expected_transitions
    counts = _value(chain, *functions, known, ExpectedTransitions)
    return counts.reshape(chain._transitions().shape)


def posterior(chain: Any) -> Tensors:
    """Return log Z, marginals and counts, or None; one pass computes all three where it can."""
    is_plain = has_values(*chain._arrays.values())
    known = chain._run(chains.posterior.posterior) if is_plain else (None, None, None)
    counts = None if chain._transitions() is None else expected_transitions(chain, known[2])
    return log_partition(chain, known[0]), marginals(chain, known[1]), counts


def filtered(chain: Any) -> Tensors:
    def compute(ctx: Context, entered: Chain, workspace: int) -> Array:
        shares, normalizers = chains.messages.filtered(ctx, entered, workspace)
        return ctx.xp.concat([shares, normalizers[..., None]], axis=-1)

    found = _value(chain, compute, recursion.filtered)
    return found[..., :-1], found[..., -1]


def forward_messages(chain: Any) -> Tensor:
    return _value(chain, chains.messages.forward_messages, recursion.forward_messages)


def backward_messages(chain: Any) -> Tensor:
    return _value(chain, chains.messages.backward_messages, recursion.backward_messages)


def entropy(chain: Any) -> Tensor:
    return _value(chain, chains.entropy.entropy, recursion.entropy)


def log_weight(chain: Any, states: Any) -> Tensor:
    """Return `LogChain.log_weight`: sums of entries, which autograd follows by itself."""
    given, found = chain._given(), []
    entered = _inputs.make_chain(given, chain._lengths)
    ctx = native_context(torch_namespace, entered.parts["potentials"].device, "float64")
    states = _inputs.check_states(ctx, states, entered)
    times, real = torch.arange(entered.num_steps, device=ctx.device), recursion.real_steps(entered)
    states = torch.where(real, states, 0)  # with all batch axes
    moves = times[:-1] * (not entered.has_one_matrix)
    places = {
        "potentials": (times, states),
        "transitions": (moves, states[..., :-1], states[..., 1:]),
        "initial": (states[..., :1],),
        "final": (entries(states, real.sum(-1, keepdim=True) - 1, axes=1),),
    }
    for part in (ARGUMENTS[name] for name in given):
        weights = entries(entered.parts[part], *places[part], axes=1)
        if entered.lengths is not None and len(places[part]) > 1:
            is_read = real[..., -weights.shape[-1] :]
            weights = torch.where(is_read, weights, float(part not in entered.logs))
        if part not in entered.logs:
            weights = recursion.logs_of(weights.double())
        found.append(weights)
    terms = torch.cat(found, -1).double()
    # Whole numbers add up exactly, up to 2**53: what cancels leaves no rounding.
    whole = terms.detach().round().nan_to_num(0, 0, 0)
    total = through_finite(whole.sum(-1) + (terms - whole).sum(-1))
    return total.to(calls.result_dtype(*given.values()))


def _value(
    chain: Any,
    compute: Callable[..., Array],
    written: Callable[..., Tensor],
    known: Tensor | None = None,
    kind: type[ChainOperation] = ChainOperation,
) -> Tensor:
    """Return what a kind of operation makes of a chain.

    Its parts get equally many batch axes, so that an axis of vmap is one more in front.
    """
    given = chain._given()
    rows = len(_inputs.check_shapes(given))
    names = [part.linear if part.linear in given else part.log for part in PARTS.values()]
    pairs = zip(map(given.get, names), OWN_AXES, strict=True)
    inputs: list[Any] = [x if x is None else x[(None,) * (rows + n - x.ndim)] for x, n in pairs]
    if known is not None and kind.sums_rows:
        known = known.reshape(inputs[1].shape)
    operation = kind(chain, names, compute, written)
    with _threads.using(chain._workers):
        found = operation.known(inputs) if known is None else (known, None)
        return call(Value(operation), *inputs, known=found)[0]


def _places(tensors: Tensors) -> list[int]:
    return [x.data_ptr() for x in tensors if x is not None]


def _leaves(tensors: Tensors) -> Tensors:
    return [x if x is None else x.detach().double().requires_grad_() for x in tensors]


def _agree(known: Tensor, found: Tensor, least: float = 0.0) -> bool:
    """Tell whether results agree where they are numbers, relative to the largest of them."""
    if not known.numel():
        return True
    numbers = torch.isfinite(known)
    known, found = (torch.where(numbers, x, 0) for x in (known, found))
    allowed = _TOLERANCE * (known.abs() + 1e-3 * known.abs().max().clamp(min=least))
    return bool(((found - known).abs() <= allowed).all())
