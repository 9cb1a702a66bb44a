"""Small kernels for the tests of compiling, caching and reporting. Imports CUTLASS."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.utils.hopper_helpers as sm90
from cutlass import BFloat16, Float32, Int32, cute
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.utils import LayoutEnum


def env_stream():
    return cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)


class Scale:
    """y = x * scale + shift for [rows, 128 n] in fp32."""

    def __init__(self, n):
        self.n = n

    @cute.jit
    def __call__(self, x: cute.Tensor, y: cute.Tensor, scale: Float32, shift: Int32, stream: cuda.CUstream):
        self.kernel(x, y, scale, shift).launch(grid=[x.shape[0], 1, 1], block=[128, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, x: cute.Tensor, y: cute.Tensor, scale: Float32, shift: Int32):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        for i in cutlass.range_constexpr(self.n):
            y[block, thread + i * 128] = x[block, thread + i * 128] * scale + Float32(shift)


def build_scale(n):
    rows = cute.sym_int()

    def fake():
        stride = cute.sym_int64(divisibility=4)
        return cute.runtime.make_fake_tensor(Float32, (rows, 128 * n), (stride, 1), assumed_align=16)

    return Scale(n), (fake(), fake(), Float32(1.0), Int32(0), env_stream())


class Twice:
    """Launches two kernels of different widths, one after the other."""

    @cute.jit
    def __call__(self, x: cute.Tensor, y: cute.Tensor, scale: Float32, shift: Int32, stream: cuda.CUstream):
        Scale(1)(x, y, scale, shift, stream)
        Scale(2)(y, x, scale, shift, stream)


def build_twice():
    return Twice(), build_scale(2)[1]


@cute.jit
def host_only(x: cute.Tensor, y: cute.Tensor, scale: Float32, shift: Int32):
    """Launches nothing: what a call costs, and what it checks, without a GPU."""


def build_host_only():
    def fake():
        shape = tuple(cute.sym_int() for _ in range(3))
        strides = tuple(cute.sym_int64(divisibility=8) for _ in range(3))
        return cute.runtime.make_fake_tensor(
            Float32, (*shape, 64), (*strides, 1), memspace=cute.AddressSpace.generic, assumed_align=16
        )

    return host_only, (fake(), fake(), Float32(1.0), Int32(0))


class Product:
    """c = a @ b.T for one tile, [64, 64] by [n, 64], with wgmma.

    ``read_early``: the accumulator is read before the wgmmas are waited for, so ptxas adds a wait of its own.
    ``crowded``: there are two accumulators, and so many threads that they do not fit: ptxas waits after each wgmma.
    """

    def __init__(self, n, read_early, crowded):
        self.n = n
        self.read_early = read_early
        self.crowded = crowded

    @cute.jit
    def __call__(self, a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, stream: cuda.CUstream):
        mma = sm90.make_trivial_tiled_mma(
            BFloat16, BFloat16, OperandMajorMode.K, OperandMajorMode.K, Float32, (1, 1, 1), (64, self.n)
        )
        layout_a = sm90.make_smem_layout_epi(BFloat16, LayoutEnum.ROW_MAJOR, (64, 64), 1)
        layout_b = sm90.make_smem_layout_epi(BFloat16, LayoutEnum.ROW_MAJOR, (self.n, 64), 1)
        threads = 384 if self.crowded else 128
        self.kernel(a, b, c, mma, layout_a, layout_b).launch(grid=[1, 1, 1], block=[threads, 1, 1], stream=stream)

    @cute.kernel
    def kernel(
        self,
        a: cute.Tensor,
        b: cute.Tensor,
        c: cute.Tensor,
        mma: cute.TiledMma,
        layout_a: cute.ComposedLayout,
        layout_b: cute.ComposedLayout,
    ):
        thread, _, _ = cute.arch.thread_idx()

        @cute.struct
        class Storage:
            a: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(layout_a)], 1024]
            b: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(layout_b)], 1024]

        storage = cutlass.utils.SmemAllocator().allocate(Storage)
        shared_a = storage.a.get_tensor(layout_a.outer, swizzle=layout_a.inner)
        shared_b = storage.b.get_tensor(layout_b.outer, swizzle=layout_b.inner)
        for i in cutlass.range(thread, 64 * 64, 128, unroll=1):
            shared_a[i // 64, i % 64, 0] = a[i // 64, i % 64]
        for i in cutlass.range(thread, self.n * 64, 128, unroll=1):
            shared_b[i // 64, i % 64, 0] = b[i // 64, i % 64]
        cute.arch.fence_view_async_shared()
        cute.arch.sync_threads()

        part = mma.get_slice(thread)
        fragment_a = mma.get_slice(0).make_fragment_A(mma.get_slice(0).partition_A(shared_a))
        fragment_b = mma.get_slice(0).make_fragment_B(mma.get_slice(0).partition_B(shared_b))
        total = cute.make_rmem_tensor(part.partition_shape_C((64, self.n)), Float32)
        second = cute.make_rmem_tensor(part.partition_shape_C((64, self.n)), Float32)
        warpgroup.fence()
        atom = cute.make_mma_atom(mma.op)
        for k in cutlass.range_constexpr(cute.size(fragment_a, mode=[2])):
            atom.set(warpgroup.Field.ACCUMULATE, k != 0)
            cute.gemm(atom, total, fragment_a[None, None, k, 0], fragment_b[None, None, k, 0], total)
        warpgroup.commit_group()
        if cutlass.const_expr(self.crowded):
            for k in cutlass.range_constexpr(cute.size(fragment_a, mode=[2])):
                atom.set(warpgroup.Field.ACCUMULATE, k != 0)
                cute.gemm(atom, second, fragment_a[None, None, k, 0], fragment_b[None, None, k, 0], second)
            warpgroup.commit_group()
        if cutlass.const_expr(self.read_early):
            total[0] = total[0] + 1.0
        warpgroup.wait_group(0)
        if cutlass.const_expr(self.crowded):
            for i in cutlass.range_constexpr(cute.size(total)):
                total[i] = total[i] * second[i]
        cute.autovec_copy(total, part.partition_C(cute.local_tile(c, (64, self.n), (0, 0))))


def build_product(n=64, *, read_early=False, crowded=False):
    def fake(dtype, rows, columns):
        return cute.runtime.make_fake_tensor(dtype, (rows, columns), (columns, 1), assumed_align=16)

    arguments = (fake(BFloat16, 64, 64), fake(BFloat16, n, 64), fake(Float32, cute.sym_int(), n), env_stream())
    return Product(n, read_early, crowded), arguments


class Crowded:
    """Keeps more values alive than a thread of a block of 1024 has registers for, so some are spilled."""

    @cute.jit
    def __call__(self, x: cute.Tensor, y: cute.Tensor, stream: cuda.CUstream):
        self.kernel(x, y).launch(grid=[1, 1, 1], block=[1024, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, x: cute.Tensor, y: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        values = cute.make_rmem_tensor(64, Float32)
        for i in cutlass.range_constexpr(64):
            values[i] = x[thread, i]
        for _ in cutlass.range(x.shape[0], unroll=1):
            for i in cutlass.range_constexpr(64):
                values[i] = values[i] * values[(i + 1) % 64] + values[(i + 29) % 64]
        for i in cutlass.range_constexpr(64):
            y[thread, i] = values[i]


def build_crowded():
    def fake():
        return cute.runtime.make_fake_tensor(Float32, (cute.sym_int(), 64), (64, 1), assumed_align=16)

    return Crowded(), (fake(), fake(), env_stream())
