"""Mods as Helion traces them into a kernel, many in one, against the same mods on whole grids."""

from __future__ import annotations

import json

import torch
from hypothesis import strategies as st

from torch_bwattn.backends import flex_blockwise
from torch_bwattn.backends.flex_inputs import Mod
from torch_bwattn.backends.helion import loader
from torch_bwattn.mods.program import along, hoisted, run, vectors
from torch_bwattn.mods.trace import traced

from .drawn import Captured, masks, score_mods

_AT_ONCE = 40
_BATCH, _HEADS, _LENGTHS = 1, 2, (16, 16)


def mod_of(function, what, device="cpu"):
    """A mod as the operator gets it, without gradients; None of None."""
    if function is None:
        return None
    found = traced(function, what)
    first, wanted, rest = hoisted(found.program)
    with torch.no_grad():
        captured = [tensor.to(device) for tensor in run(first, wanted, found.captured)]
    return Mod(rest, captured, found.numbers)


def _grid(device):
    sizes = (_BATCH, _HEADS, *_LENGTHS)
    return sizes, along([torch.arange(size, device=device) for size in sizes])


def _expected(kind, mod, scores, grads, grid):
    """(result, gradient of scores, gradients of captured tensors)."""
    if kind == "mask":
        return flex_blockwise._evaluated(mod, grid).expand(scores.shape).float(), None, []
    after = flex_blockwise._evaluated(mod, {"score": scores, **grid})
    after = after.expand(scores.shape).float()
    grad = torch.where(after == -torch.inf, 0.0, grads)
    totals = [torch.zeros_like(tensor) if tensor.is_floating_point() else None for tensor in mod.captured]
    rule = flex_blockwise._derivative(mod, tuple(total is not None for total in totals), torch.float32)
    rows = flex_blockwise._Rows(slice(None), None, grid, None)
    before = flex_blockwise._through_mod(rule, mod, scores, grad, rows, totals)
    return after, before.expand(scores.shape), totals


def check(mods, device="cpu"):
    """Evaluates all mods in one kernel; ``(kind, function)`` each."""
    loader.load()
    from .many_mods import MOST_TABLES, SIDE, family

    sizes, grid = _grid(device)
    generator = torch.Generator().manual_seed(3)
    scores, grads = (torch.randn(sizes, generator=generator).to(device) * size for size in (3.0, 1.0))
    tables, programs, wanted = [], [], []

    def place_of(tensor, *, own=False):
        tensor = tensor if tensor.dim() else tensor.view(1)
        for place, other in enumerate(tables):
            if not own and other.dtype == tensor.dtype and torch.equal(other, tensor):
                return place
        tables.append(tensor)
        return len(tables) - 1

    for kind, function in mods:
        mod = mod_of(function, f"{kind}_mod", device)
        program, captured = mod.program, mod.captured
        assert not vectors(program, tuple(tensor.dim() for tensor in captured))
        totals = [
            torch.zeros_like(tensor) if kind == "score" and tensor.is_floating_point() else None for tensor in captured
        ]
        if len(tables) + 2 * len(captured) > MOST_TABLES:
            break
        places = [place_of(tensor) for tensor in captured]
        programs.append(
            (kind, program.text, places, [None if one is None else place_of(one, own=True) for one in totals])
        )
        wanted.append((program.text, totals, _expected(kind, mod, scores, grads, grid)))
    results, gradients = (torch.full((len(programs), *sizes), torch.nan, device=device) for _ in range(2))
    filled = (*tables, *(None,) * (MOST_TABLES - len(tables)))
    arguments = (scores, grads, results, gradients, *filled, json.dumps(programs))
    config = {"block_sizes": [SIDE], "num_warps": 4, "num_stages": 1, "indexing": "pointer"}
    family([table.dim() for table in tables]).prepare(arguments, config)(*arguments)
    for place, (text, totals, (after, before, of_tables)) in enumerate(wanted):
        torch.testing.assert_close(results[place], after, rtol=1e-5, atol=1e-5, msg=lambda m, t=text: f"{t}: {m}")
        if before is not None:
            torch.testing.assert_close(
                gradients[place], before, rtol=1e-4, atol=1e-4, msg=lambda m, t=text: f"gradient of {t}: {m}"
            )
        for found, expected in zip(totals, of_tables, strict=False):
            if expected is not None:
                most = float(expected.abs().max())
                torch.testing.assert_close(found.view_as(expected), expected, rtol=1e-4, atol=1e-5 * max(1.0, most))
    return len(programs)


@st.composite
def drawn_mods(draw):
    captured = Captured(train=False)
    found = []
    for _ in range(_AT_ONCE):
        if draw(st.booleans()):
            found.append(("mask", draw(masks())))
        else:
            mod = draw(score_mods())
            found.append(("score", lambda s, b, h, q, k, mod=mod: mod(captured, s, b, h, q, k) * 1.0))
    return found
