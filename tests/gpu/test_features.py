"""Windows, soft caps and sinks by the Helion kernels on a GPU, against the fp64 oracle."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import torch_bwattn
from tests.support.calls import Call, Mask, Operand, Sink, build, run
from tests.support.check import check_call

pytestmark = pytest.mark.gpu
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

# No multiple of any tile, shorter and longer than each other, and long enough for tiles on both sides of a window.
SIZES = [(127, 129), (777, 1111), (2049, 515), (1300, 1300)]
KINDS = {
    "window": {"window_size": (100, 30)},
    "window_of_one": {"window_size": (0, 0)},
    "causal_window": {"window_size": (200, -1), "is_causal": True, "causal_alignment": "bottom_right"},
    "left_window": {"window_size": (64, -1), "causal_alignment": "bottom_right"},
    "window_and_bool": {"window_size": (150, 60), "mask": "bool"},
    "window_and_additive": {"window_size": (150, 60), "mask": "own"},
    "softcap": {"softcap": 5.0, "is_causal": True},
    "softcap_and_additive": {"softcap": 5.0, "mask": "own"},
    "sink": {"sink": Sink("float32"), "is_causal": True},
    "sink_and_dropout": {"sink": Sink("own"), "dropout_p": 0.3},
    "all": {"window_size": (150, 60), "softcap": 5.0, "sink": Sink("own", "large"), "mask": "own", "dropout_p": 0.2},
}


def call_of(kind: str, dtype: torch.dtype, width: int, size: tuple[int, int]) -> Call:
    rows, columns = size
    options = dict(KINDS[kind])
    if "mask" in options:
        options["mask"] = Mask((1, 6, rows, columns), kind=options["mask"], needs_grad=options["mask"] == "own")
    return Call(
        Operand((2, 6, rows, width), "bshd"),
        Operand((2, 2, columns, width), "bshd"),
        Operand((2, 2, columns, width), "bshd"),
        dtype=dtype,
        enable_gqa=True,
        with_lse_grad=True,
        grad_out="bshd",
        **options,
    )


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("kind", KINDS)
def test_against_the_oracle(kind, width, device):
    """All sizes in one test: they share kernels, which take longer to compile than to run."""
    with torch_bwattn.backend("helion"):
        for size in SIZES:
            check_call(call_of(kind, BF16, width, size), device)


@pytest.mark.parametrize(("dtype", "width"), [(FP16, 64), (FP32, 64), (FP32, 128), (BF16, 256)], ids=str)
@pytest.mark.parametrize("kind", ["window", "softcap", "sink", "all"])
def test_other_kernels(kind, dtype, width, device):
    with torch_bwattn.backend("helion"):
        check_call(call_of(kind, dtype, width, (300, 413)), device)


@pytest.mark.parametrize("kind", ["causal_window", "all"])
def test_gradients_repeat_bitwise(kind, device):
    call = dataclasses.replace(call_of(kind, BF16, 64, (777, 1111)), dropout_p=0.0)
    with torch_bwattn.backend("helion"):
        first, second = (dict(run(call, build(call, device)).items()) for _ in range(2))
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())


def test_no_kernel_is_compiled_for_another_window_or_cap(device):
    from torch_bwattn.backends.helion import backward, forward

    families = (forward.FORWARD, backward.DKV, backward.DQ)
    call = dataclasses.replace(call_of("causal_window", BF16, 64, (777, 1111)), softcap=5.0)
    with torch_bwattn.backend("helion"):
        run(call, build(call, device))
        compiled = [family.binary_count() for family in families]
        for left, softcap in ((1, 2.0), (16, 30.0), (5000, 50.0)):
            call = dataclasses.replace(call, window_size=(left, -1), softcap=softcap)
            run(call, build(call, device))
    assert [family.binary_count() for family in families] == compiled


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_soft_caps_of_every_size(dtype, device):
    with torch_bwattn.backend("helion"):
        for softcap in (1e-25, 1e-3, 1e6, 1e29):
            check_call(dataclasses.replace(call_of("softcap", dtype, 64, (300, 413)), softcap=softcap), device)
