"""A kernel that only evaluates mods, many at once: binding one for each would take a second a mod."""

from __future__ import annotations

import json
from typing import Any

import helion.language as hl
import torch

from torch_bwattn.backends.helion import flex_mods, runtime

SIDE = 16
MOST_TABLES = 32


def evaluated(
    programs: str, score: torch.Tensor, grad: torch.Tensor, at: Any, tables: Any, results: torch.Tensor,
    gradients: torch.Tensor, row: torch.Tensor, col: torch.Tensor, b: Any, h: Any,
) -> torch.Tensor:  # fmt: skip
    """Stores what each mod gives, and the gradient of scores before it; adds those of its tables."""
    for place, (kind, text, places, grads) in enumerate(json.loads(programs)):
        own = tuple(tables[one] for one in places)
        if kind == "mask":
            shown = flex_mods.shown(text, at, own, ())
            hl.store(results, [place, b, h, row, col], torch.zeros_like(score) + shown.to(torch.float32))
            continue
        totals = tuple(None if one is None else tables[one] for one in grads)
        after, before = flex_mods.differentiated(
            text, score, at, own, (), totals, lambda found: (found, torch.where(found == float("-inf"), 0.0, grad))
        )
        hl.store(results, [place, b, h, row, col], after)
        hl.store(gradients, [place, b, h, row, col], before)
    return score


def many_mods(
    scores: torch.Tensor,
    grads: torch.Tensor,
    results: torch.Tensor,
    gradients: torch.Tensor,
    t0: torch.Tensor | None,
    t1: torch.Tensor | None,
    t2: torch.Tensor | None,
    t3: torch.Tensor | None,
    t4: torch.Tensor | None,
    t5: torch.Tensor | None,
    t6: torch.Tensor | None,
    t7: torch.Tensor | None,
    t8: torch.Tensor | None,
    t9: torch.Tensor | None,
    t10: torch.Tensor | None,
    t11: torch.Tensor | None,
    t12: torch.Tensor | None,
    t13: torch.Tensor | None,
    t14: torch.Tensor | None,
    t15: torch.Tensor | None,
    t16: torch.Tensor | None,
    t17: torch.Tensor | None,
    t18: torch.Tensor | None,
    t19: torch.Tensor | None,
    t20: torch.Tensor | None,
    t21: torch.Tensor | None,
    t22: torch.Tensor | None,
    t23: torch.Tensor | None,
    t24: torch.Tensor | None,
    t25: torch.Tensor | None,
    t26: torch.Tensor | None,
    t27: torch.Tensor | None,
    t28: torch.Tensor | None,
    t29: torch.Tensor | None,
    t30: torch.Tensor | None,
    t31: torch.Tensor | None,
    programs: hl.constexpr,
) -> None:
    B, H, M, N = scores.shape
    block = hl.register_block_size(16, 16)
    for i, j, h, b in hl.grid([(M + block - 1) // block, (N + block - 1) // block, H, B]):
        row = i * block + hl.arange(block)
        col = j * block + hl.arange(block)
        score = hl.load(scores, [b, h, row, col])
        grad = hl.load(grads, [b, h, row, col])
        at = flex_mods.position(b, h, row[:, None], col[None, :])
        tables = (
            t0, t1, t2, t3, t4, t5, t6, t7, t8, t9, t10, t11, t12, t13, t14, t15,
            t16, t17, t18, t19, t20, t21, t22, t23, t24, t25, t26, t27, t28, t29, t30, t31,
        )  # fmt: skip
        last = evaluated(programs, score, grad, at, tables, results, gradients, row, col, b, h)  # noqa: F841


def family(ranks: list[int]) -> runtime.KernelFamily:
    """The kernel for tables of so many dimensions."""
    dims = {
        **dict.fromkeys(("scores", "grads"), "B H M N"), **dict.fromkeys(("results", "gradients"), "K B H M N"),
        **{f"t{place}": " ".join(f"T{place}_{dim}" for dim in range(rank)) for place, rank in enumerate(ranks)},
        **{f"t{place}": "1" for place in range(len(ranks), MOST_TABLES)},
    }  # fmt: skip
    canonical = {f"T{place}_{dim}": 101 + 7 * place + dim for place, rank in enumerate(ranks) for dim in range(rank)}
    return runtime.KernelFamily(many_mods, dims=dims, canonical={**canonical, "H": 3, "K": 29})
