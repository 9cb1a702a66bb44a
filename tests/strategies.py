"""Hypothesis strategies that draw attention calls.

The device is no part of a call, so the tests of the CPU and of the GPU draw from the same strategies; the GPU's draw
features (dtype, widths, kind of mask) from small sets, because each combination is a kernel to compile.
"""

from __future__ import annotations

import math

import torch
from hypothesis import settings
from hypothesis import strategies as st

from .support.calls import LAYOUTS, Call, Mask, Operand, Sink

LOW_PRECISION = (torch.bfloat16, torch.float16)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
KINDS = ("plain", "causal", "bool", "additive", "dropout")
MASK_DTYPES = ("own", "float32")
INNER_KINDS = ("plain", "causal", "bool", "additive")
WIDTHS = (1, 2, 3, 5, 8, 12, 16, 17, 24, 32, 40, 64, 72)

_TINY = (1, 2, 3, 4, 5, 7, 8, 9)
_SMALL = (1, 3, 6, 15, 16, 17, 31, 32, 33, 47, 63, 64, 65, 70)
_LONG = (257, 513, 700, 1025)
_SCALES = (None, None, None, None, 0.0, -2.0, 0.3, 1.0, -0.125, 50.0)
_MAGNITUDES = (1.0, 1.0, 1.0, 1.0, 0.1, 3.0, 10.0)
# Contiguous and B,S,H,D more often than the rest: they are what models use.
_LAYOUTS = ("contiguous", "contiguous", "bshd", "bshd", *LAYOUTS)


def share(fraction: float) -> int:
    """A property's number of examples, as a share of the profile's ``max_examples``."""
    return max(1, round(settings.default.max_examples * fraction))


def probability(draw: st.DrawFn, percent: int) -> bool:
    """True in about so many of a hundred draws; shrinks to False."""
    return draw(st.integers(0, 99)) >= 100 - percent


@st.composite
def leads(draw: st.DrawFn, gqa: bool, ndim: int, budget: int) -> list[tuple[int, ...]]:
    """Leading dimensions of query, key and value that broadcast, in one rank or in mixed ones."""
    count = ndim - 2
    sizes = []
    for _ in range(count):
        size = 0 if probability(draw, 2) else draw(st.sampled_from([s for s in (1, 2, 3, 4) if s <= max(1, budget)]))
        sizes.append(size)
        budget //= max(1, size)
    if gqa:
        group = draw(st.sampled_from((1, 2, 3, 4)))
        kv_heads = max(1, sizes[-1])
        query = (*sizes[:-1], kv_heads * group)
        shapes = [query, (*sizes[:-1], kv_heads), (*sizes[:-1], kv_heads)]
        fixed = 1
    else:
        shapes = [tuple(sizes)] * 3
        fixed = 0
    mixed = probability(draw, 25)
    result = []
    for shape in shapes:
        free = list(shape)
        if mixed:
            for index in range(len(free) - fixed):
                if probability(draw, 25):
                    free[index] = 1
            drop = draw(st.integers(0, len(free) - fixed)) if probability(draw, 25) else 0
            free = free[drop:]
        result.append(tuple(free))
    return result


@st.composite
def lengths(draw: st.DrawFn) -> tuple[int, int, int]:
    """Query length, key length, and how many (batch, head) pairs keep the problem small."""
    size = draw(st.sampled_from(("tiny", "tiny", "small", "small", "small", "long")))
    pool = {"tiny": _TINY, "small": _SMALL, "long": _SMALL}[size]
    rows, columns = draw(st.sampled_from(pool)), draw(st.sampled_from(pool))
    if size == "long":
        columns = draw(st.sampled_from(_LONG))
        if draw(st.booleans()):
            rows, columns = columns, rows
    if probability(draw, 2):
        rows = 0
    if probability(draw, 2):
        columns = 0
    # Half of the small problems exceed 16,384 scores, where the fused CPU kernels take over.
    return rows, columns, {"tiny": 12, "small": 12, "long": 2}[size]


@st.composite
def masks(draw: st.DrawFn, call: Call, kind: str, dtypes: tuple[str, ...] = MASK_DTYPES) -> Mask:
    """A mask in any form that broadcasts to the scores, of a rank up to the query's."""
    ndim = len(call.query.shape)
    rank = ndim if not probability(draw, 40) else draw(st.integers(0, ndim))
    full = call.mask_shape[max(len(call.mask_shape) - rank, 0) :]
    shape = tuple(1 if probability(draw, 30) else size for size in full)
    layout = draw(st.sampled_from(LAYOUTS)) if probability(draw, 40) else "contiguous"
    if kind == "bool":
        content = draw(st.sampled_from(("random", "sparse", "dead_rows")))
        return Mask(shape, layout, "bool", content, needs_grad=False)
    content = draw(st.sampled_from(("random", "infinite", "dead_rows", "lowest")))
    return Mask(shape, layout, draw(st.sampled_from(dtypes)), content, draw(st.booleans()))


