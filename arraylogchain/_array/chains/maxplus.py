"""Steps of the max-plus recursion: the log of the largest weight of all paths up to each state."""

from __future__ import annotations

from arraylogchain._array.chains.scaled import Options
from arraylogchain._array.chains.states import State, part_of
from arraylogchain._array.chains.tiles import Tile
from arraylogchain._context import Array, Precision, whole_maximum
from arraylogchain._fold import chunks


class MaxPlusStepper:
    """Advances states in logs by their largest sums; see `ScaledStepper`. All steps are proved.

    Integer shifts are taken off, and forgotten: paths are told apart by differences alone.
    """

    def __init__(self, tile: Tile, precision: Precision, options: Options) -> None:
        self.tile, self.ctx, self.precision = tile, tile.ctx, precision
        self.panel = options.pieces.panel
        self._logs: Array | None = None

    def advance(
        self, before: State | None, i: int, ignored: Array | None, keep: bool
    ) -> tuple[State, State, None]:
        xp, ctx, axis = self.ctx.xp, self.ctx, self.tile.select_axis
        out = ctx.empty(self.tile.state_shape, ctx.dtype(ctx.precision))
        lanes = slice(self.tile.count(i))
        now, rest = (part_of(out, some, axis) for some in (lanes, slice(lanes.stop, None)))
        if before is None:
            self._start(out)
        else:
            rest[...] = part_of(before.values, slice(lanes.stop, None), axis)
            self._multiply(part_of(before.values, lanes, axis), i, now)
        x = ctx.load(self.tile.potentials_of(slice(i, i + 1))[:, :, 0, :], ctx.precision)
        # Their own shift first, so that large potentials do not swallow small differences.
        ctx.apply(xp.add, now, x - whole_maximum(ctx, x, -1, ctx.precision), out=now)
        ctx.apply(xp.subtract, now, whole_maximum(ctx, now, -1, ctx.precision), out=now)
        nothing = xp.zeros_like(out[..., :1])
        state = State(out, nothing, nothing, None, in_logs=True)
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
