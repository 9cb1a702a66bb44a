"""Which blocks of 128 queries by 128 keys a forward visits, and the sizes that lengths are padded to.

Plain tensors; nothing here knows a kernel language.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from .runtime import refuse_during_capture

BLOCK = 128
_LEAST = 2 * BLOCK  # below, Helion's pattern takes the lists for trivial ones
MOST_BLOCKS = 1 << 20
"""Blocks of a table, 4 MiB of each list: 131,072 queries by as many keys. It is the one thing that grows with both."""


def padded_length(length: int, per_doubling: int = 2, multiple: int = BLOCK) -> int:
    """The length that a kernel is compiled for: so many to each doubling, multiples of a tile, at least 256.

    With 2, 19 sizes serve all lengths up to 131,072, and a length grows by up to a half; with 8 some 60 do, and it
    grows by up to an eighth. Where blocks are listed, what is padded costs a copy and no product: it is in no list.
    """
    step = max(multiple, (1 << (length - 1).bit_length()) // 2 // per_doubling)
    return max(_LEAST, -(-length // step) * step)


def padded_width(width: int) -> int:
    """The head width that a kernel is compiled for."""
    return 64 if width <= 64 else 128


def block_count(q_len: int, kv_len: int) -> int:
    """Blocks of a table."""
    return (padded_length(q_len) // BLOCK) * (padded_length(kv_len) // BLOCK)


class Blocks(NamedTuple):
    """The lists of a forward, int32: counts [1, 1, R], indices [1, 1, R, L]."""

    full_count: Tensor
    full_index: Tensor
    part_count: Tensor
    part_index: Tensor


def bounds(q_len: int, kv_len: int, diagonal: int | None, low_diagonal: int | None) -> tuple[int, int]:
    """(high, low): query i sees key j when ``i + low <= j <= i + high``; where nothing hides, what hides nothing."""
    return kv_len if diagonal is None else diagonal, -q_len if low_diagonal is None else low_diagonal


_lasting: list[Blocks] = []


def blocks(q_len: int, kv_len: int, high: int, low: int, device: torch.device, masked: bool = False) -> Blocks:
    """The lists for these lengths and bounds, built once; what a CUDA graph was captured with is kept for good.

    Beside a mask (``masked``) no block counts as wholly visible.
    """
    found = _blocks(q_len, kv_len, high, low, device, masked)
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        _lasting.append(found)  # the graph reads this memory whenever it is replayed
    return found


@functools.lru_cache(maxsize=64)
def _blocks(q_len: int, kv_len: int, high: int, low: int, device: torch.device, masked: bool) -> Blocks:
    refuse_during_capture("attention_flash", device)
    # Helion keeps what it derives from these by their versions, which tensors of inference mode have not.
    with torch.inference_mode(False):
        row = torch.arange(padded_length(q_len) // BLOCK, device="cpu").unsqueeze(1) * BLOCK
        col = torch.arange(padded_length(kv_len) // BLOCK, device="cpu").unsqueeze(0) * BLOCK
        last_row, last_col = (row + BLOCK - 1).clamp(max=q_len - 1), (col + BLOCK - 1).clamp(max=kv_len - 1)
        least, most = col - last_row, last_col - row  # of j - i in the block
        seen = (row < q_len) & (col < kv_len) & (least <= high) & (most >= low)
        full = torch.zeros_like(seen) if masked else seen & (most <= high) & (least >= low) & (col + BLOCK <= kv_len)
        return Blocks(*_listed(full, device), *_listed(seen & ~full, device))


def _listed(chosen: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """How many of each row, and which: they first, in their order."""
    count = chosen.sum(1, dtype=torch.int32)
    index = torch.sort(chosen.to(torch.int8), dim=1, descending=True, stable=True).indices.to(torch.int32)
    return count[None, None].to(device), index[None, None].contiguous().to(device)
