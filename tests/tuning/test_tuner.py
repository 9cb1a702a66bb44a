"""The tuner with fakes: what is wrong, hangs or dies is left out, and what is known is not measured again."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time

import pytest
import torch

from torch_bwattn.problem import Problem
from torch_bwattn.selection import tables
from torch_bwattn.selection.choose import plan
from torch_bwattn.selection.key import key_of
from torch_bwattn.selection.tables import Tunable
from torch_bwattn.tuning import problems, tuner

PROBLEM = Problem("cpu", torch.float32, 1, 2, 2, 40, 50, 16, 16, 0.25)
BUDGET = {"warmup_ms": 0.0, "rep_ms": 4.0, "rounds": 1}
CODE = """
import json, sys
from tests.support import fake_backends
from torch_bwattn.selection import choose
fake_backends.install(json.loads(sys.argv[1]))
from torch_bwattn.tuning import worker
worker.get_backend = choose.get_backend
worker.main()
"""


# Answers at once, that all is right and takes 1 ms: where what is done with answers is the question.
STUB = """
import json, sys
print('{"ready": true}', flush=True)
for line in sys.stdin:
    count = len(json.loads(line).get("tunables", ()))
    reply = {"failure": "", "says_nothing": False, "ms": [1.0] * count, "failures": [""] * count}
    print(json.dumps(reply), flush=True)
"""


def stubbed(**others):
    return tuner.Options(jobs=1, limit_s=20.0, command=(sys.executable, "-c", STUB), **others)


def options(told, **others):
    command = (sys.executable, "-c", CODE, json.dumps(told))
    return tuner.Options(jobs=1, limit_s=20.0, budget=BUDGET, command=command, **others)


def tuned(told, found=(PROBLEM,), **others):
    lines, steps = [], []
    outcomes = tuner.tune(
        found, options(told, **others), log=lines.append, advance=lambda done, total: steps.append((done, total))
    )
    return outcomes, lines, steps


def test_only_what_is_right_is_timed_and_the_fastest_is_first(fakes):
    told = {"cute": ["slow", "right", "wrong", "nan"], "helion": ["raises", "does not compile"], "aten": ["-no"]}
    fakes(**told)
    (outcome,), lines, steps = tuned(told)
    assert [str(one.tunable) for one in outcome.ranking] == ["cute: right", "cute: slow"]
    assert {str(tunable) for tunable in outcome.failures} == {
        "cute: wrong", "cute: nan", "helion: raises", "helion: does not compile"
    }  # fmt: skip
    assert sum("left out" in line for line in lines) == 4
    assert steps[-1] == (7, 7)
    assert [done for done, _ in steps] == sorted(done for done, _ in steps)
    assert plan(PROBLEM, None).candidates[0].verdict.config == "right"


@pytest.mark.parametrize("failing", ["hangs", "dies"])
def test_what_hangs_or_dies_takes_nothing_with_it(fakes, failing):
    told = {"cute": [failing, "right"], "helion": ["slow"], "aten": ["-no"]}
    fakes(**told)
    chosen = dataclasses.replace(options(told), jobs=2, limit_s=5.0)
    (outcome,) = tuner.tune([PROBLEM], chosen)
    assert [str(one.tunable) for one in outcome.ranking] == ["cute: right", "helion: slow"]
    (reason,) = outcome.failures.values()
    assert ("no answer within 5 s" if failing == "hangs" else "status 7") in reason


def test_what_is_known_is_not_measured_again(fakes):
    fakes(cute=["right"], aten=["-no"])
    assert len(tuner.tune([PROBLEM], stubbed())) == 1
    assert tuner.tune([PROBLEM], stubbed()) == []
    assert len(tuner.tune([PROBLEM], stubbed(again=True))) == 1


def test_other_versions_are_measured_again(fakes, monkeypatch):
    fakes(cute=["right"], aten=["-no"])
    tuner.tune([PROBLEM], stubbed())
    monkeypatch.setattr(tables, "_installed", lambda: {"triton": "another"})
    assert len(tuner.tune([PROBLEM], stubbed())) == 1


def test_a_problem_nobody_can_run_keeps_nothing(fakes):
    told = {"cute": ["raises"], "aten": ["-no"]}
    fakes(**told)
    (outcome,), _, _ = tuned(told)
    assert outcome.ranking == ()
    assert tables.lookup("cpu", key_of(PROBLEM)) is None


def test_fallbacks_are_measured_only_where_there_is_nothing_else(fakes):
    fakes(cute=["right"], aten=["right!"], helion=["-no"])
    assert [str(tunable) for tunable in tuner.competitors(PROBLEM)] == ["cute: right"]
    fakes(cute=["-no"], aten=["right!"], helion=["-no"])
    (only,) = tuner.competitors(PROBLEM)
    assert only.backend == "reference"


def test_two_processes_with_threads_tune_one_cache(fakes):
    """Eight threads, of different problems at the same time, into one file."""
    code = """
