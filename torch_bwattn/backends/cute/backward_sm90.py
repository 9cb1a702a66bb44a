"""Attention backward for Hopper (sm_90a): dK, dV, and an fp32 accumulator of dQ.

    S = Q K^T      x = log2(e) * (scale * S, or softcap * tanh(t), t = scale * S / softcap), -inf where not seen
    P = exp2(x - log2(e) * lse)      dP = dO V^T      dS = P * (dP - delta), and times 1 - tanh(t)^2 with a cap
    dV = P^T dO      dK = scale * dS^T Q      dQ = scale * dS K

One CTA has a tile of ``tile_n`` keys of a key head and visits, for every query head of that head, the tiles of
``tile_m`` queries that see some of them. All is transposed: scores are (keys, queries), so that P^T and dS^T are left
operands in registers, and each of two consumer warp groups has 64 keys.

    shared memory   K, V  (tile_n, D), (tile_n, Dv), once      Q, dO  (tile_m, D), (tile_m, Dv), rings of two
                    lse and delta of each stage's queries      dS^T  (tile_n, tile_m), two      dQ  fp32
    registers       dK  (64, D), dV  (64, Dv) in fp32 of all visits; S^T and dP^T  (64, tile_m) of one

dQ leaves by bulk additions in memory. The accumulator holds, for each tile of queries and each group, the group's
registers as they are, four floats of a thread side by side, so that each is one contiguous addition; the postprocess
knows that order. ``lse`` comes in powers of two and padded to whole tiles with +inf, which also stands for rows that
see no key, ``delta`` padded with 0: so P and dS of what is no query are 0.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.utils.hopper_helpers as sm90
from cutlass import Boolean, Float32, Int32, Int64, const_expr, cute, pipeline
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warp, warpgroup
from cutlass.experimental import primitives
from cutlass.utils import LayoutEnum

from .configs import SLAB, BackwardConfig, ForwardFeatures
from .forward_sm90 import _DTYPES, LOG2_E, WARP_GROUP, Limits, Moved
from .parts import queries, softmax, wgmma

_GROUPS = 2
_REGISTERS = (24, 240)
_STAGES = 2
_DS_WRITTEN = 1  # the named barrier at which both groups have written dS^T
_DQ = 2  # the first of those that join a group's warps around its dQ


class Operands(NamedTuple):
    """A group's operands, as matrix descriptors (with the ring's stages as last mode) or registers."""

    k: cute.Tensor
    q: cute.Tensor
    v: cute.Tensor
    do: cute.Tensor
    p: cute.Tensor
    do_t: cute.Tensor
    ds: cute.Tensor
    q_t: cute.Tensor
    ds_shared: cute.Tensor
    k_t: cute.Tensor


class Backward:
    """The kernel for one config and one set of features."""

    def __init__(self, features: ForwardFeatures, config: BackwardConfig) -> None:
        self.features, self.config = features, config
        self.dtype = _DTYPES[features.dtype]
        self.tile_m, self.tile_n = config.tile_m, _GROUPS * SLAB
        self.width = config.width
        self.value_width = config.value_width
        self.k_tile, self.v_tile = (self.tile_n, self.width), (self.tile_n, self.value_width)
        self.q_tile, self.do_tile = (self.tile_m, self.width), (self.tile_m, self.value_width)
        self.ds_tile = (self.tile_n, self.tile_m)
        self.dq_elements = self.tile_m * self.width // _GROUPS  # of a group

    def layouts(self) -> tuple[cute.ComposedLayout, ...]:
        """In shared memory: of K, V, Q, dO and dS^T."""
        tiles = ((self.k_tile, 1), (self.v_tile, 1), (self.q_tile, 2), (self.do_tile, 2), (self.ds_tile, 2))
        return tuple(sm90.make_smem_layout_epi(self.dtype, LayoutEnum.ROW_MAJOR, tile, n) for tile, n in tiles)

    def products(self) -> tuple[cute.TiledMma, ...]:
        """For S^T and dP^T, for dV, for dK, for dQ."""
        k_major, mn_major = OperandMajorMode.K, OperandMajorMode.MN
        shared, registers = warpgroup.OperandSource.SMEM, warpgroup.OperandSource.RMEM

        def product(a_major: Any, b_major: Any, groups: tuple[int, int, int], columns: int, a: Any) -> cute.TiledMma:
            return sm90.make_trivial_tiled_mma(
                self.dtype, self.dtype, a_major, b_major, Float32, groups, (SLAB, columns), a_source=a
            )

        by_rows = (_GROUPS, 1, 1)
        if self.tile_m == SLAB:
            dq = product(mn_major, mn_major, (1, _GROUPS, 1), self.width // _GROUPS, shared)
        else:
            dq = product(mn_major, mn_major, by_rows, self.width, shared)
        return (
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

        def vector() -> cute.Tensor:
            strides = (cute.sym_int64(divisibility=4), cute.sym_int64(divisibility=4), 1)
            return cute.runtime.make_fake_tensor(Float32, (batch, q_heads, padded), strides, assumed_align=16)

        d, dv = features.head_dim, features.value_dim
        return (
            operand(q_heads, q_len, d),
            operand(kv_heads, kv_len, d),
            operand(kv_heads, kv_len, dv),
            operand(q_heads, q_len, dv),
            vector(),
            vector(),
            operand(kv_heads, kv_len, d),
            operand(kv_heads, kv_len, dv),
            cute.runtime.make_fake_tensor(Float32, (cute.sym_int64(),), (1,), assumed_align=16),
            Float32(1.0),
            Float32(1.0) if features.softcap else None,
            Int32(0) if features.right else None,
            Int32(0) if features.left else None,
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
        stream: cuda.CUstream,
    ) -> None:
        """Launches the kernel: ``[B, H, S, D]`` tensors of any strides, ``dq`` the zeroed accumulator."""
        batch, heads, kv_heads = q.shape[0], q.shape[1], k.shape[1]
        q_len, kv_len = q.shape[2], k.shape[2]
        q, k, v, do, dk, dv = (
            cute.make_tensor(t.iterator, cute.select(t.layout, mode=[2, 3, 1, 0])) for t in (q, k, v, do, dk, dv)
        )
        k_layout, v_layout, q_layout, do_layout, ds_layout = self.layouts()
        read, write = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()

        def moved(op: Any, tensor: cute.Tensor, layout: cute.ComposedLayout, tile: tuple[int, int]) -> Moved:
            return Moved(*cpasync.make_tiled_tma_atom(op, tensor, cute.select(layout, mode=[0, 1]), tile))

        @cute.struct
        class Storage:
            kv_barriers: cute.struct.MemRange[Int64, 4]
            q_barriers: cute.struct.MemRange[Int64, 2 * _STAGES]
            do_barriers: cute.struct.MemRange[Int64, 2 * _STAGES]
            lse: cute.struct.Align[cute.struct.MemRange[Float32, _STAGES * self.tile_m], 128]
            delta: cute.struct.Align[cute.struct.MemRange[Float32, _STAGES * self.tile_m], 128]
            k: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(k_layout)], 1024]
            v: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(v_layout)], 1024]
            q: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(q_layout)], 1024]
            do: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(do_layout)], 1024]
            ds: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(ds_layout)], 1024]
            dq: cute.struct.Align[cute.struct.MemRange[Float32, _GROUPS * self.dq_elements], 1024]

        self.storage = Storage
        c, cap = scale * LOG2_E, None
        if const_expr(softcap is not None):
            c, cap = softcap * LOG2_E, 2.0 * c / softcap
        n_tiles = cute.ceil_div(kv_len, self.tile_n)
        self.kernel(
            *self.products(),
            moved(read, q, q_layout, self.q_tile),
            moved(read, k, k_layout, self.k_tile),
            moved(read, v, v_layout, self.v_tile),
            moved(read, do, do_layout, self.do_tile),
            moved(write, dk, k_layout, self.k_tile),
            moved(write, dv, v_layout, self.v_tile),
            lse,
            delta,
            dq,
            scale,
            c,
            cap,
            Limits(q_len, kv_len, right, left),
            cute.FastDivmodDivisorV2(kv_heads * batch),
            cute.FastDivmodDivisorV2(kv_heads),
            heads // kv_heads,
        ).launch(
            grid=(n_tiles * kv_heads * batch, 1, 1),
            block=(WARP_GROUP * (_GROUPS + 1), 1, 1),
            stream=stream,
            min_blocks_per_mp=1,
        )

    @cute.kernel
    def kernel(
        self,
        mma_s: cute.TiledMma,
        mma_dv: cute.TiledMma,
        mma_dk: cute.TiledMma,
        mma_dq: cute.TiledMma,
        q: Moved,
        k: Moved,
        v: Moved,
        do: Moved,
        dk: Moved,
        dv: Moved,
        lse: cute.Tensor,
        delta: cute.Tensor,
        dq: cute.Tensor,
        scale: Float32,
        c: Float32,
        cap: Float32 | None,
        limits: Limits,
        pairs: cute.FastDivmodDivisorV2,
        heads: cute.FastDivmodDivisorV2,
        group: Int32,
    ) -> None:
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        storage = cutlass.utils.SmemAllocator().allocate(self.storage)
        k_layout, v_layout, q_layout, do_layout, ds_layout = self.layouts()
        s_k = storage.k.get_tensor(k_layout.outer, swizzle=k_layout.inner)
        s_v = storage.v.get_tensor(v_layout.outer, swizzle=v_layout.inner)
        s_q = storage.q.get_tensor(q_layout.outer, swizzle=q_layout.inner)
        s_do = storage.do.get_tensor(do_layout.outer, swizzle=do_layout.inner)
        s_ds = storage.ds.get_tensor(ds_layout.outer, swizzle=ds_layout.inner)
        vectors = cute.make_layout((self.tile_m, _STAGES))
        s_lse, s_delta = storage.lse.get_tensor(vectors), storage.delta.get_tensor(vectors)
        if warp_index == 0:
            for moved in (q, k, v, do, dk, dv):
                cpasync.prefetch_descriptor(moved.atom)
        width, vector_bytes = self.dtype.width // 8, self.tile_m * 4
        kv_bytes = self.tile_n * self.width * width, self.tile_n * self.value_width * width
        k_pipe = self.pipe(storage.kv_barriers.data_ptr(), 1, kv_bytes[0])
        v_pipe = self.pipe(storage.kv_barriers.data_ptr() + 2, 1, kv_bytes[1])
        q_pipe = self.pipe(storage.q_barriers.data_ptr(), _STAGES, self.tile_m * self.width * width + vector_bytes)
        do_pipe = self.pipe(
            storage.do_barriers.data_ptr(), _STAGES, self.tile_m * self.value_width * width + vector_bytes
        )
        pipeline.pipeline_init_arrive(is_relaxed=True)
        pipeline.pipeline_init_wait()
        n, pair = divmod(cute.arch.block_idx()[0], pairs)
        batch, kv_head = divmod(pair, heads)
        if warp_index < WARP_GROUP // 32:
            cute.arch.setmaxregister_decrease(_REGISTERS[0])
            if warp_index == 0:
                self.produce(
                    q, k, v, do, lse, delta, s_q, s_k, s_v, s_do, s_lse, s_delta,
                    k_pipe, v_pipe, q_pipe, do_pipe, limits, n, batch, kv_head, group,
                )  # fmt: skip
        else:
            cute.arch.setmaxregister_increase(_REGISTERS[1])
            self.consume(
                mma_s, mma_dv, mma_dk, mma_dq, dk, dv, dq, s_q, s_k, s_v, s_do, s_ds, s_lse, s_delta, storage.dq,
                k_pipe, v_pipe, q_pipe, do_pipe, scale, c, cap, limits, n, batch, kv_head, group, heads.divisor,
            )  # fmt: skip

    def pipe(self, barriers: Any, stages: int, tx_count: int) -> pipeline.PipelineTmaAsync:
        """A ring that one warp fills and all consumer warps free."""
        threads = pipeline.Agent.Thread
        return pipeline.PipelineTmaAsync.create(
            barrier_storage=barriers,
            num_stages=stages,
            producer_group=pipeline.CooperativeGroup(threads, 1),
            consumer_group=pipeline.CooperativeGroup(threads, WARP_GROUP // 32 * _GROUPS),
            tx_count=tx_count,
            defer_sync=True,
        )

    def query_tiles(self, limits: Limits, n: Int32) -> queries.QueryTiles:
        """The tiles of queries that see a tile of keys."""
        q_len, kv_len, right, left = limits
        return queries.query_tiles(n * self.tile_n, self.tile_m, self.tile_n, q_len, kv_len, right, left)

    def views(
        self, moved: Moved, tile: tuple[int, int], shared: cute.Tensor, head: Int32, batch: Int32
    ) -> tuple[cute.Tensor, cute.Tensor]:
        """What a copy moves: in shared memory [part, stage], globally [part, tile]."""
        tiles = cute.local_tile(moved.tensor[None, None, head, batch], tile, (None, 0))
        grouped = cute.group_modes(shared, 0, 2), cute.group_modes(tiles, 0, 2)
        return cpasync.tma_partition(moved.atom, 0, cute.make_layout(1), *grouped)

    @cute.jit
    def produce(
        self,
        q: Moved,
        k: Moved,
        v: Moved,
        do: Moved,
        lse: cute.Tensor,
        delta: cute.Tensor,
        s_q: cute.Tensor,
        s_k: cute.Tensor,
        s_v: cute.Tensor,
        s_do: cute.Tensor,
        s_lse: cute.Tensor,
        s_delta: cute.Tensor,
        k_pipe: pipeline.PipelineTmaAsync,
        v_pipe: pipeline.PipelineTmaAsync,
        q_pipe: pipeline.PipelineTmaAsync,
        do_pipe: pipeline.PipelineTmaAsync,
        limits: Limits,
        n: Int32,
        batch: Int32,
        kv_head: Int32,
        group: Int32,
    ) -> None:
        """Loads K and V once, and Q with lse, dO with delta of every visited tile of queries."""
        kind = pipeline.PipelineUserType.Producer
        once = pipeline.make_pipeline_state(kind, 1)
        state = pipeline.make_pipeline_state(kind, _STAGES)
        tiles = self.query_tiles(limits, n)
        self.load(k.atom, self.views(k, self.k_tile, s_k, kv_head, batch), n, k_pipe, once)
        self.load(v.atom, self.views(v, self.v_tile, s_v, kv_head, batch), n, v_pipe, once)
        vector = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Float32, num_bits_per_copy=32 * self.tile_m)
        for g in cutlass.range(group, unroll=1):
            head = kv_head * group + g
            q_views = self.views(q, self.q_tile, s_q, head, batch)
            do_views = self.views(do, self.do_tile, s_do, head, batch)
            lse_tiles = cute.local_tile(lse[batch, head, None], (self.tile_m,), (None,))
            delta_tiles = cute.local_tile(delta[batch, head, None], (self.tile_m,), (None,))
            for m in cutlass.range(tiles.begin, tiles.end, unroll=1):
                self.load(q.atom, q_views, m, q_pipe, state)
                with cute.arch.elect_one():
                    barrier = q_pipe.producer_get_barrier(state)
                    cute.copy(vector, lse_tiles[None, m], s_lse[None, state.index], mbar_ptr=barrier)
                self.load(do.atom, do_views, m, do_pipe, state)
                with cute.arch.elect_one():
                    barrier = do_pipe.producer_get_barrier(state)
                    cute.copy(vector, delta_tiles[None, m], s_delta[None, state.index], mbar_ptr=barrier)
                state.advance()

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
    def consume(
        self,
        mma_s: cute.TiledMma,
        mma_dv: cute.TiledMma,
        mma_dk: cute.TiledMma,
        mma_dq: cute.TiledMma,
        dk: Moved,
        dv: Moved,
        dq: cute.Tensor,
        s_q: cute.Tensor,
        s_k: cute.Tensor,
        s_v: cute.Tensor,
        s_do: cute.Tensor,
        s_ds: cute.Tensor,
        s_lse: cute.Tensor,
        s_delta: cute.Tensor,
        dq_memory: Any,
        k_pipe: pipeline.PipelineTmaAsync,
        v_pipe: pipeline.PipelineTmaAsync,
        q_pipe: pipeline.PipelineTmaAsync,
        do_pipe: pipeline.PipelineTmaAsync,
        scale: Float32,
        c: Float32,
        cap: Float32 | None,
        limits: Limits,
        n: Int32,
        batch: Int32,
        kv_head: Int32,
        group: Int32,
        kv_heads: Int32,
    ) -> None:
        """One group: its 64 keys."""
        thread = cute.arch.thread_idx()[0] - WARP_GROUP
        warp_group = cute.arch.make_warp_uniform(thread // WARP_GROUP)
        first = warp_group * WARP_GROUP
        of_s, of_dv, of_dk, of_dq = (mma.get_slice(first) for mma in (mma_s, mma_dv, mma_dk, mma_dq))

        def transposed(tensor: cute.Tensor) -> cute.Tensor:
            return cute.make_tensor(tensor.iterator, cute.select(tensor.layout, mode=[1, 0, 2]))

        operands = Operands(
            of_s.make_fragment_A(of_s.partition_A(s_k))[None, None, None, 0],
            of_s.make_fragment_B(of_s.partition_B(s_q)),
            of_s.make_fragment_A(of_s.partition_A(s_v))[None, None, None, 0],
            of_s.make_fragment_B(of_s.partition_B(s_do)),
            of_dv.make_fragment_A(of_dv.partition_shape_A((self.tile_n, self.tile_m))),
            of_dv.make_fragment_B(of_dv.partition_B(transposed(s_do))),
            of_dk.make_fragment_A(of_dk.partition_shape_A((self.tile_n, self.tile_m))),
            of_dk.make_fragment_B(of_dk.partition_B(transposed(s_q))),
            of_dq.make_fragment_A(of_dq.partition_A(transposed(s_ds))),
            of_dq.make_fragment_B(of_dq.partition_B(transposed(s_k)))[None, None, None, 0],
        )
        acc_s = cute.make_rmem_tensor(of_s.partition_shape_C((self.tile_n, self.tile_m)), Float32)
        acc_dp = cute.make_rmem_tensor(acc_s.layout, Float32)
        acc_dv = cute.make_rmem_tensor(of_dv.partition_shape_C((self.tile_n, self.value_width)), Float32)
        acc_dk = cute.make_rmem_tensor(of_dk.partition_shape_C((self.tile_n, self.width)), Float32)
        acc_dq = cute.make_rmem_tensor(of_dq.partition_shape_C((self.tile_m, self.width)), Float32)
        of_thread = mma_s.get_slice(thread)
        coords = wgmma.rows_view(of_thread.partition_C(cute.make_identity_tensor(self.ds_tile)))
        by_column = cute.make_layout((self.tile_n, self.tile_m, _STAGES), stride=(0, 1, self.tile_m))
        t_lse = of_thread.partition_C(cute.make_tensor(s_lse.iterator, by_column))
        t_delta = of_thread.partition_C(cute.make_tensor(s_delta.iterator, by_column))
        store_atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(transpose=False, num_matrices=4), self.dtype)
        ds_copy = cute.make_tiled_copy_C(store_atom, mma_s).get_slice(thread)
        s_ds_parts = ds_copy.partition_D(s_ds)
        own_dq = dq_memory.data_ptr() + cute.assume(warp_group * self.dq_elements, divby=256)
        s_dq = cute.make_tensor(own_dq, cute.make_layout((4, WARP_GROUP, self.dq_elements // 512)))

        kind = pipeline.PipelineUserType.Consumer
        once = pipeline.make_pipeline_state(kind, 1)
        state = pipeline.make_pipeline_state(kind, _STAGES)
        acc_dv.fill(0.0)
        acc_dk.fill(0.0)
        tiles = self.query_tiles(limits, n)
        m_tiles = (limits.q_len + (self.tile_m - 1)) // self.tile_m
        first_key = n * self.tile_n
        k_pipe.consumer_wait(once)
        v_pipe.consumer_wait(once)
        for g in cutlass.range(group, unroll=1):
            head = batch * kv_heads * group + kv_head * group + g
            for m in cutlass.range(tiles.begin, tiles.end, unroll=1):
                self.visit(
                    operands, mma_s, mma_dv, mma_dk, mma_dq, acc_s, acc_dp, acc_dv, acc_dk, acc_dq, coords, t_lse,
                    t_delta,
                    ds_copy, s_ds_parts, s_dq, dq, (Int64(head) * m_tiles + m) * (2 * self.dq_elements),
                    q_pipe, do_pipe, state, c, cap, limits, m * self.tile_m, first_key, thread, warp_group,
                )  # fmt: skip
                state.advance()
        dk_rows = wgmma.rows_view(acc_dk)
        for r in cutlass.range_constexpr(cute.size(dk_rows, mode=[0])):
            for j in cutlass.range_constexpr(cute.size(dk_rows, mode=[1]) // 2):
                for e in cutlass.range_constexpr(2 * j, 2 * j + 2):
                    dk_rows[r, e] = dk_rows[r, e] * scale
        # All of a CTA's products are done with K and V when both groups are here.
        cute.arch.barrier(barrier_id=_DS_WRITTEN, number_of_threads=_GROUPS * WARP_GROUP)
        self.to_shared(mma_dk, acc_dk, s_k, store_atom, thread)
        self.to_shared(mma_dv, acc_dv, s_v, store_atom, thread)
        cute.arch.fence_view_async_shared()
        cute.arch.barrier(barrier_id=_DS_WRITTEN, number_of_threads=_GROUPS * WARP_GROUP)
        if cute.arch.make_warp_uniform(thread // 32) == 0:
            s_part, g_part = self.views(dk, self.k_tile, s_k, kv_head, batch)
            cute.copy(dk.atom, s_part[None, 0], g_part[None, n])
            s_part, g_part = self.views(dv, self.v_tile, s_v, kv_head, batch)
            cute.copy(dv.atom, s_part[None, 0], g_part[None, n])
            cute.arch.cp_async_bulk_commit_group()
        cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def visit(
        self,
        operands: Operands,
        mma_s: cute.TiledMma,
        mma_dv: cute.TiledMma,
        mma_dk: cute.TiledMma,
        mma_dq: cute.TiledMma,
        acc_s: cute.Tensor,
        acc_dp: cute.Tensor,
        acc_dv: cute.Tensor,
        acc_dk: cute.Tensor,
        acc_dq: cute.Tensor,
        coords: cute.Tensor,
        t_lse: cute.Tensor,
        t_delta: cute.Tensor,
        ds_copy: Any,
        s_ds_parts: cute.Tensor,
        s_dq: cute.Tensor,
        dq: cute.Tensor,
        dq_offset: Int64,
        q_pipe: pipeline.PipelineTmaAsync,
        do_pipe: pipeline.PipelineTmaAsync,
        state: pipeline.PipelineState,
        c: Float32,
        cap: Float32 | None,
        limits: Limits,
        first_query: Int32,
        first_key: Int32,
        thread: Int32,
        warp_group: Int32,
    ) -> None:
        """One tile of queries: its share of dV and dK, and the group's share of its dQ."""
        stage = state.index
        q_pipe.consumer_wait(state)
        wgmma.issue(mma_s, acc_s, operands.k, operands.q[None, None, None, stage], Boolean(False))
        do_pipe.consumer_wait(state)
        wgmma.issue(mma_s, acc_dp, operands.v, operands.do[None, None, None, stage], Boolean(False))
        warpgroup.wait_group(1)
        lses = self.of_columns(t_lse, stage)
        scores, dp = wgmma.rows_view(acc_s), wgmma.rows_view(acc_dp)
        slopes = None
        if const_expr(cap is not None):
            softmax.cap_scores(scores, cap)
            slopes = cute.make_rmem_tensor(acc_s.layout, Float32)
            softmax.cap_slopes(acc_s, slopes)
        _, kv_len, right, left = limits
        if not queries.all_seen(first_query, first_key, self.tile_m, self.tile_n, kv_len, right, left):
            queries.hide_keys(scores, coords, first_query, first_key, kv_len, right, left)
        for j in cutlass.range_constexpr(cute.size(scores, mode=[1])):
            for r in cutlass.range_constexpr(2):
                scores[r, j] = cute.math.exp2(scores[r, j] * c - lses[0, j], fastmath=True)
        wgmma.to_operand(operands.p, acc_s, self.dtype)
        warpgroup.wait_group(0)
        deltas = self.of_columns(t_delta, stage)
        for j in cutlass.range_constexpr(cute.size(scores, mode=[1])):
            for r in cutlass.range_constexpr(2):
                dp[r, j] = scores[r, j] * (dp[r, j] - deltas[0, j])
        if const_expr(slopes is not None):
            for e in cutlass.range_constexpr(cute.size(slopes) // 2):
                for i in cutlass.range_constexpr(2 * e, 2 * e + 2):
                    acc_dp[i] = acc_dp[i] * slopes[i]
        wgmma.to_operand(operands.ds, acc_dp, self.dtype)
        cute.copy(ds_copy, self.as_stored(ds_copy, operands.ds, acc_dp), s_ds_parts[None, None, None, stage])
        wgmma.issue(mma_dv, acc_dv, operands.p, operands.do_t[None, None, None, stage], Boolean(True))
        cute.arch.fence_view_async_shared()
        cute.arch.barrier(barrier_id=_DS_WRITTEN, number_of_threads=_GROUPS * WARP_GROUP)
        wgmma.issue(mma_dq, acc_dq, operands.ds_shared[None, None, None, stage], operands.k_t, Boolean(False))
        warpgroup.wait_group(1)
        do_pipe.consumer_release(state)
        wgmma.issue(mma_dk, acc_dk, operands.ds, operands.q_t[None, None, None, stage], Boolean(True))
        warpgroup.wait_group(1)
        self.add_dq(acc_dq, s_dq, dq, dq_offset, thread, warp_group)
        warpgroup.wait_group(0)
        q_pipe.consumer_release(state)

    def of_columns(self, tensor: cute.Tensor, stage: Int32) -> cute.Tensor:
        """The values of a thread's columns, in registers."""
        part = tensor[None, None, None, stage]
        values = cute.make_rmem_tensor_like(part)
        cute.autovec_copy(part, values)
        return wgmma.rows_view(values)

    def as_stored(self, copy: Any, operand: cute.Tensor, acc: cute.Tensor) -> cute.Tensor:
        """The converted accumulator, which the operand's registers are, in the copy's order."""
        return copy.retile(cute.make_tensor(operand.iterator, acc.layout))

    @cute.jit
    def add_dq(
        self, acc: cute.Tensor, s_dq: cute.Tensor, dq: cute.Tensor, offset: Int64, thread: Int32, warp_group: Int32
    ) -> None:
        """Adds a group's dQ to the accumulator in memory, through the group's part of shared memory."""
        barrier = {"barrier_id": _DQ + warp_group, "number_of_threads": WARP_GROUP}
        lane = thread % WARP_GROUP
        cute.arch.cp_async_bulk_wait_group(0, read=True)  # whoever issued the addition before waits here
        cute.arch.barrier(**barrier)
        for i in cutlass.range_constexpr(self.dq_elements // 512):
            four = cute.make_tensor(acc.iterator + 4 * i, cute.make_layout(4))
            cute.autovec_copy(four, s_dq[None, lane, i])
        cute.arch.fence_view_async_shared()
        cute.arch.barrier(**barrier)
        if lane == 0:
            target = dq.iterator + offset + warp_group * self.dq_elements
            primitives.cp_reduce_async_bulk_global_shared_cta(
                target,
                s_dq.iterator,
                4 * self.dq_elements,
                op=primitives.CpReduceOp.ADD,
                type=primitives.CpReduceType.F32,
            )
            cute.arch.cp_async_bulk_commit_group()

    @cute.jit
    def to_shared(
        self, mma: cute.TiledMma, acc: cute.Tensor, shared: cute.Tensor, atom: cute.CopyAtom, thread: Int32
    ) -> None:
        """An accumulator in 16 bits, to shared memory."""
        low = cute.make_rmem_tensor(acc.layout, self.dtype)
        wgmma.to_operand(low, acc, self.dtype)
        copy = cute.make_tiled_copy_C(atom, mma).get_slice(thread)
        cute.copy(copy, copy.retile(low), copy.partition_D(shared[None, None, 0]))
