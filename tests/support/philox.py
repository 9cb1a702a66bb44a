"""Philox-4x32 in numpy, written from its paper and from nothing in the package, and the dropout mask made of it.

Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3 (SC11).
"""

from __future__ import annotations

import numpy as np
import torch

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)


def philox_4x32(counter: tuple, key: tuple[int, int], rounds: int) -> tuple[np.ndarray, ...]:
    """Four uint32 outputs (as uint64 arrays) of each counter; the counter's parts are broadcast."""
    c0, c1, c2, c3 = (np.asarray(part, dtype=np.uint64) & _LOW for part in counter)
    k0, k1 = key
    for _ in range(rounds):
        first, second = c0 * np.uint64(_MULTIPLIERS[0]), c2 * np.uint64(_MULTIPLIERS[1])
        c0, c1, c2, c3 = (
            (second >> _SHIFT) ^ c1 ^ np.uint64(k0),
            second & _LOW,
            (first >> _SHIFT) ^ c3 ^ np.uint64(k1),
            first & _LOW,
        )
        k0, k1 = (k0 + _KEY_STEPS[0]) & 0xFFFFFFFF, (k1 + _KEY_STEPS[1]) & 0xFFFFFFFF
    return tuple(np.broadcast_arrays(c0, c1, c2, c3))


def keep_mask(seed: int, scores_shape: tuple[int, ...], dropout_p: float) -> torch.Tensor:
    """Which probabilities dropout keeps, as the package defines it.

    Key: the two halves of the seed. Counter: (column // 4, row, index of batch and head, 0); column % 4 chooses among
    the four outputs; kept if the output is at least round(dropout_p * 2**32).
    """
    *lead, rows, columns = scores_shape
    planes = int(np.prod(lead, dtype=np.int64))
    counter = (
        np.arange(-(-columns // 4)).reshape(1, 1, -1),
        np.arange(rows).reshape(1, -1, 1),
        np.arange(planes).reshape(-1, 1, 1),
        0,
    )
    outputs = philox_4x32(counter, (seed & 0xFFFFFFFF, seed >> 32), rounds=7)
    numbers = np.stack(outputs, axis=-1).reshape(planes, rows, 4 * -(-columns // 4))[:, :, :columns]
    threshold = min(round(dropout_p * 2**32), 2**32 - 1)
    return torch.from_numpy(numbers >= threshold).reshape(scores_shape)
