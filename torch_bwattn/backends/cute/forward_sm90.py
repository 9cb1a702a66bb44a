"""Attention forward for Hopper (sm_90a).

    S = Q K^T      x = log2(e) * (scale * S, or softcap * tanh(scale * S / softcap)), -inf where a key is not seen
    P = exp2(x - shift)      O = P V / l      lse = ln(2) * (shift + log2 l)      l = sum_j P_j + the sink's share

One CTA has a producer warp, which moves tiles by TMA, and ``tile_m / 64`` consumer warp groups of 64 query rows each.

    shared memory   Q  (64, D) for each consumer group, where its O goes out again unless O has memory of its own
                    K  (tile_n, D) and V  (tile_n, Dv), rings of ``num_stages`` tiles
    registers       S  (64, tile_n) and O  (64, Dv) in fp32, P  (64, tile_n) in 16 bits: the left operand of P V

While a tile's scores go through the softmax, the product of the previous tile's P with V runs, and so do the other
groups' products: with ``ping_pong`` the groups issue theirs in turns.

The rows of a tile are queries of one head, or, ``packed``, queries of all heads that share a key head.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.utils.hopper_helpers as sm90
from cutlass import Boolean, Float32, Int32, Int64, const_expr, cute, pipeline
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warp, warpgroup
from cutlass.utils import LayoutEnum

from .configs import SLAB, ForwardConfig, ForwardFeatures
from .parts import keys, schedule, softmax, wgmma

WARP_GROUP = 128
LOG2_E = 1.4426950408889634
DTYPES = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16}
_REGISTERS = {1: (56, 256), 2: (24, 240), 3: (32, 160)}
"""Of a producer's and of a consumer's thread, by consumer groups: together at most the 64 Ki of an SM."""
_TURN = 1  # the first of the named barriers by which groups take turns; one a group
_STORED = 5  # the first of those that join a group's warps around its store


class Moved(NamedTuple):
    """An operand that TMA moves: the copy atom, and the global tensor [rows, width, head, batch]."""

    atom: cute.CopyAtom
    tensor: cute.Tensor


class Limits(NamedTuple):
    """What decides which keys a row sees; ``right`` and ``left`` as in :mod:`.parts.keys`."""

    q_len: Int32
    kv_len: Int32
    right: Int32 | None
    left: Int32 | None


class Place(NamedTuple):
    """Of which batch and query head a group's rows are, and the first of them."""

    batch: Int32
    head: Int32
    first_row: Int32


class Pipes(NamedTuple):
    """Of a group's Q (one stage a group), of K and of V.

    To be unpacked before use: a loop that carries the tuple would make traced values of the numbers in them.
    """

    q: pipeline.PipelineTmaAsync
    k: pipeline.PipelineTmaAsync
    v: pipeline.PipelineTmaAsync


class Operands(NamedTuple):
    """The two products of a group and what they read; ``b_k`` and ``b_v`` have the ring's stages as last mode.

    ``visits`` is what the producer leaves with each K, if anything.
    """

    qk: cute.TiledMma
    pv: cute.TiledMma
    a_q: cute.Tensor
    b_k: cute.Tensor
    a_p: cute.Tensor
    b_v: cute.Tensor
    visits: cute.Tensor


class Rows(NamedTuple):
    """A thread's accumulators, as the products have them and as [row, column], and the state of its two rows."""

    acc_s: cute.Tensor
    acc_o: cute.Tensor
    scores: cute.Tensor
    out: cute.Tensor
    coords: cute.Tensor
    shifts: cute.Tensor
    sums: cute.Tensor
    factors: cute.Tensor


