"""Which Helion config each kernel runs with: one table, read by the backend, the bench and the cross-compile checks.

A config depends on the kernel, the dtype, the padded head width, what each score needs beside a maximum and an
exponential (its ``work``: a mask, dropout), whether the problem is causal, and, for the forward alone, on which side of
``SHORT_KV_LEN`` the keys are. So a feature has at most two forward kernels, whatever lengths it meets.

Figures are of an H200 with triton 3.6, bf16 unless they say otherwise, each config's results checked before it was
timed. Times are milliseconds of the kernel alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from ...problem import Problem
from ...target import capability
from .forms import has_tcgen05


@dataclass(frozen=True)
class Config:
    """One Helion config. ``tile_m`` counts queries, ``tile_n`` keys."""

    tile_m: int
    tile_n: int
    num_warps: int
    num_stages: int

    order: tuple[str, ...] = ("tile_m", "tile_n")
    """The order in which the kernel registers its block sizes."""
    packed: bool = False
    """Whether the forward rescales O, and scales and shifts scores, two values at a time: from sm_100 on."""

    def helion(self) -> dict[str, Any]:
        """As ``helion.Config`` takes it."""
        return {
            "block_sizes": [getattr(self, name) for name in self.order],
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
            "indexing": "pointer",
        }

    def __str__(self) -> str:
        packed = ", packed" if self.packed else ""
        return f"{self.tile_m}x{self.tile_n}, {self.num_warps} warps, {self.num_stages} stages{packed}"


def padded(width: int) -> int:
    """The power of two, at least 16, to which a kernel pads a head width."""
    return max(16, 1 << (width - 1).bit_length())


def _width(problem: Problem) -> int:
    """The width whose tiles the problem takes: 64, 128 or 256."""
    return max(64, padded(problem.head_dim), padded(problem.value_dim))


def _work(problem: Problem) -> str:
    """What each score needs. With a mask and dropout the mask's tiles are taken; that pair was not timed."""
    if problem.mask_dtype is not None:
        return "bool" if problem.mask_dtype == torch.bool else "additive"
    return "dropout" if problem.dropout_p > 0.0 else "plain"


_ROOMY_SHARED_MEMORY = ((9, 0), (10, 0), (10, 3))
"""Targets whose blocks may take 227 KiB of shared memory, for which the measured tiles were chosen. The others have
163 KiB (sm_80) or 99 KiB (sm_86, 89, 120) and take tiles that fit the latter, not measured."""


def _roomy(problem: Problem) -> bool:
    return capability(problem.target) in _ROOMY_SHARED_MEMORY


SHORT_KV_LEN = 1024
"""Up to so many keys, smaller tiles win: a program's first loads and its epilogue are a larger part of its time, and
two programs on an SM hide each other's. At 2048 keys both kinds are equal."""

# B4 H32 S8192 (B2 H16 at 256), TFLOP/s not causal / causal. Width 64: 128x64 8w 3s 449/435, 64x128 4w 3s 436/406,
# 64x64 4w 3s 422/385, 128x128 4w 3s 387/380. Width 128: 128x128 8w 3s 487/464, 128x64 8w 4s 472/463, 128x64 8w 3s
# 470/462, 64x64 4w 3s 423/426, 128x64 4w 3s 263/217 (spills). Width 256: 128x64 8w 2s 500/495, 128x32 8w 4s 459/437,
# 64x64 4w 2s 317/313.
#
# B2 H16 S4096 with a mask or dropout. Width 64, bool: 64x64 4w 3s 0.49, 64x64 4w 2s 0.55, 128x64 8w 3s 0.65; additive:
# 64x64 4w 3s 0.66, 64x128 4w 2s 0.66, 128x64 8w 3s 0.71; dropout: 64x128 4w 2s 0.75, 64x64 4w 2s 0.83, 128x64 8w 3s
# 0.86. Width 128, bool: 64x64 4w 2s 0.86, 128x64 8w 3s 0.95, 128x128 8w 2s 0.97; additive: 128x64 8w 3s 0.79, 64x64 4w
# 2s 0.98; dropout: 128x64 8w 3s 1.11, 128x128 8w 2s 1.15. Width 256, bool: 64x32 4w 2s 2.18, 128x64 8w 1s 2.29, 128x32
# 8w 1s 2.78; additive: 64x32 4w 2s 1.66, 128x32 8w 2s 1.97; dropout: 64x32 4w 2s 1.87, 128x32 8w 2s 2.13.
_FORWARD = {
    (64, "plain"): Config(128, 64, 8, 3),
    (64, "bool"): Config(64, 64, 4, 3),
    (64, "additive"): Config(64, 64, 4, 3),
    (64, "dropout"): Config(64, 128, 4, 2),
    (128, "plain"): Config(128, 128, 8, 3),
    (128, "bool"): Config(64, 64, 4, 2),
    (128, "additive"): Config(128, 64, 8, 3),
    (128, "dropout"): Config(128, 64, 8, 3),
    (256, "plain"): Config(128, 64, 8, 2),
    (256, "bool"): Config(64, 32, 4, 2),
    (256, "additive"): Config(64, 32, 4, 2),
    (256, "dropout"): Config(64, 32, 4, 2),
}

