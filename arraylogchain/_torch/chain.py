"""Methods of `LogChain` for tensors that take part in autograd, transforms or compilation."""

from __future__ import annotations

from collections.abc import Callable
from itertools import compress
from typing import Any

import array_api_compat.torch as torch_namespace
import numpy as np
import torch

from arraylogchain import _chains as chains
from arraylogchain._core import threads
from arraylogchain._core.context import Array, Context
from arraylogchain._inputs.arrays import has_values, native_context
from arraylogchain._inputs.chain import (
    PARTS,
    Chain,
    ChainArguments,
    check_shapes,
    check_states,
    make_chain,
    states_of,
)
from arraylogchain._inputs.tensors import check_tensors
from arraylogchain._torch import reference, rules
from arraylogchain._torch.products import entries, through_finite
from arraylogchain._torch.rules import Mask, Primal, Tensor, Tensors, call

# Tolerance between reference and certified values, for each step and each nat. It exceeds rounding
# errors, so that larger differences show lost paths.
_TOLERANCE = 1e-12
# Numbers of axes of the parts beyond the batch axes.
OWN_AXES = tuple(len(part.axes) for part in PARTS.values())


class ChainOperation(rules.Operation):
    """An operation on log potentials, transitions, initial and final weights, or None.

    Derivatives that no pullback computes are derivatives of a float64 reference by autograd.
    FloatingPointError is raised if the reference has lost paths, or if they are not finite.

    Parameters
    ----------
    log_chain : LogChain
    names : sequence of str
        The names of the inputs as arguments of `LogChain`.
    compute : callable
        Maps a context, a chain and a workspace to the value.
    differentiable : callable
        Differentiable reference: maps a chain of tensors to the value.
    paths : tuple of integer arrays
        Of `log_probability`; else empty.
    """

    def __init__(
        self, log_chain: Any, names: Any, compute: Any, differentiable: Any, paths: Tensors = ()
    ) -> None:
        super().__init__()
        self.names, self.compute, self.differentiable = names, compute, differentiable
        self.paths = paths
        self.name = differentiable.__name__
        # The chain itself is not stored, so that checkpoints can free its tensors.
        self.lengths, self.workspace = log_chain._arguments.lengths, log_chain._workspace
        self.keeps_messages, self.workers = log_chain._keeps_messages, log_chain._workers

    def value(self, *inputs: Tensor) -> Tensor:
        ctx, chain = ChainArguments(self._named(inputs), self.lengths).prepare()
        with ctx.computing():
            return ctx.to_caller(self.compute(ctx, chain, self.workspace))

    def precomputed(self, inputs: Tensors) -> Any:
        """Return the value and its residuals if gradients can use them, else None."""

    def check(self, leaves: Tensors, out: Tensor) -> Tensor:
        """Return a certified value, of the operation or log Z.

        Raise FloatingPointError if the reference `out` has lost paths: it differs from the value.
        """
        value, tolerance = self.value(*leaves), (_TOLERANCE * leaves[0].shape[-2], _TOLERANCE)
        self._require(_agree(value, out.detach(), *tolerance))
        return value

    def gradients(
        self, residuals: Any, requested: Mask, out: Tensor, g: Tensor, *inputs: Any
    ) -> Tensors:
        with torch.enable_grad():
            leaves = self._leaves(inputs)
            recorded_value = self._record(leaves)
            certified = self.check(leaves, recorded_value)
            results = _derivatives(recorded_value, leaves, g.detach().double())
        self._require_numbers(results, certified, g)
        return rules.cast(results, inputs)

    def second(
        self, requested: Mask, out: Tensor, g: Tensor, *inputs_and_cotangents: Tensor
    ) -> Tensors:
        inputs, cotangents = (
            inputs_and_cotangents[: len(PARTS)],
            inputs_and_cotangents[len(PARTS) :],
        )
        with torch.enable_grad():
            leaves = self._leaves(inputs)
            recorded_value = self._record(leaves)
            certified = self.check(leaves, recorded_value)
            like = (
                recorded_value.new_ones((), dtype=rules.result_dtype(*inputs)) if g is None else g
            )
            weights = like.detach().double().expand(recorded_value.shape).requires_grad_()
            gradients = _derivatives(recorded_value, leaves, weights, create_graph=True)
            product = 0 * weights.sum()
            for x, direction in zip(gradients, cotangents, strict=True):
                if direction is not None:
                    product = product + (x * direction.detach()).sum()
            selected = tuple(compress((weights, *leaves), requested))
            results = torch.autograd.grad(product, selected, materialize_grads=True)
        self._require_numbers(results, certified, like, *cotangents)
        return rules.cast(results, tuple(compress((like, *inputs), requested)))

    def _require(self, is_right: bool) -> None:
        if not is_right:
            raise FloatingPointError(
                f"this derivative of {self.name} must be computed in linear space, where the "
                "weights of this chain range too widely for float64; first derivatives of "
                "log_partition by backward() are right on any range"
            )

    def _require_numbers(self, results: Tensors, certified: Tensor, *cotangents: Tensor) -> None:
        """Raise if results are not finite, unless the value is NaN or a cotangent not finite."""
        if not all(x is None or bool(torch.isfinite(x).all()) for x in results):
            is_number = (x is None or bool(torch.isfinite(x).all()) for x in cotangents)
            self._require(bool(torch.isnan(certified).any()) or not all(is_number))

    def _scaled(self, leaves: Tensors, gradients: Tensors) -> Tensors:
        """Return gradients with respect to linear weights times the largest, others unchanged."""
        results = []
        for name, part, x, y in zip(self.names, PARTS, leaves, gradients, strict=True):
            if x is not None and not name.startswith("log_"):
                top = reference.finite_max(x, reference.OWN_AXES[part])
                y = y * torch.where(top > 0, top, 1)
            if x is not None:
                results.append(y.detach())
        return results

    def _leaves(self, inputs: Tensors) -> Tensors:
        """Return the inputs as float64 leaves, logarithms minus the largest of their step.

        This changes no derivative, and keeps large offsets from taking digits of the values.
        """
        leaves = [x if x is None else x.detach().double() for x in inputs]
        for i, (name, part) in enumerate(zip(self.names, PARTS, strict=True)):
            if leaves[i] is not None and name.startswith("log_"):
                axes = reference.OWN_AXES[part]
                leaves[i] = leaves[i] - reference.finite_max(leaves[i], axes)
        return [x if x is None else x.requires_grad_() for x in leaves]

    def _record(self, leaves: Tensors) -> Tensor:
        """Return the value of the reference, with a history in autograd in any case."""
        chain = make_chain(self._named(leaves), self.lengths)
        return self.differentiable(chain) + leaves[0].flatten()[:0].sum()

    def _named(self, inputs: Tensors) -> dict[str, Tensor]:
        return {n: x for n, x in zip(self.names, inputs, strict=True) if x is not None}


