"""The entropy of the posterior over paths."""

from __future__ import annotations

import numpy as np

from arraylogchain._compiled.chains.sources import frozen
from arraylogchain._compiled.chains.sweep import Sweep
from arraylogchain._compiled.loops.compiling import Floats
from arraylogchain._compiled.loops.entropy import entropies, surprisals
from arraylogchain._context import Array, Context
from arraylogchain._inputs.chain import Chain


def entropy(ctx: Context, chain: Chain, workspace: int) -> Array:
    """Return the entropies [*batch] in nats; 0 where there is no path, NaN for infinite weights."""
    out = np.zeros(chain.batch, ctx.result_dtype)
    sweep = Sweep(chain, workspace, more=1)
    flat = out.reshape(-1)
    whole = sweep.matrices[False].whole
    logs_of_whole = None if whole is None else _logs(whole[0])

    def work(rows: range) -> None:
        states, of_states = sweep.state(rows), np.empty((len(rows), sweep.K))
        found = np.empty(len(rows))
        for steps in sweep.blocks(rows, range(sweep.T)):
            block = sweep.read(rows, steps)
            logs = logs_of_whole or _logs(block[2][0])
            entropies(block, logs, states, of_states, found)
        flat[sweep.layout.positions(rows)] = found

    sweep.share(work, 8 * sweep.K)
    return out


def _logs(P: Floats) -> tuple[Floats, Floats]:
    Q, tops = np.empty(P.shape), np.empty(P.shape[:2])
    surprisals(P, Q, tops)
    return frozen(Q), tops
