"""Device-side pieces that the forward and the backward kernels share.

Everything here is called from inside a Helion kernel: Helion inlines these plain Python functions while it traces, so
a Python ``if`` on a ``hl.constexpr`` argument (or on "the mask is None") chooses code, and costs nothing when it runs.

Conventions:

* ``row`` and ``col`` are integer vectors of query and key positions made with ``hl.arange``, not ``hl.tile`` indices.
  Helion masks every load and every reduction over a tile of ``hl.tile`` against the end of the loop, two selects for
  each score; positions made with ``hl.arange`` carry no such mask, so each loop states exactly the bounds it needs.
* Query ``i`` sees key ``j`` when ``j < keys`` and, for causal attention, ``j <= i + diagonal`` (``diagonal`` is 0 for
  top-left alignment and ``keys - rows`` for bottom-right). The right side of a window is causality with another
  diagonal; its left side hides the keys before ``i + low_diagonal`` (None: there is no left side).
* A soft cap (None: there is none) turns a score ``x`` into ``softcap * tanh(x / softcap)`` before any mask. Kernels
  hold the tanh, from which the exponent and the derivative ``1 - tanh^2`` follow.
* Scores handed to :func:`exp_shifted` are *exponents*: in base 2 (``s * scale * log2(e)``), which saves one
  multiplication for each score, or in natural units when there is an additive mask. An additive mask may hold
  ``finfo.min``, which times ``log2(e)`` would overflow to -inf and turn "the mean of V" into "no visible key".
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import helion.language as hl
import torch

if TYPE_CHECKING:
    from torch import SymInt

    Int = int | SymInt

LOG2E = 1.0 / math.log(2.0)
LN2 = math.log(2.0)

# Rounds of Philox-4x32. Seven is the fewest that pass BigCrush (Salmon et al., SC'11).
PHILOX_ROUNDS = 7

# One Philox call gives the bits of four neighbouring keys, hence a tile is computed at a quarter of its width and then
# interleaved: join(join(r0, r2), join(r1, r3)) lists r0, r1, r2, r3 along its last two axes. The two high counter
# words are built from tensors because tl.philox wants all four counters in one dtype.
_KEEP_TILE = f"""
def keep_tile(rng_state, plane, row, group, threshold):
    c0 = tl.broadcast_to(group.to(tl.uint32)[None, :], [row.shape[0], group.shape[0]])
    c1 = tl.broadcast_to(row.to(tl.uint32)[:, None], [row.shape[0], group.shape[0]])
    zero = tl.zeros_like(c0)
    r0, r1, r2, r3 = tl.philox(tl.load(rng_state), c0, c1, zero + plane.to(tl.uint32), zero, n_rounds={PHILOX_ROUNDS})
    limit = threshold.to(tl.uint32)
    keep = tl.join(tl.join(r0 >= limit, r2 >= limit), tl.join(r1 >= limit, r3 >= limit))
    return tl.reshape(keep, [row.shape[0], 4 * group.shape[0]])
"""


def signed_threshold(dropout_p: float) -> int:
    """The keep threshold as the 32-bit pattern that kernels take (host side).

    A position is kept when its random uint32 is at least ``round(dropout_p * 2**32)``. The kernels take that number as
    an int32 with the same bits, because Triton would type a larger Python int as int64 and compile once more.

    Args:
        dropout_p: Probability of dropping, in [0, 1).

    Returns:
        An integer in [-2**31, 2**31).
    """
    threshold = min(round(dropout_p * 2.0**32), 2**32 - 1)
    return threshold - 2**32 if threshold >= 2**31 else threshold


def clamped_tiles(position: Int, limit: Int, block: Int) -> torch.Tensor:
    """``clamp(position, 0, limit) // block`` as a scalar on the device."""
    zero = hl.full([], 0, dtype=torch.int32)
    clamped = torch.minimum(torch.maximum(zero + position, zero), zero + limit)
    return torch.div(clamped, block, rounding_mode="trunc")


