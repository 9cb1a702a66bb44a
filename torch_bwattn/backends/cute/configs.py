"""Which config each Hopper kernel runs with: one table, read by the backend, the bench and the cross-compile checks."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ...problem import Problem, dtype_name
from .parts.accumulators import WARP, WARP_GROUP, Accumulator

WIDEST = 256
"""Columns of Q, K and V that kernels take."""

WIDEST_MASKED = 192
"""Columns up to which the backward has shared memory for tiles of a mask."""

LONGEST = 2**22
"""Queries and keys of calls with mods are up to so many, or a sum of a few positions in float32 would not be exact."""

SLAB = 64
"""Rows of one warp group's matrix instruction."""


@dataclass(frozen=True)
class ForwardConfig:
    """A config of the forward kernel.

    Attributes:
        tile_m: Queries of a program; each consumer warp group has 64.
        tile_n: Keys of a tile.
        num_stages: Tiles of K, and of V, that the ring holds.
        ping_pong: Warp groups issue their products in turns.
        own_o: O has shared memory of its own, so that the next Q need not wait for it.
        cluster: CTAs that share the keys and values they load.
    """

    tile_m: int
    tile_n: int
    num_stages: int
    ping_pong: bool
    own_o: bool = False
    cluster: int = 1

    def __str__(self) -> str:
        text = f"{self.tile_m}x{self.tile_n}, {self.num_stages} stages"
        flags = ("ping_pong", "own_o")
        text += "".join(f", {name.replace('_', ' ')}" for name in flags if getattr(self, name))
        return text + (f", clusters of {self.cluster}" if self.cluster > 1 else "")


@dataclass(frozen=True)
class BackwardConfig:
    """A config of the backward kernel.

    Attributes:
        tile_m: Queries of a visit.
        tile_n: Keys of a program: 128, of which each of two groups has half, or 64, of which each has half the columns.
        adders: What adds dQ at once: "threads" add their registers; "warps", or "groups" of four, what they have
            written to shared memory.
    """

    tile_m: int
    tile_n: int
    adders: str

    def __str__(self) -> str:
        return f"{self.tile_m}x{self.tile_n}, dQ added by {self.adders}"

    @property
    def direct(self) -> bool:
        """Whether dQ is added from registers, and has no shared memory."""
        return self.adders == "threads"

    @property
    def by_keys(self) -> bool:
        """Whether each group has keys of its own."""
        return self.tile_n == 2 * SLAB

    @property
    def dq_split(self) -> str:
        """What of dQ's product tells the two groups apart."""
        return "rows" if self.tile_m == 2 * SLAB else "columns"


@dataclass(frozen=True)
class PostprocessConfig:
    """What shapes the code of the kernel that finishes dQ.

    Attributes:
        arch: 80, 90 or 100, of the kernel that filled the accumulator.
        tile_m: Queries of a tile.
        width: Columns of the accumulator, at least head_dim.
        threads: 128 or 256, of the product and of this kernel.
        split: What tells the two groups of 256 threads apart, in the product's own rows and columns.
        swapped: The product was (width, queries).
        side_by_side: Threads whose four floats lie side by side: 128 or 32.
    """

    arch: int
    tile_m: int
    width: int
    threads: int = 128
    split: str = "rows"
    swapped: bool = False
    side_by_side: int = WARP_GROUP

    @property
    def accumulator(self) -> Accumulator:
        """Of a tile."""
        sizes = (self.width, self.tile_m) if self.swapped else (self.tile_m, self.width)
        return Accumulator(self.arch, *sizes, self.threads, self.split)