import dataclasses, sys, threading
from tests.support import fake_backends
from tests.tuning.test_tuner import PROBLEM, stubbed
from torch_bwattn.tuning import tuner
fake_backends.install({"cute": ["right"], "aten": ["-no"]})
mine = [dataclasses.replace(PROBLEM, q_len=16 << (int(sys.argv[1]) + i)) for i in range(4)]
threads = [threading.Thread(target=tuner.tune, args=([one], stubbed())) for one in mine]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
"""
    running = [subprocess.Popen([sys.executable, "-c", code, str(4 * i)], env=dict(os.environ)) for i in range(2)]
    assert [process.wait() for process in running] == [0, 0]
    assert len(tables.tuned("cpu").load()["entries"]) == 8


def test_the_release_covers_every_feature_and_every_kind_of_length():
    found = problems.release("sm_90a")
    for fields in ("mask_dtype", "softcap", "sink_dtype", "low_diagonal"):
        assert any(getattr(problem, fields) is not None for problem in found)
    assert any(problem.dropout_p for problem in found)
    assert {problem.q_len for problem in found} >= {1, 16, 128, 32768}
    assert {problem.backward for problem in found} == {False, True}
    assert len(tuner.one_of_each_key(found)) > 200


@pytest.mark.parametrize(("variables", "threads"), [({}, os.cpu_count() // 2 or 1), ({"OMP_NUM_THREADS": "7"}, 7)])
def test_processes_beside_each_other_share_the_cores(monkeypatch, variables, threads):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    code = """
import json, os, sys
print('{"ready": true}', flush=True)
for line in sys.stdin:
    print(json.dumps({"failure": os.environ["OMP_NUM_THREADS"], "says_nothing": False}), flush=True)
"""
    checkers = tuner.Checkers(dataclasses.replace(stubbed(), jobs=2, command=(sys.executable, "-c", code)))
    try:
        (found,) = checkers.check([(PROBLEM, Tunable("cute", ""))], lambda *_: None).values()
    finally:
        checkers.end()
    assert found.failure == str(threads)


@pytest.mark.parametrize(
    "reply",
    ["5", "[1]", "null", "{}", "nonsense", '{"ms": [], "failures": []}', '{"ms": [-1.0], "failures": [""]}',
     '{"ms": [NaN], "failures": [""]}', '{"ms": ["fast"], "failures": [""]}', '{"ms": [1.0]}'],
)  # fmt: skip
def test_a_worker_that_answers_with_nonsense_has_not_answered(reply):
    code = f"""
import sys
print("a banner")
print('{{"ready": true}}', flush=True)
sys.stdin.readline()
print({reply!r}, flush=True)
sys.stdin.read()
"""
    worker = tuner.Worker((sys.executable, "-c", code))
    with pytest.raises(tuner.NoAnswer):
        worker.ask({"do": "time"}, 20.0, tuner.times_of(1))
    worker.end()


def test_a_worker_that_closes_its_output_has_not_answered():
    code = "import os, time; os.write(1, b'{\"ready\": true}\\n'); os.close(1); time.sleep(60)"
    worker = tuner.Worker((sys.executable, "-c", code))
    with pytest.raises(tuner.NoAnswer, match="closed its output"):
        worker.ask({"do": "time"}, 20.0, tuner.times_of(1))


def test_a_worker_ends_with_its_parent():
    code = """
import os, sys, threading, time
from tests.tuning.test_tuner import CODE, PROBLEM
from torch_bwattn.selection.on_demand import to_json
from torch_bwattn.tuning import tuner
worker = tuner.Worker((sys.executable, "-c", CODE, '{"cute": ["right"]}'))
request = {"do": "check", "problem": to_json(PROBLEM), "tunable": ["cute", "right"]}
worker.ask(request, 60.0, {"failure": str})
os.kill(worker._process.pid, 19)  # as a kernel that hangs, it does not read that its requests have ended
print(worker._process.pid, flush=True)
os._exit(0)
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ), timeout=120, check=True)
    pid = int(done.stdout)
    os.kill(pid, 18)
    for _ in range(100):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    os.kill(pid, 9)
    pytest.fail("the worker outlived its parent")
