"""The forward over lists of blocks, in the one form that Helion lowers to tcgen05 through CuTe-DSL.

For one folded head (batch and head in one), with ``c`` the scale, row ``i`` a query and ``j`` a key::

    s_ij = c * q_i . k_j     -inf unless j < n and i + low <= j <= i + high; with a soft cap, cap * tanh(s_ij / cap);
                             then, with a mask, + mask_ij, or -inf where mask_ij is 0
    lse_i = log sum_j exp(s_ij)             -inf for a row without a visible key
    o_i = sum_j exp(s_ij - lse_i) * v_j     0 for a row without a visible key

The scores are cut in blocks of 128 queries by 128 keys. Two lists say for each row of blocks which of them are wholly
visible and which in part; no other is visited, and only those of the second list compare positions. The lists are
tensors (:mod:`.flash_blocks`) and the bounds are numbers, so causality, windows, ragged lengths and scales are all one
kernel: what is compiled for are the padded sizes, whether there is a soft cap, and what there is of a mask. Beside a
mask all blocks that are visited are in the second list.

Helion compares this function's graph with a pattern, node for node, and takes its tcgen05 body where they are equal;
where they are not, it says nothing and makes scalar code. Hence what looks odd here: the literals (no module's names),
the positions of the queries and of the head made outside of the loops, the bound of 128 in each inner loop, the order
of the results, the scale before and ``log2(e)`` after the mask, and that what is added to scores is added in both
loops. :mod:`.cute_lowering` asserts the match. Through Triton the same function is an ordinary kernel, in which its
values are tested.

Data layout, all contiguous: q [1, H, M, D], k [1, G, N, D], v [1, G, N, D], o [1, H, M, D], lse [1, H, M], H a multiple
of G, M and N multiples of 128 and of at least 256, D 64 or 128. The mask is contiguous too, its sizes those or 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import helion.language as hl
import torch

from . import flash, forms, runtime

if TYPE_CHECKING:
    from collections.abc import Sequence


def attention_flash(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    full_count: torch.Tensor,
    full_index: torch.Tensor,
    part_count: torch.Tensor,
    part_index: torch.Tensor,
    mask: torch.Tensor | None,
    o: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
    softcap: float | None,
    n: int,
    high: int,
    low: int,
    along: hl.constexpr,
) -> None:
    """Helion kernel function; :data:`FLASH` describes its arguments.

    Args:
        q: Queries [1, H, M, D].
        k: Keys [1, G, N, D].
        v: Values [1, G, N, D].
        full_count: How many blocks of a row of blocks are wholly visible, int32 [1, 1, M / 128].
        full_index: Which, int32 [1, 1, M / 128, N / 128]; beyond the count not read.
        part_count: How many are visible in part.
        part_index: Which.
        mask: None, or [B, A, M, N] for heads (b, a) in that order, all but the last folded into one: added to the
            scores, or of uint8, where 0 hides a key. Each size may be 1 instead. Then no block is in the first list.
        o: Output [1, H, M, D], written.
        lse: Natural log-sum-exp [1, H, M], fp32, written.
        scale: Multiplies q . k; above 0. With a soft cap, divided by it.
        softcap: None, or the bound of the scores.
        n: Keys from here on are padding.
        high: Query i sees key j when j <= i + high,
        low: and j >= i + low.
        along: For each of the mask's four dimensions, whether its size is not 1.
    """
    B, H, M, D = q.shape
    _, G, N, _ = k.shape
    D = hl.specialize(D)
    group = H // G
    block_m = hl.register_block_size(M)
    block_n = hl.register_block_size(N)
    for tile_b, tile_h, tile_m in hl.tile([B, H, M], block_size=[1, 1, block_m]):
        b = tile_b.begin
        h = tile_h.begin
        hk = h // group
        row = tile_m.begin // 128
        q_tile = q[b, h, tile_m, :]
        i = tile_m.index.unsqueeze(1)
        plane = (h + hl.arange(1))[:, None]
        m = hl.full([tile_m], float("-inf"), dtype=torch.float32)
        l = hl.zeros([tile_m], dtype=torch.float32)
        acc = hl.zeros([tile_m, D], dtype=torch.float32)
        for entry in hl.tile(full_count[0, 0, row], block_size=1):
            start = full_index[0, 0, row, entry.id] * 128
            stop = torch.minimum(start + 128, hl.full([], N, dtype=torch.int32))
            for tile_n in hl.tile(start, stop, block_size=block_n):
                k_tile = k[b, hk, tile_n, :]
                v_tile = v[b, hk, tile_n, :]
                s = hl.dot(q_tile, k_tile.T, acc=hl.zeros([tile_m, tile_n], dtype=torch.float32))
                j = tile_n.index[None, :]
                p, alpha, m_next = _softmax(_score(s, scale, softcap, mask, along, plane, (H, M), i, j), m)
                l = l * alpha + torch.sum(p, -1)
                acc = hl.dot(p.to(v.dtype), v_tile, acc=acc * alpha[:, None])
                m = m_next
        for entry in hl.tile(part_count[0, 0, row], block_size=1):
            start = part_index[0, 0, row, entry.id] * 128
            stop = torch.minimum(start + 128, hl.full([], N, dtype=torch.int32))
            for tile_n in hl.tile(start, stop, block_size=block_n):
                k_tile = k[b, hk, tile_n, :]
                v_tile = v[b, hk, tile_n, :]
                s = hl.dot(q_tile, k_tile.T, acc=hl.zeros([tile_m, tile_n], dtype=torch.float32))
                j = tile_n.index[None, :]
                seen = (j < n) & (j <= i + high) & (j >= i + low)
                seen = seen & _shown(mask, along, plane, (H, M), i, j)
                score = _score(s, scale, softcap, mask, along, plane, (H, M), i, j)
                p, alpha, m_next = _softmax(torch.where(seen, score, float("-inf")), m)
                l = l * alpha + torch.sum(p, -1)
                acc = hl.dot(p.to(v.dtype), v_tile, acc=acc * alpha[:, None])
                m = m_next
        divisor = torch.where(l == 0.0, 1.0, l)
        o[b, h, tile_m, :] = (acc / divisor[:, None]).to(o.dtype)
        lse[b, h, tile_m] = (m + torch.log2(divisor)) * 0.6931471805599453


def _score(
    s: torch.Tensor,
    scale: float,
    softcap: float | None,
    mask: torch.Tensor | None,
    along: Sequence[bool],
    plane: torch.Tensor,
    sizes: tuple[int, int],
    i: torch.Tensor,
    j: torch.Tensor,
) -> torch.Tensor:
    s = s * scale if softcap is None else torch.tanh(s * scale) * softcap
    if mask is None or mask.dtype == torch.uint8:
        return s
    return s + _mask_tile(mask, along, plane, sizes, i, j).to(torch.float32)


def _shown(
    mask: torch.Tensor | None,
    along: Sequence[bool],
    plane: torch.Tensor,
    sizes: tuple[int, int],
    i: torch.Tensor,
    j: torch.Tensor,
) -> torch.Tensor | bool:
    """What a mask of uint8 does not hide."""
    if mask is None or mask.dtype != torch.uint8:
        return True
    return _mask_tile(mask, along, plane, sizes, i, j) != 0


def _mask_tile(
    mask: torch.Tensor,
    along: Sequence[bool],
    plane: torch.Tensor,
    sizes: tuple[int, int],
    i: torch.Tensor,
    j: torch.Tensor,
) -> torch.Tensor:
    """The mask's values for a tile; ``plane`` is the folded head, [1, 1], ``sizes`` are H and M."""
    heads, rows = sizes
    planes = mask.shape[0] // rows if along[2] else mask.shape[0]
    row = plane * 0  # a tensor even where nothing is added, as Helion wants all indices of a load
    if along[0] and along[1]:
        row = plane
    elif along[0]:
        row = plane // (heads // planes)
    elif along[1]:
        row = plane % planes
    row = row * rows + i if along[2] else row
    return hl.load(mask, [row, j if along[3] else plane * 0])


def _softmax(s: torch.Tensor, m: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One online-softmax step: (p, factor for the old sums, new maximum), in base-2 units."""
    s = s * 1.4426950408889634
    m_next = torch.maximum(m, torch.amax(s, -1))
    shift = torch.where(m_next == float("-inf"), 0.0, m_next)
    return torch.exp2(s - shift.unsqueeze(1)), torch.exp2(m - shift), m_next


FLASH = runtime.KernelFamily(
    attention_flash,
    dims={
        "q": "1 H M D",
        "k": "1 G N D",
        "v": "1 G N D",
        "full_count": "1 1 R",
        "full_index": "1 1 R L",
        "part_count": "1 1 R",
        "part_index": "1 1 R L",
        "mask": "MR MC",
        "o": "1 H M D",
        "lse": "1 H M",
    },
    specialized=("D",),
    canonical={"H": 6, "G": 3, "R": 5, "L": 7, "MR": 1632, "MC": 176},
    cute=forms.CuteForm("cute_flash_search_enabled", "helion_flash", flash.TRITON),
)
