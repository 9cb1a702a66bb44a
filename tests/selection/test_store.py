"""Files that threads and processes share: nothing is lost, and nothing damaged is used."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading

import pytest

from torch_bwattn.selection import store, tables
from torch_bwattn.selection.key import Key
from torch_bwattn.selection.store import Store
from torch_bwattn.selection.tables import Measured, Tunable

ENVIRONMENT = {"date": "2026-11-30", "device": {"name": "a card"}, "versions": {"triton": "1"}}
RANKING = (Measured(Tunable("cute", "64x64"), 0.5),)


def table():
    return Store("tuned", "sm_90a", tables.valid)


def add(kind, described=ENVIRONMENT):
    return table().update(lambda contents: tables.add(contents, Key(kind, (16, 16, 16)), RANKING, described))


def test_an_entry_comes_back(cache):
    add("forward")
    add("backward", {**ENVIRONMENT, "date": "2026-12-01"})
    found = tables.entries_of(table().load(), "here")
    assert {key.kind for key in found} == {"forward", "backward"}
    assert found[Key("backward", (16, 16, 16))].environment["date"] == "2026-12-01"
    assert found[Key("forward", (16, 16, 16))].ranking == RANKING
    assert (cache / "tuned" / "sm_90a.v1.json").stat().st_mode & 0o077 == 0


def test_a_new_entry_takes_the_place_of_the_old():
    add("forward")
    add("forward", {**ENVIRONMENT, "date": "2026-12-01"})
    (entry,) = tables.entries_of(table().load(), "here").values()
    assert entry.environment["date"] == "2026-12-01"


@pytest.mark.parametrize(
    "text",
    [
        "", "{", '{"format": 1, "entries": [', "[]", "null", '{"format": 0}', '{"entries": []}', "\x00\xff",
        '{"format": 1, "environments": [], "entries": [{"kind": "forward"}]}',
        ('{"format": 1, "environments": [{}], "entries": [{"kind": "forward", "sizes": [1, 1, 1], "environment": 1, '
        '"ranking": []}]}'),
        ('{"format": 1, "environments": [{}], "entries": [{"kind": "forward", "sizes": [1, 1, 1], "environment": 0, '
        '"ranking": [["cute", "64x64", "fast"]]}]}'),
    ],
)  # fmt: skip
def test_what_is_damaged_or_older_is_ignored_once_and_kept(cache, caplog, text):
    caplog.set_level(logging.WARNING, "torch_bwattn")
    add("forward")
    path = cache / "tuned" / "sm_90a.v1.json"
    path.write_text(text)
    assert table().load() == {}
    assert table().load() == {}
    (record,) = caplog.records
    assert "ignored" in record.message
    (aside,) = path.parent.glob("*.old")
    assert aside.read_text() == text
    assert add("backward")
    assert {key.kind for key in tables.entries_of(table().load(), "here")} == {"backward"}


@pytest.mark.parametrize("which", ["folder", "file"])
def test_what_others_can_write_is_refused_once(cache, caplog, which):
    caplog.set_level(logging.WARNING, "torch_bwattn")
    add("forward")
    path = cache / "tuned" / "sm_90a.v1.json"
    (path if which == "file" else path.parent).chmod(0o777)
    before = path.read_text()
    for _ in range(3):
        assert table().load() == {}
    assert not add("backward")
    assert path.read_text() == before
    (record,) = caplog.records
    assert "can be written by another user" in record.message


def test_reading_makes_nothing_and_tells_nothing(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").touch()
    for place in (tmp_path / "cache", tmp_path / "file" / "cache"):
        monkeypatch.setenv("BWATTN_CACHE_DIR", str(place))
        assert table().load() == {}
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert not caplog.records
    assert not add("forward")
    assert len(caplog.records) == 1


def test_threads_lose_nothing():
    threads = [threading.Thread(target=lambda i=i: [add(f"{i} {j}") for j in range(5)]) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(table().load()["entries"]) == 40


def test_processes_lose_nothing():
    code = "import sys; from tests.selection.test_store import add; [add(f'{sys.argv[1]} {j}') for j in range(20)]"
    running = [subprocess.Popen([sys.executable, "-c", code, str(i)], env=dict(os.environ)) for i in range(2)]
    assert [process.wait() for process in running] == [0, 0]
    assert len(table().load()["entries"]) == 40


def test_a_full_disk_is_told_once_and_loses_nothing(monkeypatch, caplog):
    caplog.set_level(logging.WARNING, "torch_bwattn")
    add("forward")

    def refuse(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store.storage, "write", refuse)
    assert not add("backward")
    assert not add("backward")
    assert len(caplog.records) == 1
    assert len(table().load()["entries"]) == 1


def test_shipped_tables_are_tables():
    for path in tables._SHIPPED.glob("*.json"):
        contents = json.loads(path.read_text())
        assert tables.valid(contents)
        for described in contents["environments"]:
            assert {"date", "device", "driver", "versions"} <= set(described)


def test_whose_tests_have_passed_is_said_of_one_environment():
    assert tables.valid({"environments": [ENVIRONMENT], "tested": 0})
    assert not tables.valid({"environments": [ENVIRONMENT], "tested": 1})


@pytest.mark.parametrize(
    "change",
    [
        {"environment": 0.0}, {"environment": True}, {"sizes": [10**400, 16, 16]}, {"sizes": [16, 16]},
        {"ranking": [["cute", "64x64", 10**400]]}, {"ranking": [["cute", "64x64", -1.0]]}, {"ranking": [["cute"]]},
        {"ranking": 5}, {"kind": None},
    ],
    ids=str,
)  # fmt: skip
def test_what_is_odd_deep_inside_is_no_table(change):
    entry = {"kind": "forward", "sizes": [16, 16, 16], "environment": 0, "ranking": [["cute", "64x64", 0.5]]}
    assert tables.valid({"environments": [ENVIRONMENT], "entries": [entry]})
    assert not tables.valid({"environments": [ENVIRONMENT], "entries": [{**entry, **change}]})


@pytest.mark.parametrize("name", ["date", "device", "versions"])
def test_what_is_odd_in_an_environment_is_no_table(name):
    for value in (None, 5, [1]):
        assert not tables.valid({"environments": [{**ENVIRONMENT, name: value}], "entries": []})


@pytest.mark.parametrize("text", ["[" * 200_000, '{"format": 1, "x": NaN}'])
def test_what_json_does_not_take_is_damaged(cache, text):
    add("forward")
    (cache / "tuned" / "sm_90a.v1.json").write_text(text)
    assert table().load() == {}
    assert add("forward")


def test_two_damaged_files_are_both_kept(cache):
    add("forward")
    for text in ("{", "["):
        (cache / "tuned" / "sm_90a.v1.json").write_text(text)
        assert table().load() == {}
    assert {path.read_text() for path in (cache / "tuned").glob("*.old")} == {"{", "["}
