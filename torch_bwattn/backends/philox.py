"""The dropout mask, defined once for every backend: counter-based, independent of tiles, devices and launch order.

Philox-4x32 with 7 rounds (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011): for batch b, query
head h, query i and key j the counter is ``(j // 4, i, b * Hq + h, 0)``, the key is the 63-bit seed's low and high
words, and the ``j % 4``-th of the four outputs decides: kept when it is at least ``round(p * 2**32)``.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROUNDS = 7
_MUL = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF


def threshold(dropout_p: float) -> int:
    """The smallest kept 32-bit draw."""
    return min(round(dropout_p * 2**32), _WORD)


def new_state(device: torch.device) -> Tensor:
    """A fresh seed, drawn from the device's default generator: int64 ``[1]``, non-negative."""
    return torch.randint(0, 2**63 - 1, (1,), dtype=torch.int64, device=device)


def _mul_hi_lo(constant: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """High and low words of ``constant * x`` for 32-bit words held in int64, without overflowing the sign bit."""
    low_part = (constant & 0xFFFF) * x  # at most 48 bits
    high_part = (constant >> 16) * x + (low_part >> 16)
    return high_part >> 16, ((high_part & 0xFFFF) << 16) | (low_part & 0xFFFF)


def keep_mask(
    rng_state: Tensor, batch: int, heads: int, rows: range, kv_len: int, dropout_p: float, first_key: int = 0
) -> Tensor:
    """Which scores survive: bool ``[batch, heads, len(rows), kv_len - first_key]`` on ``rng_state``'s device."""
    device = rng_state.device
    first_group, groups = first_key // 4, (kv_len + 3) // 4
    c0 = torch.arange(first_group, groups, device=device)
    c1 = torch.arange(rows.start, rows.stop, device=device)[:, None]
    c2 = torch.arange(batch * heads, device=device)[:, None, None]
    c0, c1, c2, c3 = torch.broadcast_tensors(c0, c1, c2, torch.zeros((), dtype=torch.int64, device=device))
    k0, k1 = rng_state & _WORD, (rng_state >> 32) & _WORD
    for _ in range(ROUNDS):
        hi0, lo0 = _mul_hi_lo(_MUL[0], c0)
        hi1, lo1 = _mul_hi_lo(_MUL[1], c2)
        c0, c1, c2, c3 = hi1 ^ c1 ^ k0, lo1, hi0 ^ c3 ^ k1, lo0
        k0, k1 = (k0 + _WEYL[0]) & _WORD, (k1 + _WEYL[1]) & _WORD
    skipped = 4 * first_group
    draws = torch.stack((c0, c1, c2, c3), -1).flatten(-2)[..., first_key - skipped : kv_len - skipped]
    return (draws >= threshold(dropout_p)).view(batch, heads, len(rows), kv_len - first_key)