class PosteriorOperation(ChainOperation):
    """An operation on the posterior distribution over the paths of each row."""

    def check(self, leaves: Tensors, out: Tensor) -> Tensor:
        """Return the certified log Z; raise if its derivatives show that paths are lost.

        Values do not show it: sums over rows and steps, and entropies, may agree without them.
        """
        potentials, *weights = leaves
        batch = make_chain(self._named(leaves), self.lengths).batch
        rows = [potentials.expand(*batch, *potentials.shape[-2:]), *weights]
        rows = [x if x is None else x.detach().requires_grad_() for x in rows]
        log_z = reference.log_partition(make_chain(self._named(rows), self.lengths))
        derivatives = self._scaled(rows, _derivatives(log_z, rows, torch.ones_like(log_z)))
        value, (_, pullback) = self.value_and_residuals(rows)
        every = [x is not None for x in rows]
        expected = self._scaled(rows, pullback(torch.ones_like(value), every))
        tolerance = _TOLERANCE * leaves[0].shape[-2]
        # Derivatives with respect to linear weights multiply the loss.
        largest = _largest(expected)
        pairs = zip(expected, derivatives, strict=True)
        self._require(all(_agree(x, y, tolerance / largest, tolerance) for x, y in pairs))
        return value

    def value_and_residuals(self, inputs: Tensors, *paths: Any) -> tuple[Tensor, Any]:
        """Return log Z, or log probabilities of paths, and residuals.

        The latter are the addresses of the inputs and the pullback.
        """
        ctx, chain = ChainArguments(self._named(inputs), self.lengths).prepare()
        with ctx.computing():
            module = chains.log_probability if paths else chains.marginals
            options = [check_states(ctx, x, chain, self.workspace) for x in paths]
            value, pull = module.value_and_pullback(
                ctx, chain, self.workspace, *(options or [self.keeps_messages])
            )

        def pullback(g: Tensor, requested: Mask) -> Tensors:
            (g,) = rules.read(ctx, g)
            ctx.record_stream(g)
            with ctx.computing():
                gradients = pull(g, frozenset(compress(PARTS, requested)))
                return [
                    ctx.to_caller(gradients[part]) if part in gradients else None for part in PARTS
                ]

        return ctx.to_caller(value), (_addresses(inputs), pullback)


