"""Which mods are features that kernels have."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import and_masks, noop_mask, or_masks

from torch_bwattn.mods.program import POSITION, evaluate
from torch_bwattn.mods.recognize import Features, recognized
from torch_bwattn.mods.trace import traced
from torch_bwattn.ops.flex import options_of

INF = float("inf")


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def of_mask(mask):
    return recognized(None, traced(mask, "mask_mod").program)


def of_score(mod):
    return recognized(traced(mod, "score_mod").program, None)


@pytest.mark.parametrize(
    ("mask", "features"),
    [
        (noop_mask, Features()), (causal, Features(high=0)),
        (lambda b, h, i, j: j < i, Features(high=-1)), (lambda b, h, i, j: i - j <= 50, Features(low=-50)),
        (lambda b, h, i, j: (i >= j) & (i - j < 50), Features(0, -49)),
        (and_masks(causal, lambda b, h, i, j: j > i - 4), Features(0, -3)),
        (lambda b, h, i, j: 2 * i - 3 >= 2 * j, Features(high=-2)), (lambda b, h, i, j: 5 - j > -i, Features(high=4)),
        (lambda b, h, i, j: i >= 2 * j, None), (lambda b, h, i, j: i >= j + h, None),
        (or_masks(causal, lambda b, h, i, j: j < 5), None), (lambda b, h, i, j: i // 2 >= j // 2, None),
        (lambda b, h, i, j: j < 100, None), (lambda b, h, i, j: torch.rsub(j - i, 5) >= 0, Features(high=5)),
        (lambda b, h, i, j: torch.rsub(j - i, 5, alpha=2) >= 0, None),
        (lambda b, h, i, j: torch.sub(i * 1.0, j, alpha=1.5) >= 0, None),
    ],
)  # fmt: skip
def test_masks(mask, features):
    assert of_mask(mask) == features


@pytest.mark.parametrize(
    ("mod", "features"),
    [
        (lambda s, b, h, i, j: 20 * torch.tanh(s / 20), Features(softcap=20.0)),
        (lambda s, b, h, i, j: torch.tanh(s * 0.25) * 4.0, Features(softcap=4.0)),
        (lambda s, b, h, i, j: 5 * torch.tanh(torch.div(s, 5, rounding_mode="floor")), None),
        (lambda s, b, h, i, j: torch.tanh(s / 20) * 21, None), (lambda s, b, h, i, j: torch.tanh(20 / s) * 20, None),
        (lambda s, b, h, i, j: torch.where(i >= j, s, -INF), Features(high=0)),
        (lambda s, b, h, i, j: torch.where(i >= j, 9 * torch.tanh(s / 9), -INF), Features(0, None, 9.0)),
        (lambda s, b, h, i, j: torch.where(i >= j, s, 0.0), None), (lambda s, b, h, i, j: s + i, None),
        (lambda s, b, h, i, j: s, Features()),
    ],
)  # fmt: skip
def test_scores(mod, features):
    assert of_score(mod) == features


@given(
    high=st.none() | st.integers(-9, 20),
    low=st.none() | st.integers(-20, 9),
    lengths=st.tuples(*[st.integers(1, 9)] * 2),
)
def test_options_show_what_the_mask_shows(high, low, lengths):
    options = options_of(Features(high, low), *lengths)
    q_idx, kv_idx = torch.arange(lengths[0])[:, None], torch.arange(lengths[1])
    shown = torch.ones(lengths, dtype=torch.bool)
    if high is not None:
        shown &= kv_idx <= q_idx + high
    if low is not None:
        shown &= kv_idx >= q_idx + low
    if options is None:
        return
    left, right = options.get("window_size", (-1, 0 if options["is_causal"] else -1))
    offset = lengths[1] - lengths[0] if options["causal_alignment"] == "bottom_right" else 0
    said = torch.ones(lengths, dtype=torch.bool)
    if right >= 0:
        said &= kv_idx <= q_idx + offset + right
    if left >= 0:
        said &= kv_idx >= q_idx + offset - left
    assert torch.equal(said, shown)


@given(
    x=st.integers(-3, 3), y=st.integers(-3, 3), c=st.integers(-9, 9), compare=st.sampled_from(["ge", "gt", "le", "lt"])
)
def test_what_is_recognised_is_what_the_mask_computes(x, y, c, compare):
    def mask(b, h, q_idx, kv_idx):
        return getattr(torch, compare)(x * q_idx + c, y * kv_idx)

    program = traced(mask, "mask_mod").program
    features = recognized(None, program)
    if features is None:
        assert x == 0 or x != y
        return
    axes = [torch.arange(size, dtype=torch.int32) for size in (1, 1, 12, 12)]
    grid = {name: axis.view([-1 if own == place else 1 for place in range(4)])
            for own, (name, axis) in enumerate(zip(POSITION, axes, strict=True))}  # fmt: skip
    (shown,) = evaluate(program.steps, [program.result], grid, [])
    apart = torch.arange(12) - torch.arange(12)[:, None]
    said = torch.ones(12, 12, dtype=torch.bool)
    if features.high is not None:
        said &= apart <= features.high
    if features.low is not None:
        said &= apart >= features.low
    assert torch.equal(shown[0, 0].expand(12, 12), said)
