"""The attention forward kernel on small drawn problems.

Mostly its generated Triton code, run tile by tile in Triton's interpreter; the same function in Helion's own
interpreter; and, without running it, what the compiler for sm_90 makes of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.strategies import share
from tests.support.philox import keep_mask
from torch_bwattn.testing import Results, judge, oracle, pt_reference

interpreted = pytest.mark.interpreted
compile_only = pytest.mark.compile_only

SEED = 0x123456789ABCDEF


pytestmark = pytest.mark.usefixtures("fast_row_maximum")


@dataclass(frozen=True)
class Features:
    """What a kernel is compiled for: each combination is bound once, then serves every length.

    A window has a left side, and a right one if ``causal``.
    """

    dtype: torch.dtype = torch.float32
    widths: tuple[int, int] = (16, 16)
    causal: bool = False
    mask: torch.dtype | None = None
    dropout: bool = False
    negative_scale: bool = False
    window: bool = False
    softcap: bool = False
    sink: torch.dtype | None = None
    tile: tuple[int, int] = (32, 16)

    def __str__(self) -> str:
        mask = None if self.mask is None else f"{self.mask} mask"
        flags = ("causal" if self.causal else None, mask, "dropout" if self.dropout else None)
        sign = "negative scale" if self.negative_scale else None
        flags += ("window" if self.window else None, "softcap" if self.softcap else None)
        flags += (None if self.sink is None else f"{self.sink} sink",)
        tile = "x".join(map(str, self.tile))
        return " ".join(filter(None, (f"{self.dtype} D{self.widths} {tile}", *flags, sign))).replace("torch.", "")


@dataclass(frozen=True)
class Problem:
    """One call of the kernel."""

    batch: int = 1
    kv_heads: int = 1
    group: int = 1
    rows: int = 20
    keys: int = 37
    bottom_right: bool = False
    scale: float = 0.4
    dropout_p: float = 0.4
    mask_shape: tuple[bool, bool, bool, bool] = (True, True, True, True)
    mask_content: str = "random"
    layout: str = "contiguous"
    seed: int = 0
    left: int = 7
    right: int = 3
    softcap: float = 2.0

    def diagonals(self, features: Features) -> dict[str, int | None]:
        """As the kernel takes them."""
        offset = self.keys - self.rows if self.bottom_right else 0
        if not features.window:
            return {"diagonal": offset, "low_diagonal": None}
        return {"diagonal": offset + self.right, "low_diagonal": offset - self.left}


FEATURES = (
    Features(),
    Features(causal=True),
    Features(causal=True, tile=(16, 64)),
    Features(causal=True, negative_scale=True),
    Features(dtype=torch.float16, widths=(32, 32), causal=True),
    Features(dtype=torch.float16, widths=(64, 32), negative_scale=True),
    Features(widths=(1, 1), causal=True),
    Features(widths=(3, 5)),
    Features(widths=(40, 8), causal=True, tile=(16, 16)),
    Features(dtype=torch.float16, widths=(72, 104)),
    Features(dtype=torch.float16, widths=(128, 96), causal=True, tile=(64, 32)),
    Features(mask=torch.bool),
    Features(mask=torch.bool, causal=True, widths=(24, 40)),
    Features(dtype=torch.float16, mask=torch.bool, tile=(16, 32)),
    Features(mask=torch.float32),
    Features(mask=torch.float32, causal=True, negative_scale=True),
    Features(dtype=torch.float16, mask=torch.float16),
    Features(dtype=torch.float16, mask=torch.float32, causal=True, tile=(16, 32)),
    Features(dropout=True),
    Features(dtype=torch.float16, dropout=True, causal=True, widths=(8, 16)),
    Features(dropout=True, mask=torch.bool, tile=(16, 32)),
    Features(dropout=True, mask=torch.float32, causal=True),
    Features(window=True, causal=True),
    Features(window=True, causal=True, tile=(16, 64), sink=torch.float32),
    Features(window=True, tile=(16, 16)),
    Features(dtype=torch.float16, window=True, causal=True, mask=torch.bool, tile=(16, 32)),
    Features(window=True, causal=True, mask=torch.float32, dropout=True),
    Features(softcap=True, causal=True),
    Features(dtype=torch.float16, softcap=True, negative_scale=True, mask=torch.float16),
    Features(sink=torch.float32),
    Features(dtype=torch.float16, sink=torch.float16, dropout=True, mask=torch.bool),
    Features(window=True, causal=True, softcap=True, sink=torch.float32, mask=torch.float32, widths=(24, 40)),
)

_LENGTHS = (0, 1, 2, 3, 15, 16, 17, 31, 32, 33, 40, 47, 65)
# Batch, key heads, queries per key head: the interpreter takes a program at a time, so few of them.
_PLANES = ((1, 1, 1), (1, 1, 2), (1, 2, 1), (2, 1, 1), (1, 1, 3), (1, 2, 2), (2, 1, 2))


@st.composite
def problems(draw: st.DrawFn, features: Features) -> Problem:
    scales = (-0.3, -2.0) if features.negative_scale else (0.0, 0.3, 1.0, 4.0)
    batch, kv_heads, group = draw(st.sampled_from(_PLANES))
    return Problem(
        batch=batch,
        kv_heads=kv_heads,
        group=group,
        rows=draw(st.sampled_from(_LENGTHS)),
        keys=draw(st.sampled_from(_LENGTHS)),
        bottom_right=draw(st.booleans()),
        scale=draw(st.sampled_from(scales)),
        dropout_p=draw(st.sampled_from((0.1, 0.5, 0.9))),
        mask_shape=draw(st.tuples(st.booleans(), st.booleans(), st.booleans(), st.booleans())),
        mask_content=draw(st.sampled_from(("random", "dead rows", "extreme"))),
        layout=draw(st.sampled_from(("contiguous", "bshd", "stepped", "one head", "offset"))),
        seed=draw(st.integers(0, 2**16)),
        left=draw(st.sampled_from((0, 1, 5, 16, 17, 31, 40, 100))),
        right=draw(st.sampled_from((0, 1, 4, 15, 16, 33, 100))),
        softcap=draw(st.sampled_from((0.4, 2.0, 50.0, 1e6))),
    )


def operand(shape: tuple[int, ...], dtype: torch.dtype, layout: str, generator: torch.Generator) -> torch.Tensor:
    """Random values in one of the memory layouts that callers have."""
    b, h, s, d = shape
    if layout == "bshd":
        return torch.randn(b, s, h, d, generator=generator).to(dtype).transpose(1, 2)
    if layout == "stepped":
        return torch.randn(b, h, 2 * s, 2 * d, generator=generator).to(dtype)[:, :, ::2, ::2]
    if layout == "one head":
        return torch.randn(b, 1, s, d, generator=generator).to(dtype).expand(shape)
    if layout == "offset":
        return torch.randn(b * h * s * d + 3, generator=generator).to(dtype)[3:].view(shape)
    return torch.randn(shape, generator=generator).to(dtype)


def attention_mask(
    problem: Problem, dtype: torch.dtype, scores: tuple[int, ...], generator: torch.Generator
) -> torch.Tensor:
    """A mask with the problem's broadcast dimensions; a dead row sees nothing, an extreme one only finfo.min."""
    shape = [size if kept else min(size, 1) for size, kept in zip(scores, problem.mask_shape, strict=True)]
    drawn = torch.rand(shape, generator=generator)
    if dtype == torch.bool:
        mask = drawn > 0.4
        dead = False
    else:
        mask = (4 * drawn - 2).to(dtype)
        mask[drawn > 0.8] = -math.inf
        dead = -math.inf
    if problem.mask_content != "random":
        mask[:, :, ::3] = dead
    if problem.mask_content == "extreme" and dtype != torch.bool:
        mask[:, :, 1::3] = torch.finfo(dtype).min
    return mask


