"""What the host decides about the Hopper forward. That its configs compile clean is the cross-compile lane's to say."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from torch_bwattn.backends.cute import configs
from torch_bwattn.backends.cute.backend import CuteBackend
from torch_bwattn.problem import Problem

LONG = (4096, 4096)


def problem(
    widths: tuple[int, int] = (128, 128), lengths: tuple[int, int] = LONG, heads: int = 8, **others: object
) -> Problem:
    sizes = {"batch": 2, "heads": heads, "kv_heads": 2, "q_len": lengths[0], "kv_len": lengths[1]}
    others = {"dtype": torch.bfloat16, "head_dim": widths[0], "value_dim": widths[1], "scale": 0.1, **others}
    return Problem("sm_90a", **sizes, **others)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"dtype": torch.float32}, "float32"),
        ({"head_dim": 100}, "multiples of 8"),
        ({"value_dim": 264}, "256"),
        ({"mask_dtype": torch.bool}, "mask"),
        ({"dropout_p": 0.1}, "dropout"),
        ({"scale": 0.0}, "scale"),
        ({"bulk_copies": False}, "TMA"),
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
    for rows, packed, tile_m in ((7, 4, 64), (40, 4, 128), (64, 1, 64), (65, 1, 128)):
        few = problem(lengths=(rows, 4096), diagonal=0)
        assert configs.packed_heads(few) == packed
        assert configs.forward(few).tile_m == tile_m


def test_clusters_only_where_both_have_queries():
    for rows, cluster in ((256, 1), (257, 2)):
        assert configs.forward(problem(lengths=(rows, 512))).cluster == cluster


def counts(described):
    return configs.counts_tiles(described, configs.forward(described))


def test_tiles_are_counted_where_they_differ_and_programs_have_several():
    assert not counts(problem())
    assert counts(problem(diagonal=0))
    assert counts(problem(low_diagonal=-5))
    assert not counts(problem(lengths=(128, 4096), diagonal=0))
