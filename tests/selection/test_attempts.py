"""Running a plan: what fails is passed over and told once, unless it was pinned."""

from __future__ import annotations

import logging
import threading

import pytest
import torch

import torch_bwattn
from torch_bwattn.backends.base import BackwardInputs
from torch_bwattn.errors import UnsupportedProblem
from torch_bwattn.problem import Problem
from torch_bwattn.selection import attempts, drawn, trust
from torch_bwattn.selection.attempts import Attempts, choose
from torch_bwattn.selection.choose import plan
from torch_bwattn.selection.key import features_of

PROBLEM = Problem("cpu", torch.float32, 1, 2, 2, 40, 50, 16, 16, 0.25)


@pytest.fixture(autouse=True)
def _logged(caplog):
    caplog.set_level(logging.WARNING, "torch_bwattn")


def run(problem=PROBLEM, pin=None):
    made = choose(problem, pin)
    x = drawn.inputs(problem, "cpu")
    oracle, _ = drawn.references(problem, x, None)
    out, _ = made(x)
    torch.testing.assert_close(out.double(), oracle.out, atol=1e-5, rtol=1e-5)
    return made


@pytest.mark.parametrize("failing", ["raises", "does not compile", "lacks memory", "nan", "wrong"])
def test_what_fails_is_passed_over_and_told_once(fakes, failing, caplog):
    fakes(cute=[failing], helion=["right"])
    for _ in range(3):
        assert run().name == "helion"
    (record,) = caplog.records
    assert f"cute: {failing}" in record.message
    assert features_of(PROBLEM) in record.message


@pytest.mark.parametrize("failing", ["raises", "does not compile", "lacks memory", "nan"])
def test_a_pinned_backend_hides_nothing(fakes, failing, caplog):
    fakes(cute=[failing, "right"], helion=["right"])
    with pytest.raises((RuntimeError, UnsupportedProblem), match=r"fails|compile|memory|check"):
        run(pin="cute")
    assert not caplog.records


def test_lack_of_memory_is_for_this_call_only(fakes, monkeypatch):
    fakes(cute=["right"], helion=["right"])
    made = Attempts(plan(PROBLEM, None))
    x = drawn.inputs(PROBLEM, "cpu")
    made(x)
    right = made._run

    def lacks_memory(_):
        raise torch.OutOfMemoryError("too little memory")

    made._run = lacks_memory
    made(x)
    assert made.name == "helion"
    made._run = right
    made(x)
    assert [candidate.backend for candidate in made._rest][:2] == ["cute", "helion"]


def test_the_last_candidates_error_is_the_callers(fakes):
    fakes(cute=["raises"], helion=["raises"], aten=["-no"], reference=["raises"])
    with pytest.raises(RuntimeError, match="always fails"):
        run()


def test_nothing_is_tried_during_a_capture(fakes, monkeypatch):
    fakes(cute=["raises"], helion=["right"], aten=["-no"])
    monkeypatch.setattr(trust, "why_distrusted", lambda *_, **__: "")
    monkeypatch.setattr(attempts, "_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="always fails"):
        run()


def test_nothing_is_checked_during_a_capture(fakes, monkeypatch):
    fakes(cute=["right"])
    monkeypatch.setattr(attempts, "_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="before a CUDA graph captures it"):
        run()


def test_a_check_is_made_once_and_its_verdict_kept(fakes, monkeypatch):
    fakes(cute=["right"])
    checks = []
    real = drawn.check
    monkeypatch.setattr(drawn, "check", lambda *args: checks.append(args) or real(*args))
    run()
    run()
    assert len(checks) == 1
    trust._known.clear()  # as in the next process
    run()
    assert len(checks) == 1
    monkeypatch.setattr(trust, "_versions", lambda: {"triton": "another"})
    trust._known.clear()
    run()
    assert len(checks) == 2


def test_eight_threads_make_one_check_and_all_get_an_answer(fakes, monkeypatch):
    fakes(cute=["raises"], helion=["right"])
    made = Attempts(plan(PROBLEM, None))
    x = drawn.inputs(PROBLEM, "cpu")
    found = []
    start = threading.Barrier(8)

    def call():
        start.wait()
        found.append(made(x)[0])

    threads = [threading.Thread(target=call) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert all(torch.equal(one, found[0]) for one in found)
    assert made.name == "helion"


def test_backward_too(fakes):
    problem = Problem("cpu", torch.float32, 1, 2, 2, 40, 50, 16, 16, 0.25, backward=True)
    fakes(cute=["wrong"], helion=["right"])
    x = drawn.inputs(problem, "cpu")
    grad_out = drawn.gradient_of(problem, x)
    oracle, _ = drawn.references(problem, x, grad_out)
    y = drawn.backward_inputs(problem, x, oracle, grad_out)
    assert isinstance(y, BackwardInputs)
    made = choose(problem, None)
    dq, _, _, _, _ = made(y, drawn.wanted(problem))
    assert made.name == "helion"
    torch.testing.assert_close(dq.double(), oracle.dq, atol=1e-4, rtol=1e-4)


def test_who_is_passed_over_and_why_is_logged_for_who_debugs(fakes, caplog):
    caplog.set_level(logging.DEBUG, "torch_bwattn")
    fakes(cute=["-it is Monday"], helion=["right"])
    run()
    assert "cute is passed over: it is Monday" in caplog.text


def test_the_operator_counts_what_ran(fakes, monkeypatch):
    fakes(aten=["raises"], cute=["-no"], helion=["right"])
    torch_bwattn.reset_call_counts()
    query = torch.randn(1, 3, 37, 24)
    torch_bwattn.sdpa(query, query, query)
    assert torch_bwattn.call_counts() == {"helion": 1}