class Forward:
    """The kernel for one config and one set of features."""

    def __init__(self, features: ForwardFeatures, config: ForwardConfig) -> None:
        self.features, self.config = features, config
        self.dtype = DTYPES[features.dtype]
        self.tile_m, self.tile_n, self.stages = config.tile_m, config.tile_n, config.num_stages
        self.groups = config.tile_m // SLAB
        self.takes_turns = config.ping_pong and self.groups > 1
        self.packed, self.cluster = features.packed, config.cluster
        self.leaves_visits = False  # which tile of keys it is, with each K
        self.may_hide = features.mods is not None or features.mask is not None  # keys anywhere
        self.natural = features.mask == "added"  # :mod:`.parts.softmax`
        self.beside_keys = 0  # bytes of what comes with a tile of keys
        self.beside_stage = 0  # and of its place in shared memory
        # A matrix instruction takes 16 columns of Q and K at a time, and TMA fills with zeros what a tensor lacks.
        self.width = -(-features.head_dim // 16) * 16
        self.value_width = -(-features.value_dim // 16) * 16
        self.q_tile, self.o_tile = (SLAB, self.width), (SLAB, self.value_width)
        self.k_tile, self.v_tile = (self.tile_n, self.width), (self.tile_n, self.value_width)
        self.slab_elements = SLAB * max(self.width, self.value_width)

    @property
    def words_of_tile(self) -> int:
        """That are left with a tile's Q: its number, and of what keys it visits how many, and how many masked."""
        return 3 if self.leaves_visits else 1

    def layouts(self) -> tuple[cute.ComposedLayout, ...]:
        """In shared memory: of a group's Q and O, and of the rings of K and V."""

        def ring(tile: tuple[int, int], stages: int) -> cute.ComposedLayout:
            return sm90.make_smem_layout_epi(self.dtype, LayoutEnum.ROW_MAJOR, tile, stages)

        return (
            ring(self.q_tile, 1),
            ring(self.o_tile, 1),
            ring(self.k_tile, self.stages),
            ring(self.v_tile, self.stages),
        )

    def products(self) -> tuple[cute.TiledMma, cute.TiledMma]:
        """Q K^T and P V for one group's 64 rows."""
        k_major, mn_major, one_group = OperandMajorMode.K, OperandMajorMode.MN, (1, 1, 1)
        sources = warpgroup.OperandSource

        def product(b_major: OperandMajorMode, columns: int, source: warpgroup.OperandSource) -> cute.TiledMma:
            return sm90.make_trivial_tiled_mma(
                self.dtype, self.dtype, k_major, b_major, Float32, one_group, (SLAB, columns), a_source=source
            )

        return product(k_major, self.tile_n, sources.SMEM), product(mn_major, self.value_width, sources.RMEM)

    def fake_arguments(self) -> tuple[Any, ...]:
        """Arguments of any sizes and strides, for the compiler."""
        features = self.features
        batch, q_heads, kv_heads, q_len, kv_len = (cute.sym_int() for _ in range(5))
        lse_sizes = tuple(cute.sym_int() for _ in range(3))

        def operand(heads: Any, length: Any, width: int) -> cute.Tensor:
            strides = [cute.sym_int64(divisibility=8) for _ in range(3)]
            shape = (batch, heads, length, width)
            return cute.runtime.make_fake_tensor(self.dtype, shape, (*strides, 1), assumed_align=16)

        def vector(kind: Any, length: Any) -> cute.Tensor:
            return cute.runtime.make_fake_tensor(kind, (length,), (1,), assumed_align=4)

        lse_strides = (cute.sym_int64(), cute.sym_int64(), 1)
        return (
            operand(q_heads, q_len, features.head_dim),
            operand(kv_heads, kv_len, features.head_dim),
            operand(kv_heads, kv_len, features.value_dim),
            operand(q_heads, q_len, features.value_dim),
            cute.runtime.make_fake_tensor(Float32, lse_sizes, lse_strides, assumed_align=4),
            Float32(1.0),
            Float32(1.0) if features.softcap else None,
            vector(Float32, q_heads) if features.sink else None,
            Int32(0) if features.right else None,
            Int32(0) if features.left else None,
            vector(Int32, 1) if features.limited else None,
            Int32(0),
            Int32(132),
            cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
        )

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        o: cute.Tensor,
        lse: cute.Tensor,
        scale: Float32,
        softcap: Float32 | None,
        sink: cute.Tensor | None,
        right: Int32 | None,
        left: Int32 | None,
        counter: cute.Tensor | None,
        counts: Int32,
        programs: Int32,
        stream: cuda.CUstream,
    ) -> None:
        """Launches the kernel.

        ``[B, H, S, D]`` tensors of any strides, ``sink`` and ``lse`` in fp32, the latter empty where it is not wanted;
        ``programs`` is the number of SMs. Where keys are limited, ``counter`` is an int32, which is 0 and is used if
        ``counts`` is not 0 (:func:`.parts.schedule.next_index`).
        """
        c, cap = scale * LOG2_E, None
        if const_expr(softcap is not None):
            c, cap = softcap * LOG2_E, 2.0 * c / softcap
        self.start(q, k, v, o, lse, c, cap, sink, right, left, counter, counts, programs, stream, None)

    @cute.jit
    def start(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        o: cute.Tensor,
        lse: cute.Tensor,
        c: Float32,
        cap: Float32 | None,
        sink: cute.Tensor | None,
        right: Int32 | None,
        left: Int32 | None,
        counter: cute.Tensor | None,
        counts: Int32,
        programs: Int32,
        stream: cuda.CUstream,
        more: Any,
    ) -> None:
        """Launches the kernel: descriptors, the order of tiles, the grid. ``more`` is for kernels made of this one."""
        kv_heads, q_len, batch = k.shape[1], q.shape[2], q.shape[0]
        q, o = self.rows_of(q, kv_heads), self.rows_of(o, kv_heads)
        k, v = (cute.make_tensor(t.iterator, cute.select(t.layout, mode=[2, 3, 1, 0])) for t in (k, v))
        q_layout, o_layout, k_layout, v_layout = self.layouts()
        read, write = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        read_for_all = cpasync.CopyBulkTensorTileG2SMulticastOp() if self.cluster > 1 else read
        moved_q, moved_o = self.moved(read, q, q_layout, self.q_tile), self.moved(write, o, o_layout, self.o_tile)
        moved_k = self.moved(read_for_all, k, k_layout, self.k_tile, self.cluster)
        moved_v = self.moved(read_for_all, v, v_layout, self.v_tile, self.cluster)
        elements = self.groups * self.slab_elements
        own = elements if self.config.own_o else 0

        @cute.struct
        class Storage:
            q_barriers: cute.struct.MemRange[Int64, 2 * self.groups]
            k_barriers: cute.struct.MemRange[Int64, 2 * self.stages]
            v_barriers: cute.struct.MemRange[Int64, 2 * self.stages]
            tiles: cute.struct.MemRange[Int32, self.words_of_tile * self.groups]
            visits: cute.struct.MemRange[Int32, self.stages]
            q: cute.struct.Align[cute.struct.MemRange[self.dtype, elements], 1024]
            k: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(k_layout)], 1024]
            v: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(v_layout)], 1024]
            o: cute.struct.Align[cute.struct.MemRange[self.dtype, own], 1024]
            beside: cute.struct.Align[cute.struct.MemRange[cutlass.Uint8, self.stages * self.beside_stage], 1024]

        self.storage = Storage
        m_tiles = cute.ceil_div(q_len * self.packed, self.tile_m * self.cluster)
        head_bytes = Int64(k.shape[0]) * ((self.features.head_dim + self.features.value_dim) * self.dtype.width // 8)
        order = schedule.make_order(m_tiles, q.shape[2], kv_heads, batch, head_bytes)
        limits = Limits(q_len, k.shape[0], right, left)
        self.kernel(
            *self.products(),
            moved_q,
            moved_o,
            moved_k,
            moved_v,
            lse,
            c,
            cap,
            sink,
            limits,
            order,
            counter,
            counts,
            more,
        ).launch(
            grid=(cutlass.min(programs // self.cluster, order.total) * self.cluster, 1, 1),
            block=(WARP_GROUP * (self.groups + 1), 1, 1),
            cluster=(self.cluster, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,
        )

    def rows_of(self, tensor: cute.Tensor, kv_heads: Int32) -> cute.Tensor:
        """[B, H, S, D] as [S, D, H, B], or as [(G, S), D, H / G, B] where the G heads of a group share a tile."""
        if self.packed == 1:
            return cute.make_tensor(tensor.iterator, cute.select(tensor.layout, mode=[2, 3, 1, 0]))
        (batch, _, length, width), (to_batch, to_head, to_row, to_column) = tensor.shape, tensor.stride
        shape = ((self.packed, length), width, kv_heads, batch)
        stride = ((to_head, to_row), to_column, to_head * self.packed, to_batch)
        return cute.make_tensor(tensor.iterator, cute.make_layout(shape, stride=stride))

    def moved(
        self, op: Any, tensor: cute.Tensor, layout: cute.ComposedLayout, tile: tuple[int, int], ctas: int = 1
    ) -> Moved:
        """The operand with its TMA descriptor; so many CTAs each load a part of a tile for all of them."""
        return Moved(*cpasync.make_tiled_tma_atom(op, tensor, cute.select(layout, mode=[0, 1]), tile, ctas))

    @cute.kernel
    def kernel(
        self,
        qk: cute.TiledMma,
        pv: cute.TiledMma,
        q: Moved,
        o: Moved,
        k: Moved,
        v: Moved,
        lse: cute.Tensor,
        c: Float32,
        cap: Float32 | None,
        sink: cute.Tensor | None,
        limits: Limits,
        order: schedule.TileOrder,
        counter: cute.Tensor | None,
        counts: Int32,
        more: Any,
    ) -> None:
        self.more = more
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        storage = cutlass.utils.SmemAllocator().allocate(self.storage)
        _, _, k_layout, v_layout = self.layouts()
        s_k = storage.k.get_tensor(k_layout.outer, swizzle=k_layout.inner)
        s_v = storage.v.get_tensor(v_layout.outer, swizzle=v_layout.inner)
        self.beside = self.beside_views(storage.beside)
        if warp_index == 0:
            for moved in (q, k, v, o):
                cpasync.prefetch_descriptor(moved.atom)
        pipes = Pipes(
            self.pipe(storage.q_barriers, self.groups, 1, self.q_tile),
            self.pipe(storage.k_barriers, self.stages, self.groups, self.k_tile, self.cluster, self.beside_keys),
            self.pipe(storage.v_barriers, self.stages, self.groups, self.v_tile, self.cluster),
        )
        next_tiles = storage.tiles.get_tensor(cute.make_layout((self.words_of_tile, self.groups)))
        visits = storage.visits.get_tensor(cute.make_layout(self.stages))
        cluster = (self.cluster, 1) if const_expr(self.cluster > 1) else None
        pipeline.pipeline_init_arrive(cluster_shape_mn=cluster, is_relaxed=True)
        pipeline.pipeline_init_wait(cluster_shape_mn=cluster)
        if warp_index < WARP_GROUP // 32:
            cute.arch.setmaxregister_decrease(_REGISTERS[self.groups][0])
            if warp_index == 0:
                self.produce(q, k, v, storage.q, s_k, s_v, next_tiles, visits, pipes, limits, order, counter, counts)
        else:
            cute.arch.setmaxregister_increase(_REGISTERS[self.groups][1])
            o_memory = storage.o if const_expr(self.config.own_o) else storage.q
            self.consume(
                qk, pv, storage.q, o_memory, s_k, s_v, next_tiles, visits, pipes, o, lse, c, cap, sink, limits, order
            )
        if const_expr(self.cluster > 1):
            # The other CTA may still write to this one's memory and signal its barriers.
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()

    def pipe(
        self, barriers: Any, stages: int, groups: int, tile: tuple[int, int], ctas: int = 1, beside: int = 0
    ) -> pipeline.PipelineTmaAsync:
        """A ring of tiles: one warp of each of ``ctas`` CTAs fills it, the warps of all their groups free it.

        So many bytes come ``beside`` a tile.
        """

        def threads(count: int) -> pipeline.CooperativeGroup:
            return pipeline.CooperativeGroup(pipeline.Agent.Thread, count)

        return pipeline.PipelineTmaAsync.create(
            barrier_storage=barriers.data_ptr(),
            num_stages=stages,
            producer_group=threads(1),
            consumer_group=threads(WARP_GROUP // 32 * groups * ctas),
            tx_count=tile[0] * tile[1] * self.dtype.width // 8 + beside,
            cta_layout_vmnk=cute.make_layout((1, ctas, 1, 1)),
            mcast_mode_mn=(0, 1),
            defer_sync=True,
        )

    # ------------------------------------------------------------------------------------- what both roles agree on

    def key_tiles(self, tile: schedule.Tile, limits: Limits) -> keys.KeyTiles:
        """The keys that any CTA of the cluster needs: they load them together."""
        rows, (q_len, kv_len, right, left) = self.tile_m * self.cluster, limits
        return keys.key_tiles(tile.m_index * rows, rows, self.tile_n, q_len, kv_len, right, left, self.packed)

    def visited(self, tile: schedule.Tile, tiles: keys.KeyTiles, i: Int32, windowed: bool) -> Int32:
        """The i-th tile of keys that a tile of queries visits."""
        return keys.visited(tiles, i, windowed)

    def m_index(self, tile: schedule.Tile) -> Int32:
        """This CTA's tile of queries; those of a cluster are neighbours."""
        if self.cluster == 1:
            return tile.m_index
        return tile.m_index * self.cluster + cute.arch.block_idx_in_cluster()

    def slab(self, memory: Any, group: Int32 | int, layout: cute.ComposedLayout) -> cute.Tensor:
        """A group's part of the memory of Q or O."""
        pointer = memory.data_ptr() + cute.assume(group * self.slab_elements, divby=512)
        return cute.make_tensor(cute.recast_ptr(pointer, layout.inner, self.dtype), layout.outer)

    def tma_views(
        self, moved: Moved, tile: tuple[int, int], shared: cute.Tensor, head: Int32, batch: Int32, ctas: int = 1
    ) -> tuple[cute.Tensor, cute.Tensor]:
        """What a copy moves, or this CTA's share of it: in shared memory [part, stage], globally [part, tile]."""
        tiles = cute.local_tile(moved.tensor[None, None, head, batch], tile, (None, 0))
        rank = cute.arch.block_idx_in_cluster() if ctas > 1 else 0
        grouped = cute.group_modes(shared, 0, 2), cute.group_modes(tiles, 0, 2)
        return cpasync.tma_partition(moved.atom, rank, cute.make_layout(ctas), *grouped)

    # ------------------------------------------------------------------------------------------------ the producer

    @cute.jit
    def produce(
        self,
        q: Moved,
        k: Moved,
        v: Moved,
        q_memory: Any,
        s_k: cute.Tensor,
        s_v: cute.Tensor,
        next_tiles: cute.Tensor,
        visits: cute.Tensor,
        pipes: Pipes,
        limits: Limits,
        order: schedule.TileOrder,
        counter: cute.Tensor | None,
        counts: Int32,
    ) -> None:
        """Loads Q once a tile, and K one tile of keys ahead of V, as the consumers take them.

        A tile's number goes to a group with its Q: the barrier that says that Q is there makes it visible too. A tile
        that sees no key, and the number past the last tile, which ends the group, come without Q.
        """
        windowed = limits.left is not None
        q_pipe, k_pipe, v_pipe = pipes
        q_layout = self.layouts()[0]
        kind = pipeline.PipelineUserType.Producer
        q_state = pipeline.make_pipeline_state(kind, self.groups)
        k_state, v_state = (pipeline.make_pipeline_state(kind, self.stages) for _ in range(2))
        index = cute.arch.block_idx()[0] // self.cluster
        while index < order.total:
            tile = schedule.tile_at(order, index)
            tiles = self.key_tiles(tile, limits)
            if tiles.count > 0:
                k_views = self.tma_views(k, self.k_tile, s_k, tile.kv_head, tile.batch, self.cluster)
                v_views = self.tma_views(v, self.v_tile, s_v, tile.kv_head, tile.batch, self.cluster)
                n = self.visited(tile, tiles, Int32(0), windowed)
                self.leave_visit(visits, n, k_pipe, k_state)
                k_state = self.fetch(k.atom, k_views, n, k_pipe, k_state, tile)
                for group in cutlass.range_constexpr(self.groups):
                    s_q = self.slab(q_memory, group, q_layout)
                    s_part, g_part = self.tma_views(q, self.q_tile, s_q, tile.head, tile.batch)
                    self.announce(index, tiles, next_tiles, q_pipe, q_state)
                    q_pipe.producer_acquire(q_state)
                    cute.copy(
                        q.atom,
                        g_part[None, self.m_index(tile) * self.groups + group],
                        s_part[None, 0],
                        tma_bar_ptr=q_pipe.producer_get_barrier(q_state),
                    )
                    q_state.advance()
                for i in cutlass.range(1, tiles.count, unroll=1):
                    following = self.visited(tile, tiles, i, windowed)
                    self.leave_visit(visits, following, k_pipe, k_state)
                    k_state = self.fetch(k.atom, k_views, following, k_pipe, k_state, tile)
                    v_state = self.fetch(v.atom, v_views, n, v_pipe, v_state)
                    n = following
                v_state = self.fetch(v.atom, v_views, n, v_pipe, v_state)
            else:
                q_state = self.announce_alone(index, tiles, next_tiles, q_pipe, q_state)
            index = schedule.next_index(index, cute.arch.grid_dim()[0] // self.cluster, counter, counts)
        self.announce_alone(index, None, next_tiles, q_pipe, q_state)
        if const_expr(self.cluster > 1):
            k_pipe.producer_tail(k_state)
            v_pipe.producer_tail(v_state)

    @cute.jit
    def announce(
        self,
        index: Int32,
        tiles: keys.KeyTiles | None,
        next_tiles: cute.Tensor,
        q_pipe: pipeline.PipelineTmaAsync,
        q_state: pipeline.PipelineState,
    ) -> None:
        """Leaves a tile's number for a group, once it is done with the Q before; its keys where it cannot know them."""
        q_pipe.sync_object_empty.wait(q_state.index, q_state.phase)
        if cute.arch.lane_idx() == 0:
            next_tiles[0, q_state.index] = index
            if const_expr(self.leaves_visits and tiles is not None):
                next_tiles[1, q_state.index] = tiles.count
                next_tiles[2, q_state.index] = tiles.masked
        cute.arch.sync_warp()

    def leave_visit(
        self, visits: cute.Tensor, n: Int32, k_pipe: pipeline.PipelineTmaAsync, state: pipeline.PipelineState
    ) -> None:
        """Leaves which tile of keys comes next, where the consumers cannot know it."""

    @cute.jit
    def announce_alone(
        self,
        index: Int32,
        tiles: keys.KeyTiles | None,
        next_tiles: cute.Tensor,
        q_pipe: pipeline.PipelineTmaAsync,
        q_state: pipeline.PipelineState,
    ) -> pipeline.PipelineState:
        """Leaves a number that no Q comes with, for all groups."""
        for _ in cutlass.range_constexpr(self.groups):
            self.announce(index, tiles, next_tiles, q_pipe, q_state)
            if cute.arch.lane_idx() == 0:
                cute.arch.mbarrier_arrive(q_pipe.producer_get_barrier(q_state))
            q_state.advance()
        return q_state

    def beside_views(self, memory: Any) -> Any:
        """What of the shared memory holds what comes with tiles of keys."""
        return None

    def beside_parts(self, qk: cute.TiledMma, thread: Int32, group: Int32) -> Any:
        """A thread's part of it."""
        return None

    def fetch_beside(self, tile: schedule.Tile, n: Int32, stage: Int32, barrier: cute.Pointer) -> None:
        """Loads what comes with a tile of keys."""

    @cute.jit
    def fetch(
        self,
        atom: cute.CopyAtom,
        views: tuple[cute.Tensor, cute.Tensor],
        n: Int32,
        pipe: pipeline.PipelineTmaAsync,
        state: pipeline.PipelineState,
        tile: schedule.Tile | None = None,
    ) -> pipeline.PipelineState:
        """Loads a tile of keys or values, or this CTA's share of it, into the next free stage.

        ``tile``, of queries, is given where more comes with it.
        """
        to_all = {"mcast_mask": cutlass.Int16((1 << self.cluster) - 1)} if self.cluster > 1 else {}
        pipe.producer_acquire(state)
        barrier = pipe.producer_get_barrier(state)
        cute.copy(atom, views[1][None, n], views[0][None, state.index], tma_bar_ptr=barrier, **to_all)
        if const_expr(tile is not None):
            self.fetch_beside(tile, n, state.index, barrier)
        state.advance()
        return state

    # ----------------------------------------------------------------------------------------------- the consumers

    @cute.jit
    def consume(
        self,
        qk: cute.TiledMma,
        pv: cute.TiledMma,
        q_memory: Any,
        o_memory: Any,
        s_k: cute.Tensor,
        s_v: cute.Tensor,
        next_tiles: cute.Tensor,
        visits: cute.Tensor,
        pipes: Pipes,
        o: Moved,
        lse: cute.Tensor,
        c: Float32,
        cap: Float32 | None,
        sink: cute.Tensor | None,
        limits: Limits,
        order: schedule.TileOrder,
    ) -> None:
        """One group: its 64 rows of every tile."""
        windowed = limits.left is not None
        q_pipe, _, _ = pipes
        q_layout, o_layout, _, _ = self.layouts()
        thread = cute.arch.thread_idx()[0] % WARP_GROUP
        group = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // WARP_GROUP) - 1
        s_q, s_o = self.slab(q_memory, group, q_layout), self.slab(o_memory, group, o_layout)
        operands = self.operands(qk, pv, s_q, s_k, s_v, visits)
        rows = self.rows(qk, pv, thread)
        self.of_thread = self.beside_parts(qk, thread, group)
        lses = cute.make_rmem_tensor((2,), Float32)
        kind = pipeline.PipelineUserType.Consumer
        k_state, v_state = (pipeline.make_pipeline_state(kind, self.stages) for _ in range(2))
        if const_expr(self.takes_turns):  # noqa: SIM102 (joined, the two conditions would be one that is decided when run)
            if group == self.groups - 1:
                cute.arch.barrier_arrive(barrier_id=_TURN, number_of_threads=2 * WARP_GROUP)

        q_state = pipeline.PipelineState(self.groups, Int32(0), group, Int32(0))
        index = self.awaited_tile(next_tiles, q_pipe, q_state)
        while index < order.total:
            tile = schedule.tile_at(order, index)
            tiles = self.awaited_keys(tile, limits, next_tiles, q_state)
            first_row = self.m_index(tile) * self.tile_m + group * SLAB
            if tiles.count <= 0:
                rows.acc_o.fill(0.0)
                rows.sums.fill(0.0)
                rows.shifts.fill(-Float32.inf)
            else:
                n = self.expected(tile, tiles, Int32(0), windowed)
                masked = tiles.masked
                place = Place(tile.batch, tile.head, first_row)
                k_state = self.first_keys(operands, rows, c, cap, limits, place, n, masked > 0, pipes, k_state)
                masked = cutlass.max(masked, 1)
                for i in cutlass.range(1, masked, unroll=1):
                    n = self.expected(tile, tiles, i, windowed)
                    k_state, v_state = self.next_keys(
                        operands, rows, c, cap, limits, place, n, True, pipes, k_state, v_state, group
                    )
                for i in cutlass.range(tiles.count - masked, unroll=1):
                    if const_expr(self.features.mods is not None):
                        n = self.expected(tile, tiles, masked + i, windowed)
                    k_state, v_state = self.whole_keys(
                        operands, rows, c, cap, limits, place, n, s_q, s_k, thread, pipes, k_state, v_state, group
                    )
                if const_expr(self.config.own_o):
                    q_pipe.consumer_release(q_state)
                v_state = self.last_values(operands, rows, pipes, v_state)
            sinks = None
            if const_expr(sink is not None):
                sinks = cute.make_rmem_tensor((2,), Float32)
                for r in cutlass.range_constexpr(2):
                    head, _ = self.query_of(tile, first_row + rows.coords[r, 0][0])
                    sinks[r] = sink[head] * (1.0 if self.natural else LOG2_E)
            softmax.finish(rows.sums, rows.shifts, rows.factors, lses, sinks, c, self.natural)
            softmax.rescale(rows.out, rows.factors)
            self.store(pv, rows, lses, s_o, o, lse, thread, group, first_row, tile)
            if const_expr(self.config.own_o):
                if tiles.count <= 0:
                    q_pipe.consumer_release(q_state)
            else:
                q_pipe.consumer_release(q_state)
            q_state = pipeline.PipelineState(self.groups, Int32(0), group, q_state.phase ^ 1)
            index = self.awaited_tile(next_tiles, q_pipe, q_state)
        cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def awaited_tile(
        self, next_tiles: cute.Tensor, q_pipe: pipeline.PipelineTmaAsync, q_state: pipeline.PipelineState
    ) -> Int32:
        """The number of a group's next tile, with which its Q has come."""
        q_pipe.consumer_wait(q_state)
        return self.word(next_tiles, 0, q_state)

    @cute.jit
    def word(self, next_tiles: cute.Tensor, word: cutlass.Constexpr, q_state: pipeline.PipelineState) -> Int32:
        """What was left with a group's Q."""
        found = Int32(0)
        if cute.arch.lane_idx() == 0:  # the lane that frees the place
            found = next_tiles[word, q_state.index]
        return cute.arch.shuffle_sync(found, 0)

    def awaited_keys(
        self, tile: schedule.Tile, limits: Limits, next_tiles: cute.Tensor, q_state: pipeline.PipelineState
    ) -> keys.KeyTiles:
        """The keys of a tile whose number has come."""
        return self.key_tiles(tile, limits)

    def expected(self, tile: schedule.Tile, tiles: keys.KeyTiles, i: Int32, windowed: bool) -> Int32:
        """The i-th tile of keys as far as a consumer knows before it has come."""
        return self.visited(tile, tiles, i, windowed)

    def arrived(self, operands: Operands, n: Int32, state: pipeline.PipelineState) -> Int32:
        """The tile of keys that has come, which was expected to be ``n``."""
        return n

    def operands(
        self,
        qk: cute.TiledMma,
        pv: cute.TiledMma,
        s_q: cute.Tensor,
        s_k: cute.Tensor,
        s_v: cute.Tensor,
        visits: cute.Tensor,
    ) -> Operands:
        """A group's operands: Q, K and V as matrix descriptors of shared memory, P as registers."""
        of_qk, of_pv = qk.get_slice(0), pv.get_slice(0)
        s_vt = cute.make_tensor(s_v.iterator, cute.select(s_v.layout, mode=[1, 0, 2]))
        return Operands(
            qk,
            pv,
            of_qk.make_fragment_A(of_qk.partition_A(s_q))[None, None, None, 0],
            of_qk.make_fragment_B(of_qk.partition_B(s_k)),
            of_pv.make_fragment_A(of_pv.partition_shape_A((SLAB, self.tile_n))),
            of_pv.make_fragment_B(of_pv.partition_B(s_vt)),
            visits,
        )

    def rows(self, qk: cute.TiledMma, pv: cute.TiledMma, thread: Int32) -> Rows:
        """A thread's registers for its two rows."""
        of_qk, of_pv = qk.get_slice(0), pv.get_slice(0)
        acc_s = cute.make_rmem_tensor(of_qk.partition_shape_C((SLAB, self.tile_n)), Float32)
        acc_o = cute.make_rmem_tensor(of_pv.partition_shape_C((SLAB, self.value_width)), Float32)
        coords = qk.get_slice(thread).partition_C(cute.make_identity_tensor((SLAB, self.tile_n)))
        states = (cute.make_rmem_tensor((2,), Float32) for _ in range(3))
        return Rows(acc_s, acc_o, *(wgmma.rows_view(t) for t in (acc_s, acc_o, coords)), *states)

    @cute.jit
    def first_keys(
        self,
        operands: Operands,
        rows: Rows,
        c: Float32,
        cap: Float32 | None,
        limits: Limits,
        place: Place,
        n: Int32,
        masked: Boolean,
        pipes: Pipes,
        k_state: pipeline.PipelineState,
    ) -> pipeline.PipelineState:
        """The first tile of keys: its scores become P, and O starts at 0."""
        _, k_pipe, _ = pipes
        k_pipe.consumer_wait(k_state)
        n = self.arrived(operands, n, k_state)
        b_k = operands.b_k[None, None, None, k_state.index]
        wgmma.issue(operands.qk, rows.acc_s, operands.a_q, b_k, Boolean(False))
        warpgroup.wait_group(0)
        stage = k_state.index
        if const_expr(not self.beside_keys):
            k_pipe.consumer_release(k_state)
            k_state.advance()
        self.prepare(rows, cap, limits, place, n, masked, stage)
        if const_expr(self.beside_keys):
            k_pipe.consumer_release(k_state)
            k_state.advance()
        softmax.first_step(rows.scores, rows.shifts, rows.sums, c, self.natural)
        wgmma.to_operand(operands.a_p, rows.acc_s, self.dtype)
        rows.acc_o.fill(0.0)
        return k_state

    @cute.jit
    def next_keys(
        self,
        operands: Operands,
        rows: Rows,
        c: Float32,
        cap: Float32 | None,
        limits: Limits,
        place: Place,
        n: Int32,
        masked: cutlass.Constexpr,
        pipes: Pipes,
        k_state: pipeline.PipelineState,
        v_state: pipeline.PipelineState,
        group: Int32,
    ) -> tuple[pipeline.PipelineState, pipeline.PipelineState]:
        """A further tile of keys, masked or not: its scores, and the previous tile's share of O while they become P."""
        _, k_pipe, v_pipe = pipes
        self.issue_both(operands, rows, pipes, k_state, v_state, group)
        n = self.arrived(operands, n, k_state)
        warpgroup.wait_group(1)
        stage = k_state.index
        if const_expr(not self.beside_keys):
            k_pipe.consumer_release(k_state)
            k_state.advance()
        self.prepare(rows, cap, limits, place, n, masked, stage)
        if const_expr(self.beside_keys):
            k_pipe.consumer_release(k_state)
            k_state.advance()
        grown = softmax.step(rows.scores, rows.shifts, rows.sums, rows.factors, c, self.natural)
        warpgroup.wait_group(0)
        v_pipe.consumer_release(v_state)
        v_state.advance()
        if grown:
            softmax.rescale(rows.out, rows.factors)
        wgmma.to_operand(operands.a_p, rows.acc_s, self.dtype)
        return k_state, v_state

    @cute.jit
    def issue_both(
        self,
        operands: Operands,
        rows: Rows,
        pipes: Pipes,
        k_state: pipeline.PipelineState,
        v_state: pipeline.PipelineState,
        group: Int32,
    ) -> None:
        """Issues a tile's scores, then the previous tile's share of O, in the group's turn."""
        _, k_pipe, v_pipe = pipes
        k_pipe.consumer_wait(k_state)
        if const_expr(self.takes_turns):
            cute.arch.barrier(barrier_id=_TURN + group, number_of_threads=2 * WARP_GROUP)
        b_k = operands.b_k[None, None, None, k_state.index]
        wgmma.issue(operands.qk, rows.acc_s, operands.a_q, b_k, Boolean(False))
        v_pipe.consumer_wait(v_state)
        b_v = operands.b_v[None, None, None, v_state.index]
        wgmma.issue(operands.pv, rows.acc_o, operands.a_p, b_v, Boolean(True))
        if const_expr(self.takes_turns):
            following = group + 1 if group < self.groups - 1 else Int32(0)
            cute.arch.barrier_arrive(barrier_id=_TURN + following, number_of_threads=2 * WARP_GROUP)

    @cute.jit
    def whole_keys(
        self,
        operands: Operands,
        rows: Rows,
        c: Float32,
        cap: Float32 | None,
        limits: Limits,
        place: Place,
        n: Int32,
        s_q: cute.Tensor,
        s_k: cute.Tensor,
        thread: Int32,
        pipes: Pipes,
        k_state: pipeline.PipelineState,
        v_state: pipeline.PipelineState,
        group: Int32,
    ) -> tuple[pipeline.PipelineState, pipeline.PipelineState]:
        """As next_keys without a mask, in the hope that no score has outgrown its row's shift; else it makes good."""
        _, k_pipe, v_pipe = pipes
        self.issue_both(operands, rows, pipes, k_state, v_state, group)
        n = self.arrived(operands, n, k_state)
        warpgroup.wait_group(1)
        self.prepare_whole(rows, cap, limits, place, n, k_state.index)
        parts = cute.make_rmem_tensor((2,), Float32)
        if const_expr(self.may_hide):
            softmax.start_rows(rows.scores, rows.shifts, c, self.natural)
        grown = softmax.hopeful_step(rows.scores, rows.shifts, parts, c, self.may_hide, self.natural)
        warpgroup.wait_group(0)
        v_pipe.consumer_release(v_state)
        v_state.advance()
        wgmma.to_operand(operands.a_p, rows.acc_s, self.dtype)
        if grown:
            if softmax.overflown(parts):
                self.scores_again(rows, s_q, s_k[None, None, k_state.index], thread)
                self.prepare_whole(rows, cap, limits, place, n, k_state.index)
                softmax.step(rows.scores, rows.shifts, rows.sums, rows.factors, c, self.natural)
                parts.fill(0.0)
            else:
                softmax.settle(rows.scores, rows.shifts, rows.sums, parts, rows.factors, c, self.natural)
            softmax.rescale(rows.out, rows.factors)
            wgmma.to_operand(operands.a_p, rows.acc_s, self.dtype)
        for r in cutlass.range_constexpr(2):
            rows.sums[r] = rows.sums[r] + parts[r]
        k_pipe.consumer_release(k_state)
        k_state.advance()
        return k_state, v_state

    @cute.jit
    def scores_again(self, rows: Rows, s_q: cute.Tensor, s_k: cute.Tensor, thread: Int32) -> None:
        """A thread's scores of a tile once more, without the tensor cores, so that a warp can do it by itself."""
        rows.scores.fill(0.0)
        for d in cutlass.range(self.width, unroll=1):
            for j in cutlass.range_constexpr(cute.size(rows.scores, mode=[1])):
                key = s_k[rows.coords[0, j][1], d].to(Float32)
                for r in cutlass.range_constexpr(2):
                    rows.scores[r, j] = rows.scores[r, j] + s_q[rows.coords[r, 0][0], d, 0].to(Float32) * key

    @cute.jit
    def last_values(
        self, operands: Operands, rows: Rows, pipes: Pipes, v_state: pipeline.PipelineState
    ) -> pipeline.PipelineState:
        """The last tile's share of O."""
        _, _, v_pipe = pipes
        v_pipe.consumer_wait(v_state)
        b_v = operands.b_v[None, None, None, v_state.index]
        wgmma.issue(operands.pv, rows.acc_o, operands.a_p, b_v, Boolean(True))
        warpgroup.wait_group(0)
        v_pipe.consumer_release(v_state)
        v_state.advance()
        return v_state

    @cute.jit
    def prepare_whole(
        self, rows: Rows, cap: Float32 | None, limits: Limits, place: Place, n: Int32, stage: Int32
    ) -> None:
        """What happens to scores of a tile in which positions hide nothing."""
        if const_expr(cap is not None):
            softmax.cap_scores(rows.scores, cap)
        self.apply_mask(rows, stage)

    def apply_mask(self, rows: Rows, stage: Int32) -> None:
        """What the keys in a stage came with does to their scores."""

    @cute.jit
    def prepare(
        self,
        rows: Rows,
        cap: Float32 | None,
        limits: Limits,
        place: Place,
        n: Int32,
        masked: Boolean | bool,
        stage: Int32,
    ) -> None:
        """What happens to scores before the softmax: the cap, then the mask, then what positions hide."""
        self.prepare_whole(rows, cap, limits, place, n, stage)
        if masked:
            first_key = n * self.tile_n
            keys.hide_keys(
                rows.scores,
                rows.coords,
                place.first_row,
                first_key,
                limits.kv_len,
                limits.right,
                limits.left,
                self.packed,
            )

    # ----------------------------------------------------------------------------------------------- the epilogue

    def query_of(self, tile: schedule.Tile, row: Int32) -> tuple[Int32, Int32]:
        """(head, query) of a row."""
        if self.packed == 1:
            return tile.head, row
        return tile.head * self.packed + row % self.packed, row // self.packed

    @cute.jit
    def store(
        self,
        pv: cute.TiledMma,
        rows: Rows,
        lses: cute.Tensor,
        s_o: cute.Tensor,
        o: Moved,
        lse: cute.Tensor,
        thread: Int32,
        group: Int32,
        first_row: Int32,
        tile: schedule.Tile,
    ) -> None:
        """O through the group's own part of shared memory and a TMA store that knows the bounds; lse directly."""
        low = cute.make_rmem_tensor(rows.acc_o.layout, self.dtype)
        wgmma.to_operand(low, rows.acc_o, self.dtype)
        atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(transpose=False, num_matrices=4), self.dtype)
        copy = cute.make_tiled_copy_C(atom, pv).get_slice(thread)
        barrier = {"barrier_id": _STORED + group, "number_of_threads": WARP_GROUP}
        if const_expr(self.config.own_o):
            # The previous tile's O has to have been read. Only the warp that stored it has something to wait for.
            cute.arch.cp_async_bulk_wait_group(0, read=True)
            cute.arch.barrier(**barrier)
        cute.copy(copy, copy.retile(low), copy.partition_D(s_o[None, None, 0]))
        cute.arch.fence_view_async_shared()
        if rows.coords[0, 0][1] == 0:  # one of a row's four threads
            for r in cutlass.range_constexpr(2):
                head, query = self.query_of(tile, first_row + rows.coords[r, 0][0])
                if query < lse.shape[2]:
                    lse[tile.batch, head, query] = lses[r]
        cute.arch.barrier(**barrier)
        if cute.arch.make_warp_uniform(thread // 32) == 0:
            s_part, g_part = self.tma_views(o, self.o_tile, s_o, tile.head, tile.batch)
            cute.copy(o.atom, s_part[None, 0], g_part[None, self.m_index(tile) * self.groups + group])
            cute.arch.cp_async_bulk_commit_group()
            if const_expr(not self.config.own_o):
                cute.arch.cp_async_bulk_wait_group(0, read=True)
        if const_expr(not self.config.own_o):
            # The next Q goes where O is.
            cute.arch.barrier(**barrier)
