"""What attention kernels take of an SM, in clocks: the tiles of this package's Hopper kernels, and what is published.

A visit of a tile takes of an SM

    products   clocks of the tensor cores, or of shared memory, which they read operands from: the longer
    scalars    clocks of exp2, or of issuing instructions: the longer; and of comparisons, where there is a mask
               or a maximum to look for, and of additions to memory from registers, one after the other

Groups of warps take products and scalars in turn, and each waits where another one is: a closed queue of two servers
and as many customers as there are groups. With service at random that takes (Buzen, 1973), ``a`` and ``b`` the clocks
of all groups and ``n`` the groups,

    (a^n + a^(n-1) b + ... + b^n) / (a^(n-1) + a^(n-2) b + ... + b^(n-1))

a visit: ``a + b`` of one group, and less the more there are, down to the longer of both.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from ..backends.cute import configs

LATENCY = 1000
"""Clocks from the request of a tile by TMA to its use, about half a microsecond. Assumed, not measured."""

BYTES = 2
"""Of an element."""
_BOTH_WAYS = 2
"""What goes through shared memory is written and read."""


@dataclasses.dataclass(frozen=True)
class Gpu:
    """What an SM does in a clock, and how many there are.

    Attributes:
        sms: SMs.
        peak_flops: Dense bf16 of the datasheet, a second.
        flops: Of the tensor cores of an SM, dense bf16, a clock.
        copy_bytes_per_s: Of a copy in device memory, read and written.
        exp2: Of the special function units.
        lanes: Threads for which an instruction is issued: a warp on each of four schedulers. As many fp32 FMAs.
        compared: fp32 comparisons, maxima and selections.
        shared_bytes: Of shared memory.
        added_bytes: Of additions to global memory from registers: the way from an SM to the L2 cache.
    """

    sms: int
    peak_flops: float
    flops: int
    copy_bytes_per_s: float
    exp2: int = 16
    lanes: int = 128
    compared: int = 64
    shared_bytes: int = 128
    added_bytes: int = 64

    @property
    def clock_hz(self) -> float:
        """At which the datasheet's figure holds."""
        return self.peak_flops / (self.sms * self.flops)


GPUS = {
    # 4.24 TB/s was measured, of 4.8; for B200 the same share of 8 is taken.
    "sm_90a": Gpu(132, 989.4e12, 4096, 4.24e12),
    "sm_100a": Gpu(148, 2250e12, 8192, 7.07e12),
}


@dataclasses.dataclass(frozen=True)
class Product:
    """A matrix product of a visit: (rows, depth) by (depth, columns).

    Attributes:
        rows: Of A.
        columns: Of B.
        depth: Of both.
        a_shared: Whether A is read from shared memory; else from registers or tensor memory.
        times: How often a visit has it.
        b_share: How much of B one CTA reads: half of it where two share a product.
    """

    rows: int
    columns: int
    depth: int
    a_shared: bool
    times: int = 1
    b_share: float = 1.0

    def tensor(self, gpu: Gpu) -> float:
        """Clocks of the tensor cores."""
        return self.times * 2 * self.rows * self.columns * self.depth / gpu.flops

    @property
    def operand_bytes(self) -> float:
        """Read from shared memory. B is read anew for each slab of A, whose rows one instruction has."""
        return self.times * BYTES * self.depth * (self.rows * self.a_shared + self.columns * self.b_share)


@dataclasses.dataclass(frozen=True)
class Visit:
    """What a visit of a whole program takes, in clocks of an SM; its groups have equal shares.

    Attributes:
        tensor: Of the tensor cores.
        shared: Of shared memory.
        exp2: Of the special function units.
        issue: Of the schedulers.
        adding: Of additions to global memory from registers.
        masking: Of the comparisons that a mask costs.
        maximum: Of those that a row's maximum costs, where it is looked for.
        groups: Of warps.
    """

    tensor: float
    shared: float
    exp2: float
    issue: float
    adding: float
    masking: float
    maximum: float
    groups: int

    @property
    def bound(self) -> str:
        """The resource that most clocks are of."""
        names = {"tensor": "tensor cores", "shared": "shared memory", "exp2": "exp2", "issue": "instructions"}
        return names[max(names, key=lambda name: getattr(self, name))]

    @property
    def products(self) -> float:
        """Clocks of the products of all groups."""
        return max(self.tensor, self.shared)

    def scalars(self, masked: bool, maximum: bool) -> float:
        """Clocks of all that is not a product, of all groups."""
        compared = (self.masking if masked else 0.0) + (self.maximum if maximum else 0.0)
        return max(self.exp2, self.issue) + self.adding + compared

    def clocks(self, masked: bool, maximum: bool) -> float:
        """Of a visit among many."""
        return overlapped(self.products, self.scalars(masked, maximum), self.groups)