def why_no_postprocess(dtype: str, head_dim: int, config: PostprocessConfig) -> str | None:
    """Why the kernel does not exist, or None: what ``Postprocess`` asks for before anything is compiled."""
    if dtype not in ("float16", "bfloat16"):
        return f"dtype: expected float16 or bfloat16, got {dtype}"
    if head_dim % 8 or not 0 < head_dim <= WIDEST:
        return f"head_dim: expected a multiple of 8 up to {WIDEST}, got {head_dim}"
    if config.width < head_dim:
        return f"width: expected at least head_dim {head_dim}, got {config.width}"
    if config.side_by_side not in (WARP, WARP_GROUP):
        return f"side_by_side: expected 32 or 128, got {config.side_by_side}"
    return config.accumulator.why_not() or None


@dataclass(frozen=True)
class ModFeatures:
    """What of mods and lists of blocks shapes a kernel's code.

    Attributes:
        score_mod: A program's text, or None.
        mask_mod: A program's text, or None.
        tables: Of each captured tensor, PyTorch's name of its dtype and how many dimensions it has.
        numbers: How many integers are captured.
        lists: Whether there are lists of blocks.
        full: Whether some count as whole.
        learned: Which captured tensors get gradients, backward.
    """

    score_mod: str | None
    mask_mod: str | None
    tables: tuple[tuple[str, int], ...]
    numbers: int
    lists: bool
    full: bool
    learned: tuple[int, ...] = ()


@dataclass(frozen=True)
class ForwardFeatures:
    """What shapes the forward kernel's code beside its config.

    ``right`` and ``left`` say whether later and earlier keys are limited, ``packed`` how many query heads share a tile,
    ``mask`` whether one is "added" or "bool", and ``mask_row`` whether all rows of a tile have the same.
    """

    dtype: str
    head_dim: int
    value_dim: int
    right: bool = False
    left: bool = False
    softcap: bool = False
    sink: bool = False
    packed: int = 1
    mods: ModFeatures | None = None
    mask: str | None = None
    mask_row: bool = False

    @property
    def limited(self) -> bool:
        """Whether positions hide keys, so that tiles of queries differ in theirs."""
        return self.right or self.left


@dataclass(frozen=True)
class BackwardFeatures:
    """What shapes the backward kernel's code beside its config; as :class:`ForwardFeatures`."""

    dtype: str
    head_dim: int
    value_dim: int
    right: bool = False
    left: bool = False
    softcap: bool = False
    deterministic: bool = False
    mods: ModFeatures | None = None
    mask: str | None = None
    mask_row: bool = False


def packed_heads(problem: Problem) -> int:
    """How many query heads share a tile: the whole group where the queries of one would leave most of a slab empty."""
    group = problem.heads // problem.kv_heads
    return group if group > 1 and SLAB % group == 0 and problem.q_len < SLAB else 1


def features(problem: Problem) -> ForwardFeatures:
    """The features of a problem."""
    return ForwardFeatures(
        dtype=dtype_name(problem.dtype),
        head_dim=problem.head_dim,
        value_dim=problem.value_dim,
        right=problem.diagonal is not None,
        left=problem.low_diagonal is not None,
        softcap=problem.softcap is not None,
        sink=problem.sink_dtype is not None,
        packed=packed_heads(problem),
        mask=_mask(problem),
        mask_row=mask_is_of_keys(problem),
    )


def mask_is_of_keys(problem: Problem) -> bool:
    """Whether a mask has one row for all that share a tile of queries."""
    sizes = problem.mask_sizes
    return sizes is not None and sizes[2] == 1 and (sizes[1] == 1 or packed_heads(problem) == 1)


def _mask(problem: Problem) -> str | None:
    if problem.mask_dtype is None:
        return None
    return "bool" if problem.mask_dtype == torch.bool else "added"


SHORT_KV_LEN = 1024
"""Up to so many keys, without causality, 128x128 tiles win at width 128: B32 H16 S512 508 against 462 TFLOP/s for
192x80, B16 S1024 572 against 529, B8 S2048 630 and 630."""

SMS = 132
"""Of an H200, and programs of a launch there. With more tiles than these a program has several, and where tiles differ
in their keys it must not be decided beforehand which: B1 H16 S16384 D128 causal 719 TFLOP/s against 581, B2 H16 S8192
D256 causal 721 against 545, B32 H16 S512 D128 causal 353 against 344."""

