"""Attention backward for Hopper (sm_90a): dK, dV, and an fp32 accumulator of dQ.

    S = Q K^T      x = log2(e) * (scale * S, or softcap * tanh(t), t = scale * S / softcap), -inf where not seen
    P = exp2(x - log2(e) * lse)      dP = dO V^T      dS = P * (dP - delta), and times 1 - tanh(t)^2 with a cap
    dV = P^T dO      dK = scale * dS^T Q      dQ = scale * dS K

One CTA has a tile of ``tile_n`` keys of a key head and visits, for every query head of that head, the tiles of
``tile_m`` queries that see some of them. Scores are transposed, (keys, queries). Two groups of warps share the work.
Up to widths of 128 each has 64 of 128 keys, so that its P^T is a left operand in registers. Beyond, a CTA has 64 keys;
each group has half of the queries of S and dP, and half of the columns of dV, dK and dQ, and P^T goes through shared
memory too.

    shared memory   K, V  (tile_n, D), (tile_n, Dv), once      Q, dO  (tile_m, D), (tile_m, Dv), rings of two
                    lse and delta of each stage's queries      dQ  fp32, of one visit
                    dS  (tile_m, tile_n), or dS^T and P^T  (tile_n, tile_m) beyond widths of 128, two
    registers       dK, dV  in fp32 of all visits; S^T and dP^T  of one

The products of a visit overlap the exponentials of the next. Up to widths of 128 the next tile's S goes first, then dV
and dK, then dQ, which needs what both groups write and has the registers of dP, then the next dP. P could be made as
soon as S is there; the assembler has it made between the instructions that issue that dP, and no other place was as
good (:mod:`.configs`). Beyond, the groups have met before the first product, so dQ goes second and is added while dK
and the next S are under way, and P is made while the next dP is.

dQ leaves by additions in memory. The accumulator holds, for each tile of queries and each group, the group's registers
as they are, four floats of a thread side by side, so that each is one contiguous addition; the postprocess knows that
order. ``lse`` comes in powers of two and padded to whole tiles with +inf, which also stands for rows that see no key,
``delta`` padded with 0: so P and dS of what is no query are 0.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.utils.hopper_helpers as sm90
from cutlass import Boolean, Float32, Int32, Int64, const_expr, cute, pipeline
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warp, warpgroup

from .configs import SLAB, BackwardConfig, BackwardFeatures, backward_widths
from .forward_sm90 import DTYPES, LOG2_E, WARP_GROUP, Limits, Moved
from .parts import queries, schedule, softmax, sums, wgmma

_GROUPS = 2
_REGISTERS = (24, 240)
STAGES = 2
_WORDS = 4  # that may be left with a visit's Q
_BOTH = 3  # that joins both groups
APART = 16  # tiles of queries up to which programs of one head start their visits apart
_ADDERS = 1  # the first of the warps beside the producer that add a group's dQ


class Shared(NamedTuple):
    """What is in shared memory."""

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    do: cute.Tensor
    ds: cute.Tensor
    p: cute.Tensor
    lse: cute.Tensor
    delta: cute.Tensor
    next_tile: cute.Tensor
    dk: cute.Tensor
    dv: cute.Tensor
    ds_written: cute.Pointer
    visits: cute.Tensor


class Tile(NamedTuple):
    """A tile of keys, and the tiles of queries [begin, end) that see some of it, visited from ``start`` on, round."""

    n: Int32
    batch: Int32
    kv_head: Int32
    begin: Int32
    end: Int32
    start: Int32


class Visit(NamedTuple):
    """A tile of queries, of a pair of batch and query head, and the first of the keys that visit it.

    ``batch``, ``head`` and ``masked`` are for mods (:mod:`.flex_backward_sm90`), else None.
    """

    m: Int32
    pair: Int32
    first_key: Int32
    batch: Int32 | None = None
    head: Int32 | None = None
    masked: Boolean | None = None


class OfHead(NamedTuple):
    """How many tiles of queries of a head are visited; of ``masked``, the first ones, mods hide some."""

    count: Int32
    masked: Int32 | None


class Pipes(NamedTuple):
    """The rings; to be unpacked before use (:class:`.forward_sm90.Pipes`)."""

    q: pipeline.PipelineTmaAsync
    do: pipeline.PipelineTmaAsync
    k: pipeline.PipelineTmaAsync
    v: pipeline.PipelineTmaAsync


class Products(NamedTuple):
    """For S^T and dP^T, for dV, for dK, for dQ."""

    s: cute.TiledMma
    dv: cute.TiledMma
    dk: cute.TiledMma
    dq: cute.TiledMma


class Operands(NamedTuple):
    """What the products read: matrix descriptors, with the ring's stages as last mode, or registers."""

    k: cute.Tensor
    q: cute.Tensor
    v: cute.Tensor
    do: cute.Tensor
    p: cute.Tensor
    do_t: cute.Tensor
    ds: cute.Tensor
    q_t: cute.Tensor
    ds_t: cute.Tensor
    k_t: cute.Tensor


class Values(NamedTuple):
    """A thread's accumulators, and P and dS of the tile in 16 bits."""

    s: cute.Tensor
    dp: cute.Tensor
    dv: cute.Tensor
    dk: cute.Tensor
    dq: cute.Tensor
    p: cute.Tensor
    ds: cute.Tensor


class Parts(NamedTuple):
    """A thread's part of what it reads and writes itself."""

    lse: cute.Tensor
    delta: cute.Tensor
    copy: Any
    p: cute.Tensor
    ds: cute.Tensor


