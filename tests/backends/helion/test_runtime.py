"""The machinery between Helion kernels and launches, on a toy attention without softmax."""

from __future__ import annotations

import contextlib
import gc
import inspect
import os
import threading
import weakref
from types import SimpleNamespace

import pytest
import torch

from torch_bwattn.backends.helion import loader, pretend, report, runtime, specialization

CONFIG = {"block_sizes": [32, 16], "num_warps": 4, "num_stages": 2, "indexing": "pointer"}
DIMS = {"q": "B Hq M D", "k": "B Hkv N D", "o": "B Hq M D", "total": "B Hq M", "bias": "B Hq M N"}

interpreted = pytest.mark.interpreted
compile_only = pytest.mark.compile_only


def toy_kernel_module():
    loader.load()
    import toy_kernel

    return toy_kernel


@pytest.fixture(scope="session")
def function():
    return toy_kernel_module().toy


def make_family(function):
    return runtime.KernelFamily(function, dims=DIMS, specialized=("D",))


@pytest.fixture(scope="session")
def family(function):
    """Shared by the tests of a process, since each new feature takes seconds to bind."""
    return make_family(function)


@pytest.fixture
def fresh_family(function):
    return make_family(function)


def arguments(b=2, hq=4, hkv=2, m=40, n=56, d=32, dtype=torch.float32, bias=False, scale=0.3, causal=True):
    generator = torch.Generator().manual_seed(m * 1000 + n)
    q = (0.3 * torch.randn(b, m, hq, d, generator=generator)).to(dtype).transpose(1, 2)
    k = torch.randn(b, hkv, n, d, generator=generator).to(dtype)
    mask = torch.randn(m, n, generator=generator).to(dtype).expand(b, hq, m, n) if bias else None
    return [q, k, torch.full_like(q, float("nan")), torch.full((b, hq, m), float("nan")), mask, scale, causal]


