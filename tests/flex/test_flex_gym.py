"""Every mask and every mod of attention-gym."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from .dense import check, operands

pytest.importorskip("attn_gym")

from attn_gym import masks, mods

from .gym import MASKS, MODS, topk


@pytest.mark.parametrize("name", MASKS)
def test_mask(name):
    make, q_len, kv_len = MASKS[name]
    mask = make()
    q_k_v = operands(2, q_len, kv_len)
    heads = (2, 2) if name.startswith("vsa") else (None, None)
    check(q_k_v, block_mask=create_block_mask(mask, *heads, q_len, kv_len, device="cpu", BLOCK_SIZE=32))


def test_vsa_block_mask():
    chosen, sizes = topk(), torch.tensor([8, 8, 5, 8, 3, 8, 8, 2])
    i, j = torch.arange(64)[:, None], torch.arange(64)
    listed = (chosen[:, :, i // 8] == (j // 8)[:, None]).any(-1)
    check(operands(2, 64), block_mask=masks.create_vsa_block_mask(chosen, 8, 8), shown=listed)
    shown = listed & (j % 8 < sizes[j // 8])
    check(operands(2, 64), block_mask=masks.create_vsa_block_mask(chosen, 8, 8, sizes), shown=shown)


def test_causal_block_mask_fast():
    for separate in (True, False):
        lists = masks.causal.create_causal_block_mask_fast(2, 2, 100, 100, "cpu", 32, separate)
        check(operands(2, 100), block_mask=lists)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", MODS)
def test_mod(name, masked):
    score_mod, captured = MODS[name]()
    lists = create_block_mask(masks.causal_mask, None, None, 64, 64, device="cpu", BLOCK_SIZE=16) if masked else None
    check(operands(3, 64), score_mod, lists, captured)


def test_activation_undoes_softmax():
    q, k, v = operands(2, 64)
    score_mod = mods.generate_activation_score_mod(torch.sigmoid)
    from torch_bwattn.flex.attention import flex_attention

    out, lse = flex_attention(q, k, v, score_mod, return_lse=True)
    undone = mods.undo_softmax(out, lse, v.sum(-2, keepdim=True))
    torch.testing.assert_close(undone, torch.sigmoid(q @ k.mT / 8**0.5) @ v, rtol=1e-4, atol=1e-4)
