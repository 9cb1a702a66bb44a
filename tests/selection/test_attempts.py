"""Running a plan: what fails is passed over and told once, unless it was pinned."""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import torch_bwattn
from torch_bwattn.backends.base import BackwardInputs
from torch_bwattn.errors import SettingError, UnsupportedProblem
from torch_bwattn.problem import Problem
from torch_bwattn.selection import attempts, drawn, tables, trust
from torch_bwattn.selection.attempts import Attempts, choose
from torch_bwattn.selection.choose import plan
from torch_bwattn.selection.key import features_of
from torch_bwattn.selection.tables import Tunable

PROBLEM = Problem("cpu", torch.float32, 1, 2, 2, 40, 50, 16, 16, 0.25)


@pytest.fixture(autouse=True)
def _logged(caplog):
    caplog.set_level(logging.WARNING, "torch_bwattn")


class Watched(TorchDispatchMode):
    """Calls go through the operators."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


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


def test_lack_of_memory_is_for_this_call_only_and_told_once(fakes, caplog):
    fakes(cute=["right"], helion=["right"])
    made = Attempts(plan(PROBLEM, None))
    x = drawn.inputs(PROBLEM, "cpu")
    made(x)
    right = made._state
    for size in range(3):

        def lacks_memory(_, size=size):
            raise torch.OutOfMemoryError(f"tried to allocate {size} MiB")

        made._state = right._replace(run=lacks_memory)
        made(x)
        assert made.name == "helion"
        made._state = right
        made(x)
        assert made.name == "cute"
    assert len(caplog.records) == 1


def test_the_memory_of_what_failed_is_free_for_the_next(fakes, monkeypatch):
    fakes(cute=["right"], helion=["right"])
    made = Attempts(plan(PROBLEM, None))
    x = drawn.inputs(PROBLEM, "cpu")
    made(x)
    kept = []

    def lacks_memory(_):
        large = torch.empty(1000)
        kept.append(weakref.ref(large))
        raise torch.OutOfMemoryError("too little memory")

    real = trust.why_distrusted
    monkeypatch.setattr(trust, "why_distrusted", lambda *a, **k: real(*a, **k) if kept[0]() is None else "it is kept")
    made._state = made._state._replace(run=lacks_memory)
    made(x)
    assert made.name == "helion"


@pytest.mark.parametrize("error", [SettingError("BWATTN_X: expected 0"), torch.AcceleratorError("CUDA error: gone")])
def test_wrong_settings_and_lost_devices_are_no_reason_to_go_on(fakes, error):
    fakes(cute=["right"], helion=["right"])
    made = Attempts(plan(PROBLEM, None))

    def fail(*_):
        raise error

    made._state = made._state._replace(run=fail)
    with pytest.raises(type(error)):
        made(drawn.inputs(PROBLEM, "cpu"))


def test_what_failed_is_not_tried_by_other_calls_of_its_kind(fakes, caplog):
    fakes(cute=["raises"], helion=["right"])
    run()
    made = choose(PROBLEM, None)
    assert made.name == "helion"
    assert [candidate.backend for candidate in made._able][:1] == ["helion"]
    assert len(caplog.records) == 1


@pytest.mark.parametrize("where", ["references", "backward"])
def test_what_says_nothing_of_the_kernel_is_no_verdict(fakes, monkeypatch, where):
    fakes(cute=["right"], helion=["right"])

    def fail(*_, **__):
        raise torch.AcceleratorError("CUDA error: gone")

    with monkeypatch.context() as patch:
        patch.setattr(drawn, "references" if where == "references" else "failure", fail)
        with pytest.raises(torch.AcceleratorError):
            run()
    assert not trust._known
    assert run().name == "cute"


def test_an_exception_is_a_verdict_for_this_process_only(fakes):
    fakes(cute=["raises"], helion=["right"])
    run()
    assert any("always fails" in failure for failure in trust._known.values())
    trust._known.clear()
    attempts._failed.clear()
    assert trust.recalled(Tunable("cute", "raises"), PROBLEM) is None


def test_a_backend_under_check_may_call_the_operator(fakes, monkeypatch):
    fakes(cute=["right"], aten=["-no"])
    real = drawn.failure

    def calls_it(*args):
        torch_bwattn.sdpa(*(torch.randn(1, 2, 9, 8) for _ in range(3)))
        return real(*args)

    monkeypatch.setattr(drawn, "failure", calls_it)
    assert run().name == "cute"


def test_two_threads_that_meet_a_failure_leave_the_only_reserve_alone(fakes, monkeypatch):
    fakes(cute=["raises"], helion=["-no"], aten=["-no"])
    monkeypatch.setattr(trust, "needs_check", lambda *_: False)
    x = drawn.inputs(PROBLEM, "cpu")
    for _ in range(50):
        attempts._failed.clear()
        made, start, found = Attempts(plan(PROBLEM, None)), threading.Barrier(2), []

        def call(made=made, start=start, found=found):
            start.wait()
            try:
                found.append(made(x))
            except RuntimeError as error:
                found.append(error)

        threads = [threading.Thread(target=call) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not any(isinstance(one, Exception) for one in found)
        assert {tunable.config for _, _, tunable in attempts._failed} == {"raises"}


def test_the_last_candidates_error_is_the_callers(fakes):
    fakes(cute=["raises"], helion=["raises"], aten=["-no"], reference=["raises"])
    with pytest.raises(RuntimeError, match="always fails"):
        run()


def test_nothing_is_tried_during_a_capture(fakes, monkeypatch):
    fakes(cute=["raises"], helion=["right"], aten=["-no"])
    monkeypatch.setattr(trust, "why_distrusted", lambda *_, **__: "")
    monkeypatch.setattr(attempts, "capturing", lambda: True)
    with pytest.raises(RuntimeError, match="always fails"):
        run()


def test_nothing_is_checked_during_a_capture(fakes, monkeypatch):
    fakes(cute=["right"])
    monkeypatch.setattr(attempts, "capturing", lambda: True)
    with pytest.raises(RuntimeError, match="before a CUDA graph captures it"):
        run()


def test_a_check_is_made_once_and_its_verdict_kept(fakes, monkeypatch):
    fakes(cute=["right"])
    checks = []
    real = drawn.failure
    monkeypatch.setattr(drawn, "failure", lambda *args: checks.append(args) or real(*args))
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


@pytest.mark.parametrize("way", [contextlib.nullcontext, Watched, torch.inference_mode], ids=str)
def test_a_check_reaches_autograd_wherever_it_is_asked_for(fakes, way):
    """Of a backward the references need it, and an operator's implementation is below it."""
    fakes(cute=["wrong", "right"], aten=["-no"])
    leaves = [torch.randn(1, 2, 37, 24, requires_grad=True) for _ in range(3)]
    with way():
        out = torch_bwattn.sdpa(*leaves)
        if out.is_inference():
            assert "wrong" in str(trust._known)
            return
        grads = torch.autograd.grad(out.square().sum(), leaves)
    assert trust._known
    assert set(trust._known.values()) > {""}
    assert not any("RuntimeError" in failure for failure in trust._known.values())
    with torch_bwattn.backend("reference"):
        right = torch.autograd.grad(torch_bwattn.sdpa(*leaves).square().sum(), leaves)
    for one, other in zip(grads, right, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


def test_a_check_of_dropout_warns_nobody(fakes, recwarn):
    fakes(cute=["right"], aten=["-no"])
    query = torch.randn(1, 2, 37, 24)
    torch_bwattn.sdpa(query, query, query, dropout_p=0.5)
    assert not recwarn.list


def test_the_operator_counts_what_ran(fakes, monkeypatch):
    fakes(aten=["raises"], cute=["-no"], helion=["right"])
    torch_bwattn.reset_call_counts()
    query = torch.randn(1, 3, 37, 24)
    torch_bwattn.sdpa(query, query, query)
    assert torch_bwattn.call_counts() == {"helion": 1}


@pytest.mark.parametrize("same", [True, False])
def test_what_the_packages_tests_vouch_for_needs_no_check(monkeypatch, same):
    problem = Problem("sm_90a", torch.bfloat16, 1, 2, 2, 40, 50, 16, 16, 0.25)
    (described,) = [tables.shipped("sm_90a")["environments"][tables.shipped("sm_90a")["tested"]]]
    versions = described["versions"] if same else {**described["versions"], "triton": "another"}
    monkeypatch.setattr(tables, "_installed", lambda: {name: versions[name] for name in tables.VERSIONS_THAT_COUNT})
    for backend, needs in (("cute", not same), ("helion", not same), ("aten", True), ("reference", False)):
        assert trust.needs_check(Tunable(backend, ""), problem) is needs
    assert not trust.needs_check(Tunable("aten", ""), PROBLEM)
