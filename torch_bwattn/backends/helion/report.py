"""What a kernel config becomes on a GPU: registers, spills, shared memory and instruction counts, without that GPU.

Compiles with Triton's own compiler and the tools it carries. The numbers depend on the Triton version (each brings its
own ptxas), so judge a config under the version that will run it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import re
import subprocess
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import flex, runtime

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence


@dataclasses.dataclass(frozen=True)
class CompileReport:
    """What a config became: for judging configs on a machine without a GPU, and for tests.

    Attributes:
        registers: Registers per thread.
        stack_bytes: Local memory per thread; Triton puts nothing but spills there.
        shared_bytes: Shared memory per block.
        counts: Instructions in the PTX text: wgmma, mma_sync, cp_async, tma, ldmatrix, ld_global_v4 (128-bit loads),
            st_global_v4, ex2, setmaxnreg, f32x2 (packed arithmetic), bar_sync.
        seconds: Time to bind and compile.
        ptx: The PTX text.
        ttgir: The TritonGPU IR text.
    """

    name: str
    capability: tuple[int, int]
    registers: int
    stack_bytes: int
    shared_bytes: int
    num_warps: int
    counts: dict[str, int]
    seconds: float
    ptx: str = dataclasses.field(repr=False)
    ttgir: str = dataclasses.field(repr=False)

    def __str__(self) -> str:
        counts = " ".join(f"{name}={count}" for name, count in self.counts.items() if count)
        return (
            f"{self.name} sm_{self.capability[0]}{self.capability[1]}: {self.registers} regs, {self.stack_bytes} B "
            f"stack, {self.shared_bytes} B shared, {self.num_warps} warps; {counts}"
        )


_COUNTED = {
    "wgmma": r"wgmma\.mma_async",
    "tcgen05": r"tcgen05\.mma",
    "mma_sync": r"mma\.sync",
    "cp_async": r"cp\.async\.c[ag]",
    "tma": r"cp\.async\.bulk\.tensor",
    "ldmatrix": r"ldmatrix",
    "ld_global_v4": r"ld\.global\.\S*v4|ld\.global\.\S*v2\.b64",
    "st_global_v4": r"st\.global\.\S*v4|st\.global\.\S*v2\.b64",
    "ex2": r"ex2\.approx",
    "setmaxnreg": r"setmaxnreg",
    "f32x2": r"\.f32x2",
    "bar_sync": r"bar\.sync|barrier\.cta\.sync",
}


def compile_report(
    family: runtime.KernelFamily,
    args: Sequence[Any],
    config: Mapping[str, Any],
    *,
    capability: tuple[int, int] = (9, 0),
    aligned: bool = True,
) -> CompileReport:
    """Binds and compiles for a GPU that is not there, and reads the result's resources.

    Args:
        family: The kernel.
        args: Arguments as for a call, on the CPU; their layouts choose the layout class, their values are not read.
        config: A Helion config.
        capability: Compute capability to compile for.
        aligned: False compiles the binary for misaligned bases.

    Raises:
        RuntimeError: This process runs Triton's interpreter, which compiles nothing.
    """
    start = time.perf_counter()
    binary = runtime.compile_only(family, args, config, capability, aligned=aligned)
    return report(binary, family.name, capability, time.perf_counter() - start)


Prepared = tuple[runtime.KernelFamily, "Sequence[Any]", "Mapping[str, Any]"]


@contextlib.contextmanager
def collected() -> Iterator[list[Prepared]]:
    """Inside, preparing a launch only notes what it is of, and launching does nothing: for the whole process.

    Yields:
        What was prepared: the kernel, its arguments and its config.
    """
    found: list[Prepared] = []

    def prepare(family: runtime.KernelFamily, arguments: Sequence[Any], config: Mapping[str, Any]) -> Any:
        found.append((family, arguments, config))
        return lambda *_: None

    flex.forget_launches()
    original = runtime.KernelFamily.prepare
    runtime.KernelFamily.prepare = prepare  # type: ignore[method-assign, assignment]
    try:
        yield found
    finally:
        runtime.KernelFamily.prepare = original  # type: ignore[method-assign]
        flex.forget_launches()


def report(binary: Any, name: str, capability: tuple[int, int], seconds: float = 0.0) -> CompileReport:
    """Reads the resources of a compiled Triton kernel off its PTX and cubin."""
    ptx = binary.asm["ptx"]
    registers, stack, shared = _cubin_resources(binary.asm["cubin"])
    return CompileReport(
        name=name,
        capability=capability,
        registers=registers,
        stack_bytes=stack,
        shared_bytes=max(int(binary.metadata.shared), shared),
        num_warps=int(binary.metadata.num_warps),
        counts=counted(ptx),
        seconds=seconds,
        ptx=ptx,
        ttgir=binary.asm["ttgir"],
    )


def counted(ptx: str) -> dict[str, int]:
    """Instructions of a PTX text by the names of :attr:`CompileReport.counts`."""
    return {label: len(re.findall(pattern, ptx)) for label, pattern in _COUNTED.items()}


def _tool(name: str) -> str:
    """Path of an NVIDIA tool that Triton carries."""
    return str(Path(importlib.import_module("triton.backends.nvidia").__path__[0]) / "bin" / name)


def _cubin_resources(cubin: bytes) -> tuple[int, int, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = _output([_tool("cuobjdump"), "--dump-resource-usage", file.name])
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+)", text)
    if found is None:
        raise RuntimeError(f"cuobjdump reported no resources: {text[:500]}")
    return int(found[1]), int(found[2]), int(found[3])


def _output(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 (tools of Triton's own)
    if done.returncode != 0:
        raise RuntimeError(f"{done.args[0]} failed: {done.stderr[:2000]}")
    return done.stdout + done.stderr
