"""The lane that compiles for GPUs that are not there. What it finds of all kernels is the command's own report."""

from __future__ import annotations

import dataclasses
import os

import pytest
import torch

from torch_bwattn import cli
from torch_bwattn.backends.cute import configs
from torch_bwattn.backends.cute import loader as cute_loader
from torch_bwattn.backends.helion import loader as helion_loader
from torch_bwattn.backends.helion.backend import tcgen05_code
from torch_bwattn.crosscompile import lane
from torch_bwattn.problem import Problem
from torch_bwattn.selection.choose import get_backend

PLAIN = Problem("sm_100a", torch.bfloat16, 1, 4, 2, 300, 300, 64, 64, 0.125)
FINE = lane.Compiled("helion", "attention_forward", "forward", "64x64", "tcgen05", 8, 0, 0, 0, 200, 0, 60000, 1.0)


def test_every_kind_of_problem_is_compiled_once():
    found = lane.problems("sm_90a")
    assert len(found) == len(set(found))
    for field in ("mask_dtype", "softcap", "sink_dtype", "diagonal", "low_diagonal"):
        assert any(getattr(problem, field) is not None for problem in found)
    assert any(problem.dropout_p for problem in found)
    assert {problem.head_dim for problem in found} == {64, 96, 128, 192, 256}


def test_a_forward_beside_a_mask_is_known_to_spill_more():
    masked = dataclasses.replace(PLAIN, mask_dtype=torch.bool, mask_sizes=(1, 1, 300, 300))
    spilling = dataclasses.replace(FINE, kernel="attention_flash", spilled_bytes=160)
    assert lane._judged(PLAIN, spilling).faults
    assert not lane._judged(masked, spilling).faults


def test_every_config_of_cute_is_compiled():
    described = [*lane.problems("sm_90a"), *lane.problems_of_cute()]
    described = [problem for problem in described if get_backend("cute").supports(problem)]
    used = {(configs.backward if problem.backward else configs.forward)(problem) for problem in described}
    for width in lane._FLEX_WIDTHS:
        used |= {configs.flex_forward(width), configs.flex_backward(width)}
    kinds = (configs.ForwardConfig, configs.BackwardConfig)
    assert {value for value in vars(configs).values() if isinstance(value, kinds)} <= used


def test_no_kernel_of_cute_is_compiled_twice():
    tasks = lane._tasks("sm_90a", ("cute",))
    compiled = [key for problem, _, names in tasks for key in lane._cute_keys(problem) if key.name in names]
    assert len(compiled) == len(set(compiled)) > 40
    of_mods = {"flex_forward_sm90", "flex_backward_sm90"}  # compiled by tasks of its own
    assert set(lane.PRODUCTS_IN_CODE) - of_mods <= {key.name for key in compiled}


def test_no_tcgen05_body_is_compiled_twice():
    tasks = lane._tasks("sm_100a", ("helion",))
    bodies = [
        tcgen05_code(problem, part) for problem, _, parts in tasks for part in parts if part.startswith(lane.PREFIX)
    ]
    assert len(bodies) == len(set(bodies)) > 10


@pytest.mark.parametrize(
    ("kernel", "products", "wrong"),
    [("forward_sm90", 6, False), ("forward_sm90", 7, True), ("backward_sm90", 9, True), ("delta", 3, False)],
)
def test_the_products_of_hand_written_kernels_are_counted(kernel, products, wrong):
    assert bool(lane._miscounted(kernel, products)) is wrong


def test_a_backend_that_is_missing_is_a_fault(monkeypatch):
    for name in ("cute", "helion"):
        monkeypatch.setattr(get_backend(name), "missing", lambda: "it is not installed")
    found = lane.run("sm_90a")
    assert [one.backend for one in found] == ["cute", "helion"]
    assert all("not installed" in one.faults[0] for one in found)
    assert [one.backend for one in lane.run("sm_100a")] == ["helion"]  # the other is not for it


@pytest.mark.parametrize(
    ("target", "product"),
    [
        ("sm_80", "mma_sync"),
        ("sm_90a", "wgmma"),
        ("sm_100a", "tcgen05"),
        ("sm_103a", "tcgen05"),
        ("sm_120a", "mma_sync"),
    ],
)
def test_each_target_has_its_matrix_instruction(target, product):
    assert lane.product_of(target) == product


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({}, ""), ({"product": "mma_sync"}, "expected tcgen05, got mma_sync"),
        ({"product": ""}, "no matrix instruction"),
        ({"spilled_bytes": 8}, "spills 8 bytes"),
        ({"kernel": "attention_dkv", "spilled_bytes": 8}, ""),
        ({"kernel": "attention_flash", "spilled_bytes": 80}, ""),
        ({"kernel": "attention_flash", "spilled_bytes": 96}, "spills 96 bytes"),
        ({"shared_bytes": 240000}, "240000 bytes of shared memory"),
        ({"kernel": "attention_delta", "product": ""}, ""),
    ],
    ids=str,
)  # fmt: skip
def test_faults(change, word):
    faults = lane._judged(PLAIN, dataclasses.replace(FINE, **change)).faults
    assert word in "".join(faults)
    assert bool(faults) == bool(word)


@pytest.mark.skipif(helion_loader.why_missing() is not None, reason="needs Helion")
def test_helion_compiles_for_what_is_not_there(monkeypatch):
    monkeypatch.setattr(lane, "problems", lambda _: [dataclasses.replace(PLAIN, target="sm_90a")])
    monkeypatch.setattr(lane, "_FLEX_WIDTHS", (64,))
    before = dict(os.environ)
    forward, *flex = lane.run("sm_90a", ("helion",))
    assert (forward.product, forward.kernel) == ("wgmma", "attention_forward")
    assert [one.kernel for one in flex] == ["flex_forward", "flex_dkv", "flex_dq"]
    assert not any(one.faults for one in (forward, *flex))
    assert min(forward.products, forward.registers, forward.shared_bytes) > 0
    assert "forward" in lane.table([forward, *flex])
    assert dict(os.environ) == before


@pytest.mark.skipif(cute_loader.why_missing() is not None, reason="needs CuTe-DSL")
def test_cute_compiles_for_hopper_and_is_not_for_others():
    problem = dataclasses.replace(PLAIN, target="sm_90a", backward=True)
    assert lane.compile_problem(dataclasses.replace(problem, target="sm_80"), "cute") == []
    found = lane.compile_problem(problem, "cute")
    assert [one.kernel for one in found] == ["backward_preprocess", "backward_sm90", "backward_postprocess"]
    assert not any(one.faults for one in found)
    assert found[1].setmaxnreg
    assert found[1].bulk_copies


def test_what_does_not_compile_is_a_fault(monkeypatch):
    def fail(*_):
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(lane, "compile_problem", fail)
    (found,) = lane._unit((PLAIN, "helion", ()))
    assert "no such instruction" in found.faults[0]


@pytest.mark.parametrize("argv", [["--target", "sm_1"], ["--target", "sm_80", "--jobs", "0"]])
def test_wrong_usage(argv, capsys):
    assert cli.main(["compile", *argv]) == 2
    assert "expected" in capsys.readouterr().err


@pytest.mark.parametrize("faults", [(), ("it is slow",)])
def test_the_status_says_whether_there_is_a_fault(monkeypatch, capsys, faults):
    monkeypatch.setattr(lane, "run", lambda *_, **__: [dataclasses.replace(FINE, faults=faults)])
    assert cli.main(["compile", "--target", "sm_100a"]) == int(bool(faults))
    assert ("it is slow" in capsys.readouterr().out) is bool(faults)