class Filtered(ChainOperation):
    """State probabilities given the steps so far, with log normalizers as a last column."""

    def check(self, leaves: Tensors, out: Tensor) -> Tensor:
        # Derivatives with respect to linear weights multiply the loss.
        normalizers = out[..., -1].masked_fill(torch.isinf(out[..., -1]), 0)
        total = normalizers.cumsum(-1).sum()
        derivatives = self._scaled(leaves, _derivatives(total, leaves, None, retain_graph=True))
        tolerance = _TOLERANCE * leaves[0].shape[-2]
        largest = _largest(derivatives)
        expected, out = self.value(*leaves), out.detach()
        self._require(
            _agree(expected[..., :-1], out[..., :-1], tolerance / largest, tolerance)
            and _agree(expected[..., -1], out[..., -1], tolerance, _TOLERANCE)
        )
        return expected


class ExpectedTransitions(PosteriorOperation):
    """Expected counts, summed over rows, in the shape of the transitions."""

    sums_rows = True


class Partition(PosteriorOperation):
    """Log Z, or the log probabilities of paths, whose gradients a pullback computes."""

    def precomputed(self, inputs: Tensors) -> Any:
        has_pullback = torch.is_grad_enabled() and has_values(*inputs)
        return self.value_and_residuals(inputs, *self.paths) if has_pullback else None

    def gradients(
        self, residuals: Any, requested: Mask, out: Tensor, g: Tensor, *inputs: Any
    ) -> Tensors:
        # Hooks on saved tensors may replace inputs by copies; the originals may have changed since.
        if residuals is None or residuals[0] != _addresses(inputs):
            _, residuals = self.value_and_residuals(inputs, *self.paths)
        return residuals[1](g, requested)  # type: ignore[no-any-return]


def log_partition(chain: Any, precomputed: Tensor | None = None) -> Tensor:
    return _value(
        chain, chains.messages.log_partition, reference.log_partition, precomputed, Partition
    )


def marginals(chain: Any, precomputed: Tensor | None = None) -> Tensor:
    functions = chains.marginals.marginals, reference.marginals
    return _value(chain, *functions, precomputed, PosteriorOperation)


def expected_transitions(chain: Any, precomputed: Tensor | None = None) -> Tensor:
    functions = chains.marginals.expected_transitions, reference.expected_transitions
    counts = _value(chain, *functions, precomputed, ExpectedTransitions)
    return counts.reshape(chain._transitions().shape)


def posterior(chain: Any) -> Tensors:
    """Return log Z, marginals and counts or None; one pass computes all if values are readable."""
    is_plain = has_values(*chain._arguments.arrays.values())
    precomputed = chain._run(chains.marginals.posterior) if is_plain else (None, None, None)
    counts = None if chain._transitions() is None else expected_transitions(chain, precomputed[2])
    return log_partition(chain, precomputed[0]), marginals(chain, precomputed[1]), counts


def filtered(chain: Any) -> Tensors:
    def compute(ctx: Context, validated: Chain, workspace: int) -> Array:
        marginals, normalizers = chains.messages.filtered(ctx, validated, workspace)
        return ctx.xp.concat([marginals, normalizers[..., None]], axis=-1)

    columns = _value(chain, compute, reference.filtered, kind=Filtered)
    return columns[..., :-1], columns[..., -1]


def forward_messages(chain: Any) -> Tensor:
    return _value(chain, chains.messages.forward_messages, reference.forward_messages)


def backward_messages(chain: Any) -> Tensor:
    return _value(chain, chains.messages.backward_messages, reference.backward_messages)


def entropy(chain: Any) -> Tensor:
    functions = chains.entropy.entropy, reference.entropy
    return _value(chain, *functions, kind=PosteriorOperation)


def log_weight(chain: Any, states: Any) -> Tensor:
    """Return `LogChain.log_weight` as sums of entries, which autograd differentiates by itself."""
    arguments = chain._arguments.floating()
    check_tensors(arguments)
    validated = make_chain(arguments, chain._arguments.lengths)
    total = _log_weight(validated, states, chain._workspace)
    return total.to(rules.result_dtype(*arguments.values()))