# By width and whether causal, H16, 16,384 tokens in sequences of 256 / 512 / 1024. Width 64: 64x64 4w 3s
# 0.066/0.102/0.180, 128x64 8w 3s 0.070/0.104/0.181; causal 0.065/0.084/0.122 against 0.068/0.088/0.125. Width 128:
# 128x32 8w 3s 0.122/0.196/0.347, 64x32 4w 3s 0.126/0.207/0.372, 128x64 8w 3s 0.151/0.223/0.389, 128x128 8w 3s
# 0.155/0.231/0.392; causal: 64x32 4w 3s 0.099/0.141/0.225, 64x64 4w 3s 0.114/0.150/0.226, 128x64 8w 3s
# 0.131/0.166/0.238, 128x128 8w 3s 0.141/0.198/0.247.
_SHORT_FORWARD = {
    (64, False): Config(64, 64, 4, 3),
    (64, True): Config(64, 64, 4, 3),
    (128, False): Config(128, 32, 8, 3),
    (128, True): Config(64, 32, 4, 3),
}

# With the left side of a window, not timed: 128x128 8w 3s spills there, this does not, and less of it lies outside of
# the window at either end.
_WINDOW_FORWARD = {128: Config(128, 64, 8, 3)}

# fp32 operands have no tensor-core path at fp32 accuracy. B1 H8 S2048: width 64 32x32 4w 2s 0.75, 64x32 8w 2s 0.76;
# width 128 32x64 8w 1s 1.55, 32x32 4w 1s 1.96; width 256 16x16 4w 2s 5.39, 32x16 8w 1s 5.45, 32x32 8w 1s 10.0.
_FP32_FORWARD = {64: Config(32, 32, 4, 2), 128: Config(32, 64, 8, 1), 256: Config(16, 16, 4, 2)}


# Where products accumulate in tensor memory, tiles were chosen by compiling alone, none was timed: the largest at which
# nothing spills, where Hopper's spills (192 to 1,104 bytes a thread in dK and dV) or, at width 256, asks for 259 KiB of
# shared memory, more than there is.
_TENSOR_MEMORY_FORWARD = {
    **_FORWARD,
    (128, "plain"): Config(128, 64, 8, 3),  # 128x128 8w spills 40 to 64 bytes with 3 stages, 32 to 56 with 2
    (256, "plain"): Config(128, 32, 8, 2),
}


def _table(problem: Problem) -> dict[tuple[int, str], Config]:
    return _TENSOR_MEMORY_FORWARD if has_tcgen05(problem.target) else _FORWARD


def _packed(problem: Problem, config: Config) -> Config:
    """The config as the target and the dtype have it.

    Compiled for sm_100a, no problem spills for it or loses a tcgen05, and registers rise by 2 at most, but for dropout,
    240 instead of 228. Instructions are 4 % fewer at width 64, 4 to 6 % at 128, 8 % at 256. Operands in fp32 take
    another path, whose arithmetic the compiler packs itself.
    """
    return replace(config, packed=has_tcgen05(problem.target) and problem.dtype != torch.float32)


def forward(problem: Problem) -> Config:
    """The forward's config."""
    return _packed(problem, _forward(problem))


def _forward(problem: Problem) -> Config:
    width, work = _width(problem), _work(problem)
    if problem.dtype == torch.float32:
        return _FP32_FORWARD[width]
    if not _roomy(problem):
        wide = width <= 64 or (width <= 128 and work == "plain")
        return Config(64, 64 if wide else 32, 4, 2 if width <= 128 else 1)
    usual = _table(problem)[width, work]
    if work == "plain" and problem.kv_len <= SHORT_KV_LEN:
        return _SHORT_FORWARD.get((width, problem.diagonal is not None), usual)
    if work == "plain" and problem.low_diagonal is not None:
        return _WINDOW_FORWARD.get(width, usual)
    return usual


def forward_choices(problem: Problem) -> tuple[Config, ...]:
    """Configs that may compete for a problem, first :func:`forward`'s: the table's of its width."""
    chosen, width = forward(problem), _width(problem)
    if problem.dtype == torch.float32 or not _roomy(problem):
        return (chosen,)
    tables = (_table(problem), _SHORT_FORWARD)
    others = [_packed(problem, config) for table in tables for (of, _), config in table.items() if of == width]
    return tuple(dict.fromkeys((chosen, *others)))


