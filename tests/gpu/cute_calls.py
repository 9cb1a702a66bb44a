"""Calls that the Hopper kernels take, for their forward and backward tests."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import assume
from hypothesis import strategies as st

import torch_bwattn
from tests.strategies import calls
from tests.support.calls import Call, Mask, Operand, Sink
from tests.support.check import check_call
from tests.support.poison import poison

BF16, FP16 = torch.bfloat16, torch.float16

WIDTHS = [(64, 64), (128, 128), (96, 96), (192, 128), (192, 192), (256, 256), (72, 72), (8, 16), (40, 128), (128, 64)]
DRAWN_KINDS = ("plain", "causal", "window", "sink", "all", "bool", "additive")

# No multiple of any tile, and long enough for all loops: (queries, keys, heads of a key head).
SIZES = [(127, 129, 1), (257, 1025, 3), (1, 4097, 4), (33, 777, 8), (2049, 515, 2), (3001, 3001, 1)]
KINDS = {
    "plain": {},
    "causal": {"is_causal": True},
    "bottom_right": {"is_causal": True, "causal_alignment": "bottom_right"},
    "window": {"window_size": (100, 30)},
    "causal_window": {"window_size": (700, 0), "causal_alignment": "bottom_right"},
    "sink": {"sink": Sink("float32"), "is_causal": True},
    "softcap": {"softcap": 5.0, "is_causal": True},
    "all": {"window_size": (150, 60), "softcap": 5.0, "sink": Sink("own", "large")},
}
MASKED_SIZES = [*SIZES[:4], (2049, 528, 2), (3001, 3008, 1)]  # as many columns: of longer masks no copies are made
MASKS = {
    "bool": lambda rows, columns: Mask((2, 1, rows, columns), "contiguous", "bool", "dead_rows", needs_grad=False),
    "additive": lambda rows, columns: Mask((1, 1, rows, columns), "contiguous", "own", "lowest", needs_grad=False),
    "keys": lambda rows, columns: Mask((2, 1, 1, columns), "contiguous", "bool", "random", needs_grad=False),
    "bias of keys": lambda rows, columns: Mask((2, 1, 1, columns), "contiguous", "own", "random", needs_grad=False),
}
SIZED = [(width, kind) for kind in KINDS for width in (WIDTHS if kind in ("causal", "all") else WIDTHS[:4])]
MASKED = [(width, kind) for kind in MASKS for width in (*WIDTHS[:6], (72, 72))]


def forward_only(call: Call) -> Call:
    sink = None if call.sink is None else dataclasses.replace(call.sink, needs_grad=False)
    mask = None if call.mask is None else dataclasses.replace(call.mask, needs_grad=False)
    return dataclasses.replace(call, needs_grad=(False, False, False), sink=sink, mask=mask)


@st.composite
def drawn_calls(draw: st.DrawFn, width: tuple[int, int], kind: str) -> Call:
    """A call whose kernel depends on little beside the widths and the kind, for each is a kernel to compile."""
    dtype = (BF16, FP16)[(WIDTHS.index(width) + DRAWN_KINDS.index(kind)) % 2]
    inner = {"plain": "plain", "window": "plain", "all": "plain", "bool": "bool", "additive": "additive"}
    options = {"dtype": dtype, "kind": inner.get(kind, "causal"), "widths": width[:1], "value_widths": width[1:]}
    call = draw(calls(**options, needs_kernel=True, features=0, mask_dtypes=("own",)))
    changes: dict[str, object] = {}
    if call.mask is not None:
        changes["mask"] = dataclasses.replace(call.mask, needs_grad=False)
    if kind in ("window", "all"):
        reach = st.integers(0, max(1, call.key.shape[-2], call.query.shape[-2]))
        changes["window_size"] = (draw(reach), draw(reach))
        changes["causal_alignment"] = draw(st.sampled_from(("top_left", "bottom_right")))
    if kind in ("sink", "all"):
        content = draw(st.sampled_from(("random", "random", "large", "infinite")))
        changes["sink"] = Sink(draw(st.sampled_from(("own", "float32"))), content)
    if kind == "all":
        changes["softcap"] = draw(st.sampled_from((0.5, 2.0, 15.0, 50.0, 1e6)))
    return dataclasses.replace(call, **changes)


def sized_calls(width: tuple[int, int], kind: str) -> list[Call]:
    """One call of each size; ``kind`` is of :data:`KINDS` or of :data:`MASKS`."""
    return [
        Call(
            Operand((2, 2 * group, rows, width[0]), "bshd"),
            Operand((2, 2, columns, width[0]), "bshd"),
            Operand((2, 2, columns, width[1]), "bshd"),
            dtype=BF16,
            enable_gqa=True,
            grad_out="bshd",
            with_lse_grad=True,
            **({"mask": MASKS[kind](rows, columns)} if kind in MASKS else KINDS[kind]),
        )
        for rows, columns, group in (MASKED_SIZES if kind in MASKS else SIZES)
    ]


@pytest.fixture(autouse=True)
def poisoned_on_hopper(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """To be imported where all tests need a Hopper GPU."""
    if torch.cuda.get_device_capability(device) != (9, 0):
        pytest.skip("the kernels are for sm_90")
    poison(monkeypatch)


def check_drawn(call: Call, device: str) -> None:
    """Checks a drawn call, unless it is one of those that the kernels leave to others."""
    try:
        with torch_bwattn.backend("cute"):
            check_call(call, device)
    except torch_bwattn.UnsupportedProblem as refusal:
        assume(not any(word in str(refusal) for word in ("TMA", "scale", "size is 0", "mask")))
        raise