def log_probability(chain: Any, states: Any) -> Tensor:
    # The caller may change the original before derivatives are computed.
    paths = states.clone() if isinstance(states, torch.Tensor) else np.array(states)

    def compute(ctx: Context, validated: Chain, workspace: int) -> Array:
        checked = check_states(ctx, paths, validated, workspace)
        return chains.log_probability.log_probability(ctx, validated, workspace, checked)

    def log_probability(validated: Chain) -> Tensor:
        weight = _log_weight(validated, paths, chain._workspace)
        difference = weight - reference.log_partition(validated)
        return torch.where(torch.isneginf(weight), weight, difference)

    return _value(chain, compute, log_probability, kind=Partition, paths=(paths,))


def _log_weight(validated: Chain, states: Any, workspace: int) -> Tensor:
    """Return the log weights of paths in float64, differentiably."""
    ctx = native_context(torch_namespace, validated.parts["potentials"].device, "float64")
    states = check_states(ctx, states, validated, workspace)
    states = states_of(ctx, states, None, (slice(None),) * states.ndim)
    times, is_valid = (
        torch.arange(validated.num_steps, device=ctx.device),
        reference.valid_steps(validated),
    )
    states = torch.where(is_valid, states, 0)  # with all batch axes
    sources = times[:-1] * (not validated.has_one_matrix)
    places = {
        "potentials": (times, states),
        "transitions": (sources, states[..., :-1], states[..., 1:]),
        "initial": (states[..., :1],),
        "final": (entries(states, is_valid.sum(-1, keepdim=True) - 1, axes=1),),
    }
    logs = []
    for part in validated.parts:
        weights = entries(validated.parts[part], *places[part], axes=1)
        if validated.lengths is not None and len(places[part]) > 1:
            is_read = is_valid[..., -weights.shape[-1] :]
            weights = torch.where(is_read, weights, float(part not in validated.logs))
        if part not in validated.logs:
            weights = reference.logs_of(weights.double())
        logs.append(weights)
    terms = torch.cat(logs, -1).double()
    # Sums of integers are exact up to 2**53, so that terms that cancel leave no rounding error.
    rounded = terms.detach().round().nan_to_num(0, 0, 0)
    return through_finite(rounded.sum(-1) + (terms - rounded).sum(-1))


def _value(
    chain: Any,
    compute: Callable[..., Array],
    differentiable: Callable[..., Tensor],
    precomputed: Tensor | None = None,
    kind: type[ChainOperation] = ChainOperation,
    paths: Tensors = (),
) -> Tensor:
    """Return the value of an operation on a chain.

    All parts get the same number of batch axes, those of paths included, so that an axis of vmap is
    one more in front.
    """
    arguments = chain._arguments.floating()
    check_tensors(arguments)
    rows = max([len(check_shapes(arguments)), *(np.ndim(x) - 1 for x in paths)])
    names = [part.linear if part.linear in arguments else part.log for part in PARTS.values()]
    pairs = zip(map(arguments.get, names), OWN_AXES, strict=True)
    inputs: list[Any] = [x if x is None else x[(None,) * (rows + n - x.ndim)] for x, n in pairs]
    if precomputed is not None and kind.sums_rows:
        precomputed = precomputed.reshape(inputs[1].shape)
    operation = kind(chain, names, compute, differentiable, paths)
    with threads.using(chain._workers):
        available = operation.precomputed(inputs) if precomputed is None else (precomputed, None)
        return call(Primal(operation), *inputs, precomputed=available)[0]


def _addresses(tensors: Tensors) -> list[int]:
    return [x.data_ptr() for x in tensors if x is not None]


def _derivatives(out: Tensor, leaves: Tensors, g: Tensor, **options: Any) -> Tensors:
    """Return the gradients with respect to the leaves, None where a leaf is None."""
    is_present = [x is not None for x in leaves]
    requested = tuple(compress(leaves, is_present))
    results = torch.autograd.grad(out, requested, g, materialize_grads=True, **options)
    return rules.scatter_optional(results, is_present)


def _largest(tensors: Tensors) -> float:
    """Return the largest absolute value, at least 1."""
    return max([1.0, *(float(x.abs().max()) for x in tensors if x.numel())])


def _agree(expected: Tensor, out: Tensor, absolute: float, relative: float) -> bool:
    """Return whether all entries agree; where NaN is expected, any value does."""
    close = (out - expected).abs() <= absolute + relative * expected.abs()
    return bool((torch.isnan(expected) | (out == expected) | close).all())
