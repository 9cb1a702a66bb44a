"""What a measurement, or a report of a fault, has to say about the machine: versions and devices."""

from __future__ import annotations

import datetime as dt
import importlib.metadata
import os
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

import torch

#: Distributions that decide which kernels exist and how fast they are, in the order in which they are shown.
DISTRIBUTIONS = (
    "torch-bwattn",
    "torch",
    "triton",
    "helion",
    "nvidia-cutlass-dsl",
    "apache-tvm-ffi",
    "flash-attn-4",
)

ENVIRONMENT_PREFIX = "BWATTN_"


def distribution_version(name: str) -> str | None:
    """The installed version of a distribution, read from its metadata; nothing is imported."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def versions() -> dict[str, str | None]:
    """Versions by name: Python, those of `DISTRIBUTIONS`, CUDA as PyTorch was built for, cuDNN as PyTorch finds it."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    found.update((name, distribution_version(name)) for name in DISTRIBUTIONS)
    # The version that the running code reports includes the local part (+cpu, +cu130), which the metadata may lack. As
    # PyTorch has it, it would be parsed anew at each comparison.
    found["torch"] = str(torch.__version__)
    found["cuda"] = torch.version.cuda
    found["cudnn"] = cudnn_version()
    return found


def cudnn_version() -> str | None:
    """The version of cuDNN that PyTorch loads, as ``9.19.0``; None without it."""
    if not torch.cuda.is_available() or not torch.backends.cudnn.is_available():
        return None
    number = torch.backends.cudnn.version()
    if number is None:
        return None
    # Since cuDNN 9 the number is major * 10000 + minor * 100 + patch, before it major * 1000 + minor * 100 + patch.
    major = number // 10000 if number >= 90000 else number // 1000
    rest = number % 10000 if number >= 90000 else number % 1000
    return f"{major}.{rest // 100}.{rest % 100}"


def driver_version() -> str | None:
    """The version of the NVIDIA driver, from ``nvidia-smi``; None where there is none."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return None
    try:
        answer = subprocess.run(  # noqa: S603 (a fixed command)
            [command, "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    lines = answer.stdout.split()
    return lines[0] if lines else None


def describe_device(index: int) -> dict[str, Any]:
    """Name, compute capability, memory and multiprocessors of CUDA device ``index``."""
    properties = torch.cuda.get_device_properties(index)
    return {
        "index": index,
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "memory_bytes": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
    }


def devices() -> list[dict[str, Any]]:
    """All CUDA devices that PyTorch sees; empty without one. Initialises CUDA."""
    if not torch.cuda.is_available():
        return []
    return [describe_device(index) for index in range(torch.cuda.device_count())]


def commit_hash() -> str | None:
    """The git commit of the checkout this package runs from, ``-dirty`` if it was changed; None outside a checkout."""
    root = Path(__file__).resolve().parents[1]
    command = shutil.which("git")
    if command is None or not (root / ".git").exists():
        return None
    try:
        head = _git(command, root, "rev-parse", "HEAD")
        changed = _git(command, root, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{head}-dirty" if changed else head


def _git(command: str, root: Path, *arguments: str) -> str:
    answer = subprocess.run(  # noqa: S603 (fixed commands)
        [command, "-C", str(root), *arguments], capture_output=True, text=True, timeout=20, check=True
    )
    return answer.stdout.strip()


def variables() -> dict[str, str]:
    """The environment variables of this package that are set."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(ENVIRONMENT_PREFIX)}


def describe(device_index: int | None, commit: str | None = None) -> dict[str, Any]:
    """The ``environment`` of a document of measurements.

    Args:
        device_index: The CUDA device that is measured, or None for the CPU.
        commit: The commit to record; None looks for it.
    """
    if device_index is None:
        device: dict[str, Any] = {"name": platform.processor() or platform.machine(), "capability": None}
        device["threads"] = torch.get_num_threads()
    else:
        device = describe_device(device_index)
    return {
        "date": dt.datetime.now(dt.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "commit": commit or commit_hash(),
        "device": device,
        "driver": None if device_index is None else driver_version(),
        "platform": platform.platform(),
        "versions": versions(),
        "variables": variables(),
    }
