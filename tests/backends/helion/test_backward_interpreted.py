"""The attention backward kernels, run tile by tile in Triton's interpreter on small drawn problems."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as example_settings
from hypothesis import strategies as st

from tests.strategies import share
from tests.support.calls import Call, Mask, Operand, Sink, Tensors, build, lay_out
from tests.support.philox import keep_mask
from torch_bwattn.backends import sinks
from torch_bwattn.problem import describe
from torch_bwattn.testing import Results, judge, oracle, pt_reference

pytestmark = [
    pytest.mark.interpreted,
    # numpy's, where a GPU is silent: log2(0) of a value that a select drops, or P of a position that does not exist.
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter"),
]

SEED = 0x7EDCBA9876543210 >> 1


@dataclass(frozen=True)
class Features:
    """What the kernels are compiled for: each combination is bound once, then serves every length."""

    dtype: torch.dtype = torch.float32
    widths: tuple[int, int] = (16, 16)
    causal: bool = False
    mask: str | None = None
    dropout: bool = False
    window: tuple[bool, bool] | None = None
    """Whether it has a left and a right side."""

    softcap: bool = False
    sink: str | None = None
    tile: tuple[int, int] = (16, 16)
    """Queries, keys."""

    warps: int = 4
    """The interpreter has none, but the way in which dK and dV load their row terms depends on the number."""

    def __str__(self) -> str:
        mask = None if self.mask is None else f"{self.mask} mask"
        flags = ("causal" if self.causal else None, mask, "dropout" if self.dropout else None)
        sides = {None: None, (True, True): "window", (True, False): "left window", (False, True): "right window"}
        flags += (sides[self.window], "softcap" if self.softcap else None, self.sink and f"{self.sink} sink")
        tile = f"{self.tile[0]}x{self.tile[1]}/{self.warps}"
        return " ".join(filter(None, (f"{self.dtype} D{self.widths} {tile}", *flags))).replace("torch.", "")


FEATURES = (
    Features(),
    Features(causal=True),
    Features(causal=True, tile=(32, 16), warps=1),
    Features(dtype=torch.float16, causal=True, widths=(32, 32), tile=(16, 32), warps=1),
    Features(widths=(1, 3), causal=True),
    Features(dtype=torch.float16, widths=(72, 40), tile=(32, 32)),
    Features(mask="bool"),
    Features(dtype=torch.float16, mask="bool", tile=(32, 16), widths=(8, 24)),
    Features(mask="own"),
    Features(dtype=torch.float16, mask="own", tile=(16, 32)),
    Features(dtype=torch.float16, mask="float32", widths=(16, 24)),
    Features(dropout=True, causal=True),
    Features(dtype=torch.float16, dropout=True, mask="own"),
    Features(dropout=True, mask="bool", tile=(32, 32), sink="own"),
    Features(window=(True, True)),
    Features(window=(True, True), causal=True, tile=(32, 16), warps=1, sink="own"),
    Features(window=(True, False), tile=(16, 32)),
    Features(dtype=torch.float16, window=(True, True), mask="bool", tile=(16, 32), sink="own"),
    Features(window=(True, True), mask="own", dropout=True),
    Features(window=(False, True), mask="own"),
    Features(softcap=True, causal=True),
    Features(dtype=torch.float16, softcap=True, mask="own", sink="float32"),
    Features(sink="float32"),
    Features(window=(True, True), softcap=True, sink="own", mask="float32", widths=(24, 40)),
)

_LENGTHS = (0, 1, 2, 5, 15, 16, 17, 31, 32, 33, 40)
_HEADS = ((1, 1, 1), (1, 1, 2), (1, 2, 1), (2, 1, 1), (1, 1, 3), (2, 2, 1))  # batch, key heads, group
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
    **rest: Any,
) -> Call:
    """A call with the features that the kernels are bound for."""
    heads, (width, value_width) = kv_heads * group, features.widths
    mask = None
    if features.mask is not None:
        scores = (batch, heads, rows, keys)
        shape = tuple(size if kept else 1 for size, kept in zip(scores, mask_axes, strict=True))
        mask = Mask(shape, mask_layout, features.mask, mask_content)
    options = {"scale": 0.4, "with_lse_grad": True, "dropout_p": 0.4, **rest}
    left, right = options.pop("window_size", (7, 3))
    if features.window is not None:
        options["window_size"] = (left if features.window[0] else -1, right if features.window[1] else -1)
    softcap = options.pop("softcap", 1.5)
    if features.softcap:
        options["softcap"] = softcap
    content = options.pop("sink_content", "random")
    if features.sink is not None:
        options["sink"] = Sink(features.sink, content)
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
    batch, kv_heads, group = draw(st.sampled_from(_HEADS))
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
        causal_alignment=draw(st.sampled_from(("top_left", "bottom_right")))
        if features.causal or features.window
        else "top_left",
        window_size=draw(st.tuples(st.sampled_from((0, 1, 5, 16, 17, 31, 60)), st.sampled_from((0, 1, 4, 15, 16, 60)))),
        softcap=draw(st.sampled_from((0.5, 2.0, 50.0, 1e6))),
        sink_content=draw(st.sampled_from(("random", "large", "infinite"))),
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
    features: Features,
    call: Call,
    tensors: Tensors,
    forward: Results,
    families: dict[str, Any] | None = None,
    partial_shape: tuple[int, ...] | None = None,
) -> Results:
    """The gradients by the kernels, for what the forward would have left behind."""
    from torch_bwattn.backends.helion import backward, mask_grad, parts

    q, k, v = (tensor.detach() for tensor in (tensors.query, tensors.key, tensors.value))
    batch, heads, rows = q.shape[:3]
    mask, dlse, do = tensors.mask, tensors.grad_lse, tensors.grad_out
    expanded = None if mask is None else mask.detach().expand(call.scores_shape)
    rng_state = torch.tensor([SEED]) if features.dropout else None
    sink = None if tensors.sink is None else tensors.sink.detach()
    additive = parts.additive(expanded)
    tile_m, tile_n = features.tile

    def run(name: str, arguments: tuple, *blocks: int) -> None:
        module = mask_grad if name == "DMASK" else backward
        config = {"block_sizes": blocks, "num_warps": features.warps, "num_stages": 1, "indexing": "pointer"}
        ((families or {}).get(name) or getattr(module, name)).prepare(arguments, config)(*arguments)

    lines = (batch, heads, rows)
    norm, delta = torch.full(lines, math.nan), torch.full(lines, math.nan)
    excess = torch.full(lines, math.nan) if additive else None
    dq, dk, dv = (unwritten(*tensor.shape, dtype=tensor.dtype) for tensor in (q, k, v))
    described = describe(
        q, k, v, mask, scale=call.scale, dropout_p=call.dropout_p, is_causal=call.is_causal, window=call.window_size,
        causal_alignment=call.causal_alignment,
    )  # fmt: skip
    options = backward.options(
        scale=call.scale, dropout_p=call.dropout_p, causal=described.diagonal is not None,
        diagonal=described.diagonal or 0, low_diagonal=described.low_diagonal, softcap=call.softcap,
    )  # fmt: skip
    scale, _, keep_scale, *switches = options
    out, lse = forward.out.to(q.dtype), forward.lse.float()
    run("DELTA", (out, do, lse, dlse, norm, delta, keep_scale, additive), tile_m)
    if additive:
        run("EXCESS", (q, k, expanded, norm, excess, sink, scale, *switches), tile_m, tile_n)
    operands = (q, k, v, expanded, rng_state, do, norm, delta, excess)
    copies = backward.row_copies_for({"block_sizes": [tile_n, tile_m], "num_warps": features.warps})
    run("DKV", (*operands, dk, dv, *options, copies), tile_n, tile_m)
    run("DQ", (*operands, dq, *options), tile_m, tile_n)
    dmask = None
    if additive:
        shape = mask.shape if partial_shape is None else partial_shape
        dmask = unwritten(*shape, dtype=mask.dtype if partial_shape is None else torch.float32)
        sums = tuple(int(size == 1) for size in shape)
        run("DMASK", (*operands, dmask, *sums, *options), tile_m, tile_n)
        if partial_shape is not None:
            dmask = dmask.sum_to_size(mask.shape).to(mask.dtype)
    dsink = None if sink is None else sinks.gradient(sink, norm, delta, excess, keep_scale)
    return Results(dq=dq, dk=dk, dv=dv, dmask=dmask, dsink=dsink)


def references(call: Call, tensors: Tensors) -> tuple[Results, Results]:
    """(in fp64, in the call's own precision)"""
    options = {
        **call.arguments(),
        **tensors.sinks(),
        "attn_mask": tensors.mask,
        "keep_mask": keep_mask(SEED, call.scores_shape, call.dropout_p) if call.dropout_p else None,
        "grad_out": tensors.grad_out,
        "grad_lse": tensors.grad_lse,
        "needs_mask_grad": call.mask is not None and call.mask.kind != "bool",
        "needs_sink_grad": call.sink is not None,
    }
    inputs = tensors.query, tensors.key, tensors.value
    return oracle(*inputs, **options), pt_reference(*inputs, **options)


def check(features: Features, call: Call, tensors: Tensors | None = None, **rest: Any) -> Results:
    tensors = tensors or build(call)
    reference, pt = references(call, tensors)
    results = launch(features, call, tensors, reference, **rest)
    for verdict in judge(results, reference, pt):
        verdict.check()
    return results


@pytest.mark.parametrize("features", FEATURES, ids=str)
@example_settings(max_examples=share(0.02))
@given(data=st.data())
def test_drawn_problems(features, data):
    check(features, data.draw(problems(features)))


@pytest.mark.parametrize("rows", [0, 1, 33])
@pytest.mark.parametrize("keys", [0, 1, 33])
@pytest.mark.parametrize("alignment", ["top_left", "bottom_right"])
def test_lengths_of_0_and_1(rows, keys, alignment):
    features = Features(causal=True)
    check(features, problem(features, rows, keys, causal_alignment=alignment))


@pytest.mark.parametrize("causal_alignment", ["top_left", "bottom_right"])
@pytest.mark.parametrize(("rows", "keys"), [(70, 20), (20, 70), (64, 64), (50, 51)])
def test_both_causal_kinds_over_many_tiles(rows, keys, causal_alignment):
    features = Features(causal=True)
    check(features, problem(features, rows, keys, group=1, causal_alignment=causal_alignment))


@pytest.mark.parametrize("window_size", [(0, 0), (5, 20), (40, 2), (16, 15), (1000, 1000)], ids=str)
@pytest.mark.parametrize(
    ("rows", "keys", "causal_alignment"),
    [(64, 64, "top_left"), *((*size, side) for size in ((70, 20), (20, 70)) for side in ("top_left", "bottom_right"))],
)
def test_windows_over_many_tiles(rows, keys, causal_alignment, window_size):
    features = Features(window=(True, True))
    call = problem(features, rows, keys, group=1, causal_alignment=causal_alignment, window_size=window_size)
    check(features, call)


def test_nothing_outside_of_the_window_is_read():
    """Tiles of keys that no query sees hold NaN in k and v; tiles of queries that see no key, in q and do."""
    features = Features(window=(True, True))
    call = problem(features, 80, 160, group=1, window_size=(3, 3))
    tensors = build(call)
    forward = references(call, tensors)[0]
    clean = launch(features, call, tensors, forward)
    with torch.no_grad():
        tensors.key[:, :, 96:], tensors.value[:, :, 96:] = math.nan, math.nan  # row 79 sees the keys up to 82
    dirty = launch(features, call, tensors, forward)
    assert torch.equal(clean.dq, dirty.dq)
    call = problem(features, 160, 80, group=1, window_size=(3, 3))
    tensors = build(call)
    forward = references(call, tensors)[0]
    clean = launch(features, call, tensors, forward)
    with torch.no_grad():
        tensors.query[:, :, 96:], tensors.grad_out[:, :, 96:] = math.nan, math.nan
    dirty = launch(features, call, tensors, forward)
    assert torch.equal(clean.dk, dirty.dk)
    assert torch.equal(clean.dv, dirty.dv)


def test_a_sink_beside_large_scores():
    """lse cannot hold the log of a sum there, and the excess must count the sink."""
    features = Features(mask="own", sink="float32")
    call = problem(features, 33, 40, mask_content="random")
    tensors = build(call)
    with torch.no_grad():
        tensors.mask += 8192.0
        tensors.sink.fill_(8192.0)
    check(features, call, tensors)


@pytest.mark.parametrize("softcap", [1e-25, 1e-3, 1e6, 1e29])
def test_soft_caps_of_every_size(softcap):
    """Relative accuracy: the cap multiplies every absolute error of a tanh, and divides those of a score."""
    features = Features(softcap=True, causal=True)
    check(features, problem(features, 33, 40, softcap=softcap))


def test_values_and_gradients_all_alike_beside_a_sink():
    """They all round alike: the judge must not add those roundings in squares, nor what a row of the mask shares."""
    features = Features(dtype=torch.float16, softcap=True, mask="own", sink="float32")
    for seed in range(3):
        call = problem(
            features, 33, 15, kv_heads=1, group=3, seed=seed, mask_axes=(True, True, True, False), softcap=2.0,
            layouts=("contiguous", "contiguous", "expanded_all"), grad_out="expanded_all", sink_content="large",
            with_lse_grad=False,
        )  # fmt: skip
        check(features, call)


def test_index_arithmetic_in_64_bits():
    from torch_bwattn.backends.helion import backward, mask_grad, runtime

    class Wide(runtime.KernelFamily):
        def index_dtype(self, args):  # as for tensors past 2**31 elements, which no test machine has room for
            return torch.int64

    def wide(family):
        dims = {name: " ".join(sizes) for name, sizes in family.dims.items()}
        return Wide(family.function, dims=dims, specialized=family.specialized, canonical=family.canonical)

    families = {name: wide(getattr(backward, name)) for name in ("DELTA", "EXCESS", "DKV", "DQ")}
    families["DMASK"] = wide(mask_grad.DMASK)
    everything = Features(window=(True, True), softcap=True, sink="own", dropout=True, mask="own")
    check(everything, problem(everything, 35, 40, batch=2), families=families)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_rows_of_the_lowest_mask_value(dtype):
    features = Features(dtype=dtype, mask="own", tile=(16, 32) if dtype == torch.float16 else (16, 16))
    call = problem(features, 33, 40, mask_axes=(False, True, True, True))
    tensors = build(call)
    tensors.mask[:, :, 5:30] = torch.finfo(dtype).min
    check(features, call, tensors)


def test_rows_without_a_visible_key():
    features = Features(mask="bool")
    call = problem(features, 33, 40, kv_heads=2)
    tensors = build(call)
    tensors.mask[:, 1, 3:20] = False
    results = check(features, call, tensors)
    assert not results.dq[:, 1, 3:20].any()
    tensors.mask[:] = False
    results = launch(features, call, tensors, references(call, tensors)[0])
    assert not any(gradient.any() for gradient in (results.dq, results.dk, results.dv))


def test_logits_far_from_0():
    features = Features(causal=True)
    call = problem(features, 50, 50, scale=0.25)
    tensors = build(call)
    with torch.no_grad():
        tensors.query[..., 0] = 1.0
        tensors.key[..., 0] = -120.0 / call.scale
    check(features, call, tensors)


def test_a_nan_in_a_query_spoils_its_own_row_of_dq_only():
    features = Features()
    call = problem(features, 33, 40, kv_heads=2)
    tensors = build(call)
    with torch.no_grad():
        tensors.query[0, 1, 7, 3] = math.nan
    forward = references(call, tensors)[0]
    results = launch(features, call, tensors, forward)
    spoiled = torch.zeros(1, 4, 33, dtype=torch.bool)
    spoiled[0, 1, 7] = True
    assert torch.equal(results.dq.isnan().any(-1), spoiled)
    # Every key of its key head is one that it sees.
    for gradient in (results.dk, results.dv):
        assert gradient[0, 0].isnan().any(-1).all()
        assert not gradient[0, 1].isnan().any()


def test_a_masked_key_does_not_leak_into_the_others():
    features = Features(mask="bool")
    call = problem(features, 33, 40)
    tensors = build(call)
    tensors.mask[..., 7] = False
    forward = references(call, tensors)[0]
    clean = launch(features, call, tensors, forward)
    with torch.no_grad():
        tensors.key[:, :, 7] = math.nan
    dirty = launch(features, call, tensors, forward)
    assert torch.equal(clean.dk, dirty.dk)
    assert torch.equal(clean.dv, dirty.dv)


@pytest.mark.parametrize("axes", [(False, False, False, True), (False, True, True, False), (False,) * 4])
def test_a_mask_gradient_through_a_wider_buffer(axes):
    features = Features(mask="own")
    call = problem(features, 33, 40, batch=2, mask_axes=axes)
    shape = (2, 2, *call.mask.shape[2:])
    check(features, call, partial_shape=shape)


def test_shapes_of_mask_gradient_buffers():
    from torch_bwattn.backends.helion.mask_grad import partial_shape

    scores = (8, 16, 1024, 1024)
    assert partial_shape((8, 16, 1024, 1024), scores, 64, 64) == (8, 16, 1024, 1024)  # 32,768 programs
    assert partial_shape((1, 16, 1024, 1024), scores, 64, 64) == (1, 16, 1024, 1024)  # 4,096
    assert partial_shape((8, 1, 1, 1024), scores, 64, 64) == (8, 16, 1, 1024)  # 128, then 2,048
    assert partial_shape((1, 1, 1, 1), scores, 64, 64) == (8, 16, 1, 1)


def test_one_kernel_serves_every_length():
    from torch_bwattn.backends.helion import backward

    features = Features()
    check(features, problem(features, 5, 5))
    families = (backward.DELTA, backward.DKV, backward.DQ)
    bound = [len(family._bound) for family in families]
    for rows, keys, layout in ((1, 1, "bshd"), (16, 32, "stepped"), (0, 7, "contiguous"), (50, 3, "expanded_lead")):
        check(features, problem(features, rows, keys, kv_heads=2, layouts=(layout,) * 3))
    assert [len(family._bound) for family in families] == bound
