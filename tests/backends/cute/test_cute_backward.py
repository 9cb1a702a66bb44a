"""What the host decides about the Hopper backward, and the kernels beside it, compiled without a GPU.

That the configs of the backward itself compile clean is the cross-compile lane's to say."""

from __future__ import annotations

import dataclasses
import sys

import pytest
import torch

from torch_bwattn.backends.cute import calls, configs, loader
from torch_bwattn.backends.cute.backend import CuteBackend
from torch_bwattn.backends.cute.compile import KernelKey
from torch_bwattn.layout import empty_like_order
from torch_bwattn.problem import Problem, describe

needs_cute = pytest.mark.skipif(loader.why_missing() is not None, reason=str(loader.why_missing()))


def problem(widths: tuple[int, int] = (128, 128), **others: object) -> Problem:
    sizes = {"batch": 2, "heads": 8, "kv_heads": 2, "q_len": 4096, "kv_len": 4096}
    others = {"dtype": torch.bfloat16, "head_dim": widths[0], "value_dim": widths[1], "scale": 0.1, **others}
    return Problem("sm_90a", **sizes, backward=True, **others)


@needs_cute
def test_what_is_beside_the_main_kernel_compiles_clean(capsys):
    from torch_bwattn.backends.cute import report

    reports = []
    pre = [
        KernelKey("backward_preprocess", "sm_90a", (dtype, width, wide, with_lse_grad, False))
        for dtype, width, wide, with_lse_grad in (("bfloat16", 128, True, False), ("float16", 40, False, True))
    ]
    post = [
        KernelKey("backward_postprocess", f"sm_{arch}{'a' * (arch > 80)}", ("bfloat16", head_dim, config, varlen, used))
        for arch, head_dim, config, varlen, used in (
            (80, 120, configs.PostprocessConfig(80, 128, 128, 256), False, False),
            (90, 256, configs.PostprocessConfig(90, 64, 256, 256, "columns"), False, False),
            (100, 64, configs.PostprocessConfig(100, 128, 64), True, True),
            (100, 128, configs.PostprocessConfig(100, 128, 128, swapped=True), False, False),
        )
    ]
    for key in pre + post:
        (found,) = report.compile_report(key, calls.build_of(key))
        reports.append(found)
        assert not found.counts["STL"] + found.counts["LDL"], found
    with capsys.disabled():
        sys.stdout.write(f"\nbeside the backward\n{report.table(reports)}\n")


def test_the_verdict_names_the_config():
    verdict = CuteBackend().supports(problem())
    assert verdict
    assert verdict.config == "64x128, dQ added by groups"


def workspace(described):
    features, config = configs.backward_features(described), configs.backward(described)
    return configs.backward_workspace(features, described.batch, described.heads, described.q_len, config)


@pytest.mark.parametrize("q_len", [1, 64, 65, 1000])
@pytest.mark.parametrize("deterministic", [False, True])
def test_the_workspace_has_sums_turns_and_a_counter(q_len, deterministic):
    described = dataclasses.replace(problem((128, 64)), q_len=q_len, deterministic=deterministic)
    tiles = -(-q_len // 64)
    elements, of_head = workspace(described)
    assert of_head == tiles * 64 * 128
    assert elements == 16 * of_head + (16 * tiles * 2 if deterministic else 0) + 4


def test_extra_memory_is_the_sums_and_two_numbers_a_row():
    """At B4 H32 S8192 D128: no more than dQ in fp32, lse and delta, but for a counter."""
    described = dataclasses.replace(problem(), batch=4, heads=32, kv_heads=32, q_len=8192, kv_len=8192)
    elements, _ = workspace(described)
    assert elements - 4 == 4 * 32 * 8192 * 128


def test_a_gradient_that_suits_no_bulk_copy_is_no_reason_to_refuse():
    q, k, v = (torch.empty(1, 2, 8, 64, dtype=torch.bfloat16) for _ in range(3))
    options = {"scale": 1.0, "is_causal": False, "causal_alignment": "top_left", "dropout_p": 0.0, "backward": True}
    described = describe(q, k, v, None, **options, more=(torch.empty((), dtype=q.dtype).expand(q.shape), q))
    assert not described.unit_last_strides
    assert described.bulk_copies
    assert not describe(q, k.mT.contiguous().mT, v, None, **options).bulk_copies


@pytest.mark.parametrize("sizes", [(2, 3, 5, 8), (1, 3, 1, 40), (2, 1, 7, 256), (1, 1, 1, 8)], ids=str)
@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (2, 0, 1), (1, 2, 0)], ids=str)
def test_tma_takes_what_the_package_lays_out(sizes, order):
    like = torch.empty([sizes[i] for i in (*order, 3)]).permute(*(order.index(i) for i in range(3)), 3)
    for tensor in (like, like[:1].expand(4, -1, -1, -1)):
        assert calls._view_for_tma(empty_like_order(tensor.to(torch.float16), sizes[3])) is None


@pytest.mark.parametrize(
    ("dtype", "head_dim", "config", "word"),
    [
        ("float32", 64, configs.PostprocessConfig(90, 64, 64), "dtype"),
        ("bfloat16", 60, configs.PostprocessConfig(90, 64, 64), "head_dim"),
        ("bfloat16", 264, configs.PostprocessConfig(90, 64, 320), "head_dim"),
        ("bfloat16", 128, configs.PostprocessConfig(90, 64, 64), "width"),
        ("bfloat16", 64, configs.PostprocessConfig(75, 64, 64), "arch"),
        ("bfloat16", 64, configs.PostprocessConfig(90, 64, 64, 96), "threads"),
        ("bfloat16", 64, configs.PostprocessConfig(90, 64, 64, 256), "rows"),
        ("bfloat16", 64, configs.PostprocessConfig(90, 64, 64, side_by_side=64), "side_by_side"),
    ],
    ids=str,
)
def test_a_postprocess_that_does_not_exist_says_why(dtype, head_dim, config, word):
    assert configs.why_no_postprocess(dtype, head_dim, config).startswith(word)
