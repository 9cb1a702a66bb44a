"""The Hopper forward, compiled without a GPU: every config is free of spills, serialised products and excess memory."""

from __future__ import annotations

import dataclasses
import sys

import pytest
import torch

from torch_bwattn.backends.cute import configs, loader
from torch_bwattn.backends.cute.backend import CuteBackend, forward_build, forward_key
from torch_bwattn.problem import Problem

needs_cute = pytest.mark.skipif(loader.why_missing() is not None, reason=str(loader.why_missing()))
WIDTHS = [(64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256), (8, 8), (72, 72), (64, 128), (256, 64)]
KINDS = {
    "plain": {},
    "causal": {"diagonal": 0},
    "window": {"diagonal": 0, "low_diagonal": -1023},
    "sink": {"diagonal": 0, "low_diagonal": -127, "sink_dtype": torch.float32},
    "softcap": {"diagonal": 0, "low_diagonal": -127, "softcap": 30.0, "sink_dtype": torch.float32},
}


def problem(width: int = 128, value_width: int = 128, q_len: int = 4096, **others: object) -> Problem:
    sizes = {"batch": 2, "heads": 8, "kv_heads": 2, "q_len": q_len, "kv_len": 4096}
    others = {"dtype": torch.bfloat16, "head_dim": width, "value_dim": value_width, "scale": 0.1, **others}
    return Problem("sm_90a", **sizes, **others)


@needs_cute
@pytest.mark.parametrize("kind", KINDS)
def test_configs_compile_clean(kind, capsys):
    from torch_bwattn.backends.cute import report

    reports = []
    for width, value_width in WIDTHS:
        for q_len in (4096, 7):
            if q_len == 7 and kind not in ("causal", "softcap"):
                continue
            described = problem(width, value_width, q_len, **KINDS[kind])
            (found,) = report.compile_report(forward_key(described), forward_build(described))
            reports.append(found)
            # Six products in the code: the first tile's scores, two in each of the two loops, the last tile's output.
            assert found.counts["ARRIVE"] == 6, found
            assert not found.faults, found
    with capsys.disabled():
        sys.stdout.write(f"\n{kind}\n{report.table(reports)}\n")


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"dtype": torch.float32}, "float32"),
        ({"head_dim": 100}, "multiples of 8"),
        ({"value_dim": 264}, "256"),
        ({"mask_dtype": torch.bool}, "mask"),
        ({"dropout_p": 0.1}, "dropout"),
        ({"scale": 0.0}, "scale"),
        ({"aligned": False}, "TMA"),
        ({"unit_last_strides": False}, "TMA"),
        ({"backward": True}, "backward"),
        ({"kv_len": 0}, "size"),
    ],
)
def test_refusals_name_their_reason(changes, word):
    verdict = CuteBackend().supports(dataclasses.replace(problem(), **changes))
    assert not verdict
    assert word in verdict.reason


def test_refuses_other_targets():
    for target in ("cpu", "sm_80", "sm_100a"):
        assert "sm_90a" in CuteBackend().supports(dataclasses.replace(problem(), target=target)).reason


def test_groups_share_a_tile_where_queries_are_few():
    assert configs.packed_heads(problem(q_len=7)) == 4
    assert configs.packed_heads(problem(q_len=64)) == 1
    assert configs.forward(problem(q_len=7)).tile_m == 64
    assert configs.forward(problem(q_len=40)).tile_m == 128