# B4 H32 S8192 unless said otherwise, TFLOP/s not causal / causal, bf16, each result checked before it was timed; FA4
# in the same run in brackets. All with own_o where it is set: +2 to 9 % wherever both fit (B32 H16 S512 D128 496 / 348
# against 431 / 298).
#
# Tried and left out: looking for the maximum before the exponentials also where there is no mask, 536 / 508 at 64,
# 624 / 626 at 128; and with that, Q in registers, -2 to +1 %; a quarter or a fifth of the
# exponentials by a polynomial, -8 to -12 % at 64; the next tile's scores a tile ahead of the softmax, -7 % at 128,
# -20 % at 64. Clusters of 2 are for short keys only: else -4 to 0 % (B4 H32 S8192 D128 720 against 736, D64 558, 584).

_WIDTH_64 = ForwardConfig(192, 128, 2, ping_pong=True, own_o=True)
"""591 / 549 [523 / 495]. 3 stages 590 / 550, 192x112 580 / 541, no turns 549 / 529, 128x128 486."""

_WIDTH_64_WINDOW = ForwardConfig(128, 128, 3, ping_pong=True, own_o=True)
"""B4 H16 S16384, window 1023: 388 TFLOP/s [352]; 192x128 367, 192x96 366, 192x112 352."""

_WIDTH_96 = ForwardConfig(192, 112, 2, ping_pong=True, own_o=True)
"""676 / 682 [606 / 567]. 192x96 without turns, 3 stages, 660, with turns, 2 stages, 647 / 637, 128x128 604 / 614."""

_WIDTH_128_WHOLE = ForwardConfig(192, 80, 3, ping_pong=False, own_o=True)
"""727 [638], B1 H16 S16384 733 [664], B4 H32/8 S4096 696 [627]. 2 stages 712, 727, 676, 128x128 695, 720, 693."""

_WIDTH_128 = ForwardConfig(128, 128, 2, ping_pong=False, own_o=True)
"""Causal: 716 [602], B1 H16 S16384 722 [636], B4 H32/8 S4096 669 [562]. 192x80 with turns 713, 733, 640."""

_WIDTH_128_TURNS = ForwardConfig(128, 128, 2, ping_pong=True, own_o=True)
"""Short: S512 causal 353 against 340 without turns. B4 H16 S16384, window 1023: 568 [467]; without turns 560, 192x64
504, 128x96 497, 192x80 484."""

_WIDTH_128_SHORT = replace(_WIDTH_128_TURNS, cluster=2)
"""Not causal: B32 H16 S512 515 against 494 without clusters, B16 S1024 582 against 568."""

_WIDTH_192 = ForwardConfig(128, 128, 2, ping_pong=True)
"""Values of up to 128: 756 / 712 [704 / 679]. No turns 738 / 711, 128x96 with own_o 708 / 701. With own_o 128x128 takes
more shared memory than there is."""

_WIDTH_192_VALUES = ForwardConfig(128, 80, 2, ping_pong=False, own_o=True)
"""Values of 192, B4 H16: 730 / 718 [695 / 681]. 128x96 without own_o 716 / 705, 128x112 without 711 / 707."""

_WIDTH_256 = ForwardConfig(128, 80, 2, ping_pong=False)
"""B2 H16: 737 / 706 [717 / 686]. With turns 731 / 707, clusters of 2 761 against 770 in another run. Nothing larger
leaves registers or shared memory."""

CLUSTER_ROWS = 256
"""Up to so many rows of queries there are no clusters: one CTA of a cluster would have little to do or nothing."""