@st.composite
def windows(draw: st.DrawFn, rows: int, columns: int) -> tuple[int, int]:
    """(left, right): mostly smaller than the problem, so that it hides something."""
    side = st.one_of(
        st.sampled_from((-1, 0, 1, 2, 2**40)), st.integers(0, max(8, columns // 4)), st.integers(0, rows + columns)
    )
    return draw(side), draw(side)


@st.composite
def featured(draw: st.DrawFn, call: Call) -> Call:
    """The same call with a window, a soft cap or a sink, or several of them."""
    which = draw(st.sampled_from(("window", "softcap", "sink", "all", "window and sink")))
    changes: dict[str, object] = {}
    if "window" in which or which == "all":
        changes["window_size"] = draw(windows(call.query.shape[-2], call.key.shape[-2]))
        if not call.is_causal:
            changes["causal_alignment"] = draw(st.sampled_from(("top_left", "bottom_right")))
    if which in ("softcap", "all"):
        changes["softcap"] = draw(st.sampled_from((0.5, 2.0, 15.0, 50.0, 1e6)))
    if "sink" in which or which == "all":
        content = draw(st.sampled_from(("random", "random", "large", "infinite")))
        changes["sink"] = Sink(draw(st.sampled_from(("own", "float32"))), content, draw(st.booleans()))
    return _replace(call, **changes)


@st.composite
def calls(
    draw: st.DrawFn,
    dtype: torch.dtype | None = None,
    kind: str | None = None,
    widths: tuple[int, ...] = WIDTHS,
    value_widths: tuple[int, ...] | None = None,
    mask_dtypes: tuple[str, ...] = MASK_DTYPES,
    dropout_over: tuple[str, ...] = INNER_KINDS,
    layouts: tuple[str, ...] = _LAYOUTS,
    ndims: tuple[int, ...] = (4, 4, 4, 3, 2, 5),
    needs_kernel: bool = False,
    features: int = 25,
) -> Call:
    """A valid call with tensors of any rank, layout, mask, causal kind, scale and dropout.

    Args:
        dtype: fixes the dtype.
        kind: fixes the kind: plain, causal, bool, additive (masks) or dropout (any of the former with dropout).
        widths: widths of query and key to draw from; the value's is often the same.
        value_widths: widths of the value to draw from, if not those.
        mask_dtypes: dtypes of additive masks, own (the query's) or float32.
        dropout_over: the kinds that dropout is combined with.
        layouts: memory layouts to draw from.
        ndims: ranks to draw from.
        needs_kernel: whether to leave out widths of 0 and the dropping of everything, for which no kernel runs.
        features: of a hundred calls, how many have a window, a soft cap or a sink.
    """
    dtype = dtype or draw(st.sampled_from(DTYPES))
    kind = kind or draw(st.sampled_from(KINDS))
    ndim = draw(st.sampled_from(ndims))
    rows, columns, budget = draw(lengths())
    gqa = ndim >= 3 and probability(draw, 30)
    query, key, value = draw(leads(gqa, ndim, budget))
    width = draw(st.sampled_from(widths))
    if value_widths is not None:
        value_width = draw(st.sampled_from(value_widths))
    else:
        value_width = width if not probability(draw, 40) else draw(st.sampled_from(widths))
    if not needs_kernel:
        width = 0 if probability(draw, 2) else width
        value_width = 0 if probability(draw, 2) else value_width
    inner = kind if kind != "dropout" else draw(st.sampled_from(dropout_over))
    needs = draw(
        st.sampled_from(
            ((True, True, True),) * 4 + ((True, False, False), (False, True, False), (False, False, True), (False,) * 3)
        )
    )
    # Most users want the gradient of the output alone, and some kernels give no other.
    with_out_grad, with_lse_grad = draw(st.sampled_from(((True, False),) * 3 + ((True, True),) * 2 + ((False, True),)))
    call = Call(
        query=Operand((*query, rows, width), draw(st.sampled_from(layouts))),
        key=Operand((*key, columns, width), draw(st.sampled_from(layouts))),
        value=Operand((*value, columns, value_width), draw(st.sampled_from(layouts))),
        dtype=dtype,
        dropout_p=0.0 if kind != "dropout" else draw(st.sampled_from((0.1, 0.5, 0.9, 0.9 if needs_kernel else 1.0))),
        is_causal=inner == "causal",
        causal_alignment=draw(st.sampled_from(("top_left", "bottom_right"))) if inner == "causal" else "top_left",
        scale=draw(st.sampled_from(_SCALES)),
        enable_gqa=gqa,
        magnitude=draw(st.sampled_from(_MAGNITUDES)),
        seed=draw(st.integers(0, 2**31 - 1)),
        grad_out=draw(st.sampled_from(LAYOUTS)),
        with_out_grad=with_out_grad,
        with_lse_grad=with_lse_grad,
        needs_grad=needs,
    )
    if width and call.scale is not None and abs(call.scale) * call.magnitude**2 * math.sqrt(width) > 200:
        # Scores in the thousands say nothing: every probability is 0 or 1, and which one hangs on the last bit.
        call = _replace(call, magnitude=0.1)
    if inner in ("bool", "additive"):
        call = _replace(call, mask=draw(masks(call, inner, mask_dtypes)))
    return draw(featured(call)) if features and probability(draw, features) else call


def _replace(call: Call, **changes: object) -> Call:
    return Call(**{**{name: getattr(call, name) for name in Call.__dataclass_fields__}, **changes})
