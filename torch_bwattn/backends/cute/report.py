"""What a CuTe-DSL kernel becomes on a GPU: registers, spills, shared memory and instructions, without that GPU.

Compiling names its architecture, so any process can do it, whatever GPU it has. ::

    print(table(compile_report(key, build)))
    python -m torch_bwattn.backends.cute.report some.module:cases  # which returns pairs of key and build

Two things are read. The *cubin* is the very binary that CUTLASS's compiler made; ``nvdisasm`` turns it into counts.
The *PTX* is given to a ptxas once more, because only ptxas says that it had to serialize wgmmas (messages C7510 and
up), and CUTLASS does not pass that on. CUTLASS 4.7.0 writes PTX 9.3, which ptxas of CUDA 13.3 is the first to take:
``pip install 'nvidia-cuda-nvcc==13.3.*'`` has the one nearest to CUTLASS's own. Without such a ptxas a report says so,
and counts that as a fault: nothing was found because nothing was looked for.

How to read the counts: ``HGMMA`` is the number of k-blocks of all matrix products, ``ARRIVE`` that of the products
themselves. When it comes near ``HGMMA``, wgmmas wait for each other, also where ptxas is silent; so does ``gsb0``,
which belongs on each product's last HGMMA only. ``STL`` and ``LDL`` are spills.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from . import compile as compiling
from . import cubin
from .compile import Build, KernelKey

#: Shared memory that a block can have, beside the part that the system keeps for itself.
SHARED_LIMIT_BYTES = {"sm_90a": 232448, "sm_100a": 232448, "sm_103a": 232448}
_SYSTEM_SHARED_BYTES = 1024

_COUNTED = {
    "HGMMA": r"HGMMA",
    "ARRIVE": r"WARPGROUP\.ARRIVE",
    "gsb0": r"HGMMA.*\bgsb0\b",
    "DEPBAR": r"WARPGROUP\.DEPBAR",
    "MUFU.EX2": r"MUFU\.EX2",
    "FFMA": r"FFMA",
    "FADD": r"FADD",
    "FMUL": r"FMUL",
    "F2FP": r"F2FP",
    "SHFL": r"SHFL",
    "STL": r"STL",
    "LDL": r"LDL",
    "UTMALDG": r"UTMALDG",
    "UTMASTG": r"UTMASTG",
    "UTMAREDG": r"UTMAREDG",
    "UBLKRED": r"UBLKRED",
    "setmaxnreg": r"USETMAXREG",
    "BAR": r"BAR",
}
_PATTERNS = {name: re.compile(rf"\b{pattern}\b") for name, pattern in _COUNTED.items()}
_SERIALIZED = re.compile(r"\(C75\d\d\)")


@dataclasses.dataclass(frozen=True)
class KernelReport:
    """One kernel of a compiled object.

    Attributes:
        name: Of the key; with a number where an object launches several kernels.
        arch: Architecture compiled for.
        symbol: The kernel's name in PTX and SASS.
        registers: Per thread at launch, before any ``setmaxnreg``.
        frame_bytes: Local memory per thread: spills.
        static_shared_bytes: Shared memory per block that the binary declares; from sm_90 on that includes 1,024 bytes
            which the system keeps for itself.
        dynamic_shared_bytes: Shared memory per block that the launch asks for; None where it is no constant.
        threads: Of a block; None where the kernel does not fix them.
        counts: SASS instructions by name.
        serialized: What ptxas said about wgmmas that wait; None when no ptxas could be asked.
        ptxas: Which ptxas was asked, or why none.
        seconds: Time to compile the object.
        sass: The disassembly of this kernel.
        ptx: The PTX of the whole object.
    """

    name: str
    arch: str
    symbol: str = dataclasses.field(repr=False)
    registers: int
    frame_bytes: int
    static_shared_bytes: int
    dynamic_shared_bytes: int | None
    threads: int | None
    counts: dict[str, int]
    serialized: tuple[str, ...] | None
    ptxas: str
    seconds: float
    sass: str = dataclasses.field(repr=False)
    ptx: str = dataclasses.field(repr=False)

    @property
    def shared_bytes(self) -> int:
        """Shared memory per block, without the system's."""
        return max(self.static_shared_bytes - _SYSTEM_SHARED_BYTES, 0) + (self.dynamic_shared_bytes or 0)

    @property
    def faults(self) -> tuple[str, ...]:
        """What must not be in a kernel that is to be fast, a sentence each; empty for a clean one."""
        return self.faults_beside(0)

    def faults_beside(self, spilled_bytes: int) -> tuple[str, ...]:
        """The same of a kernel that is known to spill so much."""
        return tuple(self._faults(spilled_bytes))

    def _faults(self, known: int) -> Iterator[str]:
        if self.frame_bytes > known or (not known and (self.counts["STL"] or self.counts["LDL"])):
            spilled = f"{self.counts['STL']} STL, {self.counts['LDL']} LDL"
            yield f"it spills: {self.frame_bytes} bytes of local memory a thread, {spilled}"
        if self.serialized is None:
            yield f"whether wgmmas are serialized is unknown: {self.ptxas}"
        else:
            yield from self.serialized
        limit = SHARED_LIMIT_BYTES.get(self.arch)
        if limit is not None and self.shared_bytes > limit:
            yield f"it asks for {self.shared_bytes} bytes of shared memory, of which a block has {limit}"

    def __str__(self) -> str:
        counts = " ".join(f"{name}={count}" for name, count in self.counts.items() if count)
        dynamic = "an unknown amount of" if self.dynamic_shared_bytes is None else f"{self.dynamic_shared_bytes} B"
        line = (
            f"{self.name} {self.arch}: {self.registers} regs, {self.frame_bytes} B frame, {self.static_shared_bytes} B "
            f"static and {dynamic} dynamic shared, {self.threads or 'any'} threads; {counts}"
        )
        return "\n".join([line, *(f"  ! {fault}" for fault in self.faults)])


