"""Keys, hits and misses, threads and processes, and what a launch checks before it launches."""

from __future__ import annotations

import dataclasses
import enum
import inspect
import threading

import pytest
import torch

from torch_bwattn.backends.cute import compile as compiling
from torch_bwattn.backends.cute import disk, loader
from torch_bwattn.backends.cute.compile import KernelKey, compiled, ready


class Mask(enum.Enum):
    NONE = 0
    CAUSAL = 1


@dataclasses.dataclass(frozen=True)
class Config:
    tile_m: int
    tile_n: int = 128
    mask: Mask = Mask.NONE


class Builder:
    """A build function that counts its calls."""

    def __init__(self, name, *arguments):
        self.name = name
        self.arguments = arguments
        self.calls = 0

    def __call__(self):
        import toy_kernels

        self.calls += 1
        return getattr(toy_kernels, f"build_{self.name}")(*self.arguments)


def scale_key(n):
    return KernelKey("scale", "sm_90a", (n, torch.float32))


KEYS = [
    KernelKey("scale", "sm_90a", (Config(64), torch.bfloat16, True, 1.0)),
    KernelKey("other", "sm_90a", (Config(64), torch.bfloat16, True, 1.0)),
    KernelKey("scale", "sm_100a", (Config(64), torch.bfloat16, True, 1.0)),
    KernelKey("scale", "sm_90a", (Config(128), torch.bfloat16, True, 1.0)),
    KernelKey("scale", "sm_90a", (Config(64, mask=Mask.CAUSAL), torch.bfloat16, True, 1.0)),
    KernelKey("scale", "sm_90a", (Config(64), torch.float16, True, 1.0)),
    KernelKey("scale", "sm_90a", (Config(64), "torch.bfloat16", True, 1.0)),
    KernelKey("scale", "sm_90a", (Config(64), torch.bfloat16, False, 1.0)),
    KernelKey("scale", "sm_90a", (Config(64), torch.bfloat16, 1, 1.0)),
    KernelKey("scale", "sm_90a", (Config(64), torch.bfloat16, True, 1)),
    KernelKey("scale", "sm_90a", (Config(64), torch.bfloat16, True, -0.0)),
    KernelKey("scale", "sm_90a", (Config(64), torch.bfloat16, True, 0.0)),
    KernelKey("scale", "sm_90a", (Config(64), torch.bfloat16, True, None)),
    KernelKey("scale", "sm_90a", (Config(64), torch.bfloat16, (True, 1.0))),
    KernelKey("scale", "sm_90a"),
]


def test_every_part_of_a_key_counts():
    assert len(set(KEYS)) == len(KEYS)
    assert len({disk.file_name(key.name, key.text) for key in KEYS}) == len(KEYS)


def test_equal_keys():
    first, second = (KernelKey("scale", "sm_90a", (Config(64), torch.bfloat16)) for _ in range(2))
    assert first == second
    assert hash(first) == hash(second)
    assert disk.file_name(first.name, first.text) == disk.file_name(second.name, second.text)


@dataclasses.dataclass
class Mutable:
    tile_m: int = 64


@pytest.mark.parametrize("part", [[1], {"a": 1}, object(), Mutable(), Config, torch.zeros(1), (1, [2])])
def test_a_part_that_may_not_say_all_is_refused(part):
    with pytest.raises(TypeError, match="parts: expected None, bool, int"):
        KernelKey("scale", "sm_90a", (part,))


@pytest.mark.parametrize("name", ["", "a b", "../scale", "scale.so", "é"])
def test_a_name_that_is_no_identifier_is_refused(name):
    with pytest.raises(ValueError, match="name: expected an identifier, got"):
        KernelKey(name, "sm_90a")


@pytest.mark.parametrize("arch", ["", "cpu", "90", "sm_90a --keep-ptx"])
def test_an_arch_that_is_none_is_refused(arch):
    with pytest.raises(ValueError, match="arch: expected a CUDA architecture"):
        KernelKey("scale", arch)


