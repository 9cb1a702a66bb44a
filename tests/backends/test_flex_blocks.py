"""Lists of blocks by columns, and what is remembered of lists."""

from __future__ import annotations

import torch
from torch.nn.attention.flex_attention import create_block_mask

from torch_bwattn.backends.flex_blocks import remembered, transposed
from torch_bwattn.backends.flex_inputs import BlockLists, visited


def lists(mask=lambda b, h, q, k: q >= k):
    return BlockLists.of(create_block_mask(mask, 2, 3, 100, 70, device="cpu", BLOCK_SIZE=16))


def test_columns_are_rows_the_other_way():
    made = lists(lambda b, h, q, k: (q + k * h) % 50 > 10 * b)
    columns = transposed(made, 100, 70)
    for one, other in zip(visited(made, 70), visited(columns, 100), strict=True):
        assert torch.equal(one[..., :5], other[..., :5, :7].mT)
    for count, index in ((columns.part_count, columns.part_index), (columns.full_count, columns.full_index)):
        for row, listed in zip(count.flatten().tolist(), index.flatten(0, -2), strict=True):
            assert listed[:row].tolist() == sorted(listed[:row].tolist())


def test_what_is_remembered_is_of_the_very_lists_as_they_are():
    made, found = lists(), []

    def find():
        found.append(len(found))
        return found[-1]

    assert [remembered(made, "a", find), remembered(made, "a", find), remembered(made, "b", find)] == [0, 0, 1]
    assert remembered(lists(), "a", find) == 2
    made.part_count.add_(0)
    assert remembered(made, "a", find) == 3
    other = BlockLists(made.part_count.clone(), made.part_index, made.full_count, made.full_index, made.sizes)
    assert remembered(other, "a", find) == 4
    with torch.inference_mode():
        fixed = lists()
        assert [remembered(fixed, "a", find), remembered(fixed, "a", find)] == [5, 6]
