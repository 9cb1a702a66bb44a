"""The disk cache: what it trusts, what it does about a file or a folder that it does not, and where it lies."""

from __future__ import annotations

import logging
import os
import shutil
import stat
from pathlib import Path

import pytest
import torch

from torch_bwattn import storage
from torch_bwattn.backends.cute import compile as compiling
from torch_bwattn.backends.cute import disk
from torch_bwattn.backends.cute.compile import KernelKey, compiled

KEY = KernelKey("scale", "sm_90a", (2, torch.float32))


@pytest.fixture(autouse=True)
def _logged(caplog):
    caplog.set_level(logging.WARNING, "torch_bwattn")


@pytest.fixture
def build():
    def build():
        import toy_kernels

        calls.append(1)
        return toy_kernels.build_scale(2)

    calls = build.calls = []
    return build


@pytest.fixture
def cache(cache, tmp_path, monkeypatch, build):
    """A cache with a compiled kernel in it, which this process never loaded.

    It is a copy, because the dynamic loader takes a file of a name or an inode that it knows for the one it has.
    """
    compiled(KEY, build)
    build.calls.clear()
    forget()
    folder = tmp_path / "copy"
    shutil.copytree(cache, folder)
    monkeypatch.setenv("BWATTN_CACHE_DIR", str(folder))
    return folder


@pytest.fixture
def stored(cache):
    """The file of the kernel in the cache."""
    (path,) = cache.rglob("*.so")
    return path


def forget():
    compiling._functions.clear()


def check_works(function):
    with pytest.raises(ValueError, match=r"argument #0 .*expected device_type=cuda"):
        function(torch.zeros(2, 256), torch.zeros(2, 256), 1.0, 0)


def test_only_the_user_can_read_and_write_what_is_stored(cache, stored):
    for path in (cache, *cache.rglob("*")):
        assert path.stat().st_mode & 0o077 == 0, path
    names = sorted(path.suffix for path in stored.parent.iterdir())
    assert names == [".lock", ".so"]  # and no temporary file


def rewrite(path, change):
    path.write_bytes(change(path.read_bytes()))


def flip_a_byte(data):
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


def put_anothers_in_its_place(path):
    other = path.with_name("other.so")
    assert disk.store(path, other, KernelKey("scale", "sm_90a", (4, torch.float32)).text)
    other.replace(path)


def seal_what_is_no_library(path):
    source = path.with_name("source")
    source.write_bytes(b"\x7fELF, or so it says")
    assert disk.store(source, path, KEY.text)
    source.unlink()


def link_elsewhere(path):
    elsewhere = path.with_name("elsewhere.so")
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


def let_others_write(path):
    path.chmod(0o666)


DAMAGES = {
    "one bit": (lambda path: rewrite(path, flip_a_byte), "damaged"),
    "seal": (lambda path: rewrite(path, lambda data: data[:-1] + b"z"), "damaged"),
    "truncated": (lambda path: rewrite(path, lambda data: data[:-1000]), "damaged"),
    "empty": (lambda path: rewrite(path, lambda _: b""), "damaged"),
    "longer": (lambda path: rewrite(path, lambda data: data + b"\0"), "damaged"),
    "another kernel's": (put_anothers_in_its_place, "belongs to another kernel"),
    "no library": (seal_what_is_no_library, "cannot be loaded"),
    "a link": (link_elsewhere, "no regular file"),
    "writable": (let_others_write, "can be written by another user"),
}


@pytest.mark.parametrize(("damage", "reason"), DAMAGES.values(), ids=DAMAGES)
def test_a_file_not_to_be_trusted_is_replaced(stored, build, caplog, damage, reason):
    damage(stored)
    check_works(compiled(KEY, build))
    assert len(build.calls) == 1
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert str(stored) in record.getMessage()
    assert reason in record.getMessage()

    forget()
    caplog.clear()
    check_works(compiled(KEY, build))
    assert len(build.calls) == 1
    assert not caplog.records
    assert stat.S_ISREG(stored.lstat().st_mode)
    assert stored.stat().st_mode & 0o077 == 0


def test_a_sound_file_is_loaded(stored, build, caplog):
    check_works(compiled(KEY, build))
    assert not build.calls
    assert not caplog.records


