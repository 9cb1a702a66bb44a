"""The Hopper forward, compiled without a GPU: every config is free of spills, serialised products and excess memory."""

from __future__ import annotations

import dataclasses
import sys

import pytest
import torch

from torch_bwattn.backends.cute import configs, loader
from torch_bwattn.backends.cute.backend import CuteBackend
from torch_bwattn.backends.cute.calls import build_of, forward_key
from torch_bwattn.problem import Problem

needs_cute = pytest.mark.skipif(loader.why_missing() is not None, reason=str(loader.why_missing()))
KINDS = {
    "plain": {},
    "causal": {"diagonal": 0},
    "sink": {"diagonal": 0, "low_diagonal": -127, "sink_dtype": torch.float32},
    "softcap": {"diagonal": 0, "low_diagonal": -127, "softcap": 30.0, "sink_dtype": torch.float32},
}
# Every config, and each feature at several widths: (widths, lengths of queries and of keys).
LONG, SHORT, FEW = (4096, 4096), (512, 512), (7, 4096)
CASES = {
    "plain": [*(((width, width), LONG) for width in (64, 96, 128, 192, 256)), ((192, 128), LONG), ((128, 128), SHORT)],
    "causal": [
        *(((width, width), LONG) for width in (8, 64, 128, 256)),
        ((128, 128), SHORT),
        *((widths, FEW) for widths in ((64, 64), (192, 128))),
    ],
    "sink": [((width, width), LONG) for width in (64, 128, 192)],
    "softcap": [
        *((widths, LONG) for widths in ((72, 40), (128, 64), (192, 128))),
        ((256, 256), FEW),
    ],
}


def problem(
    widths: tuple[int, int] = (128, 128), lengths: tuple[int, int] = LONG, heads: int = 8, **others: object
) -> Problem:
    sizes = {"batch": 2, "heads": heads, "kv_heads": 2, "q_len": lengths[0], "kv_len": lengths[1]}
    others = {"dtype": torch.bfloat16, "head_dim": widths[0], "value_dim": widths[1], "scale": 0.1, **others}
    return Problem("sm_90a", **sizes, **others)


@needs_cute
@pytest.mark.parametrize("kind", KINDS)
def test_configs_compile_clean(kind, capsys):
    from torch_bwattn.backends.cute import report

    reports = []
    for widths, lengths in CASES[kind]:
        described = problem(widths, lengths, **KINDS[kind])
        key = forward_key(described, configs.forward(described))
        (found,) = report.compile_report(key, build_of(key))
        reports.append(found)
        # Six products in the code: the first tile's scores, two in each of the two loops, the last tile's output.
        assert found.counts["ARRIVE"] == 6, found
        assert not found.faults, found
    with capsys.disabled():
        sys.stdout.write(f"\n{kind}\n{report.table(reports)}\n")


def test_every_config_is_among_those():
    wanted = {name for name, value in vars(configs).items() if isinstance(value, configs.ForwardConfig)}
    used = {
        configs.forward(problem(widths, lengths, **KINDS[kind])) for kind in CASES for widths, lengths in CASES[kind]
    }
    missing = {name for name in wanted if getattr(configs, name) not in used}
    assert not missing


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
