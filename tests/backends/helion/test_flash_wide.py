"""The forward of widths 192 and 128 that is lowered to tcgen05: what it takes, and its values through Triton."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.backends.helion.test_flash import called, check
from torch_bwattn.backends.helion import flash, flash_wide
from torch_bwattn.backends.helion.backend import HelionBackend
from torch_bwattn.problem import Problem
from torch_bwattn.selection import drawn

pytestmark = pytest.mark.usefixtures("fast_row_maximum")

SCALE = 192**-0.5
CAUSAL = Problem("sm_103a", torch.bfloat16, 2, 8, 2, 300, 300, 192, 128, SCALE, diagonal=0)
DENSE = dataclasses.replace(CAUSAL, q_len=512, kv_len=512, value_dim=64, diagonal=None)


@pytest.fixture(autouse=True)
def cute_is_there(monkeypatch):
    monkeypatch.setattr(flash.cute_loader, "why_missing", lambda: None)


@pytest.mark.parametrize(
    ("problem", "changes", "word"),
    [
        (CAUSAL, {}, ""), (DENSE, {}, ""), (CAUSAL, {"sink_dtype": torch.float32}, ""),
        (CAUSAL, {"head_dim": 160}, "D=160"), (CAUSAL, {"value_dim": 192}, "Dv=192"),
        (DENSE, {"kv_len": 256}, "Skv=256"),
        (CAUSAL, {"scale": 0.1}, "0.1"), (DENSE, {"q_len": 500, "kv_len": 500}, "512 keys"),
        (CAUSAL, {"diagonal": 1}, "i + 1"), (CAUSAL, {"low_diagonal": -9}, "window"), (CAUSAL, {"softcap": 9.0}, "cap"),
        (CAUSAL, {"dtype": torch.float32}, "float32"),
    ],
    ids=str,
)  # fmt: skip
def test_refusals_name_their_reason(problem, changes, word):
    problem = dataclasses.replace(problem, **changes)
    offer, *others = HelionBackend().offers(problem)
    assert offer.config == flash_wide.NAME
    assert bool(offer) == (not word)
    assert word in offer.reason
    assert HelionBackend().supports(problem) == (offer or others[0])
    assert isinstance(HelionBackend().forward(problem), flash_wide.Forward) == (not word)


@pytest.mark.parametrize("length", [65, 300, 512, 4096])
def test_what_it_takes_is_taken_at_the_sizes_of_a_check(length):
    for plain in (CAUSAL, DENSE):
        problem = dataclasses.replace(plain, q_len=length, kv_len=length)
        if not flash_wide.why_not(problem):
            assert not flash_wide.why_not(drawn.small(problem))


@pytest.mark.interpreted
def test_values_through_triton():
    common = {"widths": (192, 100), "scale": SCALE}
    for call in ({"lengths": (300, 300), "is_causal": True, "sink": True}, {"lengths": (256, 256), "kv_heads": 2}):
        problem, *rest = called(**call, **common)
        check(flash_wide.Forward(problem), problem, *rest)


@pytest.mark.compile_only
def test_helion_recognises_it():
    from torch_bwattn.backends.helion import cute_lowering, flash_cute_wide, pretend

    q, k, v, o = (
        torch.empty(heads, 256, width, dtype=torch.bfloat16)
        for heads, width in ((4, 192), (2, 192), (2, 128), (4, 128))
    )
    with pretend.pretend_cuda((10, 3)):
        assert callable(
            cute_lowering.lowered(flash_cute_wide.FLASH_WIDE, (q, k, v, o, torch.empty(4, 256), 2, True), {})
        )
