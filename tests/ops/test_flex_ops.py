"""The operators of mods and block lists: PyTorch's own checks of schemas, fakes and gradients."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

import torch_bwattn
from torch_bwattn.mods.program import hoisted
from torch_bwattn.mods.trace import traced
from torch_bwattn.ops import flex as flex_op

TABLE = torch.randn(2, 50)


def biased(score, b, h, q_idx, kv_idx):
    return score + TABLE[h, kv_idx]


def striped(b, h, q_idx, kv_idx):
    return (q_idx + kv_idx) % 3 != 1


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def arguments(score_mod, mask_mod, blocks, dtype=torch.float32, kv_batch=2, with_max_scores=False):
    query = torch.randn(2, 40, 2, 8, dtype=dtype).transpose(1, 2).requires_grad_()
    key, value = (torch.randn(kv_batch, 1, 50, width, dtype=dtype, requires_grad=True) for width in (8, 12))
    mods = []
    for what, mod in (("score_mod", score_mod), ("mask_mod", mask_mod)):
        found = None if mod is None else traced(mod, what)
        program = None if found is None else hoisted(found.program)[2].text
        captured = [] if found is None else [tensor.clone().requires_grad_() for tensor in found.captured]
        mods += [program, captured, []]
    lists, sizes = [], []
    if blocks:
        made = create_block_mask(mask_mod, 1, 1, 40, 50, device="cpu", BLOCK_SIZE=16)
        lists = [made.kv_num_blocks, made.kv_indices, made.full_kv_num_blocks, made.full_kv_indices]
        sizes = list(made.BLOCK_SIZE)
    return query, key, value, 0.3, *mods, lists, sizes, with_max_scores


CASES = {
    "plain": {"score_mod": None, "mask_mod": None, "blocks": False},
    "learned": {"score_mod": biased, "mask_mod": None, "blocks": False},
    "blocks": {"score_mod": biased, "mask_mod": striped, "blocks": True, "kv_batch": 1},
    "causal blocks": {"score_mod": None, "mask_mod": causal, "blocks": True, "kv_batch": 1},
    "causal in 16 bits": {"score_mod": None, "mask_mod": causal, "blocks": False, "dtype": torch.bfloat16},
    "maxima": {
        "score_mod": biased,
        "mask_mod": striped,
        "blocks": True,
        "with_max_scores": True,
        "dtype": torch.float64,
    },
}


@pytest.mark.parametrize("case", CASES)
def test_opcheck(case):
    torch.library.opcheck(torch.ops.bwattn.flex_forward.default, arguments(**CASES[case]))


def test_opcheck_of_the_backward():
    query, key, value, scale, *mods, _ = arguments(biased, striped, True)
    with torch.no_grad():
        out, lse, _ = torch.ops.bwattn.flex_forward(query, key, value, scale, *mods, False)
        grads = torch.randn_like(out), torch.randn_like(lse)
        operands = (*grads, query.detach(), key.detach(), value.detach(), out, lse, scale)
        torch.library.opcheck(torch.ops.bwattn.flex_backward.default, (*operands, *mods, [True]))


def test_gradients_of_fp64():
    query, key, value, *rest = arguments(biased, striped, True, torch.float64)
    lists = rest[-3]
    captured = rest[2][0].detach().to(torch.float64).requires_grad_()

    def call(query, key, value, captured):
        more = (rest[0], rest[1], [captured], *rest[3:])
        return torch.ops.bwattn.flex_forward(query, key, value, *more)[:2]

    assert len(lists) == 4
    assert torch.autograd.gradcheck(call, (query, key, value, captured), fast_mode=True)


def test_a_pinned_backend_without_such_kernels_is_explained():
    query = torch.randn(1, 2, 20, 8)
    with torch_bwattn.backend("aten"):
        text = torch_bwattn.explain_flex_attention(query, query, query, biased)
    assert "backend aten was pinned, which has no kernel" in text


@pytest.mark.parametrize("compiled", [False, True])
def test_a_backward_obeys_the_pin_of_its_forward(compiled, monkeypatch):
    asked, backends = [], flex_op._backends
    monkeypatch.setattr(flex_op, "_backends", lambda *given: asked.append(given) or backends(*given))
    query, key, value = (torch.randn(1, 2, 20, 8, requires_grad=True) for _ in range(3))

    def attend(query, key, value):
        return torch_bwattn.flex_attention(query, key, value, biased)

    if compiled:
        torch.compiler.reset()
        attend = torch.compile(attend, backend="aot_eager", fullgraph=True)
    with torch_bwattn.backend("reference"):
        out = attend(query, key, value)
    out.sum().backward()
    assert asked == [("forward", "reference"), ("backward", "reference")]