def test_a_hit_builds_nothing_and_gives_the_same_callable():
    build = Builder("scale", 2)
    assert not ready(scale_key(2))
    first = compiled(scale_key(2), build)
    assert ready(scale_key(2))
    assert compiled(scale_key(2), build) is first
    assert build.calls == 1


def test_other_keys_are_other_kernels():
    builds = [Builder("scale", n) for n in (1, 2)]
    functions = [compiled(scale_key(build.arguments[0]), build) for build in builds]
    for function, n in zip(functions, (1, 2), strict=True):
        with pytest.raises(ValueError, match=rf"Tensor\(\[n0, {128 * n}\], float32\)"):
            function(torch.zeros(2, 128 * n), torch.zeros(2, 128 * n), 1.0, 0)


def test_the_architecture_is_compiled_for(cache):
    """Each is a binary of its own, whatever GPU is here: their ELF headers name different architectures."""
    for arch in ("sm_90a", "sm_100a"):
        compiled(KernelKey("scale", arch, (2,)), Builder("scale", 2))
    headers = {path.read_bytes().rpartition(b"\x7fELF")[2][:64] for path in cache.rglob("*.so")}
    assert len(headers) == 2


@pytest.mark.parametrize("variable", ["sm_80", "sm_90a"])
def test_the_architecture_of_the_key_outranks_that_of_the_process(child, variable):
    """wgmma exists on sm_90a only."""
    script = """
import toy_kernels
compiled(KernelKey("product", "sm_90a"), toy_kernels.build_product)
try:
    compiled(KernelKey("product", "sm_80"), toy_kernels.build_product)
except RuntimeError as error:
    print("product does not compile for sm_80" in str(error))
"""
    assert child(script, CUTE_DSL_ARCH=variable) == "True"


def test_a_failed_build_is_tried_again():
    def build():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        compiled(scale_key(2), build)
    assert not ready(scale_key(2))
    compiled(scale_key(2), Builder("scale", 2))


def test_a_failed_compile_names_the_kernel():
    key = KernelKey("product", "sm_90a", (100,))
    with pytest.raises(RuntimeError, match=r"(?s)product does not compile for sm_90a .*key: product sm_90a \(100\)"):
        compiled(key, Builder("product", 100))


def test_memory_only(cache, monkeypatch):
    monkeypatch.setenv("BWATTN_CUTE_DISK_CACHE", "0")
    build = Builder("scale", 2)
    check_refusals(compiled(scale_key(2), build))
    assert build.calls == 1
    assert not cache.exists()


def test_the_switch_has_two_values(monkeypatch):
    monkeypatch.setenv("BWATTN_CUTE_DISK_CACHE", "off")
    with pytest.raises(ValueError, match="BWATTN_CUTE_DISK_CACHE: expected '0' or '1', got 'off'"):
        compiled(scale_key(2), Builder("scale", 2))


@pytest.mark.parametrize("compiler", ["none-such", "false"])
def test_without_a_c_compiler_the_object_file_is_kept(cache, monkeypatch, compiler):
    monkeypatch.setenv("CC", compiler)
    check_refusals(compiled(scale_key(2), Builder("scale", 2)))
    assert [path.suffix for path in cache.rglob("scale-*") if path.suffix != ".lock"] == [".o"]
    monkeypatch.setattr(compiling, "_functions", {})
    build = Builder("scale", 2)
    check_refusals(compiled(scale_key(2), build))
    assert build.calls == 0


def test_where_linked_code_cannot_be_loaded_the_object_file_is_used(cache, monkeypatch, caplog):
    """As on a file system mounted noexec."""

    def refuse(path):
        raise OSError("failed to map segment from shared object")

    monkeypatch.setattr(loader.load_tvm_ffi(), "load_module", refuse)
    check_refusals(compiled(scale_key(2), Builder("scale", 2)))
    assert "its object file is used" in caplog.text
    assert [path.suffix for path in cache.rglob("scale-*") if path.suffix != ".lock"] == [".o"]


