"""The sums over all paths of a chain of tensors that take part in autograd or compilation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from arraylogchain._arrays import is_traced
from arraylogchain._inputs.arguments import FINAL, INITIAL, TRANSITIONS, one_of
from arraylogchain._inputs.chain import PARTS
from arraylogchain._inputs.lengths import check_integers
from arraylogchain._inputs.paths import check_path_shape, check_range
from arraylogchain._torch.functions import (
    Gradients,
    Memo,
    Tensor,
    Value,
    apply,
    check_tensors,
    new_memo,
    result_dtype,
)
from arraylogchain._torch.partition import OWN_AXES, Filtered, Partition, chain_batch
from arraylogchain._torch.tracing import is_compiling, operators

# Entries up to here are far from the ends of float32's range.
_MODERATE = 2.0**60

Given = Mapping[str, Tensor]
Options = tuple[tuple[bool, ...], int | None, Any]


def log_partition(given: Given, budget: int | None, lengths: Any) -> Tensor:
    """Return `LogChain.log_partition`, differentiable.

    Parameters
    ----------
    given : mapping of str to tensor
        The arguments of `LogChain` by name.
    budget : int, optional
        Its workspace, if one was asked for.
    lengths : array [...], optional
    """
    inputs, options = _inputs(given, budget, lengths)
    return _value(inputs, options, new_memo())


def marginals(given: Given, budget: int | None, lengths: Any) -> Tensor:
    """Return `LogChain.marginals`, differentiable: the gradient to each row's own potentials."""
    inputs, options, batch = _inputs_per_row(given, budget, lengths)
    (result,) = _gradients(("potentials",), inputs, batch, options)
    return result


def expected_transitions(given: Given, budget: int | None, lengths: Any) -> Tensor:
    """Return `LogChain.expected_transitions`, differentiable: the gradient to log transitions."""
    inputs, options = _inputs(given, budget, lengths)
    batch = chain_batch(*inputs)
    (gradient,) = _gradients(("transitions",), inputs, batch, options)
    return _counts(given, gradient, inputs, batch, options)


def posterior(given: Given, budget: int | None, lengths: Any) -> tuple[Tensor | None, ...]:
    """Return `LogChain.posterior`, differentiable."""
    inputs, options, batch = _inputs_per_row(given, budget, lengths)
    memo = new_memo()
    log_z = _value(inputs, options, memo)
    if inputs[1] is None:
        return log_z, *_gradients(("potentials",), inputs, batch, options, memo), None
    wanted = ("potentials", "transitions")
    of_states, gradient = _gradients(wanted, inputs, batch, options, memo)
    return log_z, of_states, _counts(given, gradient, inputs, batch, options)


def filtered(given: Given, budget: int | None, lengths: Any) -> tuple[Tensor, Tensor]:
    """Return `LogChain.filtered`, differentiable."""
    inputs, options = _inputs(given, budget, lengths)
    if is_compiling():
        found = operators().filtered(*inputs, *options)
    else:
        found = apply(Value, Filtered(*options), None, *inputs)
    return found[..., :-1], found[..., -1]


def _counts(given: Given, gradient: Tensor, inputs: Any, batch: Any, options: Options) -> Tensor:
    """Return expected counts, given the gradient to the transitions as they are given."""
    if "log_transitions" in given:
        return gradient.reshape(given["log_transitions"].shape)
    # Matrices that no row reaches are not read.
    counts = torch.where(gradient == 0, gradient, gradient * inputs[1])
    if not _are_moderate(gradient, inputs[1]):
        # Beside small weights gradients can be beyond the dtype's range: counts come from
        # logarithms, and from the product no more than their derivatives, right beside zeros.
        detached: list[Any] = [x if x is None else x.detach() for x in inputs]
        detached[1] = detached[1].log()
        (_, *in_logs), *others = options
        (exact,) = _gradients(("transitions",), detached, batch, ((True, *in_logs), *others))
        counts = exact + torch.where(torch.isfinite(counts), counts - counts.detach(), 0)
    return counts.reshape(given["transitions"].shape)


def _are_moderate(*tensors: Tensor) -> bool:
    """Tell whether products of entries are right to rounding, and known not to be too large."""
    if is_traced():
        return False
    return all(
        x.dtype.itemsize >= 4 and bool((x.detach().abs() <= _MODERATE).all()) for x in tensors
    )