def compile_report(key: KernelKey, build: Build) -> tuple[KernelReport, ...]:
    """Compiles anew and reports on every kernel that the object launches. Uses and changes no cache.

    Args:
        key: Gives the name and the architecture.
        build: As for :func:`.compile.compiled`.

    Raises:
        ImportError: CuTe-DSL is missing.
        RuntimeError: The object does not compile, or nvdisasm is missing (``pip install nvidia-cuda-nvdisasm``).
        ValueError: The object launches no kernel.
    """
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="bwattn-") as folder:
        # Short of keeping them in a folder, the compiler throws the PTX and the cubin away.
        compiled = compiling.compile_object(key, build, f"--keep-ptx --keep-cubin --dump-dir {folder}")
    seconds = time.perf_counter() - start
    if not compiled.kernel_info:
        raise ValueError(f"build: expected an object that launches kernels, got {key.name}, which launches none")
    ptx, binary = compiled.artifacts.PTX, compiled.artifacts.CUBIN
    kernels = cubin.resources(binary)
    sass = _disassembled(binary)
    dynamic = _dynamic_shared_bytes(str(compiled.ir_module))
    ptxas, said = _asked_ptxas(ptx, key.arch)
    reports = []
    for number, (symbol, found) in enumerate(kernels.items()):
        serialized = None if said is None else _about(symbol, said)
        reports.append(
            KernelReport(
                name=key.name if len(kernels) == 1 else f"{key.name}[{number}]",
                arch=key.arch,
                symbol=symbol,
                registers=found.registers,
                frame_bytes=found.frame_bytes,
                static_shared_bytes=found.static_shared_bytes,
                dynamic_shared_bytes=dynamic.get(symbol),
                threads=found.threads,
                counts=_counts(sass[symbol]),
                serialized=serialized,
                ptxas=ptxas,
                seconds=seconds,
                sass=sass[symbol],
                ptx=ptx,
            )
        )
    return tuple(reports)


def table(reports: Iterable[KernelReport]) -> str:
    """Reports side by side, one a line, with the counts that any of them has; faults below."""
    reports = list(reports)
    counted = [name for name in _COUNTED if any(report.counts[name] for report in reports)]
    rows = [("kernel", "arch", "regs", "frame", "static", "dynamic", "threads", *counted, "C75xx", "faults")]
    for report in reports:
        dynamic = "?" if report.dynamic_shared_bytes is None else report.dynamic_shared_bytes
        said = "?" if report.serialized is None else len(report.serialized)
        numbers = (report.registers, report.frame_bytes, report.static_shared_bytes, dynamic, report.threads or "any")
        counts = (report.counts[name] for name in counted)
        rows.append(tuple(map(str, (report.name, report.arch, *numbers, *counts, said, len(report.faults)))))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join([*lines, *(f"{report.name}: {fault}" for report in reports for fault in report.faults)])


@functools.cache
def find_ptxas(isa: str = "9.3", arch: str = "sm_90a") -> str | None:
    """Path of a ptxas on this machine that takes PTX of this version for this architecture, or None."""
    probe = f".version {isa}\n.target {arch}\n.address_size 64\n"
    with tempfile.TemporaryDirectory(prefix="bwattn-") as folder:
        source = Path(folder) / "probe.ptx"
        source.write_text(probe)
        for path in _candidates("ptxas", "ptxas-blackwell"):
            if _run([path, "-arch", arch, str(source), "-o", os.devnull]).returncode == 0:
                return path
    return None


def find_nvdisasm() -> str | None:
    """Path of the first nvdisasm on this machine, or None."""
    return next(_candidates("nvdisasm"), None)


