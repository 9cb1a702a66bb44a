"""Kernels with mods: what is checked of them before their first use, and what follows from it."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, create_mask

import torch_bwattn
from tests.flex.dense import check, operands
from torch_bwattn import UnsupportedProblem
from torch_bwattn.backends import flex_blockwise
from torch_bwattn.backends.flex_blocks import cut
from torch_bwattn.backends.flex_inputs import BlockLists, visited
from torch_bwattn.backends.helion import flex as helion_flex
from torch_bwattn.ops import flex as flex_op
from torch_bwattn.selection import attempts, flex_check, trust
from torch_bwattn.selection.flex_check import FlexCall

BF16 = torch.bfloat16


def blockwise(x, *args, **options):
    """Right kernels: PyTorch's operations, given what kernels are given."""
    if not args:
        return flex_blockwise.forward(x)
    grad_out, grad_lse, _, lse, wanted = args
    return flex_blockwise.backward(x, grad_out, grad_lse, lse, wanted)


def scaled(x, *args, **options):
    return blockwise(dataclasses.replace(x, scale=x.scale * 1.1), *args)


def unwritten(x, *args, **options):
    results = blockwise(x, *args)
    results[0][-1, -1, -1, -1] = torch.nan
    return results


def without_last_key(x, *args, **options):
    """As if the keys' last tile was not read."""
    first = dataclasses.replace(x, k=x.k[:, :, :-1], v=x.v[:, :, :-1])
    results = blockwise(first, *args)
    if not args:
        return results
    return results[0], *(torch.nn.functional.pad(one, (0, 0, 0, 1)) for one in results[1:3]), results[3]


def without_captured(x, *args, **options):
    results = blockwise(x, *args)
    return *results[:3], [None if one is None else torch.zeros_like(one) for one in results[3]]


def call_of(direction, monkeypatch, *, dtype=torch.float32, lists=False, learned=False, **sizes):
    """The call that flex_attention makes, with a mod that has a table and a number."""
    found = []
    real = flex_op._by_kernels

    def seen(x, asked, runs, *args):
        found.append(asked.call(x))
        return real(x, asked, runs, *args)

    table = torch.randn(1000, generator=torch.Generator().manual_seed(3)).mul_(0.1).requires_grad_(learned)
    last = 13
    made = {"heads": 4, "q_len": 340, "kv_len": 600, "kv_heads": 2, "width": 16, "dtype": dtype, **sizes}
    q_k_v = operands(**made)
    mask = None
    if lists:
        sizes_of = made["q_len"], made["kv_len"]
        mask = create_block_mask(lambda b, h, q, k: (q + 300 >= k) & (k % 5 != h), None, 4, *sizes_of, device="cpu")
    with monkeypatch.context() as patch:
        patch.setattr(flex_op, "_by_kernels", seen)
        out = torch_bwattn.flex_attention(
            *q_k_v, lambda s, b, h, q, k: s + table[k] + last * 0.1, mask, enable_gqa=True
        )
        out.float().sum().backward()
    return found[direction == "backward"]


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("lists", [False, True])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_what_is_found(direction, lists, dtype, monkeypatch):
    learned = direction == "backward"
    call = call_of(direction, monkeypatch, lists=lists, dtype=dtype, learned=learned)
    assert flex_check.failure(flex_check.draw(call), blockwise) == ""
    for wrong in (scaled, unwritten, without_last_key, *([without_captured] if learned else [])):
        assert "FAILED" in flex_check.failure(flex_check.draw(call), wrong), wrong


@pytest.mark.parametrize("lengths", [(1, 1), (1, 900), (900, 1), (384, 640), (100, 130)])
def test_any_lengths(lengths, monkeypatch):
    call = call_of("backward", monkeypatch, q_len=lengths[0], kv_len=lengths[1], kv_heads=4, learned=True)
    assert flex_check.failure(flex_check.draw(call), blockwise) == ""
    assert "FAILED" in flex_check.failure(flex_check.draw(call), unwritten)


