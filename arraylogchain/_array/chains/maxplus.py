"""Steps of the max-plus recursion: the log of the largest weight of all paths up to each state."""

from __future__ import annotations

from arraylogchain._array.chains.states import State, held, part_of
from arraylogchain._array.chains.tiles import Tile
from arraylogchain._context import Array, whole_maximum
from arraylogchain._fold import chunks


class MaxPlusStepper:
    """Advances states in logs by their largest sums; see `ScaledStepper`. All steps are proved.

    Integer shifts are taken off, and forgotten: paths are told apart by differences alone.
    """

    def __init__(self, tile: Tile, panel: int) -> None:
        self.tile, self.ctx, self.panel = tile, tile.ctx, panel
        self._logs: Array | None = None

    def admit(self, state: State) -> State:
        return state

    def advance(
        self, before: State | None, i: int, ignored: Array | None, out: Array | None
    ) -> tuple[State, State, None]:
        xp, ctx, axis = self.ctx.xp, self.ctx, self.tile.select_axis
        if out is None:
            out = ctx.empty(self.tile.state_shape, ctx.dtype(ctx.precision))
        lanes = slice(self.tile.count(i))
        now = part_of(out, lanes, axis)
        if before is None:
            self._start(out)
        else:
            self._multiply(part_of(before.values, lanes, axis), i, now)
        x = ctx.load(self.tile.potentials_of(slice(i, i + 1))[:, :, 0, :], ctx.precision)
        # Their own shift first, so that large potentials do not swallow small differences.
        ctx.apply(xp.add, now, x - whole_maximum(ctx, x, -1, ctx.precision), out=now)
        ctx.apply(xp.subtract, now, whole_maximum(ctx, now, -1, ctx.precision), out=now)
        nothing = xp.zeros_like(now[..., :1])
        state = State(now, nothing, nothing, None, in_logs=True)
        if before is not None:
            state = held(ctx, state, before, axis, out)
        return state, state, None

    def _start(self, out: Array) -> None:
        ctx, xp, start = self.ctx, self.ctx.xp, self.tile.start()
        if start is None:
            out[...] = 0.0
            return
        logs = ctx.load(start, ctx.precision)
        logs = logs if self.tile.start_in_logs else xp.log(logs)
        out[...] = logs - whole_maximum(ctx, logs, -1, ctx.precision)

    def _multiply(self, before: Array, i: int, out: Array) -> None:
        """Write max_k before[k] + logs of matrix[k, :] into `out`, some k at a time."""
        ctx, xp = self.ctx, self.ctx.xp
        groups, rows, size = (int(n) for n in out.shape)
        together = max(1, min(size, ctx.block // (groups * rows * size)))
        terms = ctx.empty((groups, rows, together, size), out.dtype)
        for some in chunks(size, max(1, self.panel // (groups * size))):
            logs = self.logs_of(i, some)[:, None, ...]
            for k in chunks(some.stop - some.start, together):
                at = some.start + k.start
                room = terms[:, :, : k.stop - k.start, :]
                of_k = before[:, :, at : at + k.stop - k.start, None]
                ctx.apply(xp.add, of_k, logs[:, :, k, :], out=room)
                # A maximum of one would be a slow copy.
                top = room[:, :, 0, :] if together == 1 else xp.max(room, axis=-2)
                if at:
                    ctx.apply(xp.maximum, out, top, out=out)
                else:
                    out[...] = top

    def logs_of(self, i: int, k: slice) -> Array:
        """Return the logs of some rows of the matrices that lead to step i, but for a shift."""
        ctx, tile, whole = self.ctx, self.tile, slice(0, self.tile.chain.num_states)
        if self._logs is not None:
            return self._logs[:, k, :]
        given, ragged = tile.matrix(i), tile.lengths is not None
        logs = ctx.load(given[:, k, :], ctx.precision)
        if tile.chain.transitions_in_logs:
            logs = logs - whole_maximum(ctx, given, (-2, -1), ctx.precision)
        else:
            logs = ctx.xp.log(logs)
        if k == whole and tile.chain.has_one_matrix and (tile.select_axis or not ragged):
            self._logs = logs
        return logs
