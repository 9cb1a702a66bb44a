"""What the host decides about the Hopper forward. That its configs compile clean is the cross-compile lane's to say."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from torch_bwattn.backends.cute import calls, configs
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
        ({"mask_dtype": torch.float32, "mask_sizes": (1, 1, 4096, 4096)}, "query's dtype"),
        ({"mask_dtype": torch.bool, "mask_sizes": (1, 1, 4096, 1)}, "columns"),
        ({"mask_dtype": torch.bool, "mask_sizes": (2, 8, 4096, 4001), "kv_len": 4001}, "copies the mask"),
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


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"mask_dtype": torch.bfloat16, "mask_grad": True}, "gradient"),
        ({"mask_dtype": torch.bfloat16, "sink_dtype": torch.float32}, "sink"),
        ({"mask_dtype": torch.bool, "head_dim": 256}, "192"),
    ],
)
def test_masks_that_the_backward_does_not_take(changes, word):
    masked = problem(mask_sizes=(1, 1, 4096, 4096), backward=True, **changes)
    verdict = CuteBackend().supports(masked)
    assert not verdict
    assert word in verdict.reason
    assert CuteBackend().supports(dataclasses.replace(masked, backward=False, mask_grad=False))


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16])
@pytest.mark.parametrize(
    "sizes", [(1, 1, 5, 32), (2, 1, 1, 32), (1, 8, 5, 32), (2, 8, 5, 32), (1, 1, 5, 13), (2, 1, 1, 13)]
)
@pytest.mark.parametrize("layout", ["dense", "expanded", "sliced"])
def test_a_mask_comes_to_tma_with_rows_apart(dtype, sizes, layout):
    masked = problem(lengths=(5, sizes[3]), mask_dtype=dtype, mask_sizes=sizes)
    mask = torch.randn(*sizes[:3], sizes[3] + 3)[..., 3:].to(dtype) > 0 if dtype == torch.bool else torch.randn(sizes)
    mask = mask.to(dtype)
    if layout == "expanded":
        mask = mask.expand(2, 8, 5, sizes[3])
    elif layout == "sliced":
        mask = torch.cat((mask, mask), 3)[..., : sizes[3]]
    found = calls.MaskForTma(masked, mask)(mask)
    assert found.shape == (2, 8, 5, sizes[3])
    assert found.dtype == (torch.uint8 if dtype == torch.bool else dtype)
    assert torch.equal(found.to(dtype), mask.expand(found.shape))
    assert found.stride(3) == 1
    assert all(step * found.element_size() % 16 == 0 for step in found.stride()[:3])
    assert found.data_ptr() % 16 == 0
    assert masked.mask_rows_apart == (sizes[3] == 32)
    dense = layout == "dense" and sizes[3] == 32
    assert (found.untyped_storage().data_ptr() == mask.untyped_storage().data_ptr()) or not dense


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16])
@pytest.mark.parametrize("width", [8, 64, 80, 96, 128, 160, 192, 256])
def test_configs_beside_a_mask_have_room(width, dtype):
    for rows in (4096, 1):
        masked = problem(widths=(width, width), mask_dtype=dtype, mask_sizes=(1, 1, rows, 4096))
        for config in configs.forward_choices(masked):
            assert config.cluster == 1
            if rows > 1:
                assert configs._masked_bytes(masked, config) <= configs._SHARED_BYTES


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
