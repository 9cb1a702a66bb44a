"""Which Helion config each kernel runs with: one table, read by the backend, the bench and the cross-compile checks.

A config depends on features, never on lengths: the kernel, the padded head width, whether the problem is causal, and
whether each score needs more work than a maximum and an exponential (a mask or dropout: ``busy``). fp32 operands have
no tensor-core path at fp32 accuracy, so they take small tiles everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from ...problem import Problem
from ...target import capability


@dataclass(frozen=True)
class Config:
    """One Helion config. ``tile_m`` counts queries, ``tile_n`` keys."""

    tile_m: int
    tile_n: int
    num_warps: int
    num_stages: int

    order: tuple[str, ...] = ("tile_m", "tile_n")
    """The order in which the kernel registers its block sizes."""

    def helion(self) -> dict[str, Any]:
        """As ``helion.Config`` takes it."""
        return {
            "block_sizes": [getattr(self, name) for name in self.order],
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
            "indexing": "pointer",
        }

    def __str__(self) -> str:
        return f"{self.tile_m}x{self.tile_n}, {self.num_warps} warps, {self.num_stages} stages"


def padded(width: int) -> int:
    """The power of two, at least 16, to which a kernel pads a head width."""
    return max(16, 1 << (width - 1).bit_length())


def _width(problem: Problem) -> int:
    return max(padded(problem.head_dim), padded(problem.value_dim))


def _busy(problem: Problem) -> bool:
    return problem.mask_dtype is not None or problem.dropout_p > 0.0


_KEYS_FIRST = ("tile_n", "tile_m")
_ROOMY_SHARED_MEMORY = ((9, 0), (10, 0), (10, 3))
"""Targets whose blocks may take 227 KiB of shared memory, for which the measured tiles were chosen. The others have
163 KiB (sm_80) or 99 KiB (sm_86, 89, 120) and take tiles that fit the latter, not measured."""


def _roomy(problem: Problem) -> bool:
    return capability(problem.target) in _ROOMY_SHARED_MEMORY


def forward(problem: Problem) -> Config:
    """The forward's config.

    H200, triton 3.6, bf16, B4 H32 S8192 (B2 H16 at 256), TFLOP/s not causal / causal, every one of them checked
    against float64. Width 64: 128x64 8w 3s 449/435, 64x128 4w 3s 436/406, 64x64 4w 3s 422/385, 128x128 4w 3s 387/380.
    Width 128: 128x128 8w 3s 487/464, 128x64 8w 4s 472/463, 128x64 8w 3s 470/462, 64x64 4w 3s 423/426, 128x64 4w 3s
    263/217 (spills). Width 256: 128x64 8w 2s 500/495, 128x32 8w 4s 459/437, 64x64 4w 2s 317/313. A mask's tile takes
    registers and shared memory of its own: the next smaller tile then.
    """
    width, busy = _width(problem), _busy(problem)
    if problem.dtype == torch.float32:  # the largest tiles that do not spill without a mask, compiled for sm_90
        return {64: Config(32, 32, 4, 2), 128: Config(32, 64, 8, 1), 256: Config(16, 32, 8, 1)}[max(64, width)]
    if not _roomy(problem):
        return Config(64, 64 if width <= 64 or (width <= 128 and not busy) else 32, 4, 2 if width <= 128 else 1)
    if width <= 64 or (width <= 128 and busy and problem.mask_dtype != torch.bool):
        return Config(128, 64, 8, 3)
    if width <= 128:
        # A bool mask with 128x64 and 8 warps makes ptxas run the matrix instructions one by one, at any depth; with
        # dropout besides, 128x128 spills.
        if busy and problem.dropout_p > 0.0:
            return Config(64, 64, 4, 2)
        return Config(128, 128, 8, 2 if busy else 3)
    if problem.mask_dtype == torch.bool:  # at depth 2 ptxas runs the matrix instructions one by one
        return Config(128, 32, 8, 1)
    return Config(128, 32, 8, 2) if busy else Config(128, 64, 8, 2)


def backward(problem: Problem) -> dict[str, Config]:
    """The backward's configs by kernel.

    H200, triton 3.6, bf16, shapes as for the forward, milliseconds not causal / causal, checked likewise. ``dkv``
    (keys x queries): width 64 64x64 4w 3s 8.73/4.43, 64x128 4w 2s 8.83/4.43, 128x64 8w 3s 9.29/4.85; width 128 128x64
    8w 3s 14.8/8.0, 64x64 4w 2s 16.1/8.4, 128x64 8w 2s 17.1/8.0; width 256 64x64 8w 2s 15.7/7.3, 64x64 8w 1s 20.3/8.6.
    ``dq`` (queries x keys): width 64 128x64 4w 3s 4.96/2.79, 64x64 4w 3s 5.76/2.93; width 128 128x64 8w 3s 10.8/5.5,
    128x128 8w 2s 11.3/5.8; width 256 128x64 8w 1s 6.8/3.4, 128x32 8w 2s 7.6/3.7. ``delta`` reads its operands at the
    card's copy rate with any tile.
    """
    width, busy = _width(problem), _busy(problem)
    additive = problem.mask_dtype is not None and problem.mask_dtype != torch.bool
    if problem.dtype == torch.float32 or not _roomy(problem):
        side, stages = (32, 1) if problem.dtype == torch.float32 or width > 128 else (64 if width <= 64 else 32, 2)
        tile = Config(side, side, 4, stages)
        chosen = {"dkv": replace(tile, order=_KEYS_FIRST), "dq": tile, "excess": tile, "mask_grad": tile}
    else:
        if width <= 64:
            chosen = {
                "dkv": Config(64, 64, 4, 2 if busy else 3, _KEYS_FIRST),
                "dq": Config(128, 64, 8 if busy else 4, 3),
            }
        elif width <= 128:
            stages = 2 if busy else 3
            chosen = {"dkv": Config(64, 128, 8, stages, _KEYS_FIRST), "dq": Config(128, 64, 8, stages)}
        else:
            chosen = {"dkv": Config(64, 64, 8, 2, _KEYS_FIRST), "dq": Config(128, 64, 8, 1)}
        chosen |= {"excess": Config(64, 64, 4, 2), "mask_grad": Config(64, 64, 4, 1)}
    chosen["delta"] = Config(64, 64, 4, 2, ("tile_m",))
    if not additive:
        del chosen["excess"]
    if not problem.mask_grad:
        del chosen["mask_grad"]
    return chosen
