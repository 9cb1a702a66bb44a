"""Mods composed at random, of comparisons, arithmetic and captured tables."""

from __future__ import annotations

import math

import torch
from hypothesis import strategies as st

MOST = 48


def _tables():
    generator = torch.Generator().manual_seed(11)
    flags, labels = torch.rand(MOST, generator=generator) < 0.6, torch.randint(5, (MOST,), generator=generator)
    return flags, labels, torch.randint(3, (2, MOST), generator=generator)


_FLAGS, _LABELS, _OF_HEADS = _tables()

COMPARED = st.sampled_from(["ge", "gt", "le", "lt", "eq", "ne"])
_NUMBER = st.integers(-6, 20)


def compared(name, a, b):
    return getattr(torch, name)(a, torch.as_tensor(b)) if isinstance(b, torch.Tensor) else getattr(torch, name)(a, b)


@st.composite
def _atoms(draw):
    kind = draw(st.integers(0, 6))
    name, number, factor = draw(COMPARED), draw(_NUMBER), draw(st.integers(1, 3))
    if kind == 0:
        return lambda b, h, q, k: compared(name, factor * q - factor * k, number)
    if kind == 1:
        return lambda b, h, q, k: compared(name, q + number, k)
    if kind == 2:
        return lambda b, h, q, k: compared(name, (q - factor * k) % (abs(number) + 2), factor)
    if kind == 3:
        return lambda b, h, q, k: compared(name, q // (abs(number) + 1), k // (factor + 2))
    if kind == 4:
        return lambda b, h, q, k: _FLAGS[q] | _FLAGS[k]
    if kind == 5:
        return lambda b, h, q, k: _LABELS[q] == _LABELS[k]
    return lambda b, h, q, k: compared(name, _OF_HEADS[h, k], b + factor - 1)


def _and(x, y):
    return lambda b, h, q, k: x(b, h, q, k) & y(b, h, q, k)


def _or(x, y):
    return lambda b, h, q, k: x(b, h, q, k) | y(b, h, q, k)


def _not(x):
    return lambda b, h, q, k: ~x(b, h, q, k)


def _choice(x, y):
    return lambda b, h, q, k: torch.where(x(b, h, q, k), y(b, h, q, k), q + k > 9)


def masks():
    return st.recursive(
        _atoms(),
        lambda of: st.one_of(
            st.builds(_and, of, of), st.builds(_or, of, of), st.builds(_not, of), st.builds(_choice, of, of)
        ),
        max_leaves=4,
    )


class Captured:
    """Tensors that drawn mods read, made anew for each example."""

    def __init__(self, train):
        generator = torch.Generator().manual_seed(5)
        shapes = ((MOST,), (2, MOST), ())
        self.all = [torch.randn(shape, generator=generator).requires_grad_(train) for shape in shapes]


@st.composite
def _score_atoms(draw):
    kind, number = draw(st.integers(0, 7)), draw(st.integers(-3, 3))
    if kind <= 2:
        return lambda c, s, b, h, q, k: s
    if kind == 3:
        return lambda c, s, b, h, q, k: (q - k) * (number / 10)
    if kind == 4:
        return lambda c, s, b, h, q, k: c.all[0][(q - number * k) % MOST]
    if kind == 5:
        return lambda c, s, b, h, q, k: c.all[1][h, k]
    if kind == 6:
        return lambda c, s, b, h, q, k: c.all[2].exp()
    return lambda c, s, b, h, q, k: c.all[0].tanh()[k] + number


def _sum(x, y):
    return lambda c, *at: x(c, *at) + y(c, *at)


def _product(x, y):
    return lambda c, *at: x(c, *at) * y(c, *at)


def _capped(x):
    return lambda c, *at: torch.tanh(x(c, *at) / 2) * 2


def _one_or_other(mask, x, y):
    return lambda c, *at: torch.where(mask(*at[1:]), x(c, *at), y(c, *at))


def _hidden(mask, x):
    return lambda c, *at: torch.where(mask(*at[1:]), x(c, *at), -math.inf)


def score_mods():
    """Finite, or -inf in places; never inf, of which the softmax is NaN."""
    finite = st.recursive(
        _score_atoms(),
        lambda of: st.one_of(
            st.builds(_sum, of, of),
            st.builds(_product, of, of),
            st.builds(_capped, of),
            of.map(lambda x: lambda c, *at: torch.sigmoid(x(c, *at))),
            of.map(lambda x: lambda c, *at: -x(c, *at).abs()),
            st.builds(_one_or_other, _atoms(), of, of),
        ),
        max_leaves=5,
    )
    hidden = st.builds(_hidden, _atoms(), finite)
    return st.one_of(finite, finite, hidden, st.builds(_sum, hidden, finite), st.builds(_capped, hidden))
