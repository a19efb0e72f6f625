"""Blocks of chains in memory: what workers call.

Of a chain whose time is cut, a block begins with one step more, unless it is the first: the last
step of the block before, with the message that enters as its weights. Matrices are those that lead
into a block's own steps. What follows the block enters as final weights, so that each is a chain.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from array_api_compat import array_namespace

from arraylogchain import _chain_calls, _threads, vjp
from arraylogchain._array.chains.time_parallel import compared
from arraylogchain._arrays import on_host
from arraylogchain._context import DOUBLE, Array, Context
from arraylogchain._dask.blocks import AXES, FIELD_OF, name_of
from arraylogchain._inputs.arguments import FINAL, INITIAL, TRANSITIONS
from arraylogchain._inputs.chain import Chain
from arraylogchain._inputs.lengths import check_lengths
from arraylogchain._random import fill, room_for_samples
from arraylogchain.chain import LogChain

# The part of a block from which messages are guessed, and its least number of steps.
_SHARE, _LEAST = 8, 64

# The arrays of a block by name, and the messages that enter it.
Arrays = dict[str, Any]


class Message(NamedTuple):
    """Logs [..., K] of the weights of a step's states, and [...] what to add to them."""

    logs: Array
    shift: Array

    def after(self, entering: Message, guess: Message, arrays: Arrays, eps: float) -> Any:
        """Return what leaves a block, this being what does after a guess; None if it fails.

        A guess holds where it agrees with what enters as `time_parallel` has it.
        """
        xp, (lengths, count) = array_namespace(self.logs), _lengths(arrays)
        with np.errstate(invalid="ignore"):
            factor, distance = compared(xp, entering.logs, guess.logs, DOUBLE.eps)
        # What enters rows that have ended, leaves them.
        has_ended = xp.asarray(lengths <= 0)
        if not bool(xp.all(has_ended | (distance <= count / 4 * eps))):
            return None
        shift = self.shift + (entering.shift - guess.shift + factor)
        return Message(
            xp.where(has_ended[..., None], entering.logs, self.logs),
            xp.where(has_ended, entering.shift, shift),
        )


class Paths(NamedTuple):
    """States [...] of the step in front of a block, -1 of rows that have ended, and its own."""

    front: Array
    states: Array

    def after(self, entering: Paths, guess: Paths, arrays: Arrays, eps: float) -> Any:
        """Return these paths if the states that follow the block are the guessed ones, or None."""
        return self if bool((entering.front == guess.front).all()) else None


def _lengths(arrays: Arrays) -> tuple[np.ndarray, int]:
    """Return how many steps rows have from a block's first one on, and how many the block has."""
    lengths = on_host("lengths", arrays["lengths"])
    return lengths - int(arrays["steps"][0]), int(arrays["log_potentials"].shape[-2])


def checked_lengths(lengths: Array, num_steps: int) -> Array:
    """Return lengths; raise ValueError if they are not between 1 and the number of steps."""
    check_lengths(lengths, lengths.shape, num_steps)
    return lengths


def chain_of(arrays: Arrays, workspace: int | None) -> tuple[LogChain, int]:
    """Return the chain of a block, and how many steps it has in front of the block's own."""
    given, front = {name: arrays[name] for name in AXES if name in arrays}, 0
    if "steps" in arrays:
        xp, (lengths, count) = array_namespace(given["log_potentials"]), _lengths(arrays)
        front = int(arrays["steps"][0] > 0)
        given["lengths"] = np.clip(lengths, 0, count) + front
        if front:
            x, initial = given["log_potentials"], given.pop(name_of(given, INITIAL), None)
            given["log_potentials"] = xp.concat([xp.zeros_like(x[..., :1, :]), x], axis=-2)
            if initial is not None:
                given["log_initial"] = xp.zeros_like(initial)  # its batch axes count
        elif given[name_of(given, TRANSITIONS)].shape[-3] == count:
            # None leads into the first step of all.
            name = name_of(given, TRANSITIONS)
            given[name] = given[name][..., 1:, :, :]
        for side, names in (("before", INITIAL), ("after", FINAL)):
            if arrays.get(side) is not None:
                given.pop(name_of(given, names), None)
                given["log_" + names[0]] = arrays[side].logs
    return LogChain(**given, workspace=workspace), front


def _with_final(arrays: Arrays, ends: np.ndarray) -> Arrays:
    """Return arrays whose final weights are those of some rows only, and 1 of others."""
    name = name_of(arrays, FINAL)
    if not name:
        return arrays
    given, xp = dict(arrays), array_namespace(arrays[name])
    final = given.pop(name).astype("float64")
    with np.errstate(divide="ignore"):
        final = final if name == FINAL[1] else xp.log(final)
    return {**given, FINAL[1]: xp.where(xp.asarray(ends)[..., None], final, 0.0)}