def forward_messages(given: Given, budget: int | None, lengths: Any) -> Tensor:
    """Return `LogChain.forward_messages`; for the compiler only."""
    return _messages("forward_messages", given, budget, lengths)


def backward_messages(given: Given, budget: int | None, lengths: Any) -> Tensor:
    """Return `LogChain.backward_messages`; for the compiler only."""
    return _messages("backward_messages", given, budget, lengths)


def entropy(given: Given, budget: int | None, lengths: Any) -> Tensor:
    """Return `LogChain.entropy`, differentiable: log Z minus its change along all logs.

    All of it in float64, relative to the largest potentials of each step.
    """
    result = result_dtype(*given.values())
    wide = {name: x.double() for name, x in given.items()}
    for name in wide:
        if name.startswith("log_"):
            axes = (-2, -1) if name == "log_transitions" else (-1,)
            wide[name] = _below_largest(wide[name], axes)
    inputs, options = _inputs(wide, budget, lengths)
    in_logs = (True, *options[0])
    directions = [
        None if x is None else _log_weights(x, is_log)
        for x, is_log in zip(inputs, in_logs, strict=True)
    ]
    operation = Partition(*options)
    log_z = apply(Value, operation, None, *inputs)
    expected = operation.apply_tangent(log_z, inputs, directions)
    return torch.where(torch.isneginf(log_z), 0, log_z - expected).to(result)


def _below_largest(x: Tensor, axes: tuple[int, ...]) -> Tensor:
    """Return logs less the largest, rounded to an integer: entropies stay the same."""
    if 0 in x.shape:
        return x
    top = x.detach().amax(axes, keepdim=True).round()
    return x - torch.where(torch.isfinite(top), top, 0)


def _log_weights(x: Tensor, in_logs: bool) -> Tensor:
    """Return how x changes as all weights are raised to a power; 0 for weights of zero."""
    if in_logs:
        return torch.where(torch.isfinite(x), x, 0)
    return x * torch.where(x > 0, x, 1).log()


def log_weight(
    given: Given, budget: int | None, lengths: Any, states: Any, batch: tuple[int, ...]
) -> Tensor:
    """Return `LogChain.log_weight`, differentiable."""
    check_tensors(**given)
    potentials = given["log_potentials"]
    num_steps, num_states = potentials.shape[-2:]
    states = torch.as_tensor(states, device=potentials.device)
    check_integers("states", states.dtype)
    check_path_shape(tuple(states.shape), batch, num_steps)
    states = states.long()
    times = torch.arange(num_steps, device=potentials.device)
    real = torch.ones(num_steps, dtype=torch.bool, device=potentials.device)
    if lengths is not None:
        real = torch.as_tensor(lengths, device=potentials.device)[..., None] > times
        states = torch.where(real, states, 0)
    if not torch.compiler.is_compiling() and states.numel():
        check_range(int(states.min()), int(states.max()), num_states)
    # What the compiler sees cannot be checked: there, such states make NaN.
    outside = ((states < 0) | (states >= num_states)).any(-1)
    states = states.clamp(0, max(num_states - 1, 0))
    integers: Any = 0.0
    rest: Any = 0.0
    has_zero: Any = False
    for name, x in given.items():
        if name == "log_potentials":
            entries = _entries(x, times, states)
        elif name in FINAL:
            ends = real.sum(-1, keepdim=True).expand(*states.shape[:-1], 1) - 1
            entries = _entries(x, states.gather(-1, ends))
        elif name in TRANSITIONS:
            x = x[None] if x.ndim == 2 else x
            at = torch.zeros_like(times[1:]) if x.shape[-3] == 1 else times[:-1]
            entries = _entries(x, at, states[..., :-1], states[..., 1:])
        else:
            entries = _entries(x, states[..., :1])
        present = real[..., 1:] if name.endswith("transitions") else real[..., : entries.shape[-1]]
        logs, zero = _logs(entries.double(), present, name.startswith("log_"))
        # Integers add up exactly: what is large and cancels leaves no rounding.
        rounded = torch.where(torch.isfinite(logs), logs, 0).detach().round()
        integers, rest = integers + rounded.sum(-1), rest + (logs - rounded).sum(-1)
        has_zero = has_zero | zero.any(-1)
    total = torch.where(outside, torch.nan, integers + rest)
    # Where the weight is 0, every derivative is; beside NaN and +inf it is not 0 but unknown.
    weight = torch.where(torch.isnan(total) | torch.isposinf(total), torch.nan, -torch.inf)
    return torch.where(has_zero, weight, total).to(result_dtype(*given.values()))


