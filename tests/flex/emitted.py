"""Mods as Helion traces them into a kernel, many in one, against the same mods on whole grids."""

from __future__ import annotations

import json

import torch
from hypothesis import strategies as st

from torch_bwattn.mods.derivative import GRAD, derivative
from torch_bwattn.mods.program import INDEX_DTYPE, POSITION, evaluate, hoisted, run, vectors
from torch_bwattn.mods.trace import traced

from .drawn import Captured, masks, score_mods

_AT_ONCE = 40
_BATCH, _HEADS, _LENGTHS = 1, 2, (16, 16)


def _split(mod, what, device):
    found = traced(mod, what)
    first, wanted, rest = hoisted(found.program)
    with torch.no_grad():
        captured = [tensor.to(device) for tensor in run(first, wanted, found.captured)]
    assert not vectors(rest, [tensor.dim() for tensor in captured])
    return rest, captured


def _grid(device):
    sizes = (_BATCH, _HEADS, *_LENGTHS)
    axes = [
        torch.arange(size, dtype=INDEX_DTYPE, device=device).view([-1 if place == own else 1 for place in range(4)])
        for own, size in enumerate(sizes)
    ]
    return sizes, dict(zip(POSITION, axes, strict=True))


def _expected(kind, program, captured, scores, grads, grid):
    """(result, gradient of scores, gradients of captured tensors)."""
    if kind == "mask":
        (shown,) = evaluate(program.steps, [program.result], grid, captured)
        return shown.expand(scores.shape).float(), None, []
    (after,) = evaluate(program.steps, [program.result], {"score": scores, **grid}, captured)
    after = after.expand(scores.shape).float()
    grad = torch.where(after == -torch.inf, 0.0, grads)
    wanted = tuple(place for place, tensor in enumerate(captured) if tensor.is_floating_point())
    kinds = tuple((tensor.dtype, tuple(tensor.shape)) for tensor in captured)
    rule = derivative(program.text, kinds, wanted, torch.float32)
    results = [rule.score] if rule.score is not None else []
    for load in rule.loads:
        results += [load.gradient, *load.index]
    found = iter(evaluate(rule.steps, results, {"score": scores, GRAD: grad, **grid}, captured))
    before = torch.zeros_like(scores)
    if rule.score is not None:
        before = torch.where(grad == 0.0, 0.0, next(found)).expand(scores.shape)
    totals = [torch.zeros_like(tensor) if tensor.is_floating_point() else None for tensor in captured]
    for load in rule.loads:
        by = torch.where(grad == 0.0, 0.0, next(found)).expand(scores.shape)
        index = tuple(next(found).to(torch.int64).expand(scores.shape) for _ in load.index)
        if index:
            totals[load.captured].index_put_(index, by, accumulate=True)
        else:
            totals[load.captured] += by.sum()
    return after, before, totals


def check(mods, device="cpu"):
    """Evaluates all mods in one kernel; ``(kind, function)`` each."""
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

    for kind, mod in mods:
        program, captured = _split(mod, f"{kind}_mod", device)
        totals = [
            torch.zeros_like(tensor) if kind == "score" and tensor.is_floating_point() else None for tensor in captured
        ]
        if len(tables) + 2 * len(captured) > MOST_TABLES:
            break
        places = [place_of(tensor) for tensor in captured]
        programs.append(
            (kind, program.text, places, [None if one is None else place_of(one, own=True) for one in totals])
        )
        wanted.append((program.text, totals, _expected(kind, program, captured, scores, grads, grid)))
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