def _candidates(*names: str) -> Iterator[str]:
    """Where a tool may be: NVIDIA's packages, Triton's own, the path, a CUDA installation."""
    places = [folder for place in _locations("nvidia") for folder in sorted(place.glob("*/bin"), reverse=True)]
    places += [place / "backends" / "nvidia" / "bin" for place in _locations("triton")]
    places += [Path(entry) for entry in os.environ.get("PATH", "").split(os.pathsep) if entry]
    places += [Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin"]
    for place in places:
        for name in names:
            path = shutil.which(name, path=str(place))
            if path is not None:
                yield path


def _locations(package: str) -> list[Path]:
    spec = importlib.util.find_spec(package)
    return [Path(place) for place in spec.submodule_search_locations or ()] if spec is not None else []


def _disassembled(binary: bytes) -> dict[str, str]:
    """The SASS of each kernel of a cubin, by symbol."""
    tool = find_nvdisasm()
    if tool is None:
        raise RuntimeError("nvdisasm is not available (pip install nvidia-cuda-nvdisasm)")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        done = _run([tool, "-c", file.name])
    if done.returncode != 0:
        raise RuntimeError(f"{tool} failed: {done.stderr[:2000]}")
    parts = re.split(r"^\s*\.section\s+\.text\.(\w+),.*$", done.stdout, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def _counts(sass: str) -> dict[str, int]:
    # An instruction's line has its address in front; labels and directives have none.
    lines = [line for line in sass.splitlines() if line.lstrip().startswith("/*")]
    return {name: sum(pattern.search(line) is not None for line in lines) for name, pattern in _PATTERNS.items()}


def _asked_ptxas(ptx: str, arch: str) -> tuple[str, tuple[str, ...] | None]:
    """Which ptxas was asked, and its lines about serialized wgmmas; None for these when there is no ptxas."""
    version = re.search(r"^\.version\s+(\S+)", ptx, flags=re.MULTILINE)
    if version is None:
        raise RuntimeError(f"the compiler left no PTX to ask ptxas about: {ptx[:200]!r}")
    tool = find_ptxas(version[1], arch)
    if tool is None:
        return f"ptxas not available for PTX {version[1]} (pip install 'nvidia-cuda-nvcc>=13.3')", None
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        done = _run([tool, "-v", "-O3", "-arch", arch, file.name, "-o", os.devnull])
    if done.returncode != 0:
        raise RuntimeError(f"{tool} failed: {done.stderr[:2000]}")
    said = tuple(line[found.start() :] for line in done.stderr.splitlines() if (found := _SERIALIZED.search(line)))
    return _run([tool, "--version"]).stdout.strip().splitlines()[-1], said


def _about(symbol: str, said: Iterable[str]) -> tuple[str, ...]:
    """The lines about one kernel, without its long name; a line that names none may be about any."""
    return tuple(line.replace(f"function '{symbol}'", "function") for line in said if symbol in line or "'" not in line)


def _dynamic_shared_bytes(ir: str) -> dict[str, int]:
    """The dynamic shared memory of each kernel's launch, read off the lowered host code, where it is a constant.

    A launch is a function of its own there, which fills a ``cudaLaunchConfig_t``; field 2 is the number sought.
    """
    found = {}
    for function in re.split(r"^\s*llvm\.func ", ir, flags=re.MULTILINE):
        kernel = re.search(r"llvm\.mlir\.addressof @kernels_(\w+)", function)
        field = re.search(r"(%\w+) = llvm\.getelementptr %\w+\[0, 2\] .*array<3 x i32>, array<3 x i32>, i64", function)
        if kernel is None or field is None:
            continue
        stored = re.search(rf"llvm\.store (%\w+), {field[1]} : i64", function)
        constant = stored and re.search(rf"{stored[1]} = llvm\.mlir\.constant\((\d+) : i64\)", function)
        if constant:
            found[kernel[1]] = int(constant[1])
    return found


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 (NVIDIA's tools)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table of the kernels that a function names; the exit status is 1 where any has a fault."""
    parser = argparse.ArgumentParser(prog="python -m torch_bwattn.backends.cute.report", description=main.__doc__)
    parser.add_argument("cases", help="module:function, which returns pairs (KernelKey, build)")
    parser.add_argument("--sass", type=Path, help="also write each kernel's SASS to this folder")
    options = parser.parse_args(arguments)
    module, _, function = options.cases.partition(":")
    cases = getattr(importlib.import_module(module), function)()
    reports = [report for key, build in cases for report in compile_report(key, build)]
    for number, report in enumerate(reports if options.sass is not None else ()):
        options.sass.mkdir(parents=True, exist_ok=True)
        (options.sass / f"{number}-{report.name}.sass").write_text(report.sass)
    sys.stdout.write(table(reports) + "\n")
    return int(any(report.faults for report in reports))


if __name__ == "__main__":
    sys.exit(main())
