"""Compiled kernels on disk: where they lie, which are trusted, and how one is stored.

A file is a linked shared object (or an object file where no C compiler is at hand), followed by a seal: the SHA-256 of
its contents and of its key. A file whose seal does not match is never loaded. Its name is the hash of the key, and its
folder that of everything else that decides what the compiler makes of a key: the sources of this folder, the versions
of Python, CUTLASS and TVM-FFI, the processor (the host code in a kernel uses what the compiling machine has) and the
``CUTE_DSL_*`` variables. So an update never meets an old file; old folders can be deleted at any time.

Loading a shared object runs it: :mod:`torch_bwattn.storage` says whom the cache is trusted from, and where it lies.
``BWATTN_CUTE_DISK_CACHE=0`` does without it: every process compiles for itself.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import logging
import os
import platform
import sys
import time
from pathlib import Path

from ... import storage
from ...errors import SettingError
from . import loader

log = logging.getLogger(__name__)

#: A linked kernel is preferred to an object file: the latter needs ``cutlass`` to be loaded.
SUFFIXES = (".so", ".o")

_SEAL = b"bwattn-1:"
_SEAL_BYTES = len(_SEAL) + 64
_DISTRIBUTIONS = (
    "nvidia-cutlass-dsl",
    "nvidia-cutlass-dsl-libs-base",
    "nvidia-cutlass-dsl-libs-core",
    "nvidia-cutlass-dsl-libs-cu12",
    "nvidia-cutlass-dsl-libs-cu13",
    "apache-tvm-ffi",
)

#: Settings of the compiler that decide nothing here: each compile names its architecture, the compiler's own cache is
#: not used, and CUTLASS sets the last at import, to what stands in its place below.
_SETTINGS_LEFT_OUT = ("CUTE_DSL_ARCH", "CUTE_DSL_CACHE_DIR", "CUTE_DSL_LIBS")

_imported_at = time.time()


def folder() -> Path | None:
    """The folder for kernels compiled by this very installation, made if need be.

    Returns:
        A folder that nobody else can write, or None when there is to be no cache. The reason is logged once, unless
        the user asked for it.

    Raises:
        ValueError: ``BWATTN_CUTE_DISK_CACHE`` is neither 0 nor 1.
    """
    switch = os.environ.get("BWATTN_CUTE_DISK_CACHE", "1")
    if switch not in ("0", "1"):
        raise SettingError(f"BWATTN_CUTE_DISK_CACHE: expected '0' or '1', got {switch!r}")
    if switch == "0":
        return None
    try:
        if _newest_source() > _imported_at:
            _tell_once("the sources of torch_bwattn changed after it was imported")
            return None
        return storage.private_folder("cute", _version())
    except (OSError, RuntimeError, storage.Distrusted) as error:
        _tell_once(str(error))
        return None


def file_name(name: str, text: str) -> str:
    """The stem of the file of a key: its readable name and the hash of its canonical text."""
    return f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:32]}"


def why_distrusted(path: Path, text: str) -> str | None:
    """Why a cached file must not be loaded for the key of this canonical text, or None.

    Raises:
        FileNotFoundError: There is no such file.
    """
    try:
        data = storage.read(path)
    except storage.Distrusted as error:
        return str(error)
    if data[-_SEAL_BYTES:] != _seal(data[:-_SEAL_BYTES], text):
        return "it is damaged, or belongs to another kernel"
    return None


def store(source: Path, target: Path, text: str) -> bool:
    """Seals a copy of ``source`` and puts it at ``target``, all at once; False (and a message, once) if it cannot."""
    data = source.read_bytes()
    try:
        storage.write(target, data + _seal(data, text))
    except OSError as error:
        _tell_once(f"a kernel could not be stored: {error}")
        return False
    return True


def discard(path: Path) -> None:
    """Removes a file, if that is allowed."""
    with contextlib.suppress(OSError):
        path.unlink()


def _seal(data: bytes, text: str) -> bytes:
    return _SEAL + hashlib.sha256(data + b"\0" + text.encode()).hexdigest().encode()


def _version() -> str:
    names = sorted(name for name in os.environ if name.startswith("CUTE_DSL_") and name not in _SETTINGS_LEFT_OUT)
    settings = [f"{name}={os.environ[name]}" for name in names]
    return hashlib.sha256("\n".join([_installation(), *settings]).encode()).hexdigest()[:16]


@functools.cache
def _installation() -> str:
    sources = hashlib.sha256()
    for path in _sources():
        data = path.read_bytes()
        sources.update(f"{path.relative_to(Path(__file__).parent)}:{len(data)}:".encode() + data)
    versions = []
    for name in _DISTRIBUTIONS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions.append(f"{name}=={importlib.metadata.version(name)}")
    machine = [platform.machine(), _processor(), str(loader.runtime_library())]
    return " ".join([sources.hexdigest(), sys.version, *machine, *versions])


def _sources() -> list[Path]:
    return sorted(Path(__file__).parent.rglob("*.py"))


@functools.cache
def _newest_source() -> float:
    return max(path.stat().st_mtime for path in _sources())


def _processor() -> str:
    """The first processor's instruction sets; read by lines, because the whole list is long on large machines."""
    with contextlib.suppress(OSError), Path("/proc/cpuinfo").open() as file:
        return next((line.strip() for line in file if line.startswith(("flags", "Features"))), "")
    return ""


def _tell_once(reason: str) -> None:
    storage.tell_once(log, f"kernels are compiled anew by each process, because {reason}")