# ----------------------------------------------------------------- messages from block to block


def sums(
    arrays: Arrays, entering: Message | None, backward: bool, workspace: int | None
) -> Message:
    """Return the sums over all paths that leave a block in a direction."""
    chain, _ = chain_of(arrays | {"after" if backward else "before": entering}, workspace)
    logs, shift = chain._run(partial(_chain_calls.compute, "last_message"), backward)
    return Message(logs, shift if entering is None else shift + entering.shift)


def largest(
    arrays: Arrays, entering: Message | None, backward: bool, workspace: int | None
) -> Message:
    """Return the largest weights of all paths that leave a block."""
    chain, _ = chain_of(arrays | {"before": entering}, workspace)
    logs = chain._run(partial(_chain_calls.compute, "best_message"))
    return Message(logs, array_namespace(logs).zeros_like(logs[..., 0]))


def paths(
    arrays: Arrays,
    entering: Paths | None,
    backward: bool,
    workspace: int | None,
    num_samples: int | None = None,
    root: int = 0,
) -> Paths:
    """Return best paths, or samples, that lead to given states of what follows."""
    given = arrays
    if entering is not None:
        # Of rows that go on, the last state of the block is known.
        known = entering.front >= 0
        given = _with_final(arrays, ~known if num_samples is None else ~known.all(axis=0))
        if num_samples is None:
            xp, size = array_namespace(known), arrays["log_potentials"].shape[-1]
            free = ~known[..., None] | (xp.arange(size) == entering.front[..., None])
            final = given.pop(FINAL[1], 0.0) if given is not arrays else 0.0
            given = {**given, FINAL[1]: xp.where(free, final, -np.inf)}
    chain, front = chain_of(given, workspace)
    if num_samples is None:
        states = chain.viterbi().states
    else:
        states = chain._run(_drawn, arrays, entering, num_samples, root)
    if "steps" not in arrays:
        return Paths(states[..., 0], states)
    xp = array_namespace(states)
    goes_on = xp.asarray(_lengths(arrays)[0] > 0)
    return Paths(xp.where(goes_on, states[..., 0], -1), states[..., front:])


def _drawn(
    ctx: Context,
    chain: Chain,
    workspace: int,
    arrays: Arrays,
    entering: Paths | None,
    num_samples: int,
    root: int,
) -> Array:
    """Return samples of a block, which knows by its first row and step what seed it has."""
    where = [int(x[0]) if x.size else 0 for name, x in arrays.items() if name.startswith("axis ")]
    seed = np.random.SeedSequence(root, spawn_key=[*where, *map(int, arrays.get("steps", ())[:1])])
    shape = (num_samples, *chain.batch, chain.num_steps)
    (out, uniforms), rng = room_for_samples(ctx, shape), np.random.default_rng(seed)
    if "steps" in arrays:
        # Those of the first steps are the same however many follow.
        numbers = rng.random((shape[-1], *shape[:-1]))
        uniforms[...] = ctx.xp.asarray(np.moveaxis(numbers, 0, -1))
    else:
        fill(ctx, rng, uniforms)
    if entering is not None:
        last = entering.front
        uniforms[..., -1] = ctx.xp.where(last >= 0, -1.0 - last, uniforms[..., -1])
    _chain_calls.draw(ctx, chain, workspace, out, uniforms)
    return out


