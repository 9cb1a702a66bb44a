"""Replacing PyTorch's ``flex_attention``."""

from __future__ import annotations

import types

import pytest
import torch
from torch.nn.attention import flex_attention as torch_flex

import torch_bwattn

ORIGINAL = torch_flex.flex_attention


def test_it_is_replaced_while_the_patch_is_on():
    early = types.SimpleNamespace(flex_attention=ORIGINAL)
    query = torch.randn(1, 2, 40, 16)
    torch_bwattn.reset_call_counts()
    with torch_bwattn.patch_flex_attention(early):
        assert torch_flex.flex_attention is early.flex_attention is torch_bwattn.flex_attention
        with torch_bwattn.patch_flex_attention():
            out = torch_flex.flex_attention(query, query, query, lambda s, b, h, i, j: s + i)
        assert torch_flex.flex_attention is torch_bwattn.flex_attention
    assert torch_flex.flex_attention is early.flex_attention is ORIGINAL
    assert torch_bwattn.call_counts() == {"reference": 1}
    torch.testing.assert_close(out, torch_bwattn.sdpa(query, query, query))


def test_code_that_is_compiled_under_it():
    torch._dynamo.reset()
    query = torch.randn(1, 2, 40, 16)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def attend(query):
        return torch_flex.flex_attention(query, query, query, lambda s, b, h, i, j: s * 2)

    torch_bwattn.reset_call_counts()
    with torch_bwattn.patch_flex_attention():
        out = attend(query)
    assert sum(torch_bwattn.call_counts().values()) == 1
    torch.testing.assert_close(out, torch_bwattn.sdpa(query, query, query, scale=0.5))


def test_what_is_no_such_module_is_refused():
    with pytest.raises(ValueError, match="modules: expected ones whose flex_attention is PyTorch's, got 'math'"):
        torch_bwattn.patch_flex_attention(__import__("math"))


def test_what_somebody_else_put_there_stays():
    other = types.SimpleNamespace(flex_attention=ORIGINAL)
    patch = torch_bwattn.patch_flex_attention(other).install()
    other.flex_attention = print
    patch.remove()
    patch.remove()
    assert other.flex_attention is print
    assert torch_flex.flex_attention is ORIGINAL
