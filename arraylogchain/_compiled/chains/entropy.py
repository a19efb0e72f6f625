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
    if chain.num_states == 0 or out.size == 0:
        return out
    sweep = Sweep(chain, workspace, more=1)
    flat = out.reshape(-1)
    whole = sweep.matrices[False].whole
    made = None if whole is None else _logs(whole[0])

    def work(rows: range) -> None:
        state = (*sweep.state(rows), np.empty((len(rows), sweep.K)))
        found = np.empty(len(rows))
        for block in sweep.blocks(rows, range(sweep.T)):
            place, potentials, matrices, ends = sweep.read(rows, block)
            logs = _logs(matrices[0]) if made is None else made
            entropies(
                place, potentials, matrices, logs, ends, block.start, block.stop, state, found
            )
        flat[sweep.layout.positions(rows)] = found

    sweep.share(work, 8 * sweep.K)
    return out


def _logs(P: Floats) -> tuple[Floats, Floats]:
    Q, tops = np.empty(P.shape), np.empty(P.shape[:2])
    surprisals(P, Q, tops)
    return frozen(Q), tops
