"""Calls from many threads at once."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import torch_bwattn

from .support.calls import Call, Mask, Operand
from .support.check import check_call


def call_of(index: int) -> Call:
    rows, columns = 5 + 7 * (index % 5), 3 + 11 * (index % 7)
    mask = Mask((rows, columns), kind="own", needs_grad=True) if index % 3 == 0 else None
    return Call(
        Operand((2, 4, rows, 8)),
        Operand((2, 2, columns, 8)),
        Operand((2, 2, columns, 16)),
        dtype=(torch.float32, torch.bfloat16)[index % 2],
        mask=mask,
        is_causal=index % 3 == 1,
        enable_gqa=True,
        with_lse_grad=True,
        seed=index,
    )


def test_calls_from_many_threads():
    start = threading.Barrier(4)

    def work(worker):
        start.wait()
        for index in range(worker, 40, 4):
            check_call(call_of(index))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))


def test_counts_lose_no_call():
    query = torch.randn(1, 1, 3, 4)
    torch_bwattn.reset_call_counts()

    def work(_):
        for _ in range(50):
            torch_bwattn.sdpa(query, query, query)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert sum(torch_bwattn.call_counts().values()) == 200


@pytest.mark.parametrize("name", ["reference", "aten"])
def test_a_pin_belongs_to_its_thread(name):
    query = torch.randn(2, 4, 160, 32)
    other = {"reference": "aten", "aten": "reference"}[name]
    seen = {}
    pinned, done = threading.Event(), threading.Event()

    def elsewhere():
        pinned.wait()
        with torch_bwattn.backend(other):
            seen["other"] = str(torch_bwattn.explain(query, query, query))
        seen["plain"] = str(torch_bwattn.explain(query, query, query))
        done.set()

    thread = threading.Thread(target=elsewhere)
    before = str(torch_bwattn.explain(query, query, query))
    thread.start()
    with torch_bwattn.backend(name):
        pinned.set()
        done.wait()
        here = str(torch_bwattn.explain(query, query, query))
    thread.join()
    assert f"forward: {name}" in here
    assert f"forward: {other}" in seen["other"]
    assert seen["plain"] == before


def test_the_backward_in_another_thread_keeps_the_pin():
    query = torch.randn(2, 4, 160, 32, requires_grad=True)
    with torch_bwattn.backend("reference"):
        out = torch_bwattn.sdpa(query, query, query)
    result = []
    thread = threading.Thread(target=lambda: result.append(torch.autograd.grad(out.sum(), query)[0]))
    thread.start()
    thread.join()
    with torch_bwattn.backend("reference"):
        (expected,) = torch.autograd.grad(torch_bwattn.sdpa(query, query, query).sum(), query)
    assert torch.equal(result[0], expected)
