"""Methods of `LogChain` for tensors that take part in autograd, transforms or compilation."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
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
    ARGUMENTS,
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
from arraylogchain._torch.reference import OWN_AXES
from arraylogchain._torch.rules import Mask, Primal, Tensor, Tensors, call

# Tolerance between reference and certified values, for each step and each nat. It exceeds rounding
# errors, so that larger differences show lost paths.
_TOLERANCE = 1e-12


class ChainOperation(rules.Operation):
    """An operation on log potentials and other weights of a chain, in the order of `PARTS`.

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
            leaves, recorded_value, certified = self._record(inputs)
            weights = g.detach().double()
            results = torch.autograd.grad(recorded_value, leaves, weights, materialize_grads=True)
        self._require_numbers(results, certified, g)
        return rules.cast(results, inputs)

    def second(self, requested: Mask, out: Tensor, g: Tensor, *args: Tensor) -> Tensors:
        inputs, cotangents = args[: len(self.names)], args[len(self.names) :]
        with torch.enable_grad():
            leaves, recorded_value, certified = self._record(inputs)
            one = recorded_value.new_ones((), dtype=rules.result_dtype(*inputs))
            like = one if g is None else g
            weights = like.detach().double().expand(recorded_value.shape).requires_grad_()
            gradients = torch.autograd.grad(
                recorded_value, leaves, weights, create_graph=True, materialize_grads=True
            )
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
                "weights of this chain are infinite or range too widely for float64; first "
                "derivatives of log_partition and log_probability by backward() have no such limit"
            )

    def _require_numbers(self, results: Tensors, certified: Tensor, *cotangents: Tensor) -> None:
        """Raise if results are not finite, unless the value is NaN or a cotangent not finite."""
        if not all(bool(torch.isfinite(x).all()) for x in results):
            is_number = (x is None or bool(torch.isfinite(x).all()) for x in cotangents)
            self._require(bool(torch.isnan(certified).any()) or not all(is_number))

    def _scaled(self, leaves: Tensors, gradients: Tensors) -> Tensors:
        """Return gradients with respect to linear weights times the largest, others unchanged."""
        results = []
        for name, x, y in zip(self.names, leaves, gradients, strict=True):
            is_log = name.startswith("log_")
            scale = 1 if is_log else reference.scale_of(x, OWN_AXES[ARGUMENTS[name]])
            results.append(y.detach() * scale)
        return results

    def _record(self, inputs: Tensors) -> tuple[Tensors, Tensor, Tensor]:
        """Return leaves, the value of the reference with a history in autograd, and `check` of it.

        Leaves are the inputs in float64, logarithms minus the largest of their step. This changes
        no derivative, and keeps large offsets from taking digits of the values.
        """
        leaves = []
        for name, x in zip(self.names, inputs, strict=True):
            x = x.detach().double()
            if name.startswith("log_"):
                x = x - reference.finite_max(x, OWN_AXES[ARGUMENTS[name]])
            leaves.append(x.requires_grad_())
        out = self.differentiable(self._chain(leaves)) + leaves[0].flatten()[:0].sum()
        return leaves, out, self.check(leaves, out)

    def _chain(self, inputs: Tensors) -> Chain:
        return make_chain(self._named(inputs), self.lengths)

    def _named(self, inputs: Tensors) -> dict[str, Tensor]:
        return dict(zip(self.names, inputs, strict=True))


