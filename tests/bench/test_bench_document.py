import copy
import json
import stat
from pathlib import Path

import pytest
from bench_made_up import made_up_document

from torch_bwattn.bench import document


def test_a_document_goes_to_the_disk_and_back(tmp_path):
    made = made_up_document()
    path = tmp_path / "folder" / "h200.json"
    document.save(made, path)
    assert document.load(path) == made
    assert list(path.parent.iterdir()) == [path]
    assert stat.S_IMODE(path.stat().st_mode) & stat.S_IRUSR


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "h200.json"
    document.save(made_up_document(), path)
    old = path.read_text()

    def refuse(*_):
        raise OSError("disk full")

    monkeypatch.setattr(Path, "replace", refuse)
    changed = made_up_document()
    changed["rows"].pop()
    with pytest.raises(OSError, match="disk full"):
        document.save(changed, path)
    assert path.read_text() == old
    assert list(tmp_path.iterdir()) == [path]


def test_a_number_that_is_not_finite_is_not_written(tmp_path):
    made = made_up_document()
    made["rows"][0]["check"]["out"]["error"] = float("nan")
    with pytest.raises(ValueError, match="not JSON compliant"):
        document.save(made, tmp_path / "x.json")
    assert list(tmp_path.iterdir()) == []


def broken(change):
    made = copy.deepcopy(made_up_document())
    change(made)
    return made


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda made: made.update(schema=2), "schema: expected 1, got 2"),
        (lambda made: made.pop("environment"), "environment: expected an object, got None"),
        (lambda made: made["environment"].pop("date"), "environment.date: expected str, got None"),
        (lambda made: made.update(host=None), "host: expected a list, got None"),
        (lambda made: made["rows"].append(3), r"rows\[\d+\]: expected an object, got 3"),
        (lambda made: made["rows"][0].update(status="fine"), r"rows\[0\].status: expected one of ok, wrong"),
        (lambda made: made["rows"][0].pop("ms"), r"rows\[0\].ms: expected a number, got None"),
        (lambda made: made["rows"][0].update(ms=-1.0), r"rows\[0\].ms: expected a number that is not negative"),
        (lambda made: made["rows"][0].update(ms=True), r"rows\[0\].ms: expected a number, got True"),
        (lambda made: made["rows"][0].update(batch=True), r"rows\[0\].batch: expected int, got True"),
        (lambda made: made["rows"][0].update(causal=0), r"rows\[0\].causal: expected bool, got 0"),
        (lambda made: made["rows"][0].update(status="wrong"), r"rows\[0\].reason: expected str, got None"),
        (lambda made: made["host"][0].pop("us"), r"host\[0\].us: expected a number"),
        (lambda made: made["memory"][0].pop("extra_bytes"), r"memory\[0\].extra_bytes: expected int"),
    ],
)
def test_complaints_name_the_field(change, complaint):
    with pytest.raises(ValueError, match=complaint):
        document.validate(broken(change))


def test_many_complaints_are_counted():
    made = made_up_document()
    made["rows"] = [3] * 30
    with pytest.raises(ValueError, match="and 10 more"):
        document.validate(made)


def test_what_is_no_document_raises_with_the_path(tmp_path):
    path = tmp_path / "x.json"
    path.write_text("[]")
    with pytest.raises(ValueError, match=r"x\.json: .*document: expected an object, got list"):
        document.load(path)
    path.write_text("{")
    with pytest.raises(ValueError, match=r"x\.json"):
        document.load(path)


def test_an_empty_document_is_valid():
    made = document.new(made_up_document()["environment"], {})
    document.validate(made)
    json.dumps(made)