@pytest.mark.parametrize("mode", [0o777, 0o1777])
@pytest.mark.parametrize("which", ["version", "root"])
def test_a_folder_that_others_can_write_is_refused_once(cache, stored, build, caplog, mode, which):
    folder = stored.parent if which == "version" else cache
    folder.chmod(mode)
    if which == "root" and mode == 0o1777:  # as /tmp: others can add to it, but not move our folder
        check_works(compiled(KEY, build))
        assert not build.calls
        assert not caplog.records
        return
    before = sorted(stored.parent.iterdir())
    for n in (2, 3):
        compiled(KernelKey("scale", "sm_90a", (n, torch.float32)), build)
    assert len(build.calls) == 2
    (record,) = caplog.records
    assert f"{folder} can be written by another user" in record.getMessage()
    assert sorted(stored.parent.iterdir()) == before


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
@pytest.mark.parametrize("which", ["file", "version", "root"])
def test_what_another_user_owns_is_refused(cache, stored, build, caplog, which):
    os.chown({"file": stored, "version": stored.parent, "root": cache}[which], 12345, 12345)
    check_works(compiled(KEY, build))
    assert len(build.calls) == 1
    (record,) = caplog.records
    assert "can be written by another user" in record.getMessage()


def test_a_folder_that_cannot_be_made_is_no_error(tmp_path, monkeypatch, build, caplog):
    (tmp_path / "file").touch()
    monkeypatch.setenv("BWATTN_CACHE_DIR", str(tmp_path / "file" / "cache"))
    check_works(compiled(KEY, build))
    assert "kernels are compiled anew by each process" in caplog.text
    assert len(caplog.records) == 1


def test_a_full_disk_is_no_error(stored, monkeypatch, build, caplog):
    stored.unlink()

    def refuse(**_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(storage.tempfile, "mkstemp", refuse)
    check_works(compiled(KEY, build))
    assert "No space left on device" in caplog.text
    assert len(caplog.records) == 1
    assert not stored.exists()


def test_a_folder_that_is_read_only_serves(stored, monkeypatch, build, caplog):
    """Root may write whatever the mode says, so the system's answers are made up."""
    opened = os.open

    def refuse(path, flags, *rest, **options):
        if flags & os.O_CREAT and Path(path).parent == stored.parent:
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, flags, *rest, **options)

    monkeypatch.setattr(os, "open", refuse)
    check_works(compiled(KEY, build))
    assert not build.calls
    assert not caplog.records


def test_what_is_loaded_stays_when_its_file_is_replaced(stored, build):
    function = compiled(KEY, build)
    stored.unlink()
    forget()
    again = compiled(KEY, build)
    assert len(build.calls) == 1
    check_works(function)
    check_works(again)


def test_another_installation_has_another_folder(stored, monkeypatch, build, caplog):
    """Other sources, another Python, other versions: all are one text, and an old file is not even looked at."""
    monkeypatch.setattr(disk, "_installation", lambda: "another")
    assert disk.folder() != stored.parent
    check_works(compiled(KEY, build))
    assert len(build.calls) == 1
    assert not caplog.records


def test_what_the_text_of_an_installation_holds():
    text = disk._installation()
    for part in ("nvidia-cutlass-dsl==4.7.0", "apache-tvm-ffi==", disk.platform.machine(), disk.sys.version):
        assert part in text


def test_settings_of_the_compiler_have_their_own_folder(monkeypatch):
    first = disk.folder()
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_80")
    assert disk.folder() == first
    monkeypatch.setenv("CUTE_DSL_ENABLE_ASSERTIONS", "1")
    assert disk.folder() != first


def test_sources_saved_after_the_import_are_not_mistaken_for_what_runs(stored, monkeypatch, build, caplog):
    monkeypatch.setattr(disk, "_imported_at", 0.0)
    check_works(compiled(KEY, build))
    assert "the sources of torch_bwattn changed after it was imported" in caplog.text
    assert len(build.calls) == 1


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"BWATTN_CACHE_DIR": "~/kernels"}, "home/kernels/cute"),
        ({"XDG_CACHE_HOME": "{tmp}/xdg"}, "xdg/torch_bwattn/cute"),
        ({}, "home/.cache/torch_bwattn/cute"),
    ],
)
def test_where_the_cache_lies(tmp_path, monkeypatch, variables, expected):
    for name in ("BWATTN_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name, value in variables.items():
        monkeypatch.setenv(name, value.format(tmp=tmp_path))
    assert disk.folder().parent == tmp_path / expected
