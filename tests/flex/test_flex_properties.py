"""Mods composed at random, against the dense statement."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask

from torch_bwattn.flex.attention import flex_attention

from .dense import check, operands

_MOST = 48
_SETTINGS = settings(max_examples=30, deadline=None, derandomize=True, database=None)


def _tables():
    generator = torch.Generator().manual_seed(11)
    flags, labels = torch.rand(_MOST, generator=generator) < 0.6, torch.randint(5, (_MOST,), generator=generator)
    return flags, labels, torch.randint(3, (2, _MOST), generator=generator)


_FLAGS, _LABELS, _OF_HEADS = _tables()

_COMPARED = st.sampled_from(["ge", "gt", "le", "lt", "eq", "ne"])
_NUMBER = st.integers(-6, 20)


def _compared(name, a, b):
    return getattr(torch, name)(a, torch.as_tensor(b)) if isinstance(b, torch.Tensor) else getattr(torch, name)(a, b)


@st.composite
def _atoms(draw):
    kind = draw(st.integers(0, 6))
    name, number, factor = draw(_COMPARED), draw(_NUMBER), draw(st.integers(1, 3))
    if kind == 0:
        return lambda b, h, q, k: _compared(name, factor * q - factor * k, number)
    if kind == 1:
        return lambda b, h, q, k: _compared(name, q + number, k)
    if kind == 2:
        return lambda b, h, q, k: _compared(name, (q - factor * k) % (abs(number) + 2), factor)
    if kind == 3:
        return lambda b, h, q, k: _compared(name, q // (abs(number) + 1), k // (factor + 2))
    if kind == 4:
        return lambda b, h, q, k: _FLAGS[q] | _FLAGS[k]
    if kind == 5:
        return lambda b, h, q, k: _LABELS[q] == _LABELS[k]
    return lambda b, h, q, k: _compared(name, _OF_HEADS[h, k], b + factor - 1)


def _and(x, y):
    return lambda b, h, q, k: x(b, h, q, k) & y(b, h, q, k)


def _or(x, y):
    return lambda b, h, q, k: x(b, h, q, k) | y(b, h, q, k)


def _not(x):
    return lambda b, h, q, k: ~x(b, h, q, k)


def _choice(x, y):
    return lambda b, h, q, k: torch.where(x(b, h, q, k), y(b, h, q, k), q + k > 9)


def _masks():
    return st.recursive(
        _atoms(),
        lambda of: st.one_of(
            st.builds(_and, of, of), st.builds(_or, of, of), st.builds(_not, of), st.builds(_choice, of, of)
        ),
        max_leaves=4,
    )


class _Captured:
    """Tensors that drawn mods read, made anew for each example."""

    def __init__(self, train):
        generator = torch.Generator().manual_seed(5)
        shapes = ((_MOST,), (2, _MOST), ())
        self.all = [torch.randn(shape, generator=generator).requires_grad_(train) for shape in shapes]


@st.composite
def _score_atoms(draw):
    kind, number = draw(st.integers(0, 7)), draw(st.integers(-3, 3))
    if kind <= 2:
        return lambda c, s, b, h, q, k: s
    if kind == 3:
        return lambda c, s, b, h, q, k: (q - k) * (number / 10)
    if kind == 4:
        return lambda c, s, b, h, q, k: c.all[0][(q - number * k) % _MOST]
    if kind == 5:
        return lambda c, s, b, h, q, k: c.all[1][h, k]
    if kind == 6:
        return lambda c, s, b, h, q, k: c.all[2].exp()
    return lambda c, s, b, h, q, k: c.all[0].tanh()[k] + number


def _score_mods():
    return st.recursive(
        _score_atoms(),
        lambda of: st.one_of(
            st.tuples(of, of).map(lambda two: lambda c, *at: two[0](c, *at) + two[1](c, *at)),
            st.tuples(of, of).map(lambda two: lambda c, *at: two[0](c, *at) * two[1](c, *at)),
            of.map(lambda x: lambda c, *at: torch.tanh(x(c, *at) / 2) * 2),
            of.map(lambda x: lambda c, *at: torch.sigmoid(x(c, *at))),
            of.map(lambda x: lambda c, *at: -x(c, *at).abs()),
            st.tuples(_atoms(), of, of).map(
                lambda some: lambda c, *at: torch.where(some[0](*at[1:]), some[1](c, *at), some[2](c, *at))
            ),
            st.tuples(_atoms(), of).map(
                lambda some: lambda c, *at: torch.where(some[0](*at[1:]), some[1](c, *at), -math.inf)
            ),
        ),
        max_leaves=5,
    )


_LENGTHS = st.tuples(st.integers(1, _MOST), st.integers(1, _MOST))
_BLOCK = st.sampled_from([8, 16, (16, 8), 128, 5])


def _lists(mask, lengths, block):
    return create_block_mask(mask, 2, 2, *lengths, device="cpu", BLOCK_SIZE=block)


@given(_masks(), _LENGTHS, _BLOCK)
@_SETTINGS
def test_masks(mask, lengths, block):
    check(operands(2, *lengths), None, _lists(mask, lengths, block))


@given(_score_mods(), _LENGTHS, st.booleans())
@_SETTINGS
def test_score_mods(mod, lengths, train):
    captured = _Captured(train)
    check(
        operands(2, *lengths),
        lambda s, b, h, q, k: mod(captured, s, b, h, q, k) * 1.0,
        None,
        captured.all if train else (),
        tolerance=1e-4,
    )


@given(_score_mods(), _masks(), _LENGTHS, _BLOCK)
@_SETTINGS
def test_both(mod, mask, lengths, block):
    captured = _Captured(train=True)
    lists = _lists(mask, lengths, block)

    def score_mod(s, b, h, q, k):
        return mod(captured, s, b, h, q, k) * 1.0

    check(operands(2, *lengths), score_mod, lists, captured.all, tolerance=1e-4)


@given(_masks(), _LENGTHS, _BLOCK)
@_SETTINGS
def test_mask_as_score_mod_is_the_same(mask, lengths, block):
    q_k_v = operands(2, *lengths)
    by_lists = flex_attention(*q_k_v, None, _lists(mask, lengths, block))
    by_score = flex_attention(*q_k_v, lambda s, b, h, q, k: torch.where(mask(b, h, q, k), s, -math.inf))
    torch.testing.assert_close(by_lists, by_score, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("block", [8, 128])
@given(_LENGTHS, st.lists(st.tuples(_COMPARED, st.integers(-20, 20), st.integers(1, 3)), min_size=1, max_size=3))
@_SETTINGS
def test_conjunctions_of_comparisons(block, lengths, some):
    def mask(b, h, q, k):
        shown = _compared(some[0][0], some[0][2] * (q - k), some[0][1])
        for name, number, factor in some[1:]:
            shown = shown & _compared(name, factor * q, factor * k + number)
        return shown

    check(operands(2, *lengths), None, _lists(mask, lengths, block))