def output(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """An output full of NaN with a margin in every dimension, and the memory that it lies in."""
    memory = torch.full([size + 2 for size in shape], math.nan, dtype=dtype)
    return memory[tuple(slice(1, -1) for _ in shape)], memory


def sink_of(features: Features, problem: Problem, heads: int) -> torch.Tensor | None:
    """A logit for each query head, the last one -inf: no sink there."""
    if features.sink is None:
        return None
    sink = torch.linspace(-1.0, 4.0, heads) + problem.seed % 3
    sink[-1] = -math.inf
    return sink.to(features.sink)


def kernel_arguments(features, inputs, mask, problem, out, lse):
    from torch_bwattn.backends.helion import forward

    problem = replace(problem, rows=inputs[0].shape[2], keys=inputs[1].shape[2])
    return forward.forward_arguments(
        *inputs, mask, torch.tensor([SEED]) if features.dropout else None, out, lse,
        scale=problem.scale, dropout_p=problem.dropout_p if features.dropout else 0.0,
        causal=features.causal, **problem.diagonals(features),
        softcap=problem.softcap if features.softcap else None,
        sink=sink_of(features, problem, inputs[0].shape[1]),
    )  # fmt: skip


def launch(features, inputs, mask=None, problem=Problem(scale=0.3), family=None):
    """(out, lse) of the kernel; fails if it writes anywhere else."""
    from torch_bwattn.backends.helion import forward

    q, _, v = inputs
    out, memory = output((*q.shape[:3], v.shape[3]), q.dtype)
    lse = torch.full(q.shape[:3], math.nan)
    arguments = kernel_arguments(features, inputs, mask, problem, out, lse)
    config = {"block_sizes": list(features.tile), "num_warps": 4, "num_stages": 1}
    (family or forward.FORWARD).prepare(arguments, config)(*arguments)
    results = out.clone(), lse
    out.fill_(math.nan)
    assert memory.isnan().all(), "the kernel wrote beside its output"
    return results


def launch_in_helion(features, inputs, mask, problem):
    """(out, lse) of the kernel function in Helion's interpreter, where every tile has the largest size, 256."""
    import helion

    from torch_bwattn.backends.helion import forward

    q, _, v = inputs
    out, lse = torch.full((*q.shape[:3], v.shape[3]), math.nan, dtype=q.dtype), torch.full(q.shape[:3], math.nan)
    arguments = kernel_arguments(features, inputs, mask, problem, out, lse)
    with torch.library._scoped_library("aten", "IMPL") as library:
        # PyTorch has it for CUDA only.
        library.impl("mm.dtype", lambda a, b, out_dtype: a.to(out_dtype) @ b.to(out_dtype), "CPU")
        helion.kernel(forward.attention_forward, static_shapes=False, ref_mode=helion.RefMode.EAGER)(*arguments)
    return out, lse


def check(features: Features, problem: Problem, run=launch, **options) -> None:
    generator = torch.Generator().manual_seed(problem.seed)
    heads = problem.kv_heads * problem.group
    rows, keys = problem.rows, problem.keys
    width, value_width = features.widths
    q = operand((problem.batch, heads, rows, width), features.dtype, problem.layout, generator)
    k = operand((problem.batch, problem.kv_heads, keys, width), features.dtype, problem.layout, generator)
    v = operand((problem.batch, problem.kv_heads, keys, value_width), features.dtype, problem.layout, generator)
    scores = (problem.batch, heads, rows, keys)
    mask = None if features.mask is None else attention_mask(problem, features.mask, scores, generator).expand(scores)
    out, lse = run(features, (q, k, v), mask, problem, **options)

    window = None
    if features.window:
        window = (problem.left, problem.right if features.causal else -1)
    elif features.causal and mask is not None:
        # The references take one or the other, as PyTorch does.
        diagonal = keys - rows if problem.bottom_right else 0
        seen = torch.arange(keys) <= torch.arange(rows).unsqueeze(1) + diagonal
        mask = mask & seen if features.mask == torch.bool else mask.masked_fill(~seen, -math.inf)
    call = {
        "attn_mask": mask,
        "dropout_p": problem.dropout_p if features.dropout else 0.0,
        "is_causal": features.causal and features.mask is None and window is None,
        "causal_alignment": "bottom_right" if problem.bottom_right else "top_left",
        "scale": problem.scale,
        "enable_gqa": True,
        "window_size": window,
        "softcap": problem.softcap if features.softcap else None,
        "sink": sink_of(features, problem, heads),
        "keep_mask": keep_mask(SEED, scores, problem.dropout_p) if features.dropout else None,
    }
    reference, pt = oracle(q, k, v, **call), pt_reference(q, k, v, **call)
    for verdict in judge(Results(out=out, lse=lse), reference, pt):
        verdict.check()


@interpreted
@pytest.mark.parametrize("features", FEATURES, ids=str)
@settings(max_examples=share(0.02))
@given(data=st.data())
def test_drawn_problems(features, data):
    check(features, data.draw(problems(features)))


@interpreted  # which knows no functions in Triton source: dropout, and the tiles at both ends of a window
@pytest.mark.parametrize("features", [f for f in FEATURES if not (f.dropout or f.window)][::2], ids=str)
@settings(max_examples=share(0.02))
@given(data=st.data())
def test_drawn_problems_in_helions_interpreter(features, data):
    check(features, data.draw(problems(features)), run=launch_in_helion)


@interpreted
def test_several_tiles_in_helions_interpreter():
    check(Features(causal=True), Problem(rows=300, keys=530, bottom_right=True), run=launch_in_helion)


@interpreted
@pytest.mark.parametrize("rows", [0, 1, 33])
@pytest.mark.parametrize("keys", [0, 1, 33])
@pytest.mark.parametrize("bottom_right", [False, True])
def test_lengths_of_0_and_1(rows, keys, bottom_right):
    check(Features(causal=True), Problem(rows=rows, keys=keys, bottom_right=bottom_right))


@interpreted
def test_index_arithmetic_in_64_bits():
    from torch_bwattn.backends.helion import forward, runtime

    class Wide(runtime.KernelFamily):
        def index_dtype(self, args):  # as for tensors past 2**31 elements, which no test machine has room for
            return torch.int64

    family = Wide(forward.attention_forward, dims={name: " ".join(d) for name, d in forward.FORWARD.dims.items()})
    problem = Problem(batch=2, kv_heads=2, group=2, rows=40, keys=50, bottom_right=True)
    check(Features(causal=True, dropout=True, mask=torch.bool), problem, family=family)
    check(Features(causal=True, window=True, softcap=True, sink=torch.float32), problem, family=family)


@interpreted
@pytest.mark.parametrize("tile", [(16, 16), (32, 64)])
@pytest.mark.parametrize("dropout_p", [1e-9, 0.3, 0.5, 0.75, 1 - 2**-33])
def test_dropout_keeps_exactly_the_defined_positions(tile, dropout_p):
    rows, keys = 21, 30
    q, k = torch.zeros(2, 4, rows, 16), torch.zeros(2, 2, keys, 16)
    # Scores of 0 and the identity for v: out_ij is keep_ij / (keys * (1 - p)).
    v = torch.eye(keys, 32).expand(2, 2, keys, 32)
    features = Features(dropout=True, widths=(16, 32), tile=tile)
    out, _ = launch(features, (q, k, v), problem=Problem(dropout_p=dropout_p))
    assert torch.equal(out[..., :keys] != 0, keep_mask(SEED, (2, 4, rows, keys), dropout_p))


def normal(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(shape[2])).to(dtype)


@interpreted
@pytest.mark.parametrize("causal", [False, True])
def test_nan_in_a_query_stays_in_its_row(causal):
    q, k, v = normal(1, 2, 20, 16), normal(1, 2, 37, 16), normal(1, 2, 36, 16)[:, :, [*range(36), 0]]
    q[0, 0, 3, 5] = math.nan
    out, lse = launch(Features(causal=causal), (q, k, v))
    expected = torch.zeros(1, 2, 20, dtype=torch.bool)
    expected[0, 0, 3] = True
    assert torch.equal(lse.isnan(), expected)
    assert torch.equal(out.isnan().any(-1), expected)


@interpreted
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_masked_key_does_not_leak(bad):
    q, k, v = normal(1, 2, 20, 16), normal(1, 2, 37, 16), normal(1, 2, 37, 32)[..., 16:]
    mask = torch.ones(20, 37, dtype=torch.bool)
    mask[:, 7] = False
    clean = launch(Features(mask=torch.bool), (q, k, v), mask.expand(1, 2, 20, 37))
    k[0, 1, 7] = bad
    dirty = launch(Features(mask=torch.bool), (q, k, v), mask.expand(1, 2, 20, 37))
    for before, after in zip(clean, dirty, strict=True):
        assert torch.equal(before, after)


@interpreted
def test_keys_beyond_the_causal_diagonal_do_not_leak():
    q, k, v = normal(1, 1, 41, 16)[:, :, 1:], normal(1, 1, 40, 16), normal(1, 1, 40, 32)[..., 16:]
    clean = launch(Features(causal=True), (q, k, v))
    k[0, 0, 35:] = math.nan
    dirty = launch(Features(causal=True), (q, k, v))
    for before, after in zip(clean, dirty, strict=True):
        assert torch.equal(before[:, :, :35], after[:, :, :35])
        assert after[:, :, 35:].isnan().all()


@interpreted
def test_tiles_outside_of_the_window_are_not_read():
    q, k, v = normal(1, 1, 97, 16)[:, :, 64:], normal(1, 1, 190, 16), normal(1, 1, 190, 32)[..., 16:]
    features, problem = Features(window=True, causal=True), Problem(rows=33, keys=190, bottom_right=True, left=9)
    clean = launch(features, (q, k, v), problem=problem)
    k[:, :, :144], v[:, :, :144] = math.nan, math.nan  # query 0 sees the keys from 148 on
    dirty = launch(features, (q, k, v), problem=problem)
    for before, after in zip(clean, dirty, strict=True):
        assert torch.equal(before, after)


@interpreted
@pytest.mark.parametrize("softcap", [1e-25, 1e-3, 1e6, 1e29])
def test_soft_caps_of_every_size(softcap):
    check(Features(softcap=True, causal=True), Problem(rows=33, keys=40, softcap=softcap))


@interpreted
@pytest.mark.parametrize(
    ("rows", "keys", "bottom_right"),
    [(33, 90, False), (33, 90, True), (90, 33, False), (90, 33, True), (64, 64, False), (1, 70, True)],
)
@pytest.mark.parametrize("window", [(0, 0), (15, 16), (40, 3), (3, 40), (2000, 2000)], ids=str)
def test_windows_over_many_tiles(rows, keys, window, bottom_right):
    problem = Problem(rows=rows, keys=keys, bottom_right=bottom_right, left=window[0], right=window[1])
    check(Features(window=True, causal=True), problem)


@interpreted
def test_a_row_that_sees_the_sink_alone():
    q, k, v = normal(1, 2, 40, 16), normal(1, 2, 20, 16), normal(1, 2, 20, 32)[..., 16:]
    features, problem = Features(window=True, causal=True, sink=torch.float32), Problem(rows=40, keys=20, left=3)
    out, lse = launch(features, (q, k, v), problem=problem)
    assert not out[:, :, 23:].any()
    sink = sink_of(features, problem, 2)
    torch.testing.assert_close(lse[:, :, 23:], sink.view(1, 2, 1).expand(1, 2, 17))


@interpreted
def test_infinite_scores_are_what_softmax_makes_of_them():
    q, k, v = torch.ones(1, 1, 4, 16), normal(1, 1, 37, 16), normal(1, 1, 37, 32)[..., 16:]
    k[0, 0, 5] = -math.inf  # weighs nothing
    results = launch(Features(), (q, k, v))
    others = [j for j in range(37) if j != 5]
    torch.testing.assert_close(results, launch(Features(), (q, k[:, :, others], v[:, :, others])))
    k[0, 0, 6] = math.inf  # inf - inf
    out, _ = launch(Features(), (q, k, v))
    assert out.isnan().all()


@interpreted
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_row_of_the_lowest_mask_value_gives_the_mean(dtype):
    q, k, v = (normal(1, 1, length, 16, dtype=dtype) for length in (20, 37, 37))
    mask = torch.full((1, 1, 20, 37), torch.finfo(dtype).min, dtype=dtype)
    if dtype == torch.float16:
        q = torch.zeros_like(q)  # fp16's lowest value does not swamp the scores
    out, _ = launch(Features(dtype=dtype, mask=dtype), (q, k, v), mask)
    torch.testing.assert_close(out, v.mean(2, keepdim=True).expand_as(out))


@interpreted
def test_one_kernel_serves_every_length():
    from torch_bwattn.backends.helion import forward

    features = Features(tile=(16, 16))
    check(features, Problem(rows=5, keys=5))
    bound = len(forward.FORWARD._bound)
    for rows, keys, layout in ((1, 1, "bshd"), (16, 32, "stepped"), (0, 7, "contiguous"), (50, 3, "one head")):
        check(features, replace(Problem(), rows=rows, keys=keys, layout=layout, kv_heads=2, group=2))
    assert len(forward.FORWARD._bound) == bound


@interpreted
def test_one_kernel_serves_every_window_and_soft_cap():
    from torch_bwattn.backends.helion import forward

    features = Features(window=True, causal=True, softcap=True)
    check(features, Problem())
    bound = len(forward.FORWARD._bound)
    for left, right, softcap in ((0, 0, 1.0), (16, 1, 30.0), (50, 64, 0.5)):
        check(features, Problem(left=left, right=right, softcap=softcap))
    assert len(forward.FORWARD._bound) == bound


@compile_only
@pytest.mark.parametrize(("width", "tile", "warps", "stages"), [(64, (128, 64), 8, 3), (128, (128, 128), 8, 2)])
def test_what_sm_90_gets(width, tile, warps, stages):
    from torch_bwattn.backends.helion import forward, report

    b, h, rows, keys = 2, 4, 300, 500
    q, k, v, out = (
        torch.empty(b, length, h, width, dtype=torch.bfloat16).transpose(1, 2) for length in (rows, keys, keys, rows)
    )
    lse = torch.empty(b, h, rows)
    features = Features(dtype=torch.bfloat16, causal=True)
    arguments = kernel_arguments(features, (q, k, v), None, Problem(), out, lse)
    config = {"block_sizes": list(tile), "num_warps": warps, "num_stages": stages}
    compiled = report.compile_report(forward.FORWARD, arguments, config)
    assert compiled.stack_bytes == 0, f"spills: {compiled}"
    assert compiled.shared_bytes <= 227 * 1024, compiled
    assert compiled.counts["wgmma"] > 0, compiled
    assert compiled.counts["mma_sync"] == 0, compiled
    # Tiles of K and V come by 16-byte asynchronous copies, in both loops and their prologues; P stays in registers.
    assert compiled.counts["cp_async"] > 0, compiled
    # Two exponentials for each of a thread's rows and one for each of its scores, in two loops.
    scores = tile[0] * tile[1] // (32 * warps)
    assert 2 * scores <= compiled.counts["ex2"] <= 2 * (scores + 4), compiled
