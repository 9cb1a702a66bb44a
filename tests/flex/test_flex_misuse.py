"""What ``flex_attention`` refuses: the kind of error, and that its message names the argument."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask

from torch_bwattn.flex.attention import flex_attention
from torch_bwattn.mods.trace import ModError

from .dense import operands

_L = 16
_table = torch.randn(_L)


def _lists(batch=None, heads=None, q_len=_L, kv_len=_L, mask=lambda b, h, q, k: q >= k):
    return create_block_mask(mask, batch, heads, q_len, kv_len, device="cpu", BLOCK_SIZE=8)


def _lists_with(mask_mod):
    counts, index = torch.ones(1, 1, 2, dtype=torch.int32), torch.zeros(1, 1, 2, 2, dtype=torch.int32)
    return BlockMask.from_kv_blocks(counts, index, BLOCK_SIZE=8, mask_mod=mask_mod, seq_lengths=(_L, _L))


def _branch(score, b, h, q_idx, kv_idx):
    return score if q_idx >= kv_idx else score * 2


def _branch_on_score(score, b, h, q_idx, kv_idx):
    return score if score > 0 else -score


def _item(score, b, h, q_idx, kv_idx):
    return score * q_idx.item()


def _int(score, b, h, q_idx, kv_idx):
    return score * int(kv_idx)


def _in_place(score, b, h, q_idx, kv_idx):
    return score.mul_(2)


def _in_place_of_table(score, b, h, q_idx, kv_idx):
    _table.add_(1)
    return score


def _set_item(score, b, h, q_idx, kv_idx):
    _table[0] = 1.0
    return score


def _out(score, b, h, q_idx, kv_idx):
    return torch.add(score, 1, out=torch.empty(()))


def _bool_index(score, b, h, q_idx, kv_idx):
    return score + _table[q_idx > kv_idx].sum()


def _nonzero(score, b, h, q_idx, kv_idx):
    return score + (_table[q_idx] > 0).nonzero().sum()


def _random(score, b, h, q_idx, kv_idx):
    return score + torch.rand_like(score)


def _dropout(score, b, h, q_idx, kv_idx):
    return torch.nn.functional.dropout(score, 0.5)


@pytest.mark.parametrize(
    "score_mod",
    [_branch, _branch_on_score, _item, _int, _in_place, _in_place_of_table, _set_item, _out, _bool_index, _nonzero,
     _random, _dropout],
)  # fmt: skip
def test_score_mod_that_is_none(score_mod):
    before = _table.clone()
    with pytest.raises(ModError, match="score_mod"):
        flex_attention(*operands(2, _L), score_mod)
    assert torch.equal(_table, before)


@pytest.mark.parametrize(
    "mask_mod",
    [
        lambda b, h, q, k: q >= k if b == 0 else k >= q,
        lambda b, h, q, k: q - k,
        lambda b, h, q, k: True,
        lambda b, h, q, k: None,
        lambda b, h, q, k: (q >= k)[None],
        lambda b, h, q, k: q.sub_(k) > 0,
    ],
)
def test_mask_mod_that_is_none(mask_mod):
    with pytest.raises(ModError, match="mask_mod"):
        flex_attention(*operands(2, _L), None, _lists_with(mask_mod))


@pytest.mark.parametrize(
    "score_mod",
    [
        lambda s, b, h, q, k: None,
        lambda s, b, h, q, k: 1.0,
        lambda s, b, h, q, k: s > 0,
        lambda s, b, h, q, k: q - k,
        lambda s, b, h, q, k: (s, s),
        lambda s, b, h, q, k: s + torch.zeros(3),
        lambda s, b, h, q, k: _table,
    ],
)
def test_result_of_score_mod(score_mod):
    with pytest.raises(ModError, match="score_mod"):
        flex_attention(*operands(2, _L), score_mod)


def test_mods_that_are_no_functions():
    with pytest.raises(TypeError, match="score_mod"):
        flex_attention(*operands(2, _L), 3)
    with pytest.raises(TypeError, match="score_mod"):
        flex_attention(*operands(2, _L), torch.zeros(_L, _L))
    for given in (3, torch.ones(_L, _L, dtype=torch.bool), lambda b, h, q, k: q >= k):
        with pytest.raises(TypeError, match="block_mask"):
            flex_attention(*operands(2, _L), None, given)


def test_too_few_parameters():
    with pytest.raises(TypeError):
        flex_attention(*operands(2, _L), lambda s, b, h, q: s)


def test_captured_tensor_elsewhere():
    table = torch.zeros(_L, device="meta")
    with pytest.raises(ValueError, match="score_mod"):
        flex_attention(*operands(2, _L), lambda s, b, h, q, k: s + table[k])
    with pytest.raises(ValueError, match="mask_mod"):
        flex_attention(*operands(2, _L), None, _lists_with(lambda b, h, q, k: table[k] > 0))


@pytest.mark.parametrize("lengths", [(8, 16), (16, 8), (32, 16), (16, 32)])
def test_lists_for_other_lengths(lengths):
    with pytest.raises(ValueError, match="block_mask"):
        flex_attention(*operands(2, _L), None, _lists(None, None, *lengths))


def test_lists_for_other_heads_or_batch():
    for batch, heads, word in ((None, 3, "heads"), (3, None, "batch")):
        with pytest.raises(ValueError, match=f"block_mask.*{word}"):
            flex_attention(*operands(2, _L, batch=2), None, _lists(batch, heads))


def test_sliced_mask():
    lists = create_block_mask(lambda b, h, q, k: q >= k, 2, 2, _L, _L, device="cpu", BLOCK_SIZE=8)
    with pytest.raises(RuntimeError, match="block_mask"):
        flex_attention(*operands(2, _L, batch=1), None, lists[0:1])


def test_lists_elsewhere():
    with pytest.raises(ValueError, match="block_mask"):
        flex_attention(*operands(2, _L), None, _lists().to("meta"))


@pytest.mark.parametrize("place", range(3))
def test_operands(place):
    name = ("query", "key", "value")[place]

    def refused(error, change, match=name):
        given = operands(2, _L)
        given[place] = change(given[place])
        with pytest.raises(error, match=match):
            flex_attention(*given)

    refused(ValueError, lambda one: one[0])
    refused(ValueError, lambda one: one[None])
    refused(TypeError, lambda one: one.tolist())
    refused(TypeError, lambda one: None)
    refused(TypeError, lambda one: one.detach().int())
    refused(TypeError, lambda one: one.half(), "key" if place == 0 else name)
    refused(ValueError, lambda one: one.to("meta"), "key" if place == 0 else name)


def test_shapes_that_do_not_fit():
    q, k, v = operands(2, _L)
    with pytest.raises(ValueError, match="key"):
        flex_attention(q, k[..., :4], v)
    with pytest.raises(ValueError, match="value"):
        flex_attention(q, k, v[:, :, :8])
    with pytest.raises(ValueError, match="key"):
        flex_attention(q[:1], k, v)
    with pytest.raises(ValueError, match="key"):
        flex_attention(q, k[:1], v[:1])
    with pytest.raises(ValueError, match="enable_gqa"):
        flex_attention(q, k[:, :1], v[:, :1])
    q, _, _ = operands(3, _L)
    with pytest.raises(ValueError, match="key"):
        flex_attention(q, k, v, enable_gqa=True)


def test_options():
    with pytest.raises(ValueError, match="return_lse"):
        flex_attention(*operands(2, _L), return_lse=True, return_aux=AuxRequest(lse=True))
    with pytest.raises(TypeError, match="kernel_options"):
        flex_attention(*operands(2, _L), kernel_options=3)
    flex_attention(*operands(2, _L), kernel_options={"BLOCK_M": 64})


@pytest.mark.parametrize(("name", "given"), [("return_aux", True), ("scale", "1"), ("scale", torch.ones(3))])
def test_options_of_another_kind(name, given):
    with pytest.raises(TypeError, match=name):
        flex_attention(*operands(2, _L), **{name: given})


def test_refusal_leaves_no_state():
    for _ in range(2):
        with pytest.raises(ModError):
            flex_attention(*operands(2, _L), _branch)
    assert flex_attention(*operands(2, _L), lambda s, b, h, q, k: s * 2).shape == (2, 2, _L, 8)
