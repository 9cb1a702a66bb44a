"""Mods composed at random, against the dense statement."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask

from torch_bwattn.backends import flex_blockwise
from torch_bwattn.flex.attention import flex_attention

from .dense import check, operands
from .drawn import COMPARED, MOST, Captured, compared, masks, score_mods

_SETTINGS = settings(max_examples=200, deadline=None, derandomize=True, database=None)
_LENGTHS = st.tuples(st.integers(1, MOST), st.integers(1, MOST))
_BLOCK = st.sampled_from([8, 16, (16, 8), 128, 5, 27])


@pytest.fixture(autouse=True)
def _few_rows_at_a_time(monkeypatch):
    """As in long calls: fewer rows than some blocks have, and no divisor of others."""
    monkeypatch.setattr(flex_blockwise, "SMALLEST_BUDGET", 1)


def _lists(mask, lengths, block):
    return create_block_mask(mask, 2, 2, *lengths, device="cpu", BLOCK_SIZE=block)


@given(masks(), _LENGTHS, _BLOCK)
@_SETTINGS
def testmasks(mask, lengths, block):
    check(operands(2, *lengths), None, _lists(mask, lengths, block))


@given(score_mods(), _LENGTHS, st.booleans())
@_SETTINGS
def testscore_mods(mod, lengths, train):
    captured = Captured(train)
    check(
        operands(2, *lengths),
        lambda s, b, h, q, k: mod(captured, s, b, h, q, k) * 1.0,
        None,
        captured.all if train else (),
        tolerance=1e-4,
    )


@given(score_mods(), masks(), _LENGTHS, _BLOCK)
@_SETTINGS
def test_both(mod, mask, lengths, block):
    captured = Captured(train=True)
    lists = _lists(mask, lengths, block)

    def score_mod(s, b, h, q, k):
        return mod(captured, s, b, h, q, k) * 1.0

    check(operands(2, *lengths), score_mod, lists, captured.all, tolerance=1e-4)


@given(masks(), _LENGTHS, _BLOCK)
@_SETTINGS
def test_mask_as_score_mod_is_the_same(mask, lengths, block):
    q_k_v = operands(2, *lengths)
    by_lists = flex_attention(*q_k_v, None, _lists(mask, lengths, block))
    by_score = flex_attention(*q_k_v, lambda s, b, h, q, k: torch.where(mask(b, h, q, k), s, -math.inf))
    torch.testing.assert_close(by_lists, by_score, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("block", [8, 128])
@given(_LENGTHS, st.lists(st.tuples(COMPARED, st.integers(-20, 20), st.integers(1, 3)), min_size=1, max_size=3))
@_SETTINGS
def test_conjunctions_of_comparisons(block, lengths, some):
    def mask(b, h, q, k):
        shown = compared(some[0][0], some[0][2] * (q - k), some[0][1])
        for name, number, factor in some[1:]:
            shown = shown & compared(name, factor * q, factor * k + number)
        return shown

    check(operands(2, *lengths), None, _lists(mask, lengths, block))
