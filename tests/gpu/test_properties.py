"""Any call against the fp64 oracle: features from a small set, for each is a kernel to compile; any shape."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import torch_bwattn
from tests.strategies import calls, share
from tests.support.calls import Call, Operand
from tests.support.check import check_call
from tests.support.poison import poison

pytestmark = pytest.mark.gpu
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


@dataclass(frozen=True)
class Features:
    """What a kernel is compiled for."""

    dtype: torch.dtype
    width: int
    value_width: int
    kind: str
    mask_dtype: str = "own"
    dropout_over: str = "causal"

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        extra = {"additive": f"-{self.mask_dtype}", "dropout": f"-{self.dropout_over}"}.get(self.kind, "")
        return f"{dtype}-{self.width}x{self.value_width}-{self.kind}{extra}"

    def strategy(self, *, needs_kernel: bool = False) -> st.SearchStrategy:
        return calls(
            needs_kernel=needs_kernel,
            dtype=self.dtype,
            kind=self.kind,
            widths=(self.width,),
            value_widths=(self.value_width,),
            mask_dtypes=(self.mask_dtype,),
            dropout_over=(self.dropout_over,),
            features=0,  # test_features.py has them, in combinations that are not drawn
        )


FEATURES = [
    Features(BF16, 64, 64, "plain"),
    Features(BF16, 64, 64, "causal"),
    Features(BF16, 64, 64, "bool"),
    Features(BF16, 64, 64, "additive"),
    Features(BF16, 64, 64, "dropout"),
    Features(BF16, 128, 128, "causal"),
    Features(BF16, 128, 128, "bool"),
    Features(BF16, 192, 128, "causal"),
    Features(BF16, 256, 256, "plain"),
    Features(BF16, 17, 40, "plain"),
    Features(FP16, 64, 64, "causal"),
    Features(FP16, 128, 128, "plain"),
    Features(FP16, 32, 96, "additive", mask_dtype="float32"),
    Features(FP16, 72, 72, "dropout", dropout_over="bool"),
    Features(FP16, 128, 128, "dropout", "float32", "additive"),
    Features(BF16, 256, 256, "dropout", "float32", "additive"),
    Features(FP32, 64, 64, "causal"),
    Features(FP32, 128, 128, "dropout", "own", "additive"),
    Features(FP32, 32, 16, "additive"),
    Features(FP32, 40, 40, "bool"),
]
ENTRIES = st.sampled_from(("function", "op_lse"))


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch)


# Of these every layout of operands and of the mask has six kernels of its own, of ten seconds each to compile.
SLOW = [features for features in FEATURES if (features.kind, features.dropout_over) == ("dropout", "additive")]


def check_helion(features, data, device):
    call = data.draw(features.strategy(needs_kernel=True))
    with torch_bwattn.backend("helion"):
        check_call(call, device, data.draw(ENTRIES))


@pytest.mark.parametrize("features", [features for features in FEATURES if features not in SLOW], ids=str)
@settings(max_examples=share(0.4))
@given(data=st.data())
def test_helion(features, data, device):
    check_helion(features, data, device)


@pytest.mark.parametrize("features", SLOW, ids=str)
@settings(max_examples=share(0.1))
@given(data=st.data())
def test_helion_where_compiling_takes_long(features, data, device):
    check_helion(features, data, device)


@pytest.mark.parametrize("features", [f for f in FEATURES if (f.width, f.value_width) == (64, 64)], ids=str)
@settings(max_examples=share(0.3))
@given(data=st.data())
def test_automatic_choice(features, data, device):
    check_call(data.draw(features.strategy()), device, data.draw(ENTRIES))


@settings(max_examples=share(0.4))
@given(call=calls(dtype=FP64))
def test_fp64(call, device):
    check_call(call, device)


@settings(max_examples=share(0.3))
@given(
    call=calls(ndims=(4,), widths=(64,), value_widths=(64,), dtype=BF16, mask_dtypes=("own",), dropout_over=("causal",))
)
def test_reference_never_refuses(call, device):
    with torch_bwattn.backend("reference"):
        check_call(call, device)


# No multiple of any tile, each side of the tiles' sizes, and long enough for many tiles.
LENGTHS = [(127, 129), (257, 255), (1, 1025), (1023, 1), (777, 1111), (2049, 2047), (65, 4097), (3001, 63)]


@pytest.mark.parametrize("size", LENGTHS, ids=str)
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_odd_lengths(dtype, width, size, device):
    """Many tiles, grouped heads, both alignments, with the LSE's gradient."""
    rows, columns = size
    for causal, alignment in ((False, "top_left"), (True, "top_left"), (True, "bottom_right")):
        call = Call(
            Operand((2, 6, rows, width), "bshd"),
            Operand((2, 2, columns, width), "bshd"),
            Operand((2, 2, columns, width), "bshd"),
            dtype=dtype,
            is_causal=causal,
            causal_alignment=alignment,
            enable_gqa=True,
            with_lse_grad=True,
            grad_out="bshd",
        )
        with torch_bwattn.backend("helion"):
            check_call(call, device)