def _base(problem: Problem) -> ForwardConfig:
    """The config by widths and by what a query sees, for many queries."""
    width, windowed = max(problem.head_dim, problem.value_dim), problem.low_diagonal is not None
    # A soft cap takes registers that three groups do not have.
    two_groups = windowed or problem.softcap is not None
    whole = problem.diagonal is None and not windowed
    if width <= 64:
        return _WIDTH_64_WINDOW if two_groups else _WIDTH_64
    if width <= 96 and not two_groups:
        return _WIDTH_96
    if width <= 128:
        if problem.kv_len <= SHORT_KV_LEN or windowed:
            return _WIDTH_128_SHORT if whole else _WIDTH_128_TURNS
        return _WIDTH_128_WHOLE if whole and problem.softcap is None else _WIDTH_128
    if width <= 192:
        return _WIDTH_192_VALUES if problem.value_dim > 128 else _WIDTH_192
    return _WIDTH_256


_MASKED = (
    (64, ForwardConfig(192, 128, 2, ping_pong=True)),
    (64, ForwardConfig(128, 128, 2, ping_pong=True)),
    (128, ForwardConfig(128, 128, 2, ping_pong=True)),
    (128, ForwardConfig(128, 128, 2, ping_pong=False)),
    (128, ForwardConfig(128, 96, 2, ping_pong=True)),
    (192, ForwardConfig(128, 80, 2, ping_pong=False)),
    (256, ForwardConfig(128, 64, 2, ping_pong=False)),
)
"""Configs beside a mask with rows of its own, and the widths up to which there is room for its tiles, each with own_o
where that has room too. B8 H16 S4096, ms beside an additive / a bool mask: width 64 1.279 / none, 1.497 / 1.455; 96
additive 1.788, 1.749, 1.848; 128 1.955 / 1.842, 1.970 / 1.864, 1.982 / 1.862; 192 2.719; 256 3.310. Few programs want
no turns: 128 queries beside 8192 keys 0.114 against 0.132 with turns and 0.137."""

_SHARED_BYTES = 227 * 1024 - 2048
"""Of a CTA, less what barriers, numbers and alignment take."""