def check_refusals(function):
    """What compiled code refuses, up to the launch itself."""
    x = torch.zeros(2, 256)
    with pytest.raises(TypeError, match="Expects 4 parameters"):
        function(x, x)
    with pytest.raises(TypeError, match=r"argument #0 .*expected Tensor"):
        function(None, x, 1.0, 0)
    with pytest.raises(ValueError, match=r"argument #0 .*expected ndim=2"):
        function(x[0], x, 1.0, 0)
    with pytest.raises(ValueError, match=r"argument #0 .*expected device_type=cuda"):
        function(x, x, 1.0, 0)


def test_a_launch_refuses_what_it_was_not_compiled_for():
    check_refusals(compiled(scale_key(2), Builder("scale", 2)))


@pytest.fixture
def host_only():
    """Takes CPU tensors and launches nothing, so its checks can be passed on this machine."""
    return compiled(KernelKey("host_only", "sm_90a"), Builder("host_only"))


def test_a_call_returns_nothing(host_only):
    x = torch.zeros(2, 3, 4, 64)
    assert host_only(x, x, 2.0, 1) is None
    assert host_only(x, torch.zeros(5, 1, 0, 64), 2, True) is None


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({0: torch.zeros(2, 3, 4, 64, dtype=torch.float16)}, ValueError, "argument #0 .*expected dtype=float32"),
        ({1: torch.zeros(2, 3, 4, 32)}, ValueError, "argument #1 .*64"),
        ({0: torch.zeros(2, 3, 4, 65)[..., :64]}, ValueError, r"x\.strides\[0\] .*divisible by 8"),
        ({0: torch.zeros(2 * 3 * 4 * 64 + 1)[1:].view(2, 3, 4, 64)}, ValueError, "data alignment=16 bytes"),
        ({2: "1"}, TypeError, "argument #2 .*expected float"),
        ({3: 1.5}, TypeError, "argument #3 .*expected int"),
        ({3: 2**40}, ValueError, "argument #3 .*int32 range"),
        ({3: torch.tensor(1)}, TypeError, "argument #3 .*expected int"),
    ],
)
def test_checked_arguments(host_only, change, error, text):
    arguments = {0: torch.zeros(2, 3, 4, 64), 1: torch.zeros(2, 3, 4, 64), 2: 1.0, 3: 0, **change}
    with pytest.raises(error, match=text):
        host_only(*arguments.values())


def test_what_passes_unchecked(host_only):
    """As the module's text says: callers see to these."""
    x = torch.zeros(2, 3, 4, 64)
    host_only(torch.zeros(1, 1, 1, 65)[..., :64], x, 1.0, 0)  # odd strides of dimensions of size 1
    host_only(torch.zeros(2, 3, 4, 64, requires_grad=True), x, 1.0, 0)
    host_only(torch._neg_view(x), x, 1.0, 0)


def test_threads_wanting_one_kernel_build_it_once():
    build = Builder("scale", 2)
    functions = in_threads(8, lambda _: compiled(scale_key(2), build))
    assert build.calls == 1
    assert all(function is functions[0] for function in functions)


def test_threads_wanting_different_kernels():
    builds = [Builder("scale", n) for n in (1, 2, 3, 4)]
    functions = in_threads(8, lambda i: compiled(scale_key(i % 4 + 1), builds[i % 4]))
    assert [build.calls for build in builds] == [1] * 4
    assert len(set(map(id, functions))) == 4


