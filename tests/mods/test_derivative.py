"""The derivative of a mod against autograd through the mod itself."""

from __future__ import annotations

import pytest
import torch

from torch_bwattn.mods.derivative import GRAD, derivative
from torch_bwattn.mods.program import POSITION, evaluate, hoisted, run
from torch_bwattn.mods.trace import traced

TABLE = torch.randn(3, 12, dtype=torch.float64, requires_grad=True)
TEMPERATURE = torch.tensor(1.3, dtype=torch.float64, requires_grad=True)
VECTORS = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)


def capped(score, b, h, q_idx, kv_idx):
    return 2.0 * torch.tanh(score / 2.0)


def heated(score, b, h, q_idx, kv_idx):
    return score * TEMPERATURE


def learned(score, b, h, q_idx, kv_idx):
    return score * TABLE.exp()[h, kv_idx] + TABLE[h, (q_idx - kv_idx) % 12]


def chosen(score, b, h, q_idx, kv_idx):
    return torch.where(q_idx > kv_idx, torch.sigmoid(score), -float("inf"))


def dotted(score, b, h, q_idx, kv_idx):
    return score + torch.dot(VECTORS[q_idx % 3], VECTORS[kv_idx % 3])


def constant(score, b, h, q_idx, kv_idx):
    return torch.zeros_like(score) + kv_idx


@pytest.mark.parametrize("mod", [capped, heated, learned, chosen, dotted, constant])
def test_against_autograd(mod):
    found = traced(mod, "score_mod", torch.float64)
    first, wanted, rest = hoisted(found.program)
    captured = [tensor.detach() for tensor in run(first, wanted, found.captured)]
    rule = derivative(
        rest.text,
        tuple((tensor.dtype, tuple(tensor.shape)) for tensor in captured),
        tuple(range(len(captured))),
        torch.float64,
    )
    axes = dict(zip(POSITION, (torch.arange(size, dtype=torch.int32) for size in (1, 3, 5, 7)), strict=True))
    grid = {name: axis.view([-1 if own == place else 1 for place in range(4)])
            for own, (name, axis) in enumerate(axes.items())}  # fmt: skip
    score = torch.randn(1, 3, 5, 7, dtype=torch.float64, requires_grad=True)
    grad = torch.randn(1, 3, 5, 7, dtype=torch.float64)
    leaves = [tensor.clone().requires_grad_(tensor.is_floating_point()) for tensor in captured]
    (result,) = evaluate(rest.steps, [rest.result], {"score": score, **grid}, leaves)
    inputs = [score, *(leaf for leaf in leaves if leaf.requires_grad)]
    expected = [None] * len(inputs)
    if result.requires_grad:
        expected = torch.autograd.grad(result.expand(grad.shape), inputs, grad, allow_unused=True)
    wanted_refs = [rule.score] if rule.score is not None else []
    for load in rule.loads:
        wanted_refs += [load.gradient, *load.index]
    values = iter(evaluate(rule.steps, wanted_refs, {"score": score.detach(), GRAD: grad, **grid}, captured))
    if rule.score is None:
        assert expected[0] is None or not expected[0].any()
    else:
        torch.testing.assert_close(next(values), expected[0])
    totals = [torch.zeros_like(tensor) for tensor in captured]
    for load in rule.loads:
        gradient, index = next(values), [next(values).to(torch.int64) for _ in load.index]
        gradient = gradient.expand(*grad.shape, *gradient.shape[4:])
        if index:
            index = [one.expand(grad.shape) for one in index]
            totals[load.captured].index_put_(tuple(index), gradient, accumulate=True)
        else:
            totals[load.captured] += gradient.sum()
    for total, gradient in zip(totals, expected[1:], strict=True):
        torch.testing.assert_close(total, torch.zeros_like(total) if gradient is None else gradient)


def test_literals_of_other_kinds_are_other_derivatives():
    found = []
    for literal in (0.0, -0.0):

        def signed(score, b, h, q_idx, kv_idx, literal=literal):
            return torch.copysign(score, torch.tensor(literal, dtype=torch.float64))

        text = traced(signed, "score_mod", torch.float64).program.text
        rule = derivative(text, (), (), torch.float64)
        grid = dict.fromkeys(POSITION, torch.zeros(1, 1, 1, 1, dtype=torch.int32))
        inputs = {"score": torch.ones(1, 1, 1, 1, dtype=torch.float64), GRAD: torch.ones(1, 1, 1, 1), **grid}
        found += [one.item() for one in evaluate(rule.steps, [rule.score], inputs, [])]
    assert found == [1.0, -1.0]