def check(args):
    q, k, out, total, bias, scale, causal = args
    k = k.repeat_interleave(q.size(1) // max(k.size(1), 1), 1)
    scores = scale * q @ k.transpose(-1, -2)
    scores = scores if bias is None else scores + bias
    p = torch.exp2(scores)
    p = p.tril() if causal else p
    torch.testing.assert_close(out, p @ k, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(total, p.sum(-1), rtol=1e-4, atol=1e-4)


def test_needs_int64_looks_at_the_extent():
    small = torch.empty(4, 4)
    assert not specialization.needs_int64(small, None)
    wide = torch.empty_strided((2, 3), (2**31, 1), device="meta")
    assert wide.numel() == 6
    assert specialization.needs_int64(small, wide)
    # Exactly 2**31 - 1 is still reachable, one further is not.
    assert not specialization.needs_int64(torch.empty_strided((2, 1), (2**31 - 1, 1), device="meta"))
    # Unused or empty strides do not count; expanded ones reach nothing.
    assert not specialization.needs_int64(torch.empty_strided((1, 4), (2**40, 1), device="meta"))
    assert not specialization.needs_int64(torch.empty_strided((0, 4), (2**40, 1), device="meta"))
    assert not specialization.needs_int64(torch.empty(1, device="meta").expand(2**20))
    assert specialization.needs_int64(torch.empty(1, device="meta").expand(2**32))


def test_arguments_that_do_not_fit_are_named(family):
    args = arguments()
    with pytest.raises(ValueError, match=r"expected 7 arguments, got 6"):
        family.prepare(args[:-1], CONFIG)
    bad = [*args]
    bad[1] = args[1][0]
    with pytest.raises(ValueError, match=r"k: expected a tensor \[B, Hkv, N, D\], got a torch.float32 tensor of shape"):
        family.prepare(bad, CONFIG)
    bad = [*args]
    bad[3] = torch.empty(2, 3, 40)
    with pytest.raises(ValueError, match=r"total: expected Hq = 4, got 3"):
        family.prepare(bad, CONFIG)


def test_unknown_parameters_and_dimensions_are_named(function):
    with pytest.raises(ValueError, match=r"toy has no parameters \['w'\]"):
        runtime.KernelFamily(function, dims={"w": "B"})
    family = runtime.KernelFamily(function, dims={**DIMS, "bias": "B Hq Rows N"}, specialized=("D",))
    args = arguments(bias=True)
    with pytest.raises(ValueError, match=r"needs a size to bind on for dimension Rows"):
        family.canonical_args(args, "cpu")


def test_canonical_sizes_are_all_different(family):
    # D = 272 is the canonical M, too.
    canonical = family.canonical_args(arguments(b=1, hq=1, hkv=1, m=1, n=0, d=272, bias=True), "cpu")
    q, k, bias = canonical[0], canonical[1], canonical[4]
    sizes = [*q.shape, *k.shape[1:3]]
    assert q.size(3) == 272
    assert len(set(sizes)) == len(sizes)
    assert min(sizes) >= 2
    assert bias.shape == (*q.shape[:3], k.size(2))
    assert bias.is_contiguous()


def test_launcher_switch_is_checked(monkeypatch):
    monkeypatch.delenv("BWATTN_HELION_LAUNCHER", raising=False)
    assert not runtime.use_triton_launcher()
    monkeypatch.setenv("BWATTN_HELION_LAUNCHER", "triton")
    assert runtime.use_triton_launcher()
    monkeypatch.setenv("BWATTN_HELION_LAUNCHER", "fast")
    with pytest.raises(ValueError, match="BWATTN_HELION_LAUNCHER: expected 'direct' or 'triton', got 'fast'"):
        runtime.use_triton_launcher()


def test_loader_says_what_is_wrong(monkeypatch):
    loader.why_missing.cache_clear()
    monkeypatch.setattr(loader, "_loaded", None)
    try:
        monkeypatch.setattr(loader.sys, "platform", "darwin")
        assert "Linux only" in (loader.why_missing() or "")
        monkeypatch.undo()
        monkeypatch.setattr(loader, "_loaded", None)
        loader.why_missing.cache_clear()
        monkeypatch.setattr(loader, "HELION_VERSION", "9.9.9")
        with pytest.raises(
            ImportError, match=r"the helion backend cannot be used: helion 1\.5\.1 is installed.*9\.9\.9"
        ):
            loader.load()
    finally:
        loader.why_missing.cache_clear()


@interpreted
def test_one_bound_kernel_serves_every_length_and_layout(family):
    shapes = [
        (2, 4, 2, 40, 56),
        (1, 1, 1, 1, 1),
        (1, 2, 1, 65, 33),
        (3, 3, 3, 3, 100),
        (1, 1, 1, 0, 5),
        (1, 1, 1, 5, 0),
    ]
    for b, hq, hkv, m, n in shapes:
        args = arguments(b, hq, hkv, m, n)
        family.prepare(args, CONFIG)(*args)
        check(args)
    args = arguments()
    args[1] = torch.randn(2, 2, 56, 64)[..., ::2]  # a last stride of 2
    family.prepare(args, CONFIG)(*args)
    check(args)
    assert len({id(family.prepare(arguments(m=m), CONFIG)._bound) for m in (1, 2, 99)}) == 1


@interpreted
def test_features_bind_apart(family):
    bound = set()
    for args in (arguments(), arguments(bias=True), arguments(causal=False)):
        launch = family.prepare(args, CONFIG)
        launch(*args)
        check(args)
        bound.add(id(launch._bound))
    assert len(bound) == 3


@interpreted
def test_replay_takes_other_tensors_and_scalars(family):
    first = arguments(bias=True)
    launch = family.prepare(first, CONFIG)
    launch(*first)
    check(first)
    second = arguments(bias=True, scale=-0.7)
    second[1] = second[1] * 0.5
    launch(*second)
    check(second)
    second[0].mul_(0.5)
    launch(*second)
    check(second)
    check(first)


@interpreted
def test_numbers_that_the_wrapper_computes_follow_the_call():
    # ``shift`` is doubled on the host, so the wrapper launches with a number that is no argument.
    args = arguments(m=8, n=8)
    plain = runtime.KernelFamily(
        toy_kernel_module().shifted, dims={"q": "B Hq M D", "o": "B Hq M D"}, specialized=("D",)
    )
    launch = plain.prepare((args[0], args[2], 0.5), {"block_sizes": [8]})
    assert [plain.parameters[i] for i in launch._bound.derived_from] == ["shift"]
    for shift in (0.5, -2.0):
        launch(args[0], args[2], shift)
        torch.testing.assert_close(args[2], args[0] + 2 * shift)


@interpreted
def test_binding_ignores_the_callers_modes_and_leaves_the_environment(function, monkeypatch):
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    family = make_family(function)
    args = arguments()
    environment = dict(os.environ)
    with torch.inference_mode(), torch.device("meta"), torch.autocast("cpu"):
        family.prepare(args, CONFIG)(*args)
    check(args)
    assert dict(os.environ) == environment


@interpreted
def test_a_prepared_launch_holds_no_tensor(family):
    args = arguments()
    launch = family.prepare(args, CONFIG)
    launch(*args)
    references = [weakref.ref(a) for a in args if isinstance(a, torch.Tensor)]
    del args
    gc.collect()
    assert all(reference() is None for reference in references)
    assert launch is not None


@interpreted
def test_int64_indices_give_the_same_values(family, monkeypatch):
    monkeypatch.setattr(specialization, "needs_int64", lambda *_: True)
    args = arguments(bias=True)
    launch = family.prepare(args, CONFIG)
    launch(*args)
    check(args)
    assert "tl.int64" in inspect.getsource(launch._captured.function.fn)
    assert launch._bound.integer == "i64"


@interpreted
def test_threads_bind_once(fresh_family, monkeypatch):
    bindings = []
    bind = runtime.KernelFamily._bind
    monkeypatch.setattr(runtime.KernelFamily, "_bind", lambda *a: bindings.append(1) or bind(*a))
    barrier = threading.Barrier(4)
    failures = []

    def work():
        barrier.wait()
        try:
            fresh_family.prepare(arguments(), CONFIG)
        except Exception as error:  # noqa: BLE001 (shown below)
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert len(bindings) == 1


@interpreted
def test_nothing_is_compiled_in_the_interpreter(family):
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET=1 replaced Triton's compiler"):
        report.compile_report(family, arguments(), CONFIG)


@compile_only
def test_cpu_tensors_are_refused_outside_the_interpreter(family):
    with pytest.raises(RuntimeError, match="toy: expected CUDA tensors, got cpu ones"):
        family.prepare(arguments(), CONFIG)


@compile_only
def test_pretending_restores_everything():
    loader.load()
    import helion._compat

    def state():
        owners = pretend._replacements((9, 0))
        return [inspect.getattr_static(owner, name) for owner, name, _ in owners]

    before = state()
    assert not torch.cuda.is_available()
    with pretend.pretend_cuda((8, 0)):
        assert pretend.active()
        assert torch.cuda.is_available()
        assert torch.cuda.get_device_capability() == (8, 0)
        assert helion._compat.target_device_capability() == (8, 0)
        with pytest.raises(RuntimeError, match="cannot be nested"), pretend.pretend_cuda():
            pass
    with contextlib.suppress(KeyError), pretend.pretend_cuda():
        assert helion._compat.target_device_capability() == (9, 0)
        raise KeyError
    assert not pretend.active()
    assert not torch.cuda.is_available()
    assert helion._compat.target_device_capability() is None
    assert all(a is b for a, b in zip(before, state(), strict=True))
    with pytest.raises(ValueError, match=r"capability: expected one of .*, got \(7, 5\)"), pretend.pretend_cuda((7, 5)):
        pass


@compile_only
def test_binaries_are_counted_by_layout_and_not_by_length(fresh_family):
    def compiled(args, **options):
        report.compile_report(fresh_family, args, CONFIG, **options)
        return fresh_family.binary_count()

    half = torch.float16
    assert compiled(arguments(dtype=half)) == 1
    for b, hq, hkv, m, n in [(1, 1, 1, 1, 1), (1, 2, 1, 64, 128), (3, 6, 2, 17, 31), (1, 4, 4, 16, 1), (1, 1, 1, 0, 8)]:
        assert compiled(arguments(b, hq, hkv, m, n, dtype=half)) == 1
    misaligned = arguments(dtype=half)
    misaligned[0] = torch.empty(2 * 4 * 40 * 32 + 1, dtype=half)[1:].view(2, 4, 40, 32)
    assert compiled(misaligned) == 2
    odd_rows = arguments(dtype=half)
    odd_rows[1] = torch.empty(2, 2, 56, 33, dtype=half)[..., :32]
    assert compiled(odd_rows) == 2  # the same class: unit last stride, nothing else known
    assert compiled(arguments(dtype=half), aligned=False) == 2
    stepped = arguments(dtype=half)
    stepped[1] = torch.empty(2, 2, 56, 64, dtype=half)[..., ::2]
    assert compiled(stepped) == 3
    # A mask has a class of its own: rows of 56 halves are multiples of 16 bytes, rows of 55 are not.
    assert compiled(arguments(dtype=half, bias=True)) == 4
    assert compiled(arguments(n=55, dtype=half, bias=True)) == 5
    assert compiled(arguments(n=33, dtype=half, bias=True)) == 5
    broadcast = arguments(dtype=half, bias=True)
    broadcast[4] = torch.empty(1, 1, 40, 1, dtype=half).expand(2, 4, 40, 56)
    assert compiled(broadcast) == 6


@compile_only
def test_report_for_hopper_and_ampere(family):
    config = {"block_sizes": [64, 64], "num_warps": 4, "num_stages": 2, "indexing": "pointer"}
    args = arguments(m=300, n=500, d=64, dtype=torch.bfloat16)
    hopper = report.compile_report(family, args, config)
    assert hopper.capability == (9, 0)
    assert hopper.counts["wgmma"] > 0
    assert hopper.counts["cp_async"] > 0
    assert hopper.counts["ld_global_v4"] > 0
    assert 0 < hopper.registers <= 255
    assert hopper.stack_bytes == 0
    assert hopper.shared_bytes > 0
    assert "wgmma=" in str(hopper)
    blind = report.compile_report(family, args, config, aligned=False)
    assert blind.counts["cp_async"] == 0  # so the divisibility facts are what makes copies asynchronous
    ampere = report.compile_report(family, args, config, capability=(8, 0))
    assert ampere.counts["wgmma"] == 0
    assert ampere.counts["mma_sync"] > 0


@compile_only
def test_int64_route_compiles_wide_indices(family, monkeypatch):
    monkeypatch.setattr(specialization, "needs_int64", lambda *_: True)
    binary = runtime.compile_only(family, arguments(dtype=torch.float16), CONFIG, (9, 0))
    assert "i64" in binary.src.signature.values()
    assert "i32" not in binary.src.signature.values()


class _Launcher:
    """Stands for a loaded ``CompiledKernel``: checks the call against what Triton's launcher unpacks."""

    def __init__(self, binary, seen):
        self.binary = binary
        self.seen = seen
        self.function = 1234
        self.packed_metadata = binary.packed_metadata

    def run(self, x, y, z, stream, function, packed, metadata, enter, leave, *values):
        assert (stream, function, packed, metadata) == (77, 1234, self.packed_metadata, None)
        assert enter is None
        assert leave is None
        assert len(values) == len(self.binary.src.signature)
        for (name, kind), value in zip(self.binary.src.signature.items(), values, strict=True):
            expected = float if kind == "fp32" else int
            assert kind == "constexpr" or isinstance(value, expected), (name, kind, value)
        self.seen.append(
            SimpleNamespace(grid=(x, y, z), values=dict(zip(self.binary.src.signature, values, strict=True)))
        )


@pytest.fixture
def launched(monkeypatch):
    """Lets CPU tensors through to the direct launcher, with everything that needs the GPU replaced."""
    seen = []
    original = runtime._Bound.binary

    def binary(self, captured, args, layouts, _):
        return _Launcher(original(self, captured, args, layouts, torch.device("cpu")), seen)

    class Device:
        type = "cuda"
        index = 3

    monkeypatch.setattr(runtime._Bound, "binary", binary)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 3, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 77, raising=False)
    monkeypatch.setattr(
        runtime.KernelFamily,
        "prepare",
        lambda self, args, config: runtime.PreparedLaunch(
            self, self.bind(args, config, (9, 0), self.index_dtype(args), torch.device("cpu")), args, Device()
        ),
    )
    return seen


@compile_only
def test_direct_launch_passes_what_the_binary_takes(fresh_family, launched):
    args = arguments(m=40, n=56, dtype=torch.float16, bias=True)
    launch = fresh_family.prepare(args, CONFIG)
    launch(*args)
    call = launched[-1]
    assert call.grid == (2 * 2 * 4, 1, 1)
    assert call.values["q"] == args[0].data_ptr()
    assert call.values["bias"] == args[4].data_ptr()
    assert call.values["scale"] == 0.3
    assert call.values["q_stride_1"] == 32
    assert call.values["bias_stride_0"] == 0
    assert call.values["N"] == 56

    other = arguments(m=40, n=56, dtype=torch.float16, bias=True, scale=2.0)
    launch(*other)
    assert launched[-1].values["q"] == other[0].data_ptr()
    assert launched[-1].values["scale"] == 2.0
    assert fresh_family.binary_count() == 1

    other[0] = torch.empty(2 * 40 * 4 * 32 + 1, dtype=torch.float16)[1:].view(2, 40, 4, 32).transpose(1, 2)
    launch(*other)  # a base that the first binary may not assume: another one is compiled, the call goes on
    launch(*other)
    assert len(launched) == 4
    assert launched[-1].values["q"] == other[0].data_ptr()
    assert fresh_family.binary_count() == 2


@compile_only
def test_unused_strides_are_made_harmless_and_empty_grids_are_not_launched(fresh_family, launched):
    args = arguments(b=1, hq=1, hkv=1, m=8, n=8, dtype=torch.float16)
    args[1] = torch.empty_strided((1, 1, 8, 32), (2**40 + 1, 7, 32, 1), dtype=torch.float16)
    fresh_family.prepare(args, CONFIG)(*args)
    assert launched[-1].values["k_stride_0"] == 0
    assert launched[-1].values["k_stride_1"] == 0
    assert fresh_family.binary_count() == 1
    empty = arguments(m=0, dtype=torch.float16)
    fresh_family.prepare(empty, CONFIG)(*empty)
    assert len(launched) == 1


def test_compiling_during_capture_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match=r"toy is not compiled yet.*during CUDA graph capture.*warm up"):
        runtime.refuse_during_capture("toy", torch.device("cuda", 0))
    runtime.refuse_during_capture("toy", torch.device("cpu"))
