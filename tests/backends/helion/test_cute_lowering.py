"""Launches of what Helion lowers to CuTe-DSL, without a GPU to launch on: the compiling is another's."""

from __future__ import annotations

import contextlib
import os
import threading
import types

import pytest
import torch

from torch_bwattn.backends.helion import cute_lowering, forms, runtime

DEVICE = torch.device("cuda", 0)
FAMILY = types.SimpleNamespace(name="kernel", parameters=("x", "scale", "causal"), constexprs=frozenset({"causal"}))


@pytest.fixture
def made(monkeypatch):
    """What was compiled and what was launched."""
    found = types.SimpleNamespace(compiled=[], launched=[])

    def lowered(family, args, config):
        os.environ["CUTE_DSL_ARCH"] = "sm_100a"
        found.compiled.append((family.name, dict(config)))
        return lambda *launched: found.launched.append(launched)

    monkeypatch.setattr(cute_lowering, "lowered", lowered)
    monkeypatch.setattr(cute_lowering, "_lowered", {})
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(runtime, "refuse_during_capture", lambda *_: None)
    return found


def test_one_kernel_for_each_size_dtype_flag_and_config(made):
    def prepared(length=4, dtype=torch.float16, scale=0.5, causal=True, **config):
        return cute_lowering.prepare(FAMILY, (torch.empty(length, dtype=dtype), scale, causal), config, DEVICE)

    first = prepared()
    assert first is prepared(scale=0.25)
    others = [
        prepared(length=5),
        prepared(dtype=torch.bfloat16),
        prepared(scale=None),
        prepared(causal=False),
        prepared(a=1),
    ]
    assert len({id(kernel) for kernel in (first, *others)}) == 6
    assert not made.compiled


def test_it_compiles_once_whichever_thread_is_first_and_leaves_the_environment(made, monkeypatch):
    monkeypatch.delenv("CUTE_DSL_ARCH", raising=False)
    kernel = cute_lowering.prepare(FAMILY, (torch.empty(4), 0.5, True), {"pairs": 1}, DEVICE)
    threads = [threading.Thread(target=kernel, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made.compiled == [("kernel", {"pairs": 1})]
    assert sorted(made.launched) == [(0,), (1,), (2,), (3,)]
    assert "CUTE_DSL_ARCH" not in os.environ


def test_nothing_is_compiled_in_a_capture(made, monkeypatch):
    def refuse(name, device):
        raise RuntimeError(f"{name} on {device}")

    monkeypatch.setattr(runtime, "refuse_during_capture", refuse)
    kernel = cute_lowering.prepare(FAMILY, (torch.empty(4), 0.5, True), {}, DEVICE)
    with pytest.raises(RuntimeError, match="kernel on cuda:0"):
        kernel()
    assert not made.compiled


@pytest.mark.parametrize(("capability", "form"), [((10, 0), True), ((10, 3), True), ((9, 0), True), ((10, 0), False)])
def test_a_family_goes_where_the_device_has_tcgen05(made, monkeypatch, capability, form):
    def kernel(x):
        del x

    cute = forms.CuteForm("flag", "kind", {"num_warps": 8}) if form else None
    family = runtime.KernelFamily(kernel, dims={"x": "4"}, cute=cute)
    monkeypatch.setattr(family, "_device", lambda _: DEVICE)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    bound = []
    monkeypatch.setattr(family, "bind", lambda *args: bound.append(args[1]))
    monkeypatch.setattr(runtime, "PreparedLaunch", lambda *_: None)
    launch = family.prepare((torch.empty(4),), {"pairs": 1})
    assert isinstance(launch, cute_lowering.Lowered) == (form and capability[0] == 10)
    assert bound == ([] if launch else [{"num_warps": 8} if form else {"pairs": 1}])


def test_only_a_family_of_a_form_is_lowered():
    with pytest.raises(ValueError, match="CuTe form"):
        cute_lowering.lowered(types.SimpleNamespace(cute=None), (), {})