def test_what_is_seen_of_few_scores_alone(monkeypatch):
    """One key a row: what is exactly 0 for one algorithm is not for another."""
    q_k_v = operands(2, 300, width=64, dtype=BF16)
    found = []
    monkeypatch.setattr(flex_op, "_by_kernels", lambda x, asked, runs, *args: found.append(asked.call(x)))
    mask = create_block_mask(lambda b, h, q, k: q == k, None, None, 300, 300, device="cpu")
    torch_bwattn.flex_attention(*q_k_v, None, mask).float().sum().backward()

    def fused(x, grad_out, grad_lse, out, lse, wanted):
        return flex_blockwise.backward(x, grad_out, grad_lse, lse, wanted, held_as=out)

    assert flex_check.failure(flex_check.draw(found[1]), fused) == ""


def test_features(monkeypatch):
    """Larger calls share a check; what has other code does not."""
    plain = call_of("forward", monkeypatch)
    larger = call_of("forward", monkeypatch, q_len=343, kv_len=650)
    assert flex_check.features_of(plain) == flex_check.features_of(larger)
    others = [
        call_of("backward", monkeypatch),
        call_of("backward", monkeypatch, learned=True),
        call_of("forward", monkeypatch, lists=True),
        call_of("forward", monkeypatch, dtype=BF16),
        call_of("forward", monkeypatch, kv_len=640),
        call_of("forward", monkeypatch, width=24),
        call_of("forward", monkeypatch, kv_heads=4),
        dataclasses.replace(plain, with_max_scores=True),
        dataclasses.replace(plain, x=dataclasses.replace(plain.x, scale=-1.0)),
        dataclasses.replace(plain, x=dataclasses.replace(plain.x, score_mod=None)),
    ]
    assert len({flex_check.features_of(call) for call in (plain, *others)}) == 1 + len(others)


