"""Compile targets: the architecture a problem's kernels are built for, as a short string.

``cpu`` for CPU tensors, ``sm_80``, ``sm_90a``, ``sm_100a`` … for CUDA devices, the device type for everything else.
Architectures from 9.0 on carry the ``a`` suffix, which names their arch-specific instructions (wgmma, tcgen05).
"""

from __future__ import annotations

import functools
import re

import torch


def cuda_target(major: int, minor: int) -> str:
    """``(9, 0)`` -> ``"sm_90a"``, ``(8, 6)`` -> ``"sm_86"``."""
    return f"sm_{major}{minor}{'a' if major >= 9 else ''}"


def capability(target: str) -> tuple[int, int] | None:
    """The compute capability behind a CUDA target string, or None for any other target."""
    if not target.startswith("sm_"):
        return None
    digits = target[3:].rstrip("af")
    return int(digits[:-1]), int(digits[-1])


def is_target(text: str) -> bool:
    """Whether a string names a target: ``cpu``, or a CUDA one as :func:`cuda_target` writes it."""
    named = re.fullmatch(r"sm_(\d{1,2})(\d)a?", text, re.ASCII)
    return text == "cpu" or (named is not None and cuda_target(int(named[1]), int(named[2])) == text)


def here() -> str:
    """The target of the first GPU that PyTorch sees, or ``cpu``."""
    return target_of(torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu"))


@functools.cache
def _cuda_device_target(index: int) -> str:
    return cuda_target(*torch.cuda.get_device_capability(index))


def target_of(device: torch.device) -> str:
    """The compile target of a device; queries CUDA once per device index and only for CUDA devices."""
    if device.type != "cuda":
        return device.type
    return _cuda_device_target(torch.cuda.current_device() if device.index is None else device.index)
