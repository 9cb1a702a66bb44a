"""The user's cache: who may write what is trusted, and that files appear whole."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from torch_bwattn import storage


@pytest.mark.parametrize(
    ("mode", "owner", "group", "refused"),
    [
        (0o600, 1000, 1000, False),
        (0o644, 1000, 100, False),
        (0o664, 1000, 1000, False),  # the user's own group
        (0o664, 1000, 100, True),
        (0o606, 1000, 1000, True),
        (0o600, 1001, 1000, True),
        (0o644, 0, 0, False),
        (0o664, 0, 0, False),
        (0o664, 0, 1000, True),
        (0o646, 0, 0, True),
    ],
)
def test_who_can_write(monkeypatch, mode, owner, group, refused):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert storage._others_can_write(SimpleNamespace(st_mode=mode, st_uid=owner, st_gid=group)) is refused


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    target = tmp_path / "table.json"
    storage.write(target, b"old")

    def refuse(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(storage.Path, "replace", refuse)
    with pytest.raises(OSError, match="No space"):
        storage.write(target, b"new")
    assert [path.name for path in tmp_path.iterdir()] == ["table.json"]
    assert storage.read(target) == b"old"


def test_what_is_no_file_is_not_read(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(storage.Distrusted, match="no regular file"):
        storage.read(tmp_path / "link")
