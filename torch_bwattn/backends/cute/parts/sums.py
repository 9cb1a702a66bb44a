"""Sums in global memory to which many programs add: the fp32 accumulator of dQ.

A tile of queries has the registers of two groups of warps, warp after warp, four floats of a thread side by side: so 32
threads add to 128 floats in a row. A group adds straight from its registers, 16 bytes a thread, or writes them to
shared memory, from where one instruction of each warp adds all the warp's, or one all the group's, while the warps go
on.

For repeatable results programs add to a tile in a fixed order, one after the other: ``turns`` says for each tile and
group how many have. Where later keys are limited, that is from the last keys to the first, in which order their
programs come to a tile by themselves, the last one first; else from the first to the last. A program's turn always
comes, since those before it have been claimed earlier, by programs that run. A warp beside the group, its adder, waits
for the turn. Without turns it would only cost: B4 H32 S8192 D128 588 TFLOP/s with adders against 614 (causal 555 and
585).
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
from cutlass import Int32, Int64, const_expr, cute
from cutlass.experimental import primitives

from .accumulators import WARP, WARP_GROUP

_AT_ONCE = 4 * WARP
_TAKEN = 8  # the first of the named barriers at which a group's memory is its own again
_WRITTEN = 10  # the first of those at which it is the adder's


class Sums(NamedTuple):
    """The sums, of each group of each tile of queries, and the turns where results are to be repeatable."""

    memory: cute.Pointer
    turns: cute.Pointer | None


@cute.jit
def add(acc: cute.Tensor, sums: Sums, slot: Int64, group: Int32, lane: Int32) -> None:
    """Adds a group's registers, when it is its turn. ``slot`` numbers tiles and groups."""
    values = cute.size(acc)
    if const_expr(sums.turns is not None):
        cute.arch.barrier(barrier_id=_TAKEN + group, number_of_threads=WARP_GROUP + WARP)
    within = lane // WARP * (values * WARP) + lane % WARP * 4
    address = (sums.memory + (slot * (values * WARP_GROUP) + within)).toint()
    for i in cutlass.range_constexpr(values // 4):
        cute.arch.inline_ptx(
            "red.relaxed.gpu.global.add.v4.f32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
            read_only_args=[address + 4 * _AT_ONCE * i, *(acc[4 * i + j] for j in range(4))],
        )
    if const_expr(sums.turns is not None):
        cute.arch.barrier_arrive(barrier_id=_WRITTEN + group, number_of_threads=WARP_GROUP + WARP)


@cute.jit
def let_add(sums: Sums, slot: Int64, earlier: Int32, group: Int32) -> None:
    """The adder of a group that adds its registers itself: tells it when its turn has come, and passes the turn."""
    if cute.arch.lane_idx() == 0:
        spin(sums, slot, earlier)
    cute.arch.sync_warp()
    let_go_on(group)
    cute.arch.barrier(barrier_id=_WRITTEN + group, number_of_threads=WARP_GROUP + WARP)
    if cute.arch.lane_idx() == 0:
        cute.arch.fence_acq_rel_gpu()  # covers what the group has added, which the barrier has put before it
        pass_turn(sums, slot)


@cute.jit
def await_memory(sums: Sums, group: Int32, by_warps: cutlass.Constexpr) -> None:
    """A group waits until its memory has been added, or each warp for its own part."""
    if const_expr(sums.turns is None):
        cute.arch.cp_async_bulk_wait_group(0, read=True)  # only who had it added has something to wait for
        if const_expr(by_warps):
            cute.arch.sync_warp()
        else:
            cute.arch.barrier(barrier_id=_TAKEN + group, number_of_threads=WARP_GROUP)
    else:
        cute.arch.barrier(barrier_id=_TAKEN + group, number_of_threads=WARP_GROUP + WARP)


@cute.jit
def write(acc: cute.Tensor, shared: cute.Pointer, lane: Int32) -> None:
    """A group writes its registers to its memory."""
    parts = cute.size(acc) // 4
    layout = cute.make_layout((4, WARP, WARP_GROUP // WARP, parts), stride=(1, 4, _AT_ONCE * parts, _AT_ONCE))
    target = cute.make_tensor(shared, layout)
    for i in cutlass.range_constexpr(parts):
        four = cute.make_tensor(acc.iterator + 4 * i, cute.make_layout(4))
        cute.autovec_copy(four, target[None, lane % WARP, lane // WARP, i])


@cute.jit
def hand_over(
    shared: cute.Pointer,
    elements: cutlass.Constexpr,
    sums: Sums,
    slot: Int64,
    group: Int32,
    lane: Int32,
    by_warps: cutlass.Constexpr,
) -> None:
    """A group has its memory added, in one piece or each warp its part, or leaves that to its adder."""
    cute.arch.fence_view_async_shared()
    if const_expr(sums.turns is None and by_warps):
        cute.arch.sync_warp()
        warp = cute.arch.make_warp_uniform(lane // WARP)
        if lane % WARP == 0:
            add_memory(shared, elements, sums, slot, warp, WARP_GROUP // WARP)
    elif const_expr(sums.turns is None):
        cute.arch.barrier(barrier_id=_WRITTEN + group, number_of_threads=WARP_GROUP)
        if lane == 0:
            add_memory(shared, elements, sums, slot, Int32(0), 1)
    else:
        cute.arch.barrier_arrive(barrier_id=_WRITTEN + group, number_of_threads=WARP_GROUP + WARP)


def add_memory(shared: cute.Pointer, elements: int, sums: Sums, slot: Int64, part: Int32, parts: int) -> None:
    """One thread has a group's memory added, or one of so many parts of it."""
    of_part = elements // parts
    primitives.cp_reduce_async_bulk_global_shared_cta(
        sums.memory + (slot * elements + part * of_part),
        shared + cute.assume(part * of_part, divby=4 * WARP),
        4 * of_part,
        op=primitives.CpReduceOp.ADD,
        type=primitives.CpReduceType.F32,
    )
    cute.arch.cp_async_bulk_commit_group()


@cute.jit
def let_go_on(group: Int32) -> None:
    """The adder lets its group write to its memory, or add its registers."""
    cute.arch.barrier_arrive(barrier_id=_TAKEN + group, number_of_threads=WARP_GROUP + WARP)


@cute.jit
def deliver(
    shared: cute.Pointer, elements: cutlass.Constexpr, sums: Sums, slot: Int64, earlier: Int32, group: Int32
) -> None:
    """The adder: adds what its group hands over when it is its turn, and passes the turn when it has arrived."""
    cute.arch.barrier(barrier_id=_WRITTEN + group, number_of_threads=WARP_GROUP + WARP)
    if cute.arch.lane_idx() == 0:
        spin(sums, slot, earlier)
        add_memory(shared, elements, sums, slot, Int32(0), 1)
        cute.arch.cp_async_bulk_wait_group(0, read=True)
    cute.arch.sync_warp()
    let_go_on(group)
    if cute.arch.lane_idx() == 0:
        cute.arch.cp_async_bulk_wait_group(0, read=False)
        pass_turn(sums, slot)


@cute.jit
def spin(sums: Sums, slot: Int64, earlier: Int32) -> None:
    """One thread waits until so many programs have added."""
    done = cute.arch.load(sums.turns + slot, Int32, sem="acquire", scope="gpu")
    while done != earlier:
        done = cute.arch.load(sums.turns + slot, Int32, sem="acquire", scope="gpu")


@cute.jit
def pass_turn(sums: Sums, slot: Int64) -> None:
    """The next program may add."""
    cute.arch.red(sums.turns + slot, Int32(1), op="add", dtype=Int32, sem="release", scope="gpu")
