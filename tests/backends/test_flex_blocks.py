"""Lists of blocks by columns."""

from __future__ import annotations

import torch
from torch.nn.attention.flex_attention import create_block_mask

from torch_bwattn.backends.flex_blocks import transposed
from torch_bwattn.backends.flex_inputs import BlockLists, visited


def lists(mask=lambda b, h, q, k: q >= k):
    return BlockLists.of(create_block_mask(mask, 2, 3, 100, 70, device="cpu", BLOCK_SIZE=16))


def test_columns_are_rows_the_other_way():
    made = lists(lambda b, h, q, k: (q + k * h) % 50 > 10 * b)
    columns = transposed(made, 100, 70)
    for one, other in zip(visited(made, 70), visited(columns, 100), strict=True):
        assert torch.equal(one[..., :5], other[..., :5, :7].mT)
    for count, index in ((columns.part_count, columns.part_index), (columns.full_count, columns.full_index)):
        assert index.is_contiguous()
        for row, listed in zip(count.flatten().tolist(), index.flatten(0, -2), strict=True):
            assert listed[:row].tolist() == sorted(listed[:row].tolist())
