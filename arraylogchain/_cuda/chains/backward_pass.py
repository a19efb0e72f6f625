"""Gradients of chains on a CUDA device: marginals, expected transitions, derivatives.

The forward pass keeps the states of all steps, or of a few of them from which the others are
computed again. The backward pass goes through time in blocks of steps: the recursion writes the
marginals of a block and keeps its states, from which follow the sums over pairs of neighbouring
states. Sums that go over several blocks are kept in the precision of the computation.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection
from dataclasses import dataclass, replace

from arraylogchain._context import Array
from arraylogchain._cuda.chains.arrays import History
from arraylogchain._cuda.chains.matrices import steps_at_once
from arraylogchain._cuda.chains.recursion import ChainRun, Sweep, cut_steps
from arraylogchain._cuda.chains.reductions import FACTOR, Reductions, TransitionGradient
from arraylogchain._inputs.chain import PARTS


@dataclass(frozen=True, slots=True)
class ForwardPass:
    """What a forward pass keeps for the backward pass.

    Attributes
    ----------
    run : ChainRun
    total : array
        The sums over all paths.
    blocks : list of tuple of int
        The steps that the backward pass takes together, in its order.
    history : History or None
        All states, if they are kept.
    before : dict of int to History
        Otherwise the states before some steps, from which the others are computed again.
    end : History or None
        The states after the last step, if there are final weights.
    """

    run: ChainRun
    total: Array
    blocks: list[tuple[int, int]]
    history: History | None
    before: dict[int, History]
    end: History | None = None

    @property
    def arrays(self) -> list[Array]:
        """All of what the backward pass reads."""
        histories = [x for x in (*self.before.values(), self.history, self.end) if x is not None]
        kept = [x for history in histories for x in (history.states, history.scales)]
        given = [*(getattr(self.run.chain, name) for name in PARTS), self.run.lengths]
        return [self.total, *kept, *(x for x in given if x is not None)]

    def states(self, low: int, high: int) -> History:
        """Return the states from the step before `low` on, up to `high`."""
        if self.history is not None:
            return self.history
        first = max(low - 1, 0)
        history = replace(self.run.new_history(high - first), first=first)
        workspace = self.run.workspace // 4
        self.run.advance(first, high, Sweep(history=history), self.before.get(first), workspace)
        return history


def forward_pass(run: ChainRun, *, keep: bool = True) -> tuple[Array, ForwardPass]:
    """Return the logs of the sums over all paths, [*batch], and what gradients are made from.

    Parameters
    ----------
    run : ChainRun
    keep : bool
        Whether every state is kept though that takes more than a part of the workspace.
    """
    num_steps, workspace = run.chain.num_steps, run.workspace
    out = run.device.empty(run.chain.batch, run.dtype)
    history = None
    if keep or run.state_bytes * num_steps <= workspace // 4:
        history = run.new_history(num_steps)
    kept = ForwardPass(run, run.new_total(), _blocks(run, history is None), history, {})
    with_end = run.chain.final is not None
    sweep = Sweep(total_log=out, total=kept.total, history=history, with_end=with_end)
    starts = {0}
    if history is None:
        # States are kept before the step that a block's first pair of states begins with.
        starts = {max(num_steps - last - 1, 0) for _, last in kept.blocks}
    state: History | None = None
    for first, last in itertools.pairwise([*sorted(starts), num_steps]):
        if state is not None:
            kept.before[first] = state
        state = run.advance(first, last, sweep, state, workspace)
    return out, replace(kept, end=state) if with_end else kept


def _blocks(run: ChainRun, again: bool) -> list[tuple[int, int]]:
    """Return blocks of steps, in the order of the backward pass.

    Half of the workspace is for matrices, a quarter for states of the block's steps, of both
    directions if those of the forward pass are computed `again`, and a quarter for parts of sums.
    What is added up over rows may be copied in float64.
    """
    num_steps, part = run.chain.num_steps, run.workspace // 4
    each = (2 if again else 1) * run.state_bytes
    each += run.all_rows * (FACTOR + 3 * run.chain.num_states) * run.itemsize
    at_once = min(steps_at_once(run, part), max(1, part // each))
    if again:
        # Fewer blocks than steps in one: each costs a state that is kept.
        at_once = max(at_once, math.isqrt(num_steps))
    return list(cut_steps(0, num_steps, at_once))


def gradients(
    kept: ForwardPass, cotangent: Array | None, wanted: Collection[str]
) -> dict[str, Array]:
    """Return gradients by name, in the shapes of the arrays they belong to; sums may be wider.

    Parameters
    ----------
    kept : ForwardPass
    cotangent : array [*batch] or None
        Of the logs of the sums over all paths; None for ones.
    wanted : collection of str
        Of 'potentials', 'transitions', 'initial' and 'final'; or 'marginals', in place of the
        potentials' sums over rows, and 'counts', in place of the transitions' derivatives.
    """
    return _BackwardPass(kept, cotangent, wanted).run()


def state_marginals(run: ChainRun) -> Array:
    """Return the posterior probabilities of all states at all steps, [*batch, T, K]."""
    return gradients(forward_pass(run, keep=False)[1], None, ["marginals"])["marginals"]


def transition_counts(run: ChainRun) -> Array:
    """Return expected counts in the shape of the transitions."""
    return gradients(forward_pass(run, keep=False)[1], None, ["counts"])["counts"]


def posterior_of(run: ChainRun) -> tuple[Array, Array, Array | None]:
    """Return the logs of the sums over all paths, marginals, and expected counts or None."""
    total, kept = forward_pass(run, keep=False)
    wanted = ["marginals"] if run.chain.transitions is None else ["marginals", "counts"]
    found = gradients(kept, None, wanted)
    return total, found["marginals"], found.get("counts")


class _BackwardPass:
    """The launches from the last step to the first, for the gradients that are wanted."""

    def __init__(self, kept: ForwardPass, cotangent: Array | None, wanted: Collection[str]) -> None:
        self.kept, self.cotangent, self.wanted = kept, cotangent, wanted
        self.chain_run, self.chain, self.device = kept.run, kept.run.chain, kept.run.device
        # A quarter for matrices of either direction, another for parts of sums.
        self.workspace = kept.run.workspace // 4
        self.reductions = Reductions(kept.run, kept.total, cotangent)
        sums_rows = tuple(self.chain.potentials.shape[:-2]) != self.chain.batch
        self.sums_potentials = "potentials" in wanted and sums_rows

    def run(self) -> dict[str, Array]:
        """Return what is wanted."""
        run, chain, wanted = self.chain_run, self.chain, self.wanted
        out: dict[str, Array] = {}
        if "marginals" in wanted:
            out["marginals"] = run.new_per_state()
        if "potentials" in wanted:
            dtype = run.compute if self.sums_potentials else run.dtype
            out["potentials"] = self.device.empty(tuple(chain.potentials.shape), dtype)
        of_states = out.get("potentials", out.get("marginals"))
        counts, transitions = "counts" in wanted, None
        if counts or "transitions" in wanted:
            transitions = TransitionGradient(self.reductions, self.workspace, as_counts=counts)
        blocks, history, state = self.kept.blocks, None, None
        if transitions is not None or "initial" in wanted:
            history = run.new_history(max(last - first for first, last in blocks))
        for first, last in blocks:
            low, high = chain.num_steps - last, chain.num_steps - first
            if history is not None:
                history = replace(history, first=low)
            forward = self.kept.states(low, high)
            state = self._step_back(first, last, of_states, forward, history, state)
            if transitions is not None and history is not None:
                transitions.add(max(low - 1, 0), high - 1, forward, history)
        if transitions is not None:
            out["counts" if counts else "transitions"] = transitions.finish()
        if "initial" in wanted and history is not None:
            out["initial"] = self.reductions.end_gradient("initial", history)
        if "final" in wanted and self.kept.end is not None:
            out["final"] = self.reductions.end_gradient("final", self.kept.end)
        return out

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
        run, low, size = self.chain_run, self.chain.num_steps - last, self.chain.num_states
        sweep = Sweep(
            backward=True,
            total=self.kept.total,
            history=history,
            marginals=gradient,
            forward=forward,
            cotangent=self.cotangent,
        )
        if self.sums_potentials:
            wide = self.device.empty((run.all_rows, last - first, size), run.compute)
            sweep = replace(sweep, marginals=wide, by_number=True, out_time=low)
        state = run.advance(first, last, sweep, state, self.workspace)
        if gradient is not None and self.sums_potentials:
            found = self.reductions.over_rows(sweep.marginals, self.chain.potentials, 2)
            gradient[..., low : low + last - first, :] = found
        return state
