"""What the log-sum-exp of a row beside large numbers has lost, for the backward: :mod:`.mask_forward_sm90` once more.

    excess_i = log2(sum_j exp(S_ij - lse_i))

That is 0 unless |lse_i| is so large that its rounding matters: the lse of a row of n times ``finfo.min`` is
``finfo.min`` itself, log(n) is lost in it, and ``exp(S - lse)`` is 1 where P is 1 / n. Keys are visited only for tiles
of queries with such a row, so mostly for none; there, the forward is computed again, up to its output.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Boolean, Float32, Int32, cute

from .forward_sm90 import LOG2_E, Limits, Moved, Rows
from .mask_forward_sm90 import MaskForward
from .parts import keys, schedule

_LARGE = 4096.0
"""Below, fp32 resolves lse to 2.4e-4 or better, and P to that of its value."""


class MaskAndNorm(NamedTuple):
    """As :class:`.mask_forward_sm90.Mask`, and lse [B, Hq, S padded], +inf where there is no row."""

    moved: Moved
    factor: Float32
    norm: cute.Tensor


class MaskExcess(MaskForward):
    """The kernel for one config and one set of features, whose mask is added; heads share no tiles."""

    def fake_arguments(self) -> tuple[Any, ...]:
        """Arguments of any sizes and strides, for the compiler."""
        q, k, v, mask, o, lse, scale, softcap, _, *others = super().fake_arguments()
        return q, k, v, mask, o, lse, lse, scale, softcap, *others

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        mask: cute.Tensor,
        o: cute.Tensor,
        norm: cute.Tensor,
        excess: cute.Tensor,
        scale: Float32,
        softcap: Float32 | None,
        right: Int32 | None,
        left: Int32 | None,
        counter: cute.Tensor | None,
        counts: Int32,
        programs: Int32,
        stream: cuda.CUstream,
    ) -> None:
        """Launches the kernel: ``norm`` and ``excess`` ``[B, Hq, S padded]``, ``o`` as the forward's, left alone."""
        factor, cap = self.factors(scale, softcap)
        more = MaskAndNorm(self.moved_mask(mask, k.shape[1]), factor, norm)
        c = Float32(LOG2_E)
        self.start(q, k, v, o, excess, c, cap, None, right, left, counter, counts, programs, stream, more)

    def key_tiles(self, tile: schedule.Tile, limits: Limits) -> keys.KeyTiles:
        """None but for a tile with a large row."""
        tiles = super().key_tiles(tile, limits)
        return tiles._replace(end=tiles.begin + tiles.count * Int32(self.has_large(tile)))

    @cute.jit
    def has_large(self, tile: schedule.Tile) -> Boolean:
        """Whether a tile of queries has a large row, for a whole warp alike."""
        norm, found = self.more.norm, Boolean(False)
        for part in cutlass.range_constexpr(self.tile_m // 32):
            row = self.m_index(tile) * self.tile_m + 32 * part + cute.arch.lane_idx()
            if row < norm.shape[2]:
                found = found or self.is_large(norm[tile.batch, tile.head, row])
        return cute.arch.vote_any_sync(found)

    def is_large(self, norm: Float32) -> Boolean:
        """Whether a row's lse is so large, and a number."""
        return Boolean(norm * norm > _LARGE**2) & Boolean(norm < Float32.inf)

    @cute.jit
    def store(
        self,
        pv: cute.TiledMma,
        rows: Rows,
        lses: cute.Tensor,
        s_o: cute.Tensor,
        o: Moved,
        lse: cute.Tensor,
        thread: Int32,
        group: Int32,
        first_row: Int32,
        tile: schedule.Tile,
    ) -> None:
        """The excess, where the forward has its lse."""
        if rows.coords[0, 0][1] == 0:  # one of a row's four threads
            for r in cutlass.range_constexpr(2):
                row = first_row + rows.coords[r, 0][0]
                if row < lse.shape[2]:
                    norm, found = self.more.norm[tile.batch, tile.head, row], Float32(0.0)
                    if self.is_large(norm):
                        found = (rows.shifts[r] - norm) * LOG2_E - cute.math.log2(rows.factors[r], fastmath=True)
                    lse[tile.batch, tile.head, row] = found