def key_tiles(
    first_row: Int, last_row: Int, keys: Int, diagonal: Int, causal: bool, low_diagonal: Int | None, block_n: Int
) -> tuple[Int | torch.Tensor, Int | torch.Tensor, Int | torch.Tensor, Int | torch.Tensor]:
    """Which tiles of ``block_n`` keys the queries ``first_row..last_row`` see.

    Args:
        first_row: First query position of the tile.
        last_row: Last query position of the tile (it may lie beyond the last query).
        keys: Number of keys, N.
        diagonal: Offset of the causal diagonal.
        causal: Whether attention is causal.
        low_diagonal: Offset of the first visible key, or None.
        block_n: Width of a key tile.

    Returns:
        ``(first, full, start, stop)`` in tiles: tiles ``[first, full)`` hold only keys that every query of the tile
        sees; those that :func:`edge_tile` gives for the steps ``[start, stop)`` need :func:`visible`; all others are
        invisible to all of the queries.
    """
    full: Any
    stop: Any
    if causal:
        full = clamped_tiles(first_row + diagonal + 1, keys, block_n)
        # Rounding up before the clamp would let the last tile pass `keys`, so the limit is rounded up as well.
        stop = clamped_tiles(last_row + diagonal + block_n, keys + block_n - 1, block_n)
    else:
        full, stop = keys // block_n, (keys + block_n - 1) // block_n
    if low_diagonal is None:
        return 0, full, full, stop
    zero = hl.full([], 0, dtype=torch.int32)
    stop = zero + stop
    begin = torch.minimum(clamped_tiles(first_row + low_diagonal, keys, block_n), stop)
    first = clamped_tiles(last_row + low_diagonal + block_n - 1, keys + block_n - 1, block_n)
    first = torch.minimum(first, stop)
    full = torch.maximum(zero + full, first)
    # The edge tiles [begin, first) are the steps just before those of [full, stop), which are their own steps.
    return first, full, full - (first - begin), stop


def edge_tile(step: Int, first: Any, full: Any, low_diagonal: Int | None) -> Any:
    """The tile that needs :func:`visible` at a step, where ``first`` and ``full`` are those of :func:`key_tiles`."""
    if low_diagonal is None:
        return step
    source = "tl.cast(tl.where({0} < {2}, {0} - {2} + {1}, {0}), tl.int32)"
    return hl.inline_triton(source, (step, first, full), hl.full([], 0, dtype=torch.int32))


def positions(tile: Any, offsets: torch.Tensor) -> torch.Tensor:
    """Positions of a tile that is an int32 scalar on the device: ``tile * len(offsets) + offsets``.

    In Triton source, because Helion computes scalars with scalars in 64 bits, whatever their dtype: positions,
    addresses and every comparison on the diagonal would be 64 bits wide.
    """
    return hl.inline_triton("{0} * {1}.shape[0] + {1}", (tile, offsets), offsets)


def edge_positions(tile: Any, block: Int, low_diagonal: Int | None) -> torch.Tensor:
    """Positions of a tile that :func:`edge_tile` gave."""
    if low_diagonal is None:
        return tile * block + hl.arange(block)
    return positions(tile, hl.arange(block))


def query_tiles(
    first_col: Int, last_col: Int, rows: Int, diagonal: Int, causal: bool, block_m: Int
) -> tuple[Int | torch.Tensor, Int | torch.Tensor, Int]:
    """Which tiles of ``block_m`` queries see the keys ``first_col..last_col``.

    Args:
        first_col: First key position of the tile.
        last_col: Last key position of the tile (it may lie beyond the last key).
        rows: Number of queries, M.
        diagonal: Offset of the causal diagonal.
        causal: Whether attention is causal.
        block_m: Height of a query tile.

    Returns:
        ``(start, full, stop)`` in tiles: the queries before tile ``start`` see none of these keys, tiles
        ``[start, full)`` need :func:`visible`, the queries of tiles ``[full, stop)`` see all of them. The last tile
        may be ragged (queries beyond ``rows``).
    """
    stop = (rows + block_m - 1) // block_m
    if not causal:
        return 0, 0, stop
    start = clamped_tiles(first_col - diagonal, rows + block_m - 1, block_m)
    full = clamped_tiles(last_col - diagonal + block_m - 1, rows + block_m - 1, block_m)
    return start, full, stop


def visible(
    row: torch.Tensor, col: torch.Tensor, keys: Int, diagonal: Int, causal: bool, low_diagonal: Int | None
) -> torch.Tensor:
    """Bool tile: key ``col`` exists and query ``row`` may see it.

    Args:
        row: Query positions, shaped to broadcast against ``col`` (``row[:, None]``).
        col: Key positions, shaped to broadcast against ``row`` (``col[None, :]``).
        keys: Number of keys, N.
        diagonal: Offset of the causal diagonal.
        causal: Whether attention is causal.
        low_diagonal: Offset of the first visible key, or None.
    """
    if causal:
        # One comparison for each score: the smaller of the two limits is found once for each row.
        limit = torch.minimum(row + (diagonal + 1), torch.zeros_like(row) + keys)
        seen: torch.Tensor = col < limit
    else:
        seen = torch.lt(col, keys)
    return seen if low_diagonal is None else seen & (col >= row + low_diagonal)