def _keys_first(tile_m: int, tile_n: int, num_warps: int, num_stages: int) -> Config:
    return Config(tile_m, tile_n, num_warps, num_stages, ("tile_n", "tile_m"))


# dK and dV, tiles as queries x keys. B4 H32 S8192 (B2 H16 at 256), not causal / causal: width 64 64x64 4w 3s 8.73/4.43,
# 128x64 4w 2s 8.83/4.43; width 128 64x128 8w 3s 14.8/8.0, 64x64 4w 2s 16.1/8.4, 64x128 8w 2s 17.1/8.0; width 256 64x64
# 8w 2s 15.7/7.3, 64x64 8w 1s 20.3/8.6. B2 H16 S4096 with a bool mask / additive / dropout: width 64 64x64 4w 3s
# 0.92/1.49/1.12, 2s 1.01/1.56/1.18; width 128 64x128 8w 2s 1.56/2.25/1.88, 64x64 4w 2s 1.57/4.65/1.98; width 256 64x64
# 8w 2s 5.18/7.45/5.85, 1s 6.82/6.89/6.46.
_DKV = {
    (64, "plain"): _keys_first(64, 64, 4, 3),
    (64, "bool"): _keys_first(64, 64, 4, 3),
    (64, "additive"): _keys_first(64, 64, 4, 3),
    (64, "dropout"): _keys_first(64, 64, 4, 3),
    (128, "plain"): _keys_first(64, 128, 8, 3),
    (128, "bool"): _keys_first(64, 128, 8, 2),
    (128, "additive"): _keys_first(64, 128, 8, 2),
    (128, "dropout"): _keys_first(64, 128, 8, 2),
    (256, "plain"): _keys_first(64, 64, 8, 2),
    (256, "bool"): _keys_first(64, 64, 8, 2),
    (256, "additive"): _keys_first(64, 64, 8, 1),
    (256, "dropout"): _keys_first(64, 64, 8, 2),
}

# Without spills at widths 64 and 128; at 256 64 to 80 bytes, 64x64 112. Bytes for 128: 64x64 2s 368, 32x64 2s 64.
_TENSOR_MEMORY_DKV = {
    64: _keys_first(64, 64, 8, 2),
    128: _keys_first(64, 64, 8, 1),
    256: _keys_first(32, 64, 8, 1),
}

# dQ, shapes likewise: width 64 128x64 4w 3s 4.96/2.79, 64x64 4w 3s 5.76/2.93; width 128 128x64 8w 3s 10.8/5.5, 128x128
# 8w 2s 11.3/5.8; width 256 128x64 8w 1s 6.8/3.4, 128x32 8w 2s 7.6/3.7. Bool / additive / dropout: width 64 64x64 4w 3s
# 0.48/0.67/0.79, 128x64 4w 3s 0.50/0.97/1.05; width 128 64x64 4w 2s 0.90/0.94/1.30, 128x64 8w 3s 1.06/0.88/1.15; width
# 256 128x64 8w 1s 2.52/2.58/3.07, 128x32 8w 2s 2.87/2.26/2.38.
_DQ = {
    (64, "plain"): Config(128, 64, 4, 3),
    (64, "bool"): Config(64, 64, 4, 3),
    (64, "additive"): Config(64, 64, 4, 3),
    (64, "dropout"): Config(64, 64, 4, 3),
    (128, "plain"): Config(128, 64, 8, 3),
    (128, "bool"): Config(64, 64, 4, 2),
    (128, "additive"): Config(128, 64, 8, 3),
    (128, "dropout"): Config(128, 64, 8, 3),
    (256, "plain"): Config(128, 64, 8, 1),
    (256, "bool"): Config(128, 64, 8, 1),
    (256, "additive"): Config(128, 32, 8, 2),
    (256, "dropout"): Config(128, 32, 8, 2),
}

# fp32, B1 H8 S2048. dK and dV: width 64 32x64 8w 1.59, 32x32 4w 1.79; 128 16x32 8w 5.75, 32x32 8w 6.14, 32x32 4w 30
# (spills); 256 16x16 8w 20, 32x32 4w 106. dQ: width 64 64x32 8w 1.41, 32x32 4w 1.43; 128 32x32 4w 3.21, 16x32 8w 5.27;
# 256 16x32 8w 10.4, 32x32 4w 14.9. Those of a mask, not timed, are the largest that spill little when compiled.
_FP32_BACKWARD = {
    64: {"dkv": _keys_first(32, 64, 8, 1), "dq": Config(32, 32, 4, 1)},
    128: {"dkv": _keys_first(16, 32, 8, 1), "dq": Config(32, 32, 4, 1)},
    256: {"dkv": _keys_first(16, 16, 8, 1), "dq": Config(16, 32, 8, 1)},
}


