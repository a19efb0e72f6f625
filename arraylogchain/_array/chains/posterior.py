"""The posterior over paths: what the messages of both directions tell together, block by block.

With a_t what left step t forward, b_t what arrived there backward and d_t what left it backward,
each but for a factor of its own, the posterior is

    of states              a_t * b_t / Z_t,    Z_t = sum(a_t * b_t)
    of pairs of states     a_t[k] P_t[k, j] d_{t+1}[j] / Z_t,    as b_t = P_t @ d_{t+1}

and that of pairs without P_t is the derivative with respect to it, finite at P = 0. Every step is
normalised by its own sum, so that no rounding of T steps enters a share. Sums over rows and steps
are one matrix multiply for each matrix.

Rows that are linear in both directions are taken as they are, as long as their sums and the factors
of their pairs stay well within the range of numbers, which proves them; the others in logs, whose
pairs are a certified product.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

import numpy as np

from arraylogchain._array.chains.lanes import Lanes
from arraylogchain._array.chains.messages import Run, each, log_sum, runs, total_of
from arraylogchain._array.chains.pieces import (
    BOTH,
    Block,
    Messages,
    add_scale,
    exp_of_parts,
    log_parts,
)
from arraylogchain._array.chains.sums import Sums
from arraylogchain._array.products.factors import Factor
from arraylogchain._context import DOUBLE, SINGLE, Array, Context, whole_maximum, whole_part
from arraylogchain._inputs import Chain

Pullback = Callable[[Array, frozenset[str]], dict[str, Array]]


def marginals(ctx: Context, chain: Chain, workspace: int) -> Array:
    """Return the posterior probabilities of all states at all steps, [*batch, T, K]."""
    return _posterior(ctx, chain, workspace, "marginals", "potentials")[1]


def expected_transitions(ctx: Context, chain: Chain, workspace: int) -> Array | None:
    """Return expected counts in the shape of the transitions."""
    return _posterior(ctx, chain, workspace, "expected_transitions", "transitions")[2]


def posterior(ctx: Context, chain: Chain, workspace: int) -> tuple[Array, Array, Array | None]:
    """Return log Z [*batch], marginals [*batch, T, K], and expected counts or None."""
    found: tuple[Array, Array, Array | None]
    found = _posterior(ctx, chain, workspace, "posterior", "potentials", "transitions")
    return found


def _posterior(ctx: Context, chain: Chain, workspace: int, operation: str, *names: str) -> Any:
    wanted = [name for name in names if getattr(chain, name) is not None]
    sums = Sums(ctx, chain, workspace, wanted, as_counts=True)
    total = ctx.empty(chain.batch, ctx.result_dtype)

    def work(run: Run, own: Sums) -> None:
        found = Posterior(run.keep(), own, None)
        if operation == "posterior":
            run.piece.write(total, add_scale(*found.log_z))
        found.add()

    each(ctx, runs(operation, ctx, chain, workspace, history=True), work, sums)
    found = sums.results()
    return total, found.get("potentials"), found.get("transitions")


def value_and_pullback(
    ctx: Context, chain: Chain, workspace: int, keep: bool
) -> tuple[Array, Pullback]:
    """Return the logs of the sums over all paths, [*batch], and their pullback.

    Parameters
    ----------
    keep : bool
        Whether every message is kept for the pullback though that takes more than `workspace`, and
        not only those between blocks of steps.

    Returns
    -------
    value : array [*batch]
    pullback : callable
        Takes a cotangent [*batch] and the names of wanted gradients, of 'potentials',
        'transitions', 'initial' and 'final'. Returns them by name, in the chain's shapes and
        dtypes. Any number of threads may call it at once: it changes nothing.
    """
    out = ctx.empty(chain.batch, ctx.result_dtype)
    keep = keep or 8 * chain.num_rows * chain.num_steps * chain.num_states <= workspace
    found = list(runs("value_and_pullback", ctx, chain, workspace, history=not keep))

    def work(run: Run) -> None:
        run.keep(keep)
        run.piece.write(out, add_scale(*total_of(run.piece, run.last)))

    each(ctx, found, work)

    def pullback(cotangent: Array, wanted: frozenset[str]) -> dict[str, Array]:
        sums = Sums(ctx, chain, workspace, wanted)
        each(ctx, found, lambda run, own: Posterior(run, own, cotangent).add(), sums)
        return sums.results()

    return out, pullback


class Posterior:
    """What a run forward over a piece, whose messages are kept, adds to sums.

    Parameters
    ----------
    cotangent : array [*batch] or None
        Of log Z; None for ones.
    """

    def __init__(self, run: Run, sums: Sums, cotangent: Array | None) -> None:
        self.run, self.piece, self.sums = run, run.piece, sums
        self.wants_pairs = "transitions" in sums.totals
        self.panel = run.workspace // (8 * 10)
        self.ctx = ctx = run.piece.ctx
        xp, self.log_z = ctx.xp, total_of(run.piece, run.last)
        self.total = self.log_z[0]
        g = None
        if cotangent is not None:
            g = ctx.load(self.piece.read(cotangent), ctx.widest)
        if not bool(xp.all(xp.isfinite(self.total))):
            # No path, or an infinite one.
            g = xp.ones_like(self.total) if g is None else g
            g = xp.where(xp.isinf(self.total), xp.zeros_like(g), g)
            g = xp.where(xp.isnan(self.total), xp.full_like(g, math.nan), g)
        self.g = g

    def add(self) -> None:
        """Add gradients, or marginals and counts, going backward through the steps."""
        run, wanted = self.run, self.sums.totals
        last = self.run_back() if set(wanted) != {"final"} else None
        state: Any
        for name, state in (("initial", last), ("final", run.last)):
            if name in wanted:
                self._add_weights(name, state, *self.piece.end(backward=name == "final"))

    def run_back(self) -> Any:
        """Go backward through all steps; return what left the first one."""
        run = self.run
        back = Run(run.piece, run.backend, run.blocks, backward=True)
        for n in reversed(range(len(run.blocks))):
            block = run.blocks[n]
            forward = run.messages(n).last(block.stop - block.start)
            for steps, found in self._steps_back(back, block):
                own = slice(steps.start - block.start, steps.stop - block.start)
                self._add_block(steps, forward.steps(own), found)
        return back.last

    def _steps_back(self, back: Run, steps: slice) -> Iterator[tuple[slice, Block]]:
        """Take a block of steps backward, or each by itself where scales would not be exact."""
        state, xp = back.last, self.ctx.xp
        if state is not None:
            # Only differences count: scales that begin with 0 are exact for longer.
            nothing = xp.zeros_like(state.shifts)
            state = Messages(state.values, nothing, nothing, state.in_logs)
        found = back.backend.advance(state, steps, True, BOTH)
        assert found.arrived is not None
        assert found.left is not None
        largest = max(float(xp.max(xp.abs(x.shifts))) for x in (found.arrived, found.left))
        # Beyond that sums of whole numbers are not exact.
        if largest < 1.0 / self.ctx.widest.eps or steps.stop - steps.start == 1:
            back.last = found.state
            yield steps, found
        else:
            for step in reversed(range(steps.start, steps.stop)):
                yield from self._steps_back(back, slice(step, step + 1))

    def _add_weights(self, name: str, state: Messages, weights: Array, in_logs: bool) -> None:
        """Add shares of states times weights, or what is left of them without the weights."""
        ctx, xp = self.ctx, self.ctx.xp
        values = ctx.load(state.in_log_form(ctx).values, ctx.widest)
        whole, rest = log_parts(ctx, weights, in_logs)
        shift = whole_maximum(ctx, values + whole, -1, ctx.widest)
        joint = (values + (whole - shift)) + rest
        total = log_sum(xp, joint)[..., None]
        g = xp.ones_like(total) if self.g is None else self.g[..., None]
        dead = (total == -math.inf) | (g == 0)
        if in_logs:
            found = xp.exp(joint - total) * g
        else:
            del joint, whole, rest  # memory, beside all messages
            # Both may be out of range where their product is not.
            near, parts = whole_part(ctx, values, ctx.widest), log_parts(ctx, xp.abs(g), False)
            found = exp_of_parts(ctx, (near - shift) + parts[0], (values - near) - total + parts[1])
            found = found * xp.sign(g)
        self.sums.add(name, self.piece, (slice(None),), xp.where(dead, xp.zeros_like(found), found))

    def _add_block(self, steps: slice, forward: Messages, back: Block) -> None:
        """Add what a block of steps contributes, given its messages in both directions."""
        axis, shares = self.piece.axis, None
        assert back.arrived is not None
        assert back.left is not None
        count = steps.stop - steps.start
        messages = forward.last(count), back.arrived, back.left.last(count)
        odd = (forward.in_logs | back.arrived.in_logs).any(axis=1 - axis)
        while not odd.all():
            some = np.flatnonzero(~odd) if odd.any() else None
            shares, bad = Lanes(self, steps, messages, some).linear()
            if bad is None:
                break
            # Of several things to prove the first that is not is told; others may follow.
            odd[slice(None) if some is None else some] |= bad
        if odd.any():
            some = None if odd.all() else np.flatnonzero(odd)
            more = Lanes(self, steps, messages, some).in_logs()
            shares = more if shares is None else shares + more
        self.take_shares(steps, shares, messages[0])

    def take_shares(self, steps: slice, shares: Array, forward: Messages) -> None:
        """Add shares of states times cotangents, [n, groups, rows, K]."""
        if "potentials" in self.sums.totals:
            values = self.ctx.xp.permute_dims(shares, (1, 2, 0, 3))
            self.sums.add("potentials", self.piece, (steps, slice(None)), values)

    @cached_property
    def matrix(self) -> Factor:
        """The matrices [groups, K, K] that stand for every step."""
        return self.factor(self.piece.matrices(slice(0, 1))[:, 0, :, :])

    def factor(self, x: Array) -> Factor:
        """Return matrices [n, K, K], as given, as a factor."""
        precision = DOUBLE if self.run.last.values.dtype == self.ctx.xp.float64 else SINGLE
        in_logs = self.piece.chain.transitions_in_logs
        return Factor(self.ctx, x, 1, in_logs=in_logs, common=True, precision=precision)
