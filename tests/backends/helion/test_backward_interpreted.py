"""The attention backward kernels, run tile by tile in Triton's interpreter on small drawn problems."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import settings as example_settings
from hypothesis import strategies as st

from tests.strategies import share
from tests.support.calls import Call, Mask, Operand, Tensors, build, lay_out
from tests.support.philox import keep_mask
from torch_bwattn.testing import Results, judge, oracle, pt_reference

pytestmark = pytest.mark.interpreted

SEED = 0x7EDCBA9876543210 >> 1


@dataclass(frozen=True)
class Features:
    """What the kernels are compiled for: each combination is bound once, then serves every length."""

    dtype: torch.dtype = torch.float32
    widths: tuple[int, int] = (16, 16)
    causal: bool = False
    mask: str | None = None
    dropout: bool = False
    tile: tuple[int, int] = (16, 16)
    """Queries, keys."""

    warps: int = 4
    """The interpreter has none, but the way in which dK and dV load their row terms depends on the number."""

    def __str__(self) -> str:
        mask = None if self.mask is None else f"{self.mask} mask"
        flags = ("causal" if self.causal else None, mask, "dropout" if self.dropout else None)
        tile = f"{self.tile[0]}x{self.tile[1]}/{self.warps}"
        return " ".join(filter(None, (f"{self.dtype} D{self.widths} {tile}", *flags))).replace("torch.", "")


FEATURES = (
    Features(),
    Features(causal=True),
    Features(causal=True, tile=(32, 16), warps=1),
    Features(causal=True, tile=(16, 32), warps=1),
    Features(dtype=torch.float16, widths=(32, 32), causal=True),
    Features(widths=(1, 3), causal=True),
    Features(dtype=torch.float16, widths=(72, 40)),
    Features(widths=(8, 24), tile=(32, 32)),
    Features(mask="bool"),
    Features(dtype=torch.float16, mask="bool", tile=(32, 16)),
    Features(mask="own"),
    Features(dtype=torch.float16, mask="own", tile=(16, 32)),
    Features(dtype=torch.float16, mask="float32", widths=(16, 24)),
    Features(dropout=True, causal=True),
    Features(dtype=torch.float16, dropout=True, tile=(16, 32)),
    Features(dropout=True, mask="own"),
    Features(dropout=True, mask="bool", tile=(32, 16)),
)

_LENGTHS = (0, 1, 2, 3, 15, 16, 17, 31, 32, 33, 40, 49)
_LAYOUTS = ("contiguous", "bshd", "sliced", "stepped", "offset", "transposed", "expanded_lead", "expanded_all")
_CONTENTS = {"bool": ("random", "sparse", "dead_rows"), "own": ("random", "infinite", "dead_rows", "lowest")}


def problem(
    features: Features,
    rows: int = 20,
    keys: int = 37,
    batch: int = 1,
    kv_heads: int = 1,
    group: int = 2,
    *,
    mask_axes: tuple[bool, bool, bool, bool] = (True, True, True, True),
    mask_content: str = "random",
    mask_layout: str = "contiguous",
    layouts: tuple[str, str, str] = ("contiguous",) * 3,
    **rest: object,
) -> Call:
    """A call with the features that the kernels are bound for."""
    heads, (width, value_width) = kv_heads * group, features.widths
    mask = None
    if features.mask is not None:
        scores = (batch, heads, rows, keys)
        shape = tuple(size if kept else 1 for size, kept in zip(scores, mask_axes, strict=True))
        mask = Mask(shape, mask_layout, features.mask, mask_content)
    options = {"scale": 0.4, "with_lse_grad": True, "dropout_p": 0.4, **rest}
    if not features.dropout:
        options["dropout_p"] = 0.0
    return Call(
        query=Operand((batch, heads, rows, width), layouts[0]),
        key=Operand((batch, kv_heads, keys, width), layouts[1]),
        value=Operand((batch, kv_heads, keys, value_width), layouts[2]),
        mask=mask,
        dtype=features.dtype,
        is_causal=features.causal,
        enable_gqa=True,
        **options,
    )


@st.composite
def problems(draw: st.DrawFn, features: Features) -> Call:
    batch, kv_heads, group = draw(st.sampled_from(((1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 3), (1, 2, 2), (2, 1, 2))))
    layout = st.sampled_from(_LAYOUTS)
    return problem(
        features,
        draw(st.sampled_from(_LENGTHS)),
        draw(st.sampled_from(_LENGTHS)),
        batch,
        kv_heads,
        group,
        mask_axes=draw(st.tuples(st.booleans(), st.booleans(), st.booleans(), st.booleans())),
        mask_content=draw(st.sampled_from(_CONTENTS["bool" if features.mask == "bool" else "own"])),
        mask_layout=draw(layout),
        layouts=(draw(layout), draw(layout), draw(layout)),
        causal_alignment=draw(st.sampled_from(("top_left", "bottom_right"))) if features.causal else "top_left",
        scale=draw(st.sampled_from((0.0, 0.3, 1.0, -0.7))),
        dropout_p=draw(st.sampled_from((0.1, 0.5, 0.9))),
        grad_out=draw(layout),
        with_lse_grad=draw(st.booleans()),
        seed=draw(st.integers(0, 2**16)),
    )


def unwritten(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """An output full of NaN that does not lie contiguously in memory."""
    return lay_out(torch.full(shape, math.nan, dtype=dtype), "sliced")


def launch(
    features: Features, call: Call, tensors: Tensors, forward: Results, families: dict | None = None
) -> Results:
    """The gradients by the kernels, for what the forward would have left behind."""
    from torch_bwattn.backends.helion import backward, mask_grad, parts

    q, k, v = (tensor.detach() for tensor in (tensors.query, tensors.key, tensors.value))
    batch, heads, rows, width = q.shape
    mask, dlse, do = tensors.mask, tensors.grad_lse, tensors.grad_out
    expanded = None if mask is None else mask.detach().expand(call.scores_shape)
    rng_state = torch.tensor([SEED]) if features.dropout else None
    additive = parts.additive(expanded)
    tile_m, tile_n = features.tile

    def run(name: str, arguments: tuple, *blocks: int) -> None:
        module = mask_grad if name == "DMASK" else backward
        config = {"block_sizes": blocks, "num_warps": features.warps, "num_stages": 1, "indexing": "pointer"}
        ((families or {}).get(name) or getattr(module, name)).prepare(arguments, config)(*arguments)

    lines = (batch, heads, rows)
    norm, delta = torch.full(lines, math.nan), torch.full(lines, math.nan)
    excess = torch.full(lines, math.nan) if additive else None
    results = Results(
        dq=unwritten(*q.shape, dtype=q.dtype), dk=unwritten(*k.shape, dtype=q.dtype), dv=unwritten(*v.shape, dtype=q.dtype)
    )
    diagonal = k.shape[2] - rows if call.causal_alignment == "bottom_right" else 0
    options = backward.options(scale=call.scale, dropout_p=call.dropout_p, causal=call.is_causal, diagonal=diagonal)
    scale, _, keep_scale, _, causal = options
    out, lse = forward.out.to(q.dtype), forward.lse.float()
    run("DELTA", (out, do, lse, dlse, norm, delta, keep_scale, additive), tile_m)
    if additive:
        run("EXCESS", (q, k, expanded, norm, excess, scale, diagonal, causal), tile_m, tile_n)
    operands = (q, k, v, expanded, rng_state, do, norm, delta, excess)
    copies = backward.row_copies_for({"block_sizes": [tile_n, tile_m], "num_warps": features.warps})
    run("DKV", (*operands, results.dk, results.dv, *options, copies), tile_n, tile_m)
    run("DQ", (*operands, results.dq, *options), tile_m, tile_n)
    if additive:
        results.dmask = unwritten(*mask.shape, dtype=mask.dtype)
        sums = tuple(int(size == 1) for size in mask.shape)
        run("DMASK", (*operands, results.dmask, *sums, *options), tile_m, tile_n)
    return results


def references(call: Call, tensors: Tensors) -> tuple[Results, Results]:
    """(in fp64, in the call's own precision)"""
    options = {
        **call.arguments(),
        "attn_mask": tensors.mask,
        "keep_mask": keep_mask(SEED, call.scores_shape, call.dropout_p) if call.dropout_p else None,
        "grad_out": tensors.grad_out,
        "grad_lse": tensors.grad_lse,
        "needs_mask_grad": call.mask is not None and call.mask.kind != "bool",
    }
    inputs = tensors.query, tensors.key, tensors.value
    return oracle(*inputs, **options), pt_reference(*inputs, **options)


def check(features: Features, call: Call, families: dict | None = None) -> None:
    tensors = build(call)
    reference, pt = references(call, tensors)
    for verdict in judge(launch(features, call, tensors, reference, families), reference, pt):
        verdict.check()


@pytest.mark.parametrize("features", FEATURES, ids=str)
@example_settings(max_examples=share(0.1))
@given(data=st.data())
def test_drawn_problems(features, data):
    check(features, data.draw(problems(features)))