@pytest.mark.parametrize("block", [32, (48, 100), 128, 512])
@pytest.mark.parametrize("full", [True, False])
def test_the_lists_of_a_corner(block, full):
    def mask_mod(b, h, q, k):
        return (q - k).abs() < 70 + 40 * h

    mask = create_block_mask(mask_mod, None, 3, 900, 1100, device="cpu", BLOCK_SIZE=block)
    lists = BlockLists.of(mask)
    if not full:
        lists = dataclasses.replace(lists, full_count=None, full_index=None)
    corner = cut(lists, 1100, (2, 2), (330, 590))
    whole = visited(lists, 1100)
    rows, columns = (-(-length // size) for length, size in zip((330, 590), lists.sizes, strict=True))
    for found, wanted in zip(visited(corner, 590), whole, strict=True):
        assert torch.equal(found, wanted[:2, :2, :rows, :columns])
    assert (corner.full_count is None) == (not full)
    assert create_mask(mask_mod, 1, 2, 330, 590, device="cpu").any()


@pytest.fixture
def kernels(monkeypatch):
    """Puts functions in the place of Helion's kernels, for the CPU too."""

    def install(run, direction=None):
        flex_op._refused.clear()
        monkeypatch.setattr(helion_flex, "why_not", lambda x: "")
        for name in ("forward", "backward"):
            monkeypatch.setattr(helion_flex, name, run if direction in (None, name) else blockwise)

    yield install
    flex_op._refused.clear()


def attend():
    torch_bwattn.reset_call_counts()
    q_k_v = operands(2, 200, width=16)
    table = torch.randn(200, generator=torch.Generator().manual_seed(5)).requires_grad_()
    check(q_k_v, lambda s, b, h, q, k: s * 1.5 + table[k], None, [table])
    return torch_bwattn.call_counts()


def test_right_kernels_are_checked_once(kernels):
    runs = []

    def counted(x, *args, **options):
        runs.append(x.q.shape)
        return blockwise(x, *args)

    kernels(counted)
    for _ in range(2):
        assert attend() == {"helion": 1}
    assert len(runs) == 2 + 4  # a check and two calls of each direction
    trust._known.clear()  # as in the next process
    assert attend() == {"helion": 1}
    assert len(runs) == 2 + 6
    assert set(trust._known.values()) <= {""}


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("wrong", [scaled, unwritten])
def test_wrong_kernels_never_run(kernels, wrong, direction, capsys):
    kernels(wrong, direction)
    expected = {"reference": 1} if direction == "forward" else {"helion": 1}
    for _ in range(2):
        assert attend() == expected
        trust._known.clear()
    q_k_v = operands(2, 200, width=16)

    def attend_pinned():
        with torch_bwattn.backend("helion"):
            torch_bwattn.flex_attention(*q_k_v, lambda s, b, h, q, k: s * 2.5).sum().backward()

    with pytest.raises(UnsupportedProblem, match=r"helion was pinned: .*failed its check on a corner of the call: "):
        attend_pinned()
    capsys.readouterr()
    torch_bwattn.explain_flex_attention(*q_k_v, lambda s, b, h, q, k: s * 2.5)
    assert f"{direction}: reference" in capsys.readouterr().out


def test_verdicts_are_not_asked_for_where_the_tests_passed(kernels, monkeypatch):
    monkeypatch.setattr(trust, "passed_tests", lambda target: True)
    monkeypatch.setattr(flex_check, "failure", lambda *_: pytest.fail("checked"))
    kernels(blockwise)
    assert attend() == {"helion": 1}
    assert not trust._known


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("error", [RuntimeError("out of shared memory"), ValueError("no")], ids=str)
def test_what_fails_is_passed_over_and_told_once(kernels, error, direction, monkeypatch):
    monkeypatch.setattr(trust, "passed_tests", lambda target: True)
    runs, told = [], []
    monkeypatch.setattr(flex_op.log, "warning", lambda text, *values: told.append(text % values))

    def fails(x, *args, **options):
        runs.append(x)
        raise error

    kernels(fails, direction)
    for _ in range(2):
        attend()
    assert len(runs) == 1
    assert len(told) == 1
    assert str(error) in told[0]
    flex_op._refused.clear()
    with torch_bwattn.backend("helion"), pytest.raises(type(error), match=str(error)):
        attend()


def test_what_lacks_memory_is_tried_again(kernels, monkeypatch):
    monkeypatch.setattr(trust, "passed_tests", lambda target: True)
    runs = []

    def lacks_memory(x, *args, **options):
        runs.append(x)
        raise torch.OutOfMemoryError("too little memory")

    kernels(lacks_memory)
    for _ in range(2):
        assert attend() == {"reference": 1}
    assert len(runs) == 4


def test_the_loss_of_the_device_is_the_callers(kernels, monkeypatch):
    monkeypatch.setattr(trust, "passed_tests", lambda target: True)

    def lost(x, *args, **options):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    kernels(lost)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        attend()


def test_nothing_is_checked_while_a_graph_is_captured(kernels, monkeypatch):
    kernels(blockwise)
    monkeypatch.setattr(attempts, "capturing", lambda: True)
    assert attend() == {"reference": 1}
    assert not trust._known
    monkeypatch.setattr(attempts, "capturing", lambda: False)
    assert attend() == {"helion": 1}


def test_a_refusal_in_a_check_is_no_failure_of_it(kernels, monkeypatch):
    said = []
    monkeypatch.setattr(flex_op.log, "debug", lambda text, *values: said.append(text % values))

    def refuses(x, *args, **options):
        raise UnsupportedProblem("no form of this")

    kernels(refuses)
    assert attend() == {"reference": 1}
    assert any(one.endswith("does not run on helion: no form of this") for one in said)


def test_the_call_is_what_the_check_is_given():
    q_k_v = [one.detach() for one in operands(2, 50, width=16)]
    x = flex_op.inputs(*q_k_v, 0.25, (None, [], [], None, [], [], [], []))
    asked = flex_op._Asked("backward", None, wanted=(True,), lse_grad=True)
    assert asked.call(x) == FlexCall("backward", x, wanted=(True,), lse_grad=True)
