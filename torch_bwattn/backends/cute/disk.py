"""Compiled kernels on disk: where they lie, which are trusted, and how one is stored.

A file is a linked shared object (or an object file where no C compiler is at hand), followed by a seal: the SHA-256 of
its contents and of its key. A file whose seal does not match is never loaded. Its name is the hash of the key, and its
folder that of everything else that decides what the compiler makes of a key: the sources of this folder, the versions
of Python, CUTLASS and TVM-FFI, the processor (the host code in a kernel uses what the compiling machine has) and the
``CUTE_DSL_*`` variables. So an update never meets an old file; old folders can be deleted at any time.

Loading a shared object runs it. A folder or a file that another user can write is therefore refused.

``BWATTN_CACHE_DIR`` moves the cache (the default is ``$XDG_CACHE_HOME/torch_bwattn``, else ``~/.cache/torch_bwattn``).
``BWATTN_CUTE_DISK_CACHE=0`` does without it: every process compiles for itself.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import importlib.metadata
import logging
import os
import platform
import stat
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

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
_told: set[str] = set()


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
        raise ValueError(f"BWATTN_CUTE_DISK_CACHE: expected '0' or '1', got {switch!r}")
    if switch == "0":
        return None
    try:
        if _newest_source() > _imported_at:
            _tell_once("the sources of torch_bwattn changed after it was imported")
            return None
        place = (_root() / "cute" / _version()).resolve()
        for missing in reversed([path for path in (place, *place.parents) if not path.exists()]):
            # One by one: makedirs gives the mode to the last only. Another process may be making them as well.
            missing.mkdir(mode=0o700, exist_ok=True)
        for path in (place, *place.parents):
            if _others_can_write(path.stat(), sticky_is_safe=path != place):
                _tell_once(f"{path} can be written by another user")
                return None
    except (OSError, RuntimeError) as error:  # RuntimeError: no home folder
        _tell_once(str(error))
        return None
    return place


def file_name(name: str, text: str) -> str:
    """The stem of the file of a key: its readable name and the hash of its canonical text."""
    return f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:32]}"


def why_distrusted(path: Path, text: str) -> str | None:
    """Why a cached file must not be loaded for the key of this canonical text, or None.

    Raises:
        FileNotFoundError: There is no such file.
    """
    status = path.lstat()
    if not stat.S_ISREG(status.st_mode):
        return "it is no regular file"
    if _others_can_write(status):
        return "it can be written by another user"
    try:
        data = path.read_bytes()
    except PermissionError:
        return "it cannot be read"
    if data[-_SEAL_BYTES:] != _seal(data[:-_SEAL_BYTES], text):
        return "it is damaged, or belongs to another kernel"
    return None


def store(source: Path, target: Path, text: str) -> bool:
    """Seals a copy of ``source`` and puts it at ``target``, all at once; False (and a message, once) if it cannot."""
    data = source.read_bytes()
    try:
        handle, name = tempfile.mkstemp(prefix=".", suffix=target.suffix, dir=target.parent)
        temporary = Path(name)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data + _seal(data, text))
            temporary.replace(target)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    except OSError as error:
        _tell_once(f"a kernel could not be stored: {error}")
        return False
    return True


def discard(path: Path) -> None:
    """Removes a file, if that is allowed."""
    with contextlib.suppress(OSError):
        path.unlink()


@contextlib.contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Keeps other processes out of the same block for the same path; locks nothing where the folder cannot lock."""
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:  # a cache that may be read only
        yield
        return
    try:
        with contextlib.suppress(OSError):  # a file system without locks: storing is atomic all the same
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        # Closing is not enough: a process forked in between holds the lock through its copy.
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_UN)
        os.close(handle)


def _root() -> Path:
    named = os.environ.get("BWATTN_CACHE_DIR")
    if named:
        return Path(named).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "torch_bwattn"


def _seal(data: bytes, text: str) -> bytes:
    return _SEAL + hashlib.sha256(data + b"\0" + text.encode()).hexdigest().encode()


def _others_can_write(status: os.stat_result, *, sticky_is_safe: bool = False) -> bool:
    """Whether somebody other than this user and root can change a file, or swap what lies in a folder."""
    if status.st_uid not in (0, os.geteuid()):
        return True
    if sticky_is_safe and status.st_mode & stat.S_ISVTX:
        return False  # as /tmp: what lies in it can be moved by its owner only
    # A group of the same number as its user is, by convention, that user's alone.
    shared_group = status.st_gid != status.st_uid
    return bool(status.st_mode & stat.S_IWOTH or (shared_group and status.st_mode & stat.S_IWGRP))


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
    if reason not in _told:
        _told.add(reason)
        log.warning("kernels are compiled anew by each process, because %s", reason)