def heavy_first(index: Int, tiles: Int, causal: bool) -> Int:
    """The query tile of the ``index``-th program: for causal the last tile first, because it sees the most keys.

    Programs start in order of their index, so the short ones fill the gaps at the end.
    """
    return tiles - 1 - index if causal else index


def additive(mask: torch.Tensor | None) -> bool:
    """Whether the mask is added to the scores, so that exponents are in natural units (see the module docstring)."""
    return mask is not None and mask.dtype != torch.bool


def exponent_scale(scale: Any, mask: torch.Tensor | None) -> Any:
    """What a score in units of ``1 / scale`` is multiplied by to become an exponent: in base 2 unless additive."""
    return scale if additive(mask) else scale * LOG2E


def score_scale(scale: float, softcap: float | None, mask: torch.Tensor | None) -> float:
    """What a raw score ``q . k`` is multiplied by to become what :func:`capped` takes."""
    return exponent_scale(scale, mask) if softcap is None else scale / softcap


def capped(score: torch.Tensor, softcap: float | None) -> torch.Tensor:
    """``tanh(score)`` with a soft cap, else ``score``.

    The library's tanh, good to an ulp or two of its result however small: an absolute error, as 1 - 2 / (e^2x + 1) and
    the hardware's approximation have (2**-24, 2**-11), would be that of a score once the cap multiplies it.
    """
    return score if softcap is None else torch.tanh(score)


def exponents(score: torch.Tensor, softcap: float | None, mask: torch.Tensor | None) -> torch.Tensor:
    """Exponents from what :func:`capped` gives."""
    return score if softcap is None else score * exponent_scale(softcap, mask)


def uncapped(ds: torch.Tensor, score: torch.Tensor, softcap: float | None) -> torch.Tensor:
    """The gradient of scores before the soft cap, from that after it and what :func:`capped` gave."""
    return ds if softcap is None else ds * (1.0 - score * score)


def natural(exponent: torch.Tensor, in_natural: bool) -> torch.Tensor:
    """An exponent in natural units, which it may have anyway."""
    return exponent if in_natural else exponent * LN2


def exp_shifted(exponent: torch.Tensor, shift: torch.Tensor, in_natural: bool) -> torch.Tensor:
    """``exp(exponent - shift)``, where both are in natural units, or in base 2."""
    if in_natural:
        # Subtract first: see the module docstring.
        return torch.exp2((exponent - shift) * LOG2E)
    return torch.exp2(exponent - shift)


# PTX for two fp32 values at a time, which sm_100 and later have: elements that a thread holds side by side.
MULTIPLY_TWO = """
{
    .reg .b64 a, b, d;
    mov.b64 a, {$2, $3};
    mov.b64 b, {$4, $5};
    mul.rn.f32x2 d, a, b;
    mov.b64 {$0, $1}, d;
}
"""
MULTIPLY_ADD_TWO = """
{
    .reg .b64 a, b, c, d;
    mov.b64 a, {$2, $3};
    mov.b64 b, {$4, $5};
    mov.b64 c, {$6, $7};
    fma.rn.f32x2 d, a, b, c;
    mov.b64 {$0, $1}, d;
}
"""


def multiply(a: torch.Tensor, b: torch.Tensor, packed: bool) -> torch.Tensor:
    """``a * b`` in fp32, two at a time if ``packed``: by itself the compiler packs few of them."""
    if not packed:
        return a * b
    return hl.inline_asm_elementwise(MULTIPLY_TWO, "=r,=r,r,r,r,r", [a, b], torch.float32, True, 2)


def multiply_subtract(a: torch.Tensor, b: float, c: torch.Tensor, packed: bool) -> torch.Tensor:
    """``a * b - c`` in fp32, two at a time if ``packed``, with one rounding then."""
    if not packed:
        return a * b - c
    operands = [a, torch.zeros_like(c) + b, -c]  # assembly takes tensors only
    return hl.inline_asm_elementwise(MULTIPLY_ADD_TWO, "=r,=r,r,r,r,r,r,r", operands, torch.float32, True, 2)


def padded_width(width: int) -> int:
    """The power of two, at least 16 (the least depth of a matrix instruction), that holds ``width`` columns."""
    return max(16, 1 << (width - 1).bit_length())


