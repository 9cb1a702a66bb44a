"""The user's cache: where it lies, whom it is trusted from, and how a file gets into it whole.

``BWATTN_CACHE_DIR`` moves it (the default is ``$XDG_CACHE_HOME/torch_bwattn``, else ``~/.cache/torch_bwattn``). What is
in it decides what code runs, so a folder or a file that another user can write is refused.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import stat
import tempfile
from collections.abc import Hashable, Iterator
from pathlib import Path

_told: set[Hashable] = set()


class Distrusted(Exception):
    """A folder or a file that must not be used; the message says why."""


def tell_once(log: logging.Logger, text: str, about: Hashable = None) -> None:
    """A warning that a process gives only once: this text, or any about the same."""
    about = text if about is None else about
    if about not in _told:
        _told.add(about)
        log.warning("%s", text)


def root() -> Path:
    """Where the cache is, whether or not it is there yet.

    Raises:
        RuntimeError: No variable names a place, and there is no home folder.
    """
    named = os.environ.get("BWATTN_CACHE_DIR")
    if named:
        return Path(named).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "torch_bwattn"


def private_folder(*parts: str) -> Path:
    """A folder of the cache, made if need be, that nobody else can write.

    Raises:
        Distrusted: Somebody else can.
        OSError: It cannot be made.
        RuntimeError: There is no place for a cache.
    """
    place = root().joinpath(*parts).resolve()
    for missing in reversed([path for path in (place, *place.parents) if not path.exists()]):
        # One by one: makedirs gives the mode to the last only. Another process may be making them as well.
        missing.mkdir(mode=0o700, exist_ok=True)
    for path in (place, *place.parents):
        if _others_can_write(path.stat(), sticky_is_safe=path != place):
            raise Distrusted(f"{path} can be written by another user")
    return place


def read(path: Path) -> bytes:
    """The contents of a file that nobody else can write.

    Raises:
        Distrusted: Somebody else can, it is no regular file, or this user cannot read it.
        FileNotFoundError: There is no such file.
    """
    status = path.lstat()
    if not stat.S_ISREG(status.st_mode):
        raise Distrusted("it is no regular file")
    if _others_can_write(status):
        raise Distrusted("it can be written by another user")
    try:
        return path.read_bytes()
    except PermissionError:
        raise Distrusted("it cannot be read") from None


def write(target: Path, data: bytes) -> None:
    """Puts a file at ``target``, all at once: a reader sees the old file or the new one.

    Raises:
        OSError: It cannot be written.
    """
    handle, name = tempfile.mkstemp(prefix=".", suffix=target.suffix, dir=target.parent)
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


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


def _others_can_write(status: os.stat_result, *, sticky_is_safe: bool = False) -> bool:
    """Whether somebody other than this user and root can change a file, or swap what lies in a folder."""
    if status.st_uid not in (0, os.geteuid()):
        return True
    if sticky_is_safe and status.st_mode & stat.S_ISVTX:
        return False  # as /tmp: what lies in it can be moved by its owner only
    # A group of the same number as its user is, by convention, that user's alone.
    shared_group = status.st_gid != status.st_uid
    return bool(status.st_mode & stat.S_IWOTH or (shared_group and status.st_mode & stat.S_IWGRP))
