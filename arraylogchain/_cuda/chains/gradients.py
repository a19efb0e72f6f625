"""Gradients of chains on a CUDA device: marginals, expected transitions, derivatives.

The forward pass keeps the states of all steps, or of a few of them, from which the others are made
again in blocks. The way back goes through time in blocks: the
recursion writes the marginals of a block's steps and keeps their states, from which the sums for
pairs of states follow; what is summed over blocks is added up in the precision of the computation.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from arraylogchain._context import Array
from arraylogchain._cuda.chains.arrays import SCALE, History
from arraylogchain._cuda.chains.matrices import steps_at_once
from arraylogchain._cuda.chains.recursion import ChainRun, Outputs
from arraylogchain._cuda.chains.sums import FACTOR, SIDE, GradientSums

# Rows that are worth a block of their own.
ROWS_OF_A_SPLIT = 64


@dataclass(frozen=True, slots=True)
class ForwardPass:
    """What a forward pass keeps for the way back.

    Attributes
    ----------
    run : ChainRun
    total : array
        The sums over all paths.
    blocks : list of tuple of int
        The steps that are made again together, in the order of the recursion backward.
    history : History or None
        All states, if they are kept.
    before : dict of int to History
        Otherwise the states before some steps, from which the others are computed again.
    """

    run: ChainRun
    total: Array
    blocks: list[tuple[int, int]]
    history: History | None
    before: dict[int, History]

    @property
    def arrays(self) -> list[Array]:
        """All of what the way back reads."""
        histories = [*self.before.values(), *([] if self.history is None else [self.history])]
        kept = [x for history in histories for x in (history.states, history.scales)]
        chain = self.run.chain
        given = [chain.potentials, chain.transitions, chain.start, self.run.lengths]
        return [self.total, *kept, *(x for x in given if x is not None)]


def forward_pass(run: ChainRun, *, keep: bool = True) -> tuple[Array, ForwardPass]:
    """Return the logs of the sums over all paths, [*batch], and what gradients are made from.

    Parameters
    ----------
    run : ChainRun
    keep : bool
        Whether every state is kept though that takes more than a part of the workspace.
    """
    chain, workspace = run.chain, run.workspace
    out = run.device.empty(chain.batch, run.dtype)
    each = run.number * (2 * chain.size * run.item + 8 * SCALE)
    history = None
    if keep or each * chain.count <= workspace // 4:
        history = run.new_history(chain.count)
    kept = ForwardPass(run, run.new_total(), _blocks(run, history is None), history, {})
    outputs = Outputs(total_log=out, total=kept.total, history=history)
    if history is not None:
        run.run(outputs)
        return out, kept
    state: History | None = None
    # States are kept before the step that a block's first pair of states begins with.
    starts = sorted({max(chain.count - last - 1, 0) for _, last in kept.blocks})
    for first, last in itertools.pairwise([*starts, chain.count]):
        if state is not None:
            kept.before[first] = state
        for at, stop in _cut(first, last, steps_at_once(run, workspace)):
            state = run.steps(at, stop, outputs, state, keeps_state=at == first)
    return out, kept


def _blocks(run: ChainRun, again: bool) -> list[tuple[int, int]]:
    """Return blocks of steps, in the order of the recursion backward.

    Half of the workspace is for matrices, a quarter for states of the block's steps, of both
    directions if those of the forward pass are made `again`, and a quarter for parts of sums.
    """
    count, size = run.chain.count, run.chain.size
    each = (2 if again else 1) * (2 * size * run.item + 8 * SCALE) + (FACTOR + size) * run.item
    at_once = min(
        steps_at_once(run, run.workspace // 4), max(1, run.workspace // 4 // (run.number * each))
    )
    if again:
        # Fewer blocks than steps in one: each costs a state that is kept.
        at_once = max(at_once, math.isqrt(count))
    return _cut(0, count, at_once)


def _cut(first: int, last: int, at_once: int) -> list[tuple[int, int]]:
    return [(i, min(i + at_once, last)) for i in range(first, last, at_once)]


def gradients(
    kept: ForwardPass, cotangent: Array | None, wanted: Iterable[str]
) -> dict[str, Array]:
    """Return gradients by name, in the shapes and the dtype of the arrays they belong to.

    Parameters
    ----------
    kept : ForwardPass
    cotangent : array [*batch] or None
        Of the logs of the sums over all paths; None for ones.
    wanted : iterable of str
        Of 'potentials', 'transitions' and 'start'.
    """
    return _WayBack(kept, cotangent, frozenset(wanted)).run()


def marginals(run: ChainRun) -> Array:
    """Return the posterior probabilities of all states at all steps, [*batch, T, K]."""
    _, kept = forward_pass(run, keep=False)
    out = run.device.empty((*run.chain.batch, run.chain.count, run.chain.size), run.dtype)
    _WayBack(kept, None, frozenset()).run(out)
    return out


def expected_transitions(run: ChainRun) -> Array:
    """Return expected counts in the shape of the transitions."""
    _, kept = forward_pass(run, keep=False)
    way = _WayBack(kept, None, frozenset({"transitions"}), as_counts=True)
    return way.run()["transitions"]


class _WayBack:
    """The launches from the last step to the first, for the gradients that are wanted."""

    def __init__(
        self,
        kept: ForwardPass,
        cotangent: Array | None,
        wanted: frozenset[str],
        as_counts: bool = False,
    ) -> None:
        self.kept, self.cotangent, self.wanted = kept, cotangent, wanted
        self.forward = kept.run
        self.chain, self.device = kept.run.chain, kept.run.device
        forward = kept.run
        self.sums = GradientSums(forward, kept.total, cotangent)
        self.compute, self.item, self.number = forward.compute, forward.item, forward.number
        chain = self.chain
        assert chain.potentials is not None
        self.sums_potentials = tuple(chain.potentials.shape[:-2]) != chain.batch
        self.with_weights = as_counts or chain.transitions_in_logs
        x = chain.transitions
        # One matrix for all steps has one gradient; a view of one as many has as many.
        self.adds_steps = x is not None and int(x.shape[-3]) == 1 and chain.count > 2
        self.splits = self._splits()

    def _splits(self) -> tuple[int, int]:
        """Return how many blocks share a sum over steps, and over rows."""
        run = self.forward
        tiles = -(-self.chain.size // SIDE)
        slots = 1 if self.adds_steps else max(1, self.chain.count - 1)
        missing = -(-2 * self.device.multiprocessors // (tiles * tiles * run.groups * slots))
        each = run.groups * slots * self.chain.size**2 * self.item
        missing = max(1, min(missing, run.workspace // 4 // each))
        times = min(missing, self.chain.count - 1) if self.adds_steps else 1
        rows = min(max(1, missing // max(times, 1)), -(-run.rows // ROWS_OF_A_SPLIT))
        return max(times, 1), rows

    def run(self, marginals: Array | None = None) -> dict[str, Array]:
        """Return the wanted gradients, and write marginals if they are asked for."""
        chain, device = self.chain, self.device
        given = {
            "potentials": chain.potentials,
            "transitions": chain.transitions,
            "start": chain.start,
        }
        out = {}
        for name in self.wanted:
            x = given[name]
            assert x is not None
            out[name] = device.empty(tuple(x.shape), self.forward.dtype)
        edges = out.get("transitions")
        parts: Array | None = None
        if edges is not None and self.adds_steps:
            shape = (math.prod(self.splits), self.forward.groups, chain.size, chain.size)
            parts = device.empty(shape, self.compute)
        state: History | None = None
        history: History | None = None
        blocks = self.kept.blocks
        most = max(last - first for first, last in blocks)
        needs_history = edges is not None or "start" in out
        if needs_history:
            history = self.forward.new_history(most)
        for number, (first, last) in enumerate(blocks):
            low = chain.count - last
            if history is not None:
                history = replace(history, first=low)
            forward = self._forward(low, chain.count - first)
            gradient = out.get("potentials", marginals)
            state = self._step_back(first, last, gradient, forward, history, state)
            if edges is not None and history is not None:
                pairs = (max(low - 1, 0), chain.count - 1 - first)
                again = parts is not None and number > 0
                if pairs[0] < pairs[1]:
                    self.sums.over_pairs(
                        pairs, forward, history, self.splits, edges, parts, self.with_weights, again
                    )
        if edges is not None and chain.count == 1:
            self.sums.zeros(edges)
        if edges is not None and parts is not None:
            self.sums.over_parts(parts, edges)
        if "start" in out and history is not None:
            self.sums.of_start(history, out["start"])
        return out

    def _forward(self, low: int, high: int) -> History:
        """Return the forward pass's states from the step before `low` on, up to `high`."""
        run, kept = self.forward, self.kept
        if kept.history is not None:
            return kept.history
        first = max(low - 1, 0)
        history = replace(run.new_history(high - first), first=first)
        state = kept.before.get(first)
        for at, stop in _cut(first, high, steps_at_once(run, run.workspace // 4)):
            outputs = Outputs(history=history)
            state = run.steps(at, stop, outputs, state, keeps_state=at == first)
        return history

    def _step_back(
        self,
        first: int,
        last: int,
        gradient: Array | None,
        forward: History,
        history: History | None,
        state: History | None,
    ) -> History | None:
        """Run the recursion through a block of steps, in its order."""
        chain = self.chain
        low = chain.count - last
        wide: Array | None = None
        if "potentials" in self.wanted and self.sums_potentials:
            wide = self.device.empty((self.number, last - first, chain.size), self.compute)
        outputs = Outputs(
            total=self.kept.total,
            history=history,
            marginals=wide if wide is not None else gradient,
            by_number=wide is not None,
            out_time=low if wide is not None else 0,
            forward=forward,
            cotangent=self.cotangent,
        )
        for at, stop in _cut(first, last, steps_at_once(self.forward, self.forward.workspace // 4)):
            state = self.forward.steps(at, stop, outputs, state, backward=True)
        if gradient is not None and wide is not None:
            width = (last - first) * chain.size
            self.sums.over_rows(wide, width, chain.potentials, 2, gradient[..., low:, :])
        return state