def in_threads(number, task):
    barrier = threading.Barrier(number)
    results = [None] * number

    def work(i):
        barrier.wait()
        results[i] = task(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert None not in results
    return results


def test_a_second_process_loads_from_disk_without_cutlass(child):
    """Well under a second of processor time, the best of two: others may be using the machine."""
    compiled(scale_key(2), Builder("scale", 2))
    script = """
start = time.process_time()
launch = compiled(scale_key(2), build_scale(2))
spent = time.process_time() - start
try:
    launch(torch.zeros(2, 256), torch.zeros(2, 256), 1.0, 0)
except ValueError as error:
    assert "expected device_type=cuda" in str(error)
assert built == [] and "cutlass" not in sys.modules and "triton" not in sys.modules
print(spent)
"""
    assert min(float(child(script)) for _ in range(2)) < 0.5


def test_importing_cutlass_first_changes_nothing(child):
    """It sets variables at import, which must not count as settings."""
    compiled(scale_key(2), Builder("scale", 2))
    assert child("import cutlass; compiled(scale_key(2), build_scale(2)); print(built)") == "[]"


def test_two_processes_share_the_work(spawn):
    script = """
for n in (1, 2, 3):
    compiled(scale_key(n), build_scale(n))
print(len(built))
"""
    processes = [spawn(script) for _ in range(2)]
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert sum(map(int, outputs)) == 3


def test_two_processes_with_different_kernels(spawn):
    processes = [spawn(f"compiled(scale_key({n}), build_scale({n})); print(len(built))") for n in (1, 2)]
    assert [process.communicate(timeout=120)[0].strip() for process in processes] == ["1", "1"]
    build = Builder("scale", 1)
    for n in (1, 2):
        compiled(scale_key(n), build)
    assert build.calls == 0


def test_a_forked_child_waits_for_no_thread_of_its_parent(child):
    assert (
        child("""
import os, threading
held, done = threading.Event(), threading.Event()
def hold():
    with compiling._lock:
        held.set()
        done.wait()
thread = threading.Thread(target=hold)
thread.start()
held.wait()
pid = os.fork()
if pid == 0:
    compiled(scale_key(2), build_scale(2))
    os._exit(7)
status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
done.set()
thread.join()
print(status)
""")
        == "7"
    )


def test_nothing_is_imported_to_make_keys(child):
    assert child("scale_key(2); print(sorted({'cutlass', 'tvm_ffi'} & set(sys.modules)))") == "[]"


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(loader, "why_missing", lambda: "tvm_ffi is not installed (pip install 'apache-tvm-ffi')")
    for function in (loader.load, loader.load_tvm_ffi):
        with pytest.raises(ImportError, match="the cute backend cannot be used: tvm_ffi is not installed"):
            inspect.unwrap(function)()


@pytest.mark.parametrize("missing", ["nvidia_cutlass_dsl", "cutlass", "tvm_ffi"])
def test_why_missing_names_what_to_install(monkeypatch, missing):
    find = loader.importlib.util.find_spec
    monkeypatch.setattr(loader.importlib.util, "find_spec", lambda name: None if name == missing else find(name))
    reason = inspect.unwrap(loader.why_missing)()
    assert reason.startswith(f"{missing} is not installed (pip install '")


def test_another_release_is_refused(monkeypatch):
    monkeypatch.setattr(loader, "CUTLASS_VERSION", "4.6.0")
    assert inspect.unwrap(loader.why_missing)() == (
        f"nvidia-cutlass-dsl {loader.importlib.metadata.version('nvidia-cutlass-dsl')} is installed, but these kernels "
        "need 4.6.0 exactly"
    )


@pytest.mark.parametrize(("driver", "flavor"), [(None, "cu13"), (12, "cu12"), (13, "cu13"), (14, "cu13"), (11, None)])
def test_the_runtime_library_is_the_newest_that_the_driver_takes(tmp_path, monkeypatch, driver, flavor):
    for name in ("cu12", "cu13"):
        (tmp_path / name / "lib").mkdir(parents=True)
        (tmp_path / name / "lib" / "libcute_dsl_runtime.so").touch()
    monkeypatch.delenv("CUTE_DSL_LIBS", raising=False)
    monkeypatch.setattr(loader, "_package_folders", lambda: (tmp_path,))
    monkeypatch.setattr(loader, "_driver_cuda_major", lambda: driver)
    found = inspect.unwrap(loader.runtime_library)()
    assert found == (flavor and str(tmp_path / flavor / "lib" / "libcute_dsl_runtime.so"))


def test_the_runtime_library_is_the_one_that_cutlass_takes(child):
    script = (
        "from torch_bwattn.backends.cute import loader; import os; before = loader.runtime_library(); loader.load()"
    )
    assert child(f"{script}; print(os.environ['CUTE_DSL_LIBS'].split(':')[0] == before)") == "True"