class Backward:
    """The kernel for one config and one set of features."""

    def __init__(self, features: BackwardFeatures, config: BackwardConfig) -> None:
        self.features, self.config = features, config
        self.dtype = DTYPES[features.dtype]
        self.tile_m, self.tile_n = config.tile_m, config.tile_n
        self.width, self.value_width = backward_widths(features)
        self.by_keys, self.by_warps = config.by_keys, config.adders == "warps"
        # Tiles of keys differ in their queries, or one waits for another, which must have been begun.
        self.counted = features.right or features.left or features.deterministic
        self.sloped = features.softcap  # P is multiplied by what the change of scores does to their gradient
        self.k_tile, self.v_tile = (self.tile_n, self.width), (self.tile_n, self.value_width)
        self.q_tile, self.do_tile = (self.tile_m, self.width), (self.tile_m, self.value_width)
        self.s_tile = (self.tile_n, self.tile_m)
        # As dQ takes it, where nothing else reads it.
        self.ds_tile = (self.tile_m, self.tile_n) if self.by_keys else self.s_tile
        self.dq_elements = self.tile_m * self.width // _GROUPS  # of a group
        self.beside_queries = 0  # bytes of what comes with a tile of Q
        self.beside_bytes = 0  # and of its ring

    def layouts(self) -> tuple[cute.ComposedLayout, ...]:
        """In shared memory: of Q, K, V, dO, and of dS^T and P^T.

        What is swizzled together must not be torn apart by the columns of the two groups.
        """
        columns = 1 if self.by_keys else _GROUPS
        of_k = _GROUPS if self.config.dq_split == "columns" else 1

        def ring(tile: tuple[int, int], stages: int, parts: int) -> cute.ComposedLayout:
            kinds = warpgroup.SmemLayoutAtomKind
            sizes = ((64, kinds.K_SW128), (32, kinds.K_SW64), (16, kinds.K_SW32))
            kind = next(kind for size, kind in sizes if tile[1] // parts % size == 0)
            return cute.tile_to_shape(sm90.make_smem_layout_atom(kind, self.dtype), (*tile, stages), order=(0, 1, 2))

        return (
            ring(self.q_tile, STAGES, columns),
            ring(self.k_tile, 1, of_k),
            ring(self.v_tile, 1, columns),
            ring(self.do_tile, STAGES, columns),
            ring(self.ds_tile, STAGES, 1),
        )

    def products(self) -> Products:
        """The products of both groups."""
        k_major, mn_major = OperandMajorMode.K, OperandMajorMode.MN
        shared, registers = warpgroup.OperandSource.SMEM, warpgroup.OperandSource.RMEM
        by_rows, by_columns = (_GROUPS, 1, 1), (1, _GROUPS, 1)

        def product(a_major: Any, b_major: Any, groups: tuple[int, int, int], columns: int, a: Any) -> cute.TiledMma:
            return sm90.make_trivial_tiled_mma(
                self.dtype, self.dtype, a_major, b_major, Float32, groups, (SLAB, columns), a_source=a
            )

        ds_major = k_major if self.by_keys else mn_major
        if self.config.dq_split == "columns":
            dq = product(ds_major, mn_major, by_columns, self.width // _GROUPS, shared)
        else:
            dq = product(ds_major, mn_major, by_rows, self.width, shared)
        if not self.by_keys:
            return Products(
                product(k_major, k_major, by_columns, self.tile_m // _GROUPS, shared),
                product(k_major, mn_major, by_columns, self.value_width // _GROUPS, shared),
                product(k_major, mn_major, by_columns, self.width // _GROUPS, shared),
                dq,
            )
        return Products(
            product(k_major, k_major, by_rows, self.tile_m, shared),
            product(k_major, mn_major, by_rows, self.value_width, registers),
            product(k_major, mn_major, by_rows, self.width, registers),
            dq,
        )

    def fake_arguments(self) -> tuple[Any, ...]:
        """Arguments of any sizes and strides, for the compiler."""
        features = self.features
        batch, q_heads, kv_heads, q_len, kv_len, padded = (cute.sym_int() for _ in range(6))

        def operand(heads: Any, length: Any, width: int) -> cute.Tensor:
            strides = [cute.sym_int64(divisibility=8) for _ in range(3)]
            return cute.runtime.make_fake_tensor(
                self.dtype, (batch, heads, length, width), (*strides, 1), assumed_align=16
            )

        def rows() -> cute.Tensor:
            strides = (cute.sym_int64(divisibility=4), cute.sym_int64(divisibility=4), 1)
            return cute.runtime.make_fake_tensor(Float32, (batch, q_heads, padded), strides, assumed_align=16)

        d, dv = features.head_dim, features.value_dim
        return (
            operand(q_heads, q_len, d),
            operand(kv_heads, kv_len, d),
            operand(kv_heads, kv_len, dv),
            operand(q_heads, q_len, dv),
            rows(),
            rows(),
            operand(kv_heads, kv_len, d),
            operand(kv_heads, kv_len, dv),
            cute.runtime.make_fake_tensor(Float32, (cute.sym_int64(),), (1,), assumed_align=16),
            Float32(1.0),
            Float32(1.0) if features.softcap else None,
            Int32(0) if features.right else None,
            Int32(0) if features.left else None,
            Int32(132),
            cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
        )

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        do: cute.Tensor,
        lse: cute.Tensor,
        delta: cute.Tensor,
        dk: cute.Tensor,
        dv: cute.Tensor,
        dq: cute.Tensor,
        scale: Float32,
        softcap: Float32 | None,
        right: Int32 | None,
        left: Int32 | None,
        programs: Int32,
        stream: cuda.CUstream,
    ) -> None:
        """Launches the kernel.

        ``[B, H, S, D]`` tensors of any strides. ``dq`` has :func:`.configs.backward_workspace` elements, which are 0.
        ``programs`` is the number of SMs.
        """
        c, cap = scale * LOG2_E, None
        if const_expr(softcap is not None):
            c, cap = softcap * LOG2_E, 2.0 * c / softcap
        self.start(q, k, v, do, lse, delta, dk, dv, dq, scale, c, cap, right, left, programs, stream, None)

    @cute.jit
    def start(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        do: cute.Tensor,
        lse: cute.Tensor,
        delta: cute.Tensor,
        dk: cute.Tensor,
        dv: cute.Tensor,
        dq: cute.Tensor,
        scale: Float32,
        c: Float32,
        cap: Float32 | None,
        right: Int32 | None,
        left: Int32 | None,
        programs: Int32,
        stream: cuda.CUstream,
        more: Any,
    ) -> None:
        """Launches the kernel: descriptors, the order of tiles, the grid. ``more`` is for kernels made of this one."""
        batch, heads, kv_heads = q.shape[0], q.shape[1], k.shape[1]
        q_len, kv_len = q.shape[2], k.shape[2]
        q, k, v, do, dk, dv = (
            cute.make_tensor(t.iterator, cute.select(t.layout, mode=[2, 3, 1, 0])) for t in (q, k, v, do, dk, dv)
        )
        q_layout, k_layout, v_layout, do_layout, ds_layout = self.layouts()
        read, write = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()

        def moved(op: Any, tensor: cute.Tensor, layout: cute.ComposedLayout, tile: tuple[int, int]) -> Moved:
            return Moved(*cpasync.make_tiled_tma_atom(op, tensor, cute.select(layout, mode=[0, 1]), tile))

        ds_elements = cute.cosize(ds_layout)
        p_elements, dq_elements = ds_elements, 0
        if const_expr(self.by_keys):
            p_elements = 0
        if const_expr(not self.config.direct):
            # dV goes out through it.
            dq_elements = max(_GROUPS * self.dq_elements, self.tile_n * self.value_width // 2)

        @cute.struct
        class Storage:
            kv_barriers: cute.struct.MemRange[Int64, 4]
            q_barriers: cute.struct.MemRange[Int64, 2 * STAGES]
            do_barriers: cute.struct.MemRange[Int64, 2 * STAGES]
            ds_barriers: cute.struct.MemRange[Int64, STAGES]
            next_tile: cute.struct.MemRange[Int32, 4]
            visits: cute.struct.MemRange[Int32, _WORDS * STAGES]
            lse: cute.struct.Align[cute.struct.MemRange[Float32, STAGES * self.tile_m], 128]
            delta: cute.struct.Align[cute.struct.MemRange[Float32, STAGES * self.tile_m], 128]
            k: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(k_layout)], 1024]
            v: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(v_layout)], 1024]
            q: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(q_layout)], 1024]
            do: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(do_layout)], 1024]
            ds: cute.struct.Align[cute.struct.MemRange[self.dtype, ds_elements], 1024]
            p: cute.struct.Align[cute.struct.MemRange[self.dtype, p_elements], 1024]
            dq: cute.struct.Align[cute.struct.MemRange[Float32, dq_elements], 1024]
            beside: cute.struct.Align[cute.struct.MemRange[cutlass.Uint8, self.beside_bytes], 1024]

        self.storage = Storage
        n_tiles, m_tiles = cute.ceil_div(kv_len, self.tile_n), cute.ceil_div(q_len, self.tile_m)
        group = heads // kv_heads
        bytes_of_query = 2 * (self.features.head_dim + self.features.value_dim) + 4 * self.width
        order = schedule.make_order(n_tiles, kv_heads, kv_heads, batch, Int64(q_len) * group * bytes_of_query)
        slots = Int64(batch * heads) * m_tiles * _GROUPS
        whole = cute.recast_ptr(dq.iterator + slots * self.dq_elements, dtype=Int32)
        turns = whole if const_expr(self.features.deterministic) else None
        counter = whole + slots if const_expr(self.features.deterministic) else whole
        self.kernel(
            self.products(),
            moved(read, q, q_layout, self.q_tile),
            moved(read, k, k_layout, self.k_tile),
            moved(read, v, v_layout, self.v_tile),
            moved(read, do, do_layout, self.do_tile),
            moved(write, dk, k_layout, self.k_tile),
            moved(write, dv, v_layout, self.v_tile),
            self.moved_rows(lse),
            self.moved_rows(delta),
            sums.Sums(dq.iterator, turns),
            cute.make_tensor(counter, cute.make_layout(1)) if const_expr(self.counted) else None,
            scale,
            c,
            cap,
            Limits(q_len, kv_len, right, left),
            order,
            group,
            m_tiles,
            more,
        ).launch(
            grid=(cutlass.min(programs, order.total), 1, 1),
            block=(WARP_GROUP * (_GROUPS + 1), 1, 1),
            stream=stream,
            min_blocks_per_mp=1,
        )

    def moved_rows(self, tensor: cute.Tensor) -> Moved:
        """A number of each query, [B, H, S], with its TMA descriptor."""
        read = cpasync.CopyBulkTensorTileG2SOp()
        by_query = cute.make_tensor(tensor.iterator, cute.select(tensor.layout, mode=[2, 1, 0]))
        return Moved(*cpasync.make_tiled_tma_atom(read, by_query, cute.make_layout(self.tile_m), (self.tile_m,)))

    @cute.kernel
    def kernel(
        self,
        products: Products,
        q: Moved,
        k: Moved,
        v: Moved,
        do: Moved,
        dk: Moved,
        dv: Moved,
        lse: Moved,
        delta: Moved,
        dq: sums.Sums,
        counter: cute.Tensor | None,
        scale: Float32,
        c: Float32,
        cap: Float32 | None,
        limits: Limits,
        order: schedule.TileOrder,
        group: Int32,
        m_tiles: Int32,
        more: Any,
    ) -> None:
        self.more = more
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        storage = cutlass.utils.SmemAllocator().allocate(self.storage)
        self.beside = storage.beside
        q_layout, k_layout, v_layout, do_layout, ds_layout = self.layouts()
        vectors = cute.make_layout((self.tile_m, STAGES))
        s_ds = storage.ds.get_tensor(ds_layout.outer, swizzle=ds_layout.inner)
        s_p = s_ds
        if const_expr(not self.by_keys):
            s_p = storage.p.get_tensor(ds_layout.outer, swizzle=ds_layout.inner)
        s_k = storage.k.get_tensor(k_layout.outer, swizzle=k_layout.inner)
        s_v = storage.v.get_tensor(v_layout.outer, swizzle=v_layout.inner)
        s_dk, s_dv = s_k, s_v
        if const_expr(not self.config.direct):
            s_dk = cute.make_tensor(cute.recast_ptr(storage.ds.data_ptr(), k_layout.inner, self.dtype), k_layout.outer)
            s_dv = cute.make_tensor(cute.recast_ptr(storage.dq.data_ptr(), v_layout.inner, self.dtype), v_layout.outer)
        shared = Shared(
            storage.q.get_tensor(q_layout.outer, swizzle=q_layout.inner),
            s_k,
            s_v,
            storage.do.get_tensor(do_layout.outer, swizzle=do_layout.inner),
            s_ds,
            s_p,
            storage.lse.get_tensor(vectors),
            storage.delta.get_tensor(vectors),
            storage.next_tile.get_tensor(cute.make_layout(2)),
            s_dk,
            s_dv,
            storage.ds_barriers.data_ptr(),
            storage.visits.get_tensor(cute.make_layout((_WORDS, STAGES))),
        )
        if warp_index == 0:
            for moved in (q, k, v, do, dk, dv, lse, delta):
                cpasync.prefetch_descriptor(moved.atom)
        consumers, row_bytes = WARP_GROUP // 32 * _GROUPS, self.tile_m * 4
        q_bytes = self.bytes_of(self.q_tile) + row_bytes + self.beside_queries
        adders = _GROUPS if self.features.deterministic else 0
        pipes = Pipes(
            self.pipe(storage.q_barriers.data_ptr(), STAGES, q_bytes, consumers),
            self.pipe(storage.do_barriers.data_ptr(), STAGES, self.bytes_of(self.do_tile) + row_bytes, consumers),
            self.pipe(storage.kv_barriers.data_ptr(), 1, self.bytes_of(self.k_tile), consumers + adders),
            self.pipe(storage.kv_barriers.data_ptr() + 2, 1, self.bytes_of(self.v_tile), consumers),
        )
        if warp_index == 0:
            with cute.arch.elect_one():
                for stage in cutlass.range_constexpr(STAGES):
                    cute.arch.mbarrier_init(storage.ds_barriers.data_ptr() + stage, consumers)
        pipeline.pipeline_init_arrive(is_relaxed=True)
        pipeline.pipeline_init_wait()
        if warp_index < WARP_GROUP // 32:
            cute.arch.setmaxregister_decrease(_REGISTERS[0])
            if warp_index == 0:
                self.produce(q, k, v, do, lse, delta, shared, pipes, limits, order, group, counter)
            if const_expr(self.features.deterministic):  # noqa: SIM102 (joined, all would be decided when run)
                if warp_index >= _ADDERS:  # noqa: SIM102
                    if warp_index < _ADDERS + _GROUPS:
                        self.add(dq, storage.dq, shared.next_tile, pipes, limits, order, group, m_tiles, warp_index)
        else:
            cute.arch.setmaxregister_increase(_REGISTERS[1])
            self.consume(products, dk, dv, dq, shared, storage.dq, pipes, scale, c, cap, limits, order, group, m_tiles)

    def pipe(self, barriers: Any, stages: int, tx_count: int, warps: int) -> pipeline.PipelineTmaAsync:
        """A ring that one warp fills and so many free."""
        threads = pipeline.Agent.Thread
        return pipeline.PipelineTmaAsync.create(
            barrier_storage=barriers,
            num_stages=stages,
            producer_group=pipeline.CooperativeGroup(threads, 1),
            consumer_group=pipeline.CooperativeGroup(threads, warps),
            tx_count=tx_count,
            defer_sync=True,
        )

    # -------------------------------------------------------------------------------------- what all roles agree on

    def bytes_of(self, tile: tuple[int, int]) -> int:
        """Of a tile in 16 bits."""
        return tile[0] * tile[1] * self.dtype.width // 8

    def tile_of(self, order: schedule.TileOrder, index: Int32, limits: Limits) -> Tile:
        """A program's tile of keys by its number, and the queries that see some of it.

        Under causality the first keys have the most queries, and go first, unless the order of the sums is the other
        way.

        Where there are few tiles of queries, programs of one head would add to the same at the same time. There each
        starts at another one: 355 TFLOP/s against 340 at B32 S512. With many, reading the same together is worth more:
        597 against 585 at S8192.
        """
        tile = schedule.tile_at(order, index)
        n = tile.m_index
        if const_expr(not (self.features.deterministic and self.features.right)):
            n = order.m_tiles - 1 - n
        q_len, kv_len, right, left = limits
        seen = queries.query_tiles(n * self.tile_n, self.tile_m, self.tile_n, q_len, kv_len, right, left)
        start = seen.begin
        if const_expr(not self.features.deterministic):
            count, apart = seen.end - seen.begin, cutlass.max(n * self.tile_n // self.tile_m - seen.begin, 0)
            start += apart % cutlass.max(count, 1) * Int32(count <= APART)
        return Tile(n, tile.batch, tile.kv_head, seen.begin, seen.end, start)

    @cute.jit
    def awaited_tile(
        self, next_tile: cute.Tensor, k_pipe: pipeline.PipelineTmaAsync, state: pipeline.PipelineState
    ) -> Int32:
        """The number of the next tile, with which its K has come."""
        k_pipe.consumer_wait(state)
        return self.number(next_tile)

    @cute.jit
    def number(self, next_tile: cute.Tensor, word: cutlass.Constexpr = 0) -> Int32:
        """The number that was left with K, or how many visits there are."""
        index = Int32(0)
        if cute.arch.lane_idx() == 0:  # the lane that frees the place
            index = next_tile[word]
        return cute.arch.shuffle_sync(index, 0)

    def visits_of(self, tile: Tile, next_tile: cute.Tensor, group: Int32) -> Int32:
        """How many tiles of queries a tile of keys visits, of all heads."""
        return (tile.end - tile.begin) * group

    def of_head(self, tile: Tile, head: Int32) -> OfHead:
        """How many of them are of a query head."""
        return OfHead(tile.end - tile.begin, None)

    @cute.jit
    def visited(self, tile: Tile, head: Int32, of_head: OfHead, i: Int32) -> tuple[Int32, Boolean | None]:
        """The i-th of a query head, and whether mods hide some of it."""
        m = tile.start + i
        if m >= tile.end:
            m -= tile.end - tile.begin
        return m, None

    @cute.jit
    def following(self, tile: Tile, m: Int32, pair: Int32) -> tuple[Int32, Int32]:
        """What is visited after a tile of queries of a pair of batch and head."""
        next_m, next_pair = m + 1, pair
        if next_m == tile.end:
            next_m = tile.begin
        if next_m == tile.start:
            next_pair = pair + 1
        return next_m, next_pair

    def visit_in(self, visits: cute.Tensor, stage: Int32, m: Int32, pair: Int32, first_key: Int32) -> Visit:
        """The visit whose Q is in a stage: what :meth:`following` said."""
        return Visit(m, pair, first_key)

    def before(self, tile: Tile, m: Int32, limits: Limits) -> Int32:
        """How many programs add to a tile of queries before this one."""
        _, kv_len, right, left = limits
        return queries.tiles_before(m * self.tile_m, self.tile_m, tile.n, self.tile_n, kv_len, right, left)

    def views(
        self, moved: Moved, tile: tuple[int, int], shared: cute.Tensor, head: Int32, batch: Int32
    ) -> tuple[cute.Tensor, cute.Tensor]:
        """What a copy moves: in shared memory [part, stage], globally [part, tile]."""
        tiles = cute.local_tile(moved.tensor[None, None, head, batch], tile, (None, 0))
        grouped = cute.group_modes(shared, 0, 2), cute.group_modes(tiles, 0, 2)
        return cpasync.tma_partition(moved.atom, 0, cute.make_layout(1), *grouped)

    def row_views(
        self, moved: Moved, shared: cute.Tensor, head: Int32, batch: Int32
    ) -> tuple[cute.Tensor, cute.Tensor]:
        """The same for a number of each query."""
        tiles = cute.local_tile(moved.tensor[None, head, batch], (self.tile_m,), (None,))
        return cpasync.tma_partition(moved.atom, 0, cute.make_layout(1), shared, tiles)

    # ------------------------------------------------------------------------------------------------ the producer

    @cute.jit
    def produce(
        self,
        q: Moved,
        k: Moved,
        v: Moved,
        do: Moved,
        lse: Moved,
        delta: Moved,
        shared: Shared,
        pipes: Pipes,
        limits: Limits,
        order: schedule.TileOrder,
        group: Int32,
        counter: cute.Tensor | None,
    ) -> None:
        """Loads K and V once a tile, and Q with lse, dO with delta of every visited tile of queries.

        A tile's number goes along with its K, and the number past the last tile, which ends the program, without.
        """
        q_pipe, do_pipe, k_pipe, v_pipe = pipes
        kind = pipeline.PipelineUserType.Producer
        once = pipeline.make_pipeline_state(kind, 1)
        state = pipeline.make_pipeline_state(kind, STAGES)
        index = cute.arch.block_idx()[0]
        if const_expr(self.features.deterministic):
            index = schedule.claim(counter.iterator)
        while index < order.total:
            tile = self.tile_of(order, index, limits)
            self.announce(index, shared.next_tile, k_pipe, once, self.counted_visits(tile, group))
            self.load(k.atom, self.views(k, self.k_tile, shared.k, tile.kv_head, tile.batch), tile.n, k_pipe, once)
            v_due = Boolean(True)
            for g in cutlass.range(group, unroll=1):
                head = tile.kv_head * group + g
                q_views = self.views(q, self.q_tile, shared.q, head, tile.batch)
                do_views = self.views(do, self.do_tile, shared.do, head, tile.batch)
                lse_views = self.row_views(lse, shared.lse, head, tile.batch)
                delta_views = self.row_views(delta, shared.delta, head, tile.batch)
                of_head = self.of_head(tile, head)
                for i in cutlass.range(of_head.count, unroll=1):
                    m, masked = self.visited(tile, head, of_head, i)
                    self.leave_visit(shared.visits, order, tile, group, head, m, masked, q_pipe, state)
                    self.load_with_rows(q, q_views, lse, lse_views, m, q_pipe, state)
                    if const_expr(self.beside_queries):
                        barrier = q_pipe.producer_get_barrier(state)
                        self.load_beside(head, tile.batch, tile.n, m, barrier, state.index)
                    if v_due:
                        v_views = self.views(v, self.v_tile, shared.v, tile.kv_head, tile.batch)
                        self.load(v.atom, v_views, tile.n, v_pipe, once)
                        v_due = Boolean(False)
                    self.load_with_rows(do, do_views, delta, delta_views, m, do_pipe, state)
                    state.advance()
            if v_due:
                v_views = self.views(v, self.v_tile, shared.v, tile.kv_head, tile.batch)
                self.load(v.atom, v_views, tile.n, v_pipe, once)
            once.advance()
            if const_expr(self.features.deterministic):
                index = schedule.claim(counter.iterator)
            else:
                index = schedule.next_index(index, cute.arch.grid_dim()[0], counter, Int32(1))
        self.announce(index, shared.next_tile, k_pipe, once, None)
        if cute.arch.lane_idx() == 0:
            cute.arch.mbarrier_arrive(k_pipe.producer_get_barrier(once))

    @cute.jit
    def announce(
        self,
        index: Int32,
        next_tile: cute.Tensor,
        k_pipe: pipeline.PipelineTmaAsync,
        once: pipeline.PipelineState,
        visits: Int32 | None,
    ) -> None:
        """Leaves a tile's number, and how many visits it has where they are counted, once the K before is done with."""
        k_pipe.sync_object_empty.wait(once.index, once.phase)
        if cute.arch.lane_idx() == 0:
            next_tile[0] = index
            if const_expr(visits is not None):
                next_tile[1] = visits
        cute.arch.sync_warp()

    def counted_visits(self, tile: Tile, group: Int32) -> Int32 | None:
        """The visits of a tile, where the consumers do not know them by themselves."""
        return None

    def leave_visit(
        self, visits: cute.Tensor, order: schedule.TileOrder, tile: Tile, group: Int32, head: Int32, m: Int32,
        masked: Boolean | None, q_pipe: pipeline.PipelineTmaAsync, state: pipeline.PipelineState,
    ) -> None:  # fmt: skip
        """Leaves a visit with its Q, where the consumers do not know it by themselves."""

    @cute.jit
    def load(
        self,
        atom: cute.CopyAtom,
        views: tuple[cute.Tensor, cute.Tensor],
        n: Int32,
        pipe: pipeline.PipelineTmaAsync,
        state: pipeline.PipelineState,
    ) -> None:
        """Loads a tile into a stage once that is free."""
        pipe.producer_acquire(state)
        cute.copy(atom, views[1][None, n], views[0][None, state.index], tma_bar_ptr=pipe.producer_get_barrier(state))

    @cute.jit
    def load_with_rows(
        self,
        tiles: Moved,
        views: tuple[cute.Tensor, cute.Tensor],
        rows: Moved,
        row_views: tuple[cute.Tensor, cute.Tensor],
        m: Int32,
        pipe: pipeline.PipelineTmaAsync,
        state: pipeline.PipelineState,
    ) -> None:
        """The same for a tile of queries and a number of each."""
        self.load(tiles.atom, views, m, pipe, state)
        barrier = pipe.producer_get_barrier(state)
        cute.copy(rows.atom, row_views[1][None, m], row_views[0][None, state.index], tma_bar_ptr=barrier)

    def load_beside(self, head: Int32, batch: Int32, n: Int32, m: Int32, barrier: cute.Pointer, stage: Int32) -> None:
        """Loads what comes with a visit's Q."""

    # ----------------------------------------------------------------------------------------------- the consumers

    @cute.jit
    def add(
        self,
        dq: sums.Sums,
        dq_memory: Any,
        next_tile: cute.Tensor,
        pipes: Pipes,
        limits: Limits,
        order: schedule.TileOrder,
        group: Int32,
        m_tiles: Int32,
        warp_index: Int32,
    ) -> None:
        """A group's adder: adds what the group makes of dQ, or tells it when to, visit by visit."""
        _, _, k_pipe, _ = pipes
        warp_group = warp_index - _ADDERS
        own = None
        if const_expr(not self.config.direct):
            own = dq_memory.data_ptr() + cute.assume(warp_group * self.dq_elements, divby=256)
        once = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, 1)
        index = self.awaited_tile(next_tile, k_pipe, once)
        while index < order.total:
            tile = self.tile_of(order, index, limits)
            k_pipe.consumer_release(once)
            once.advance()
            if const_expr(own is not None):  # noqa: SIM102 (joined, both would be decided when run)
                if tile.begin < tile.end:
                    sums.let_go_on(warp_group)
            for g in cutlass.range(group, unroll=1):
                head = Int64((tile.batch * order.heads.divisor + tile.kv_head) * group + g)
                for m in cutlass.range(tile.begin, tile.end, unroll=1):
                    slot = (head * m_tiles + m) * _GROUPS + warp_group
                    before = self.before(tile, m, limits)
                    if const_expr(own is None):
                        sums.let_add(dq, slot, before, warp_group)
                    else:
                        sums.deliver(own, self.dq_elements, dq, slot, before, warp_group)
            index = self.awaited_tile(next_tile, k_pipe, once)

    @cute.jit
    def consume(
        self,
        products: Products,
        dk: Moved,
        dv: Moved,
        dq: sums.Sums,
        shared: Shared,
        dq_memory: Any,
        pipes: Pipes,
        scale: Float32,
        c: Float32,
        cap: Float32 | None,
        limits: Limits,
        order: schedule.TileOrder,
        group: Int32,
        m_tiles: Int32,
    ) -> None:
        """One group's share of all visits."""
        q_pipe, do_pipe, k_pipe, v_pipe = pipes
        thread = cute.arch.thread_idx()[0] - WARP_GROUP
        warp_group = cute.arch.make_warp_uniform(thread // WARP_GROUP)
        operands, values, parts = self.registers(products, shared, thread, warp_group)
        own = None
        if const_expr(not self.config.direct):
            own = dq_memory.data_ptr() + cute.assume(warp_group * self.dq_elements, divby=256)
        kind = pipeline.PipelineUserType.Consumer
        once = pipeline.make_pipeline_state(kind, 1)
        state = pipeline.make_pipeline_state(kind, STAGES)
        index = self.awaited_tile(shared.next_tile, k_pipe, once)
        while index < order.total:
            tile = self.tile_of(order, index, limits)
            values.dv.fill(0.0)
            values.dk.fill(0.0)
            first_key, m = tile.n * self.tile_n, tile.start
            pair = (tile.batch * order.heads.divisor + tile.kv_head) * group
            visits = self.visits_of(tile, shared.next_tile, group)
            if visits > 0:
                self.issue_arrived(products.s, values.s, operands.k, operands.q, q_pipe, state)
                warpgroup.wait_group(0)
                at = self.visit_in(shared.visits, state.index, m, pair, first_key)
                self.exponentials(products.s, values, parts, state.index, c, cap, limits, at, thread)
                v_pipe.consumer_wait(once)
                self.issue_arrived(products.s, values.dp, operands.v, operands.do, do_pipe, state)
                self.await_stores()
                for _ in cutlass.range(visits - 1, unroll=1):
                    at = self.visit_in(shared.visits, state.index, m, pair, first_key)
                    slot = (Int64(at.pair) * m_tiles + at.m) * _GROUPS + warp_group
                    m, pair = self.following(tile, m, pair)
                    ahead = state.clone()
                    ahead.advance()
                    self.visit(
                        products, operands, values, parts, shared, dq, own, slot, at, q_pipe, do_pipe, state, ahead, c,
                        cap, limits, m, pair, first_key, thread, warp_group, True,
                    )  # fmt: skip
                    state = ahead
                at = self.visit_in(shared.visits, state.index, m, pair, first_key)
                slot = (Int64(at.pair) * m_tiles + at.m) * _GROUPS + warp_group
                self.visit(
                    products, operands, values, parts, shared, dq, own, slot, at, q_pipe, do_pipe, state, state, c,
                    cap, limits, m, pair, first_key, thread, warp_group, False,
                )  # fmt: skip
                state.advance()
            else:
                v_pipe.consumer_wait(once)
                self.await_stores()
            # Kept in registers through all visits, it would cost more.
            tile = self.tile_of(order, self.number(shared.next_tile), limits)
            if const_expr(not self.config.direct):
                v_pipe.consumer_release(once)
                if visits > 0:
                    sums.await_memory(dq, warp_group, self.by_warps)
                k_pipe.consumer_release(once)
            self.store(products, values, shared, dk, dv, scale, tile, wgmma.anchored(thread, tile.n))
            if const_expr(self.config.direct):
                self.await_stores()
                k_pipe.consumer_release(once)
                v_pipe.consumer_release(once)
            once.advance()
            index = self.awaited_tile(shared.next_tile, k_pipe, once)
        cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def await_stores(self) -> None:
        """Both groups wait until dK and dV of the tile before have left the memory they go out through."""
        cute.arch.cp_async_bulk_wait_group(0, read=True)  # only who issued them has something to wait for
        cute.arch.barrier(barrier_id=_BOTH, number_of_threads=_GROUPS * WARP_GROUP)

    def registers(
        self, products: Products, shared: Shared, thread: Int32, warp_group: Int32
    ) -> tuple[Operands, Values, Parts]:
        """A group's operands, a thread's registers, and what it reads and writes."""
        first = warp_group * WARP_GROUP
        of_s, of_dv, of_dk, of_dq = (mma.get_slice(first) for mma in products)

        def transposed(tensor: cute.Tensor) -> cute.Tensor:
            return cute.make_tensor(tensor.iterator, cute.select(tensor.layout, mode=[1, 0, 2]))

        def rmem(of: Any, shape: tuple[int, int]) -> cute.Tensor:
            return cute.make_rmem_tensor(of.partition_shape_C(shape), Float32)

        s, dp = rmem(of_s, self.s_tile), rmem(of_s, self.s_tile)
        dq = rmem(of_dq, self.q_tile)
        if cute.size(dq) == cute.size(dp):
            dq = cute.make_tensor(dp.iterator, dq.layout)
        ds_of_queries = shared.ds if self.by_keys else transposed(shared.ds)
        if self.by_keys:
            p, ds = (of.make_fragment_A(of.partition_shape_A(self.s_tile)) for of in (of_dv, of_dk))
            dv_a, dk_a = p, ds
        else:
            p, ds = (cute.make_rmem_tensor(s.layout, self.dtype) for _ in range(2))
            dv_a = of_dv.make_fragment_A(of_dv.partition_A(shared.p))
            dk_a = of_dk.make_fragment_A(of_dk.partition_A(shared.ds))
        values = Values(s, dp, rmem(of_dv, self.v_tile), rmem(of_dk, self.k_tile), dq, p, ds)
        operands = Operands(
            of_s.make_fragment_A(of_s.partition_A(shared.k))[None, None, None, 0],
            of_s.make_fragment_B(of_s.partition_B(shared.q)),
            of_s.make_fragment_A(of_s.partition_A(shared.v))[None, None, None, 0],
            of_s.make_fragment_B(of_s.partition_B(shared.do)),
            dv_a,
            of_dv.make_fragment_B(of_dv.partition_B(transposed(shared.do))),
            dk_a,
            of_dk.make_fragment_B(of_dk.partition_B(transposed(shared.q))),
            of_dq.make_fragment_A(of_dq.partition_A(ds_of_queries)),
            of_dq.make_fragment_B(of_dq.partition_B(transposed(shared.k)))[None, None, None, 0],
        )
        of_thread = products.s.get_slice(thread)
        by_column = cute.make_layout((self.tile_n, self.tile_m, STAGES), stride=(0, 1, self.tile_m))
        atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(transpose=self.by_keys, num_matrices=4), self.dtype)
        copy = cute.make_tiled_copy_C(atom, products.s).get_slice(thread)
        s_ds = copy.partition_D(transposed(shared.ds) if self.by_keys else shared.ds)
        parts = Parts(
            of_thread.partition_C(cute.make_tensor(shared.lse.iterator, by_column)),
            of_thread.partition_C(cute.make_tensor(shared.delta.iterator, by_column)),
            copy,
            s_ds if self.by_keys else copy.partition_D(shared.p),
            s_ds,
        )
        return operands, values, parts

    @cute.jit
    def visit(
        self,
        products: Products,
        operands: Operands,
        values: Values,
        parts: Parts,
        shared: Shared,
        dq: sums.Sums,
        own: cute.Pointer | None,
        slot: Int64,
        at_hand: Visit,
        q_pipe: pipeline.PipelineTmaAsync,
        do_pipe: pipeline.PipelineTmaAsync,
        state: pipeline.PipelineState,
        ahead: pipeline.PipelineState,
        c: Float32,
        cap: Float32 | None,
        limits: Limits,
        m: Int32,
        pair: Int32,
        first_key: Int32,
        thread: Int32,
        warp_group: Int32,
        more: cutlass.Constexpr,
    ) -> None:
        """The rest of one tile of queries, whose P is there and whose dP is under way, and the next one's P.

        ``m`` and ``pair`` are the next one's, as :meth:`visit_in` takes them; ``at_hand`` is this one.
        """
        stage = state.index
        warpgroup.wait_group(0)
        self.gradients(values, parts, stage)
        self.share(values, parts, stage, shared.ds_written)
        self.learn(products.s, values, at_hand, thread)
        overlaps = more and not self.sloped  # slopes take the registers that this tile's products read
        p, ds, do_t = operands.p, operands.ds, operands.do_t[None, None, None, stage]
        if const_expr(not self.by_keys):
            p, ds = p[None, None, None, stage], ds[None, None, None, stage]
        q_t, ds_t = operands.q_t[None, None, None, stage], operands.ds_t[None, None, None, stage]
        under_way = 0  # products issued after dQ
        if const_expr(self.by_keys):
            if const_expr(overlaps):
                self.issue_arrived(products.s, values.s, operands.k, operands.q, q_pipe, ahead)
            wgmma.issue(products.dv, values.dv, p, do_t, Boolean(True))
            wgmma.issue(products.dk, values.dk, ds, q_t, Boolean(True))
            if const_expr(overlaps):
                warpgroup.wait_group(2)
                at = self.visit_in(shared.visits, ahead.index, m, pair, first_key)
                self.exponentials(products.s, values, parts, ahead.index, c, cap, limits, at, thread)
            warpgroup.wait_group(1)
            self.release(do_pipe, state)
            cute.arch.mbarrier_wait(shared.ds_written + stage, state.phase)
            wgmma.issue(products.dq, values.dq, ds_t, operands.k_t, Boolean(False))
            warpgroup.wait_group(1)
            self.release(q_pipe, state)
        else:
            wgmma.issue(products.dv, values.dv, p, do_t, Boolean(True))
            wgmma.issue(products.dq, values.dq, ds_t, operands.k_t, Boolean(False))
            warpgroup.wait_group(1)
            self.release(do_pipe, state)
            wgmma.issue(products.dk, values.dk, ds, q_t, Boolean(True))
            under_way = 1
            if const_expr(overlaps):
                self.issue_arrived(products.s, values.s, operands.k, operands.q, q_pipe, ahead)
                under_way = 2
        if const_expr(own is not None):
            sums.await_memory(dq, warp_group, self.by_warps)
            warpgroup.wait_group(under_way)
            sums.write(values.dq, own, thread % WARP_GROUP)
        else:
            warpgroup.wait_group(under_way)
            sums.add(values.dq, dq, slot, warp_group, thread % WARP_GROUP)
        if const_expr(not self.by_keys and not overlaps):
            warpgroup.wait_group(0)
            self.release(q_pipe, state)
        if const_expr(more and not overlaps):
            self.issue_arrived(products.s, values.s, operands.k, operands.q, q_pipe, ahead)
            warpgroup.wait_group(0)
            at = self.visit_in(shared.visits, ahead.index, m, pair, first_key)
            self.exponentials(products.s, values, parts, ahead.index, c, cap, limits, at, thread)
        if const_expr(more):
            self.issue_arrived(products.s, values.dp, operands.v, operands.do, do_pipe, ahead)
        if const_expr(own is not None):
            sums.hand_over(own, self.dq_elements, dq, slot, warp_group, thread % WARP_GROUP, self.by_warps)
        if const_expr(not self.by_keys and overlaps):
            warpgroup.wait_group(2)
            self.release(q_pipe, state)
            warpgroup.wait_group(1)
            at = self.visit_in(shared.visits, ahead.index, m, pair, first_key)
            self.exponentials(products.s, values, parts, ahead.index, c, cap, limits, at, thread)

    def learn(self, mma: cute.TiledMma, values: Values, at: Visit, thread: Int32) -> None:
        """What else is made of a visit's dS, which is where dP was."""

    @cute.jit
    def issue_arrived(
        self,
        mma: cute.TiledMma,
        acc: cute.Tensor,
        a: cute.Tensor,
        ring: cute.Tensor,
        pipe: pipeline.PipelineTmaAsync,
        state: pipeline.PipelineState,
    ) -> None:
        """Issues the product of K or V with a tile of its ring once that has come: S or dP."""
        pipe.consumer_wait(state)
        wgmma.issue(mma, acc, a, ring[None, None, None, state.index], Boolean(False))

    @cute.jit
    def exponentials(
        self,
        mma: cute.TiledMma,
        values: Values,
        parts: Parts,
        stage: Int32,
        c: Float32,
        cap: Float32 | None,
        limits: Limits,
        at: Visit,
        thread: Int32,
    ) -> None:
        """Turns S into P; with slopes into P times these, P itself then goes to its 16 bits already."""
        self.prepare(mma, values, cap, limits, at, thread)
        self.apply_mask(mma, values, stage, thread)
        self.powers(mma, values, parts, stage, c, thread)
        if const_expr(self.sloped):
            wgmma.to_operand(values.p, values.s, self.dtype)
            for e in cutlass.range_constexpr(cute.size(values.s) // 2):
                for i in cutlass.range_constexpr(2 * e, 2 * e + 2):
                    values.s[i] = self.weighed(values.s[i], values.dp[i])

    @cute.jit
    def powers(self, mma: cute.TiledMma, values: Values, parts: Parts, stage: Int32, c: Float32, thread: Int32) -> None:
        """P of scores."""
        scores, lses = wgmma.rows_view(values.s), self.of_columns(parts.lse, stage)
        for j in cutlass.range_constexpr(cute.size(scores, mode=[1])):
            for r in cutlass.range_constexpr(2):
                scores[r, j] = cute.math.exp2(scores[r, j] * c - lses[0, j], fastmath=True)

    def apply_mask(self, mma: cute.TiledMma, values: Values, stage: Int32, thread: Int32) -> None:
        """What the Q in a stage came with does to its scores."""

    def weighed(self, p: Float32, slope: Float32) -> Float32:
        """P times what the change of its score does to the gradient."""
        return p * slope

    @cute.jit
    def prepare(
        self, mma: cute.TiledMma, values: Values, cap: Float32 | None, limits: Limits, at: Visit, thread: Int32
    ) -> None:
        """What happens to scores before the exponentials: the cap, whose slopes go where dP will be, and the mask."""
        scores = wgmma.rows_view(values.s)
        if const_expr(cap is not None):
            softmax.cap_scores(scores, cap)
            softmax.cap_slopes(values.s, values.dp)
        _, kv_len, right, left = limits
        first_query, first_key = at.m * self.tile_m, at.first_key
        if not queries.all_seen(first_query, first_key, self.tile_m, self.tile_n, kv_len, right, left):
            queries.hide_keys(scores, self.coords(mma, thread, at), first_query, first_key, kv_len, right, left)

    def coords(self, mma: cute.TiledMma, thread: Int32, at: Visit) -> cute.Tensor:
        """(key, query) in the tile, of each of a thread's scores, computed where they are used."""
        of_thread = mma.get_slice(wgmma.anchored(thread, at.m))
        return wgmma.rows_view(of_thread.partition_C(cute.make_identity_tensor(self.s_tile)))

    @cute.jit
    def gradients(self, values: Values, parts: Parts, stage: Int32) -> None:
        """P and dS in 16 bits."""
        deltas = self.of_columns(parts.delta, stage)
        p, dp = wgmma.rows_view(values.s), wgmma.rows_view(values.dp)
        for block in cutlass.range_constexpr(cute.size(p, mode=[1]) // 2):  # four values, side by side
            for j in cutlass.range_constexpr(2 * block, 2 * block + 2):
                for r in cutlass.range_constexpr(2):
                    dp[r, j] = p[r, j] * (dp[r, j] - deltas[0, j])
            if const_expr(not self.sloped):
                self.four_to_operand(values.p, values.s, block)
            self.four_to_operand(values.ds, values.dp, block)

    @cute.jit
    def four_to_operand(self, operand: cute.Tensor, acc: cute.Tensor, block: cutlass.Constexpr) -> None:
        """Converts four values; in between the arithmetic, so that what they are made from need not be kept."""
        four = cute.make_layout(4)
        low = cute.make_tensor(operand.iterator + 4 * block, four)
        wgmma.to_operand(low, cute.make_tensor(acc.iterator + 4 * block, four), self.dtype)

    @cute.jit
    def share(self, values: Values, parts: Parts, stage: Int32, ds_written: cute.Pointer) -> None:
        """Writes dS^T, and P^T where the products do not take it from registers, for both groups."""
        ds = cute.make_tensor(values.ds.iterator, values.s.layout)
        cute.copy(parts.copy, parts.copy.retile(ds), parts.ds[None, None, None, stage])
        if const_expr(not self.by_keys):
            cute.copy(parts.copy, parts.copy.retile(values.p), parts.p[None, None, None, stage])
        cute.arch.fence_view_async_shared()
        if const_expr(self.by_keys):
            # The next product to read it is dQ, which comes late.
            cute.arch.sync_warp()
            if cute.arch.lane_idx() == 0:
                cute.arch.mbarrier_arrive(ds_written + stage)
        else:
            cute.arch.barrier(barrier_id=_BOTH, number_of_threads=_GROUPS * WARP_GROUP)

    @cute.jit
    def release(self, pipe: pipeline.PipelineTmaAsync, state: pipeline.PipelineState) -> None:
        """Frees a stage: one lane does for its warp, all of whose lanes have read lse or delta there."""
        cute.arch.sync_warp()
        pipe.consumer_release(state)

    def of_columns(self, tensor: cute.Tensor, stage: Int32) -> cute.Tensor:
        """The values of a thread's columns, in registers."""
        part = tensor[None, None, None, stage]
        values = cute.make_rmem_tensor_like(part)
        cute.autovec_copy(part, values)
        return wgmma.rows_view(values)

    # ----------------------------------------------------------------------------------------------- the epilogue

    @cute.jit
    def store(
        self,
        products: Products,
        values: Values,
        shared: Shared,
        dk: Moved,
        dv: Moved,
        scale: Float32,
        tile: Tile,
        thread: Int32,
    ) -> None:
        """Lets dK and dV out through memory that the products are done with, by TMA stores, which know the bounds."""
        for e in cutlass.range_constexpr(cute.size(values.dk) // 2):
            for i in cutlass.range_constexpr(2 * e, 2 * e + 2):
                values.dk[i] = values.dk[i] * scale
        both = {"barrier_id": _BOTH, "number_of_threads": _GROUPS * WARP_GROUP}
        cute.arch.barrier(**both)
        self.to_shared(products.dk, values.dk, shared.dk, thread)
        self.to_shared(products.dv, values.dv, shared.dv, thread)
        cute.arch.fence_view_async_shared()
        cute.arch.barrier(**both)
        if cute.arch.make_warp_uniform(thread // 32) == 0:
            s_part, g_part = self.views(dk, self.k_tile, shared.dk, tile.kv_head, tile.batch)
            cute.copy(dk.atom, s_part[None, 0], g_part[None, tile.n])
            s_part, g_part = self.views(dv, self.v_tile, shared.dv, tile.kv_head, tile.batch)
            cute.copy(dv.atom, s_part[None, 0], g_part[None, tile.n])
            cute.arch.cp_async_bulk_commit_group()

    @cute.jit
    def to_shared(self, mma: cute.TiledMma, acc: cute.Tensor, shared: cute.Tensor, thread: Int32) -> None:
        """An accumulator in 16 bits, to shared memory."""
        low = cute.make_rmem_tensor(acc.layout, self.dtype)
        wgmma.to_operand(low, acc, self.dtype)
        atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(transpose=False, num_matrices=4), self.dtype)
        copy = cute.make_tiled_copy_C(atom, mma).get_slice(thread)
        cute.copy(copy, copy.retile(low), copy.partition_D(shared[None, None, 0]))