def _masked_bytes(problem: Problem, config: ForwardConfig) -> int:
    """Shared memory of the tiles of a config with those of a mask."""
    width, value_width = (-(-width // 16) * 16 for width in (problem.head_dim, problem.value_dim))
    rows = config.tile_m * max(width, value_width) * (2 if config.own_o else 1)
    keys = config.tile_n * (width + value_width)
    mask = (1 if problem.mask_dtype == torch.bool else 2) * config.tile_m * config.tile_n
    return 2 * rows + config.num_stages * (2 * keys + mask)


def _masked_choices(problem: Problem) -> tuple[ForwardConfig, ...]:
    """Configs beside a mask: those of the least width that holds the problem's, with own_o where there is room."""
    width = max(problem.head_dim, problem.value_dim)
    least = min(most for most, _ in _MASKED if most >= width)
    found = []
    for config in (config for most, config in _MASKED if most == least):
        if config.tile_m > 2 * SLAB and problem.mask_dtype == torch.bool:
            continue  # bytes take registers that three groups do not have
        own = replace(config, own_o=True)
        found.append(own if _masked_bytes(problem, own) <= _SHARED_BYTES else config)
    return tuple(dict.fromkeys(_for_rows(problem, config) for config in found))


def _for_rows(problem: Problem, config: ForwardConfig) -> ForwardConfig:
    """A config as it is for few queries."""
    rows = problem.q_len * packed_heads(problem)
    if rows <= CLUSTER_ROWS:
        config = replace(config, cluster=1)
    return replace(config, tile_m=SLAB) if rows <= SLAB else config


def forward(problem: Problem) -> ForwardConfig:
    """The forward's config where nothing was measured."""
    return forward_choices(problem)[0]


def forward_choices(problem: Problem) -> tuple[ForwardConfig, ...]:
    """Configs that may compete for a problem, first what is run where nothing was measured."""
    if problem.mask_dtype is None:
        return _unmasked_choices(problem)
    if mask_is_of_keys(problem):  # it takes next to no room
        return tuple(dict.fromkeys(replace(config, cluster=1) for config in _unmasked_choices(problem)))
    return _masked_choices(problem)


def _unmasked_choices(problem: Problem) -> tuple[ForwardConfig, ...]:
    width = max(problem.head_dim, problem.value_dim)
    others: tuple[ForwardConfig, ...] = ()  # of the widest, nothing else has room, or was any better
    if width <= 64:
        others = (_WIDTH_64_WINDOW, _WIDTH_64)
    elif width <= 128:
        others = (_WIDTH_128, _WIDTH_128_TURNS, _WIDTH_128_WHOLE, _WIDTH_96)[: 4 if width <= 96 else 3]
        if problem.diagonal is None and problem.low_diagonal is None:
            others = (*others, _WIDTH_128_SHORT)
    if problem.softcap is not None:
        others = tuple(config for config in others if config.tile_m <= 2 * SLAB)
    return tuple(
        dict.fromkeys((_for_rows(problem, _base(problem)), *(_for_rows(problem, config) for config in others)))
    )


def counts_tiles(problem: Problem, config: ForwardConfig) -> bool:
    """Whether programs take the next tile that none has taken, by a counter, rather than every so many-th."""
    packed = packed_heads(problem)
    tiles = -(-problem.q_len * packed // config.tile_m) * (problem.heads // packed) * problem.batch
    return features(problem).limited and tiles > SMS


def backward_features(problem: Problem) -> BackwardFeatures:
    """The backward's features of a problem."""
    return BackwardFeatures(
        dtype=dtype_name(problem.dtype),
        head_dim=problem.head_dim,
        value_dim=problem.value_dim,
        right=problem.diagonal is not None,
        left=problem.low_diagonal is not None,
        softcap=problem.softcap is not None,
        deterministic=problem.deterministic,
        mask=_mask(problem),
        mask_row=problem.mask_sizes is not None and problem.mask_sizes[2] == 1,
    )


def excess_features(problem: Problem) -> ForwardFeatures:
    """The features of the kernel that finds what a backward's lse has lost beside an additive mask."""
    mask_row = backward_features(problem).mask_row
    return replace(features(problem), sink=False, packed=1, mask_row=mask_row)


def excess_config(problem: Problem) -> ForwardConfig:
    """Its config: what has room, for it mostly has nothing to do."""
    return _masked_choices(problem)[-1]


def backward_widths(features: BackwardFeatures) -> tuple[int, int]:
    """Columns of Q, K, dQ and dK, and of V, dO and dV, that the backward computes with."""
    width, value_width = (-(-width // SLAB) * SLAB for width in (features.head_dim, features.value_dim))
    return width, value_width


def backward_workspace(
    features: BackwardFeatures, batch: int, heads: int, q_len: int, config: BackwardConfig
) -> tuple[int, int]:
    """(4-byte elements that the backward needs and finds to be 0, of which so many are of a head of the sums).

    The sums, then one turn for each of their halves where results are to be repeatable, then a counter; in all a
    multiple of 16 bytes.
    """
    tiles, pairs = -(-q_len // config.tile_m), batch * heads
    of_head = tiles * config.tile_m * backward_widths(features)[0]
    elements = pairs * of_head + (2 * pairs * tiles if features.deterministic else 0) + 1
    return -(-elements // 4) * 4, of_head


def postprocess(features: BackwardFeatures, config: BackwardConfig) -> PostprocessConfig:
    """How the accumulator that the backward fills is finished."""
    width, _ = backward_widths(features)
    return PostprocessConfig(90, config.tile_m, width, 256, config.dq_split, side_by_side=WARP)


# TFLOP/s not causal / causal of preprocess, kernel and postprocess together, B4 H32 S8192 unless said otherwise, bf16,
# each variant in turns with the others and with cuDNN, whose figure is in brackets; results checked before.
#
# Tried and left out: dQ from registers where shared memory has room for it, 503 / 495 at 128; a warp that has it added,
# where that has no order to keep, 588 / 555 against 614 / 585; S and dP issued together, not the next S ahead,
# 537 / 521 at 128, 510 / 503 at 64, but 410 / 385 at 256; programs of one tile of keys, -4 % at B32 H16 S512.
# The next P pinned before dQ is issued, 550 / 539 at 128 against 597 / 592, or after the next dP is, 521 / 514: as the
# assembler has it, its instructions lie between those that issue that dP. dQ a visit later, so that no group waits for
# the other's dS, with rings of three and 40 bytes of spills, 548 / 535 against 588 / 585. The order of 64 keys with
# 128, 539 / 527 against 597 / 594, and at width 64 492 / 482 against 523 / 504. dS told to the other group only after
# the next S is issued, 576 / 574 against 599 / 590, and delta read before dP is awaited as well, 589 / 566; at 64 517 /
# 503 and 511 / 497 against 536 / 513. That order of FA4's with both, and P pinned before dS, 555 / 564. All of these
# have fewer clocks without a product under way than what is here: the card holds its power, not its clock.

_BACKWARD_64 = BackwardConfig(128, 128, adders="warps")
"""516 / 524 [443 / 401]; 64 queries 454 / 434. Added by groups 513 / 515, by warps 530 / 511."""

_BACKWARD_128 = BackwardConfig(64, 128, adders="groups")
"""617 / 604 [532 / 494], B1 H16 S16384 635 / 633 [539 / 515]; 80 queries 601 / 590, 615 / 625. Added
by groups 597 / 592, by warps 597 / 579. Also where a soft cap
takes the registers that more queries would need."""

_BACKWARD_WIDE = BackwardConfig(64, 64, adders="threads")
"""Width 256, B2 H16: 414 / 414 [345 / 402]; with the order of products of 128 keys, 413 / 374, and with dK before dQ
374 / 360. Shared memory is full, so dQ is added from registers."""


def backward(problem: Problem) -> BackwardConfig:
    """The backward's config where nothing was measured."""
    width = max(problem.head_dim, problem.value_dim)
    if width > 2 * SLAB:
        return _BACKWARD_WIDE
    # Beside 128 queries there is no room for 16 bits of a mask.
    if width > SLAB or problem.softcap is not None or problem.mask_dtype not in (None, torch.bool):
        return _BACKWARD_128
    return _BACKWARD_64


_FLEX = ForwardConfig(128, 128, 2, ping_pong=True, own_o=True)
"""B4 H16 S8192 D128, sixteen documents / a prefix of 1024 / ALiBi / a table of distances, ms: 0.241 / 1.511 / 1.675 /
5.001; without turns 0.244 / 1.488 / 1.800 / 4.788, without own_o 0.267 / 1.547 / 1.697 / 5.034, 128x64 and 3 stages
0.256 / 1.630 / 1.878 / 5.372."""

_FLEX_WIDE = ForwardConfig(128, 64, 2, ping_pong=True)
"""Not timed: what has room, of tiles that divide blocks of 128 by 128."""


def flex_forward(width: int) -> ForwardConfig:
    """The forward's config of a call with mods. Tiles divide blocks of 128 by 128, the usual ones."""
    return _FLEX if width <= 2 * SLAB else _FLEX_WIDE


def flex_backward(width: int) -> BackwardConfig:
    """The backward's config of a call with mods, which take registers as a soft cap does."""
    return _BACKWARD_WIDE if width > 2 * SLAB else _BACKWARD_128


def backward_choices(problem: Problem) -> tuple[BackwardConfig, ...]:
    """Configs that may compete for a problem, first :func:`backward`'s."""
    chosen = backward(problem)
    if problem.mask_dtype not in (None, torch.bool):
        return (chosen,)
    return (chosen, _BACKWARD_128) if chosen is _BACKWARD_64 else (chosen,)
