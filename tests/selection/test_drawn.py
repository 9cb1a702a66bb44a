"""A self-check's problem: of the same features, taken by whoever took the first, and with something to see."""

from __future__ import annotations

import dataclasses

import torch
from hypothesis import given
from hypothesis import strategies as st

from torch_bwattn.problem import Problem
from torch_bwattn.selection import drawn
from torch_bwattn.selection.choose import get_backend
from torch_bwattn.selection.key import features_of

LENGTHS = st.sampled_from((1, 5, 63, 64, 128, 330, 1000, 4096, 32768))


@st.composite
def problems(draw):
    q_len, group = draw(LENGTHS), draw(st.sampled_from((1, 4)))
    kv_len = draw(st.just(q_len) | LENGTHS)
    offset = kv_len - q_len
    ends = {}
    which = draw(st.sampled_from(("none", "top", "bottom", "right", "window", "left")))
    anchor = draw(st.sampled_from((0, offset)))
    if which in ("top", "bottom"):
        ends = {"diagonal": 0 if which == "top" else offset}
    elif which == "right":
        ends = {"diagonal": max(-q_len, min(kv_len, anchor + draw(st.integers(-200, 200))))}
    elif which == "left":
        ends = {"low_diagonal": max(-q_len, anchor - draw(st.integers(0, 3000)))}
    elif which == "window":
        high = max(-q_len, min(kv_len, anchor + draw(st.integers(0, 200))))
        ends = {"diagonal": high, "low_diagonal": max(-q_len, high - draw(st.integers(0, 3000)))}
    width = draw(st.sampled_from((32, 64, 128, 192, 256)))
    mask = draw(st.sampled_from((None, torch.bool, torch.bfloat16)))
    sizes = tuple(draw(st.sampled_from((1, most))) for most in (3, 8, q_len, kv_len)) if mask else None
    target = draw(st.sampled_from(("sm_90a", "sm_100a")))
    return Problem(
        target, torch.bfloat16, 3, 8, 8 // group, q_len, kv_len, width, width, 0.1, mask_dtype=mask, mask_sizes=sizes,
        backward=draw(st.booleans()), softcap=draw(st.none() | st.just(9.0)), **ends,
    )  # fmt: skip


@given(problems())
def test_features_and_offers_survive(problem):
    small = drawn.small(problem)
    assert features_of(small) == features_of(problem)
    for name in ("cute", "helion", "aten"):
        offers = {offer.config for offer in get_backend(name).offers(problem) if offer}
        kept = {offer.config for offer in get_backend(name).offers(small) if offer}
        if not (small.sees_one_key or problem.sees_one_key):
            assert offers <= kept, name


@given(problems())
def test_what_showed_something_still_does(problem):
    small = drawn.small(problem)
    before = drawn.visible(dataclasses.replace(problem, batch=1), "meta")
    after = drawn.visible(small, "cpu")
    assert (before is None) == (after is None)
    if after is not None and _shows(problem):
        assert after.any()
    assert small.q_len <= max(336, problem.q_len)
    assert small.kv_len <= 592


def _shows(problem: Problem) -> bool:
    """Whether a query sees a key."""
    if problem.diagonal is not None and problem.diagonal + problem.q_len <= 0:
        return False
    return problem.low_diagonal is None or problem.low_diagonal < problem.kv_len