def overlapped(products: float, scalars: float, groups: int) -> float:
    """Clocks of a visit in which each group takes an equal share of both, in turn with the others.

    Args:
        products: Clocks of all groups at the one server.
        scalars: At the other.
        groups: How many.

    Raises:
        ValueError: ``groups`` is not a positive number.
    """
    if groups < 1:
        raise ValueError(f"groups: expected a positive number, got {groups}")

    def terms(degree: int) -> float:
        return math.fsum(products ** (degree - i) * scalars**i for i in range(degree + 1))

    return terms(groups) / terms(groups - 1)


@dataclasses.dataclass(frozen=True)
class Kernel:
    """What of a kernel decides its time beside the row.

    Attributes:
        own: Rows of a program's own tile: queries forward, keys backward.
        other: Rows of a tile that it visits.
        visit: What a visit takes.
        outside: Clocks of a program's tile that overlap nothing, beside the first visit's scalars.
        cluster: CTAs whose tiles are visited together.
        maxima: Whether a row's maximum is looked for in visits that need a mask and in the first, beyond what every
            visit has.
    """

    own: int
    other: int
    visit: Visit
    outside: float
    cluster: int
    maxima: bool


def _visit(
    gpu: Gpu,
    products: Sequence[Product],
    *,
    scores: int,
    instructions: float,
    moved_bytes: float,
    wavefronts: int = 0,
    by_unit: float = 1.0,
    added_bytes: float = 0.0,
    groups: int,
) -> Visit:
    """Sums up a visit.

    Args:
        gpu: Of which.
        products: Its products.
        scores: How many it has.
        instructions: Issued for each.
        moved_bytes: That go through shared memory beside the products' operands.
        wavefronts: Reads of shared memory by a warp that need few bytes, and take a clock anyway.
        by_unit: How many of the exponentials the special function units take.
        added_bytes: Added to global memory from registers.
        groups: Of warps.
    """
    operand_bytes = math.fsum(product.operand_bytes for product in products)
    return Visit(
        tensor=math.fsum(product.tensor(gpu) for product in products),
        shared=(operand_bytes + moved_bytes) / gpu.shared_bytes + wavefronts,
        exp2=scores * by_unit / gpu.exp2,
        issue=scores * instructions / gpu.lanes,
        adding=added_bytes / gpu.added_bytes,
        masking=2 * scores / gpu.compared,  # a comparison and a selection
        maximum=scores / gpu.compared,
        groups=groups,
    )


def _way_out(gpu: Gpu, elements: int) -> float:
    """Clocks in which accumulators are scaled and leave through shared memory."""
    return elements / gpu.lanes + _BOTH_WAYS * elements * BYTES / gpu.shared_bytes


def hopper_forward(width: int, config: configs.ForwardConfig) -> Kernel:
    """The package's own forward: Q and K from shared memory, P from registers, V from shared memory."""
    gpu, slab, tile_n = GPUS["sm_90a"], configs.SLAB, config.tile_n
    groups = config.tile_m // slab
    visit = _visit(
        gpu,
        [Product(slab, tile_n, width, True, groups), Product(slab, width, tile_n, False, groups)],
        scores=config.tile_m * tile_n,
        # Of a score: multiply and subtract, exp2, add to the sum; and half a conversion, which does two.
        instructions=3.5,
        moved_bytes=2 * tile_n * width * BYTES,  # K and V come
        groups=groups,
    )
    # Where O has memory of its own, the next Q is loaded before O has left.
    outside = _way_out(gpu, config.tile_m * width) + LATENCY * (1 if config.own_o else 2)
    return Kernel(config.tile_m, tile_n, visit, outside, config.cluster, maxima=True)