def backward(problem: Problem) -> dict[str, Config]:
    """The backward's configs by kernel.

    ``delta`` reads its operands at the card's copy rate with any tile; ``excess`` and ``mask_grad`` were not timed
    against others.
    """
    width, work = _width(problem), _work(problem)
    if problem.dtype == torch.float32:
        chosen = dict(_FP32_BACKWARD[width])
        side = 16 if width > 128 else 32
        tile = Config(side, side, 4 if width <= 64 else 8, 1)
        chosen |= {"excess": tile, "mask_grad": tile}
    elif not _roomy(problem):
        side = 64 if width <= 64 else 32
        numbers = (side, side, 4, 1 if width > 128 else 2)
        tile = Config(*numbers)
        chosen = {"dkv": _keys_first(*numbers), "dq": tile, "excess": tile, "mask_grad": tile}
    else:
        dkv = _TENSOR_MEMORY_DKV[width] if has_tcgen05(problem.target) else _DKV[width, work]
        chosen = {"dkv": dkv, "dq": _DQ[width, work]}
        if (width, work) == (128, "additive") and problem.dropout_p > 0.0:
            # The table's tile would take 232 KiB of shared memory with a float32 mask; this is the next best, 0.94.
            chosen["dq"] = Config(64, 64, 4, 2)
        chosen |= {"excess": Config(64, 64, 4, 2), "mask_grad": Config(64, 64, 4, 1)}
    chosen["delta"] = Config(64, 64, 4, 2, ("tile_m",))
    if work != "additive":
        del chosen["excess"]
    if not problem.mask_grad:
        del chosen["mask_grad"]
    return chosen


def backward_choices(problem: Problem) -> tuple[dict[str, Config], ...]:
    """Configs by kernel that may compete for a problem, first :func:`backward`'s: the table's of its width."""
    chosen, width = backward(problem), _width(problem)
    found = [chosen]
    if problem.dtype != torch.float32 and _roomy(problem):
        for (of, work), dkv in _DKV.items():
            other = {**chosen, "dkv": dkv, "dq": _DQ[of, work]}
            if of == width and other not in found:
                found.append(other)
    return tuple(found)


# Attention with mods: chosen by compiling alone (triton 3.7), none was timed yet. Bytes that are spilled for sm_90a,
# with a soft cap, a bias and a mask: dQ at 64 128x64 4w 120, as here none; dK and dV at 128 64x128 8w 64, as here none,
# at 256 64x64 8w 664, 32x64 8w 512, 32x32 8w none but without wgmma. For sm_100a: dK and dV at 128 as here none, at 256
# 72.
_FLEX = {
    64: {"forward": Config(128, 64, 8, 3), "dkv": _keys_first(64, 64, 4, 3), "dq": Config(128, 64, 8, 3)},
    128: {"forward": Config(128, 64, 8, 3), "dkv": _keys_first(64, 64, 8, 2), "dq": Config(128, 64, 8, 3)},
    256: {"forward": Config(64, 32, 4, 2), "dkv": _keys_first(64, 64, 8, 1), "dq": Config(128, 32, 8, 2)},
}
_TENSOR_MEMORY_FLEX = {
    64: {"forward": Config(128, 64, 8, 3), "dkv": _keys_first(64, 64, 8, 2), "dq": Config(64, 64, 4, 3)},
    128: {"forward": Config(128, 64, 8, 3), "dkv": _keys_first(64, 64, 8, 2), "dq": Config(64, 64, 8, 2)},
    256: {"forward": Config(64, 32, 4, 2), "dkv": _keys_first(32, 64, 8, 1), "dq": Config(64, 32, 8, 1)},
}


def flex(head_dim: int, value_dim: int, dtype: torch.dtype, target: str) -> dict[str, Config]:
    """Configs by kernel of attention with mods and lists of blocks."""
    width = max(64, padded(head_dim), padded(value_dim))
    if dtype == torch.float32:
        found = {"forward": _FP32_FORWARD[width], **_FP32_BACKWARD[width]}
    elif capability(target) not in _ROOMY_SHARED_MEMORY:
        numbers = (32, 32, 4 if width <= 64 else 8, 1 if width > 128 else 2)
        found = {"forward": Config(*numbers), "dkv": _keys_first(*numbers), "dq": Config(*numbers)}
    else:
        found = (_TENSOR_MEMORY_FLEX if has_tcgen05(target) else _FLEX)[width]
    return {**found, "delta": Config(64, 64, 4, 2, ("tile_m",))}
