"""Sums in global memory to which many programs add: the fp32 accumulator of dQ.

A tile of queries has, of each of two groups of warps, the group's registers, four floats of a thread side by side: so
128 threads add to 512 floats in a row. A group adds straight from its registers, 16 bytes a thread, or writes them to
shared memory, from where one instruction adds them all while the group goes on.

For repeatable results programs add to a tile in the order of their keys, one after the other: ``turns`` says for each
tile and group how many have. A program's turn always comes, since those before it have lower block numbers and have
been started.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, Int64, const_expr, cute
from cutlass.experimental import primitives

_GROUPS, _WARP_GROUP = 2, 128
_AT_ONCE = 4 * _WARP_GROUP


class Sums(NamedTuple):
    """The sums: ``elements`` of each group, of each tile of queries; ``turns`` where results are to be repeatable."""

    memory: cute.Tensor
    turns: cute.Tensor | None


class Adder(NamedTuple):
    """One group's way to the sums.

    ``barrier_id`` joins its warps; ``shared`` is memory of its own, or None where it adds from registers.
    """

    barrier_id: Int32
    group: Int32
    lane: Int32
    shared: Any


@cute.jit
def join(adder: Adder) -> None:
    """All of the group's warps are here."""
    cute.arch.barrier(barrier_id=adder.barrier_id, number_of_threads=_WARP_GROUP)


@cute.jit
def make_room(adder: Adder) -> None:
    """Waits until what was added before has been read."""
    if const_expr(adder.shared is not None):
        cute.arch.cp_async_bulk_wait_group(0, read=True)  # only who issued it has something to wait for
        join(adder)


@cute.jit
def take(adder: Adder, acc: cute.Tensor, sums: Sums, tile: Int64, earlier: Int32) -> None:
    """Takes a group's registers; after it they may be overwritten. ``earlier`` programs add to the tile before."""
    elements = cute.size(acc) * _WARP_GROUP
    if const_expr(adder.shared is None):
        await_turn(adder, sums, tile, earlier)
        address = (sums.memory.iterator + ((tile * _GROUPS + adder.group) * elements + adder.lane * 4)).toint()
        for i in cutlass.range_constexpr(elements // _AT_ONCE):
            cute.arch.inline_ptx(
                "red.relaxed.gpu.global.add.v4.f32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
                read_only_args=[address + 4 * _AT_ONCE * i, *(acc[4 * i + j] for j in range(4))],
            )
        if const_expr(sums.turns is not None):
            cute.arch.fence_acq_rel_gpu()
            join(adder)
            pass_turn(adder, sums, tile)
    else:
        shared = cute.make_tensor(adder.shared, cute.make_layout((4, _WARP_GROUP, elements // _AT_ONCE)))
        for i in cutlass.range_constexpr(elements // _AT_ONCE):
            four = cute.make_tensor(acc.iterator + 4 * i, cute.make_layout(4))
            cute.autovec_copy(four, shared[None, adder.lane, i])


@cute.jit
def send(adder: Adder, elements: cutlass.Constexpr, sums: Sums, tile: Int64, earlier: Int32) -> None:
    """Adds what was taken to shared memory."""
    if const_expr(adder.shared is not None):
        cute.arch.fence_view_async_shared()
        join(adder)
        if adder.lane == 0:
            spin(adder, sums, tile, earlier)
            primitives.cp_reduce_async_bulk_global_shared_cta(
                sums.memory.iterator + (tile * _GROUPS + adder.group) * elements,
                adder.shared,
                4 * elements,
                op=primitives.CpReduceOp.ADD,
                type=primitives.CpReduceType.F32,
            )
            cute.arch.cp_async_bulk_commit_group()
            if const_expr(sums.turns is not None):
                cute.arch.cp_async_bulk_wait_group(0, read=False)
            pass_turn(adder, sums, tile)


@cute.jit
def await_turn(adder: Adder, sums: Sums, tile: Int64, earlier: Int32) -> None:
    """The whole group waits until ``earlier`` programs have added."""
    if const_expr(sums.turns is not None):
        if adder.lane == 0:
            spin(adder, sums, tile, earlier)
        join(adder)


@cute.jit
def spin(adder: Adder, sums: Sums, tile: Int64, earlier: Int32) -> None:
    """One thread waits until ``earlier`` programs have added."""
    if const_expr(sums.turns is not None):
        turn = sums.turns.iterator + (tile * _GROUPS + adder.group)
        done = cute.arch.load(turn, Int32, sem="acquire", scope="gpu")
        while done != earlier:
            done = cute.arch.load(turn, Int32, sem="acquire", scope="gpu")


@cute.jit
def pass_turn(adder: Adder, sums: Sums, tile: Int64) -> None:
    """The next program may add."""
    if const_expr(sums.turns is not None):  # noqa: SIM102 (joined, the two would be one that is decided when run)
        if adder.lane == 0:
            turn = sums.turns.iterator + (tile * _GROUPS + adder.group)
            cute.arch.red(turn, Int32(1), op="add", dtype=Int32, sem="release", scope="gpu")


def finish() -> None:
    """Waits until all that was added from shared memory has been read."""
    cute.arch.cp_async_bulk_wait_group(0, read=True)