def hopper_backward(width: int, config: configs.BackwardConfig) -> Kernel:
    """The package's own backward, its five products as its two groups share them."""
    gpu, slab, groups = GPUS["sm_90a"], configs.SLAB, 2
    tile_m, tile_n = config.tile_m, config.tile_n
    columns = width if config.dq_split == "rows" else width // groups
    dq = Product(slab, columns, tile_n, True, groups)
    if config.by_keys:  # each group has 64 keys and all queries; P and dS are in registers
        s, dv = Product(slab, tile_m, width, True, 2 * groups), Product(slab, width, tile_m, False, 2 * groups)
        score_columns, written = tile_m, 1  # dS is written for dQ
    else:  # each has half of the queries, then half of the columns of dV and dK
        s = Product(slab, tile_m // groups, width, True, 2 * groups)
        dv = Product(slab, width // groups, tile_m, True, 2 * groups)
        score_columns, written = tile_m // groups, 2  # P is written too
    sums = tile_m * width * 4
    moved = 2 * tile_m * width * BYTES + written * tile_m * tile_n * BYTES  # Q and dO come
    warps = groups * configs.WARP_GROUP // configs.WARP
    visit = _visit(
        gpu,
        [s, dv, dq],  # the first two twice: S and dP, dV and dK
        scores=tile_m * tile_n,
        # Multiply and subtract, exp2, subtract delta, multiply; and two halves of a conversion.
        instructions=5.0,
        moved_bytes=moved + (0 if config.direct else _BOTH_WAYS * sums),
        # lse and delta: an instruction of a warp reads those of 8 of its scores' columns.
        wavefronts=2 * warps * score_columns // 8,
        added_bytes=sums if config.direct else 0.0,
        groups=groups,
    )
    # The first S and P are alone, K and Q are awaited, and dK and dV leave before the next K comes.
    outside = s.tensor(gpu) / 2 + _way_out(gpu, 2 * tile_n * width) + 2 * LATENCY
    return Kernel(tile_n, tile_m, visit, outside, 1, maxima=False)


POLYNOMIAL_SHARE = 0.25
"""Of the exponentials of a B200's forward, by a polynomial on the FMA units. Assumed."""


def blackwell_forward(width: int) -> Kernel:
    """The published way (FlashAttention 4): two groups of 128 queries, 128 keys, P in tensor memory.

    Instructions of a score, packed arithmetic counting half: multiply and subtract 0.5, maximum 1, sum 0.5, conversion
    0.5, exp2 1 or, by polynomial, 4.5: two packed for the whole part, three for the polynomial, two to join them.
    """
    gpu, groups, slab, tile_n = GPUS["sm_100a"], 2, 128, 128
    visit = _visit(
        gpu,
        [Product(slab, tile_n, width, True, groups), Product(slab, width, tile_n, False, groups)],
        scores=groups * slab * tile_n,
        instructions=2.5 + (1 - POLYNOMIAL_SHARE) + 4.5 * POLYNOMIAL_SHARE,
        moved_bytes=2 * tile_n * width * BYTES,
        by_unit=1 - POLYNOMIAL_SHARE,
        groups=groups,
    )
    return Kernel(groups * slab, tile_n, visit, _way_out(gpu, groups * slab * width) + LATENCY, 1, maxima=False)


def blackwell_backward(width: int) -> Kernel:
    """The published way: tiles of 128 and 128, two CTAs to a product, each of which reads half of B."""
    gpu, groups, tile = GPUS["sm_100a"], 2, 128
    s = Product(tile, tile, width, True, 2, b_share=0.5)
    dv = Product(tile, width, tile, False, 2, b_share=0.5)
    dq = Product(tile, width, tile, True, b_share=0.5)
    sums = tile * width * 4
    visit = _visit(
        gpu,
        [s, dv, dq],
        scores=tile * tile,
        instructions=3.5,  # as Hopper's, arithmetic packed
        moved_bytes=2 * tile * width * BYTES + tile * tile * BYTES + _BOTH_WAYS * sums,
        # A thread has a row of half of the scores, and a read serves four of its columns.
        wavefronts=2 * 8 * (tile // groups) // 4,
        groups=groups,
    )
    outside = s.tensor(gpu) / 2 + _way_out(gpu, 2 * tile * width) + 2 * LATENCY
    return Kernel(tile, tile, visit, outside, 2, maxima=False)