def value_columns(width: int, value_width: int) -> int:
    """Columns of the forward value tile: a power of two that holds ``value_width``, 64 or more beside wide keys.

    With fewer (16 or 32) than the keys have, and rows off 16-byte boundaries, the compiled kernel was wrong: measured
    on the H200 with triton 3.6, fp16, every pair of widths out of 16, 32, 64, 128, 256. Outputs were silently wrong at
    (32, 16), (64, 16) and (64, 32), and from 128 on shared memory was read out of bounds; no other pair was wrong, nor
    any with rows on the boundaries.
    """
    return max(padded_width(value_width), min(64, padded_width(width)))


def load_rows(
    tensor: torch.Tensor, b: Int, h: Int, row: torch.Tensor, d: torch.Tensor, rows: Int, width: int, ragged: bool
) -> torch.Tensor:
    """Rows of a [B, H, rows, width] tensor, zero beyond its end.

    Args:
        tensor: What to load from.
        b: Batch.
        h: Head.
        row: Positions along the third dimension.
        d: Columns to load, ``hl.arange`` of ``padded_width(width)`` or more.
        rows: Size of the third dimension.
        width: Size of the last dimension, known at compile time.
        ragged: Whether ``row`` may pass the end. Without a bound, and with a width that needs no padding, the load
            has no mask at all.
    """
    inside = (row < rows).unsqueeze(1) if ragged else None
    if width != d.shape[0]:
        narrow = (d < width).unsqueeze(0)
        inside = narrow if inside is None else inside & narrow
    return hl.load(tensor, [b, h, row, d], extra_mask=inside)


def store_rows(
    tensor: torch.Tensor, b: Int, h: Int, row: torch.Tensor, d: torch.Tensor, rows: Int, width: int, value: torch.Tensor
) -> None:
    """Writes a tile to rows of a [B, H, rows, width] tensor in that tensor's dtype; the rest as :func:`load_rows`."""
    inside = (row < rows).unsqueeze(1)
    if width != d.shape[0]:
        inside = inside & (d < width).unsqueeze(0)
    hl.store(tensor, [b, h, row, d], value.to(tensor.dtype), extra_mask=inside)


def load_mask(
    mask: torch.Tensor | None, b: Int, h: Int, row: torch.Tensor, col: torch.Tensor, inside: torch.Tensor
) -> torch.Tensor | None:
    """The tile of the mask at ``row`` and ``col``, where ``inside`` (None without a mask).

    Call it before the first dot product of a loop body. Triton's layout pass takes the anchors of a loop from the last
    to the first, and a vector reached by two of them gets the layout of the one that comes later in the program: after
    the dot product, the load would drag maximum and sum into its own layout and the whole softmax would be computed in
    two layouts (2,193 instead of 845 instructions for a 128x64 tile at D=128).
    """
    return None if mask is None else hl.load(mask, [b, h, row, col], extra_mask=inside)


def masked_exponents(exponent: torch.Tensor, mask: torch.Tensor | None, mask_tile: torch.Tensor | None) -> torch.Tensor:
    """Adds an additive mask tile, or puts -inf where a bool mask tile is False.

    The selection comes after the scale, so that a NaN score at a position that a bool mask removes is gone.
    """
    if mask is None:
        return exponent
    if additive(mask):
        return exponent + mask_tile.to(torch.float32)
    return torch.where(mask_tile, exponent, float("-inf"))


def keep_tile(
    rng_state: torch.Tensor,
    plane: Int,
    row: torch.Tensor,
    col_tile: Int | torch.Tensor,
    threshold: int,
    block_m: Int,
    block_n: Int,
) -> torch.Tensor:
    """Bool tile [block_m, block_n] of the scores that dropout keeps; the same bits whatever the tiling.

    Philox-4x32 with 7 rounds, the 64-bit seed as key, counter ``(j // 4, i, b * Hq + h, 0)``; key ``j`` takes word
    ``j % 4`` of the result and is kept when that uint32 is at least the threshold.

    Args:
        rng_state: The kernel's int64 [1] argument that holds the seed.
        plane: ``b * Hq + h``.
        row: The tile's query positions, int vector of ``block_m``.
        col_tile: Index of the key tile: its first key is ``col_tile * block_n``.
        threshold: What :func:`signed_threshold` gives.
        block_m: Height of the tile.
        block_n: Width of the tile, a multiple of 4.
    """
    group = col_tile * (block_n // 4) + hl.arange(block_n // 4)
    shape = hl.zeros([block_m, block_n], dtype=torch.bool)
    return hl.triton_kernel(_KEEP_TILE, (rng_state, plane, row, group, threshold), shape)