class PosteriorOperation(ChainOperation):
    """An operation on the posterior distribution over the paths of each row."""

    def check(self, leaves: Tensors, out: Tensor) -> Tensor:
        """Return the certified log Z; raise if its derivatives show that paths are lost.

        Values do not show it: sums over rows and steps, and entropies, may agree without them.
        """
        potentials, *weights = leaves
        batch = self._chain(leaves).batch
        rows = [potentials.expand(*batch, *potentials.shape[-2:]), *weights]
        rows = [x.detach().requires_grad_() for x in rows]
        log_z = reference.log_partition(self._chain(rows))
        derivatives = torch.autograd.grad(log_z.sum(), rows, materialize_grads=True)
        value, (_, pullback) = self.value_and_residuals(rows)
        expected = self._scaled(rows, pullback(torch.ones_like(value), [True] * len(rows)))
        tolerance = _TOLERANCE * leaves[0].shape[-2]
        # Derivatives with respect to linear weights multiply the loss.
        largest = _largest(expected)
        pairs = zip(expected, self._scaled(rows, derivatives), strict=True)
        self._require(all(_agree(x, y, tolerance / largest, tolerance) for x, y in pairs))
        return value

    def value_and_residuals(self, inputs: Tensors, *paths: Any) -> tuple[Tensor, Any]:
        """Return log Z, or log probabilities of paths, and residuals.

        The latter are the addresses of the inputs and the pullback.
        """
        ctx, chain = ChainArguments(self._named(inputs), self.lengths).prepare()
        parts = [ARGUMENTS[name] for name in self.names]
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
                gradients = pull(g, frozenset(compress(parts, requested)))
                return [ctx.to_caller(gradients.get(part)) for part in parts]

        return ctx.to_caller(value), (_addresses(inputs), pullback)


class Filtered(ChainOperation):
    """State probabilities given the steps so far, with log normalizers as a last column."""

    def check(self, leaves: Tensors, out: Tensor) -> Tensor:
        # Derivatives with respect to linear weights multiply the loss.
        normalizers = out[..., -1].masked_fill(torch.isinf(out[..., -1]), 0)
        total = normalizers.cumsum(-1).sum()
        derivatives = torch.autograd.grad(total, leaves, retain_graph=True, materialize_grads=True)
        tolerance = _TOLERANCE * leaves[0].shape[-2]
        largest = _largest(self._scaled(leaves, derivatives))
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


def _value(
    compute: Callable[..., Array],
    differentiable: Callable[..., Tensor],
    kind: type[ChainOperation],
    chain: Any,
    precomputed: Tensor | None = None,
    paths: Tensors = (),
) -> Tensor:
    """Return the value of an operation on a chain.

    All parts get the same number of batch axes, including batch axes of paths, so that an axis of
    vmap is one more in front.
    """
    arguments = chain._arguments.floating()
    check_tensors(arguments)
    rows = max([len(check_shapes(arguments)), *(np.ndim(x) - 1 for x in paths)])
    inputs = []
    for name, x in arguments.items():
        own_axes = PARTS[ARGUMENTS[name]].axes
        inputs.append(x[(None,) * (rows + len(own_axes) - x.ndim)])
    if precomputed is not None and kind.sums_rows:
        precomputed = precomputed.reshape(inputs[1].shape)
    operation = kind(chain, tuple(arguments), compute, differentiable, paths)
    with threads.using(chain._workers):
        available = operation.precomputed(inputs) if precomputed is None else (precomputed, None)
        return call(Primal(operation), *inputs, precomputed=available)[0]


log_partition = partial(_value, chains.messages.log_partition, reference.log_partition, Partition)
marginals = partial(_value, chains.marginals.marginals, reference.marginals, PosteriorOperation)
entropy = partial(_value, chains.entropy.entropy, reference.entropy, PosteriorOperation)
forward_messages = partial(
    _value, chains.messages.forward_messages, reference.forward_messages, ChainOperation
)
backward_messages = partial(
    _value, chains.messages.backward_messages, reference.backward_messages, ChainOperation
)


def expected_transitions(chain: Any, precomputed: Tensor | None = None) -> Tensor:
    functions = chains.marginals.expected_transitions, reference.expected_transitions
    counts = _value(*functions, ExpectedTransitions, chain, precomputed)
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

    columns = _value(compute, reference.filtered, Filtered, chain)
    return columns[..., :-1], columns[..., -1]


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

    return _value(compute, log_probability, Partition, chain, paths=(paths,))


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


def _addresses(tensors: Tensors) -> list[int]:
    return [x.data_ptr() for x in tensors]


def _largest(tensors: Tensors) -> float:
    """Return the largest absolute value, at least 1."""
    return max([1.0, *(float(x.abs().max()) for x in tensors if x.numel())])


def _agree(expected: Tensor, out: Tensor, absolute: float, relative: float) -> bool:
    """Return whether all entries agree; where NaN is expected, any value does."""
    close = (out - expected).abs() <= absolute + relative * expected.abs()
    return bool((torch.isnan(expected) | (out == expected) | close).all())