def _entries(x: Tensor, *trailing: Tensor) -> Tensor:
    """Return x[..., *trailing], where leading axes of x broadcast against those of paths."""
    lead = x.shape[: x.ndim - len(trailing)]
    along = [
        torch.arange(n, device=x.device).reshape(-1, *(1,) * (len(lead) - axis))
        for axis, n in enumerate(lead)
    ]
    return x[(*along, *trailing)]


def _logs(entries: Tensor, present: Tensor, in_logs: bool) -> tuple[Tensor, Tensor]:
    """Return logs of weights, 0 for those that are not present or zero, and which are zero."""
    zero = torch.isneginf(entries) if in_logs else entries == 0
    safe = torch.where(zero | ~present, 0.0 if in_logs else 1.0, entries)
    return safe if in_logs else safe.log(), zero & present


def undifferentiated(name: str, compute: Callable[[], Any]) -> Any:
    """Call what has no derivatives, on tensors that may take part in autograd."""
    if torch.compiler.is_compiling():
        return torch.compiler.disable(compute)()
    if torch._C._are_functorch_transforms_active():
        raise NotImplementedError(
            f"{name}() has no derivatives and no vmap; call it outside of torch.func transforms, "
            "on all rows at once"
        )
    return compute()


def _messages(name: str, given: Given, budget: int | None, lengths: Any) -> Tensor:
    if not is_compiling():
        raise NotImplementedError(
            f"{name}() has no derivatives and no vmap; call it within torch.no_grad(), or on a "
            "chain of detached tensors; log_partition(), marginals() and expected_transitions() "
            "have both"
        )
    inputs, options = _inputs(given, budget, lengths)
    return getattr(operators(), name)(*inputs, *options)


def _value(inputs: Any, options: Options, memo: Memo | None) -> Tensor:
    if is_compiling():
        return operators().log_partition(*inputs, *options)
    return apply(Value, Partition(*options), memo, *inputs)


def _gradients(
    names: tuple[str, ...], inputs: Any, batch: Any, options: Options, memo: Memo | None = None
) -> Any:
    """Return the gradients of the sum of log Z to some inputs."""
    wanted = tuple(name in names for name in PARTS)
    ones = torch.ones(batch, dtype=result_dtype(*inputs), device=inputs[0].device)
    if is_compiling():
        return operators().log_partition_gradients(*inputs, None, ones, list(wanted), *options)
    return apply(Gradients, Partition(*options), memo, wanted, None, ones, *inputs)


def _inputs(given: Given, budget: int | None, lengths: Any) -> tuple[list[Any], Options]:
    """Return the inputs, and how they are to be read.

    They get equally many batch axes, so that an axis of vmap is one more in front.
    """
    check_tensors(**given)
    pairs = (TRANSITIONS, INITIAL, FINAL)
    inputs = [given["log_potentials"], *(one_of(given, pair) for pair in pairs)]
    most = max(x.ndim - n for x, n in zip(inputs, OWN_AXES, strict=True) if x is not None)
    for i, (x, n) in enumerate(zip(inputs, OWN_AXES, strict=True)):
        if x is not None and x.ndim - n < most:
            inputs[i] = x[(None,) * (most - x.ndim + n)]
    if is_compiling() and lengths is not None:
        lengths = torch.as_tensor(lengths)
    return inputs, (tuple(pair[1] in given for pair in pairs), budget, lengths)


def _inputs_per_row(
    given: Given, budget: int | None, lengths: Any
) -> tuple[list[Any], Options, tuple[int, ...]]:
    """Return the same with potentials of each row's own, and the batch axes."""
    inputs, options = _inputs(given, budget, lengths)
    batch = chain_batch(*inputs)
    inputs[0] = inputs[0].expand(*batch, *inputs[0].shape[-2:])
    return inputs, options, batch