def guess(
    arrays: Arrays, function: Callable[..., Any], backward: bool, eps: float, **options: Any
) -> Any:
    """Return what leaves a block, guessed from the steps that a direction ends with."""
    x, steps, name = arrays["log_potentials"], arrays["steps"], name_of(arrays, TRANSITIONS)
    count = x.shape[-2]
    length = min(count, max(_LEAST, count // _SHARE))
    some = slice(length) if backward else slice(count - length, None)
    part = arrays | {"log_potentials": x[..., some, :], "steps": steps[some]}
    if arrays[name].shape[-3] == count:
        part[name] = arrays[name][..., some, :, :]
    part = _with_final(part, _lengths(part)[0] <= length)
    return function(part, None, backward=backward, **options)


def leave(
    arrays: Arrays, function: Callable[..., Any], backward: bool, eps: float, **options: Any
) -> Any:
    """Return what leaves a block after what enters it."""
    return function(arrays, arrays.get("entering"), backward=backward, **options)


def verified(
    entering: Any,
    guess: Any,
    result: Any,
    blocks: Sequence[Any],
    *,
    names: Sequence[str],
    options: Mapping[str, Any],
) -> Any:
    """Return what leaves a block: the result of a guess, or if that fails, computed again."""
    arrays = dict(zip(names, blocks, strict=True))
    found = result.after(entering, guess, arrays, options["eps"])
    if found is not None:
        return found
    with _threads.using(1):
        return leave({**arrays, "entering": entering}, **options)


# ------------------------------------------------------------------------- results of blocks


def results(arrays: Arrays, operation: str, workspace: int | None) -> tuple[Array, ...]:
    """Return the arrays that a method returns, of the steps of a block."""
    chain, front = chain_of(arrays, workspace)
    found = getattr(chain, operation)()
    if operation == "posterior":
        log_z, marginals, counts = found
        if counts is not None:
            counts = _of_steps(chain, arrays, "transitions", counts)
        return log_z[..., None], marginals[..., front:, :], counts
    if operation == "viterbi":
        return found.states, found.log_weight[..., None]
    if operation == "filtered":
        return found.probabilities[..., front:, :], found.log_normalizers[..., front:]
    if operation == "expected_transitions":
        return (_of_steps(chain, arrays, "transitions", found),)
    if operation in ("log_partition", "entropy"):
        if front:
            # The step in front counts in the block before.
            ends = arrays["before"].logs + arrays["leaving"].logs
            found = found - LogChain(ends[..., None, :]).entropy()
        return (found[..., None],)
    entering = arrays.get("before" if operation == "forward_messages" else "after")
    if entering is not None and operation != "marginals":
        found = found + entering.shift[..., None, None]
    return (found[..., front:, :],)


def total(arrays: Arrays, workspace: int | None) -> tuple[Array]:
    """Return log Z, [..., 1], of what leaves the last block."""
    chain, _ = chain_of(_at_end(arrays), workspace)
    return ((chain.log_partition() + arrays["leaving"].shift)[..., None],)


def _at_end(arrays: Arrays) -> Arrays:
    """Return the chain of one step that is left after the last block."""
    logs, names = arrays["leaving"].logs, (*FINAL, "cotangent")
    given = {name: arrays[name] for name in names if name in arrays}
    nothing = array_namespace(logs).zeros_like(logs)
    return {**given, "log_potentials": nothing[..., None, :], "log_initial": logs}


def weights(arrays: Arrays, workspace: int | None) -> tuple[Array]:
    """Return the part that a block has in the log weights of paths, [..., 1]."""
    states, given = arrays["states"], arrays
    if "steps" in arrays:
        lengths, count = _lengths(arrays)
        given = _with_final(arrays, (lengths > 0) & (lengths <= count))
    chain, front = chain_of(given, workspace)
    if front:
        xp = array_namespace(states)
        states = xp.concat([xp.clip(arrays["in front"], min=0), states], axis=-1)
    return (chain.log_weight(states)[..., None],)


def last_states(arrays: Arrays, workspace: int | None) -> Array:
    return arrays["states"][..., -1:]


def gradients(arrays: Arrays, wanted: Sequence[str], workspace: int | None) -> tuple[Array, ...]:
    """Return gradients with respect to arrays of a block."""
    given = _at_end(arrays) if "leaving" in arrays else arrays
    chain, front = chain_of(given, workspace)
    _, pullback = vjp.log_partition(chain)
    found = pullback(arrays["cotangent"], [FIELD_OF[name] for name in wanted])
    out = []
    for name in wanted:
        y = getattr(found, FIELD_OF[name])
        if front and name in INITIAL:
            y = array_namespace(y).zeros_like(arrays[name])
        out.append(_of_steps(chain, arrays, name, y))
    return tuple(out)


def _of_steps(chain: LogChain, arrays: Arrays, name: str, y: Array) -> Array:
    """Return gradients, or counts, with all batch axes and one of steps, those of a block."""
    core = len(AXES[name])
    if name == "log_potentials":
        y = y[..., y.shape[-2] - arrays[name].shape[-2] :, :]
    elif name in (*INITIAL, *FINAL):
        y, core = y[..., None, :], core + 1
    elif "steps" in arrays:
        matrices, xp = arrays[name_of(arrays, TRANSITIONS)], array_namespace(y)
        missing = matrices[..., : matrices.shape[-3] - y.shape[-3], :, :]
        y = xp.concat([xp.zeros_like(missing), y], axis=-3)
    return y[(None,) * (len(chain._batch) + core - y.ndim)]


def call(
    function: Callable[..., Any], names: Sequence[str], options: Mapping[str, Any], *blocks: Any
) -> Any:
    """Call a function of the arrays of a block by name."""
    return function(dict(zip(names, blocks, strict=True)), **options)
