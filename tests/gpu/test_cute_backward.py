"""The Hopper backward: gradients against the fp64 oracle, repeats, graphs, and the kernels beside the main one."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import torch_bwattn
from tests.gpu.cute_calls import (
    DRAWN_KINDS,
    KINDS,
    MASKED,
    SIZED,
    WIDTHS,
    check_drawn,
    drawn_calls,
    poisoned_on_hopper,  # noqa: F401 (a fixture for all tests here)
    sized_calls,
)
from tests.strategies import share
from tests.support.calls import Call, Operand, build
from tests.support.check import check_call
from torch_bwattn.backends.cute import calls, configs
from torch_bwattn.backends.cute.compile import KernelKey, compiled

pytestmark = pytest.mark.gpu
BF16, FP16 = torch.bfloat16, torch.float16


@pytest.mark.parametrize("kind", DRAWN_KINDS)
@pytest.mark.parametrize("width", WIDTHS, ids=str)
@settings(max_examples=share(0.64))
@given(data=st.data())
def test_gradients(width, kind, data, device):
    call = data.draw(drawn_calls(width, kind))
    check_drawn(call, device)


@pytest.mark.parametrize(("width", "kind"), SIZED, ids=str)
def test_sizes(width, kind, device):
    for call in sized_calls(width, kind):
        with torch_bwattn.backend("cute"):
            check_call(call, device)


@pytest.mark.parametrize(
    ("width", "kind"),
    [(width, kind) for width, kind in MASKED if max(width) <= configs.WIDEST_MASKED or "keys" in kind],
    ids=str,
)
def test_masks(width, kind, device):
    for call in sized_calls(width, kind):
        with torch_bwattn.backend("cute"):
            check_call(call, device)


@pytest.fixture
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(("width", "kind"), [*SIZED[::3], ((64, 64), "bool"), ((128, 128), "additive")], ids=str)
def test_repeatable_gradients(width, kind, device, deterministic):
    for call in sized_calls(width, kind):
        with torch_bwattn.backend("cute"):
            check_call(call, device)


@pytest.mark.parametrize(
    ("shape", "kv_heads", "options"),
    [
        ((2, 8, 1500, 128), 8, {"is_causal": True}),
        ((4, 16, 700, 64), 4, {}),
        ((1, 4, 2048, 256), 4, {"is_causal": True}),
        ((2, 4, 1100, 128), 2, {"window_size": (200, 50)}),
    ],
    ids=str,
)
def test_a_thousand_repeats_are_bitwise_equal(shape, kv_heads, options, device, deterministic):
    batch, _, length, width = shape
    query = torch.randn(shape, device=device, dtype=BF16, requires_grad=True)
    key, value = (torch.randn(batch, kv_heads, length, width, device=device, dtype=BF16) for _ in range(2))
    inputs = (query, key.requires_grad_(), value.requires_grad_())
    with torch_bwattn.backend("cute"):
        out = torch_bwattn.sdpa(*inputs, enable_gqa=True, **options)
        grad_out = torch.randn_like(out)
        grads = torch.autograd.grad(out, inputs, grad_out, retain_graph=True)
        differing = torch.zeros((), dtype=torch.int64, device=device)
        for _ in range(1000):
            again = torch.autograd.grad(out, inputs, grad_out, retain_graph=True)
            differing += sum((a != b).any() for a, b in zip(grads, again, strict=True))
    assert differing.item() == 0


@pytest.mark.parametrize("kind", ["plain", "causal", "window"])
def test_repeatable_where_not_all_programs_run_at_a_time(kind, device, deterministic, monkeypatch):
    """As on a part of a GPU: what a program waits for must have been begun."""
    programs = torch.cuda.get_device_properties(device).multi_processor_count * 3 // 2
    monkeypatch.setattr(calls, "programs_of", lambda _: programs)
    operand = Operand((16, 8, 503, 64), "bshd")
    with torch_bwattn.backend("cute"):
        check_call(Call(operand, operand, operand, dtype=BF16, **KINDS[kind]), device)


@pytest.mark.parametrize("grad_out", ["expanded_all", "expanded_columns", "stepped", "sliced", "transposed"])
@pytest.mark.parametrize("width", [(64, 64), (128, 64)], ids=str)
def test_the_results_gradient_may_lie_anyhow(width, grad_out, device):
    query, key, value = (Operand((2, 3, length, width[i]), "bshd") for length, i in ((100, 0), (200, 0), (200, 1)))
    with torch_bwattn.backend("cute"):
        check_call(Call(query, key, value, dtype=BF16, grad_out=grad_out), device)


@pytest.mark.parametrize("lengths", [(1, 1), (77, 1), (1, 300)], ids=str)
def test_few_rows_and_keys(lengths, device):
    query, key = (Operand((2, 2, length, 64)) for length in lengths)
    with torch_bwattn.backend("cute"):
        check_call(Call(query, key, key, dtype=BF16, with_lse_grad=True), device)


def test_kernels_of_one_backend_take_what_another_made(device):
    call = dataclasses.replace(sized_calls((128, 128), "all")[1], magnitude=2.0)
    tensors = build(call, device)
    found = {}
    for forward in ("cute", "helion"):
        for backward in ("cute", "helion"):
            with torch_bwattn.backend(forward):
                options = call.arguments() | tensors.sinks()
                out, lse = torch_bwattn.sdpa(tensors.query, tensors.key, tensors.value, return_lse=True, **options)
            with torch_bwattn.backend(backward):
                found[forward, backward] = torch.autograd.grad(
                    (out, lse), tensors.inputs(), (tensors.grad_out, tensors.grad_lse)
                )
    for grads in found.values():
        for got, expected in zip(grads, found["helion", "helion"], strict=True):
            torch.testing.assert_close(got, expected, atol=0.03 * expected.abs().max().item(), rtol=0.03)


def test_captured_and_on_a_side_stream(device):
    inputs = tuple(torch.randn(2, 4, 300, 128, device=device, dtype=BF16, requires_grad=True) for _ in range(3))
    grad_out = torch.randn(2, 4, 300, 128, device=device, dtype=BF16)

    def gradients() -> tuple[torch.Tensor, ...]:
        with torch_bwattn.backend("cute"):
            return torch.autograd.grad(torch_bwattn.sdpa(*inputs, is_causal=True), inputs, grad_out)

    def close(got: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> None:
        torch.testing.assert_close(got, expected, atol=0.01, rtol=0.01)

    expected = gradients()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        close(gradients(), expected)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = gradients()
    with torch.no_grad():
        inputs[0].normal_()
    for _ in range(3):  # what the kernel counts on being 0 is so at each replay
        graph.replay()
        close(captured, gradients())


# ------------------------------------------------------------------------------------------------ the postprocess


def accumulated(values: torch.Tensor, config: configs.PostprocessConfig) -> torch.Tensor:
    """[..., tiles, tile_m, width] as the accumulator of a product has it: thread by thread, four values at a time."""
    accumulator, threads = config.accumulator, torch.arange(config.threads)
    places = [accumulator.coordinates(threads, value) for value in range(accumulator.values)]
    rows, columns = (torch.stack([place[i].expand(config.threads) for place in places], 1) for i in range(2))
    if config.swapped:
        rows, columns = columns, rows
    taken = values[..., rows.to(values.device), columns.to(values.device)]  # [..., threads, values]
    # [..., set of threads, thread, values / 4, 4]
    four = taken.unflatten(-1, (-1, 4)).unflatten(-3, (-1, config.side_by_side))
    return four.transpose(-2, -3).flatten(-4)


POSTPROCESSES = [
    configs.PostprocessConfig(80, 64, 64),
    configs.PostprocessConfig(80, 128, 128, 256),
    configs.PostprocessConfig(80, 64, 64, swapped=True),
    configs.PostprocessConfig(90, 64, 128, 256, "columns"),
    configs.PostprocessConfig(90, 128, 64, 256, "rows"),
    configs.PostprocessConfig(90, 128, 64, 256, "rows", side_by_side=32),
    configs.PostprocessConfig(90, 64, 128, 256, "columns", side_by_side=32),
    configs.PostprocessConfig(90, 64, 256, 256, "columns"),
    configs.PostprocessConfig(90, 64, 96, 128),
    configs.PostprocessConfig(90, 80, 128, 256, swapped=True),
    configs.PostprocessConfig(90, 80, 64, 128, swapped=True),
]


def postprocess(config: configs.PostprocessConfig, head_dim: int, dtype: str, varlen: bool, used: bool):
    key = KernelKey("backward_postprocess", calls.ARCH, (dtype, head_dim, config, varlen, used))
    return compiled(key, calls.build_of(key))


@pytest.mark.parametrize("config", POSTPROCESSES, ids=str)
def test_postprocess(config, device):
    """Against a plain statement of itself, over lengths 1 to 300."""
    assert configs.why_no_postprocess("bfloat16", config.width, config) is None
    for head_dim in {config.width, config.width - 8}:
        kernel = postprocess(config, head_dim, "bfloat16", varlen=False, used=False)
        for length in (*range(1, 20), *range(20, 300, 23), config.tile_m, config.tile_m + 1, 300):
            tiles = -(-length // config.tile_m)
            values = torch.randn(2, 3, tiles, config.tile_m, config.width, device=device)
            sums = accumulated(values, config).flatten()
            dq = torch.full((2, length, 3, head_dim), float("nan"), device=device, dtype=BF16).transpose(1, 2)
            of_head = tiles * config.tile_m * config.width
            kernel(sums, dq, 3 * of_head, of_head, 0.3, None, None, 2, length)
            expected = (values.flatten(2, 3)[:, :, :length, :head_dim] * 0.3).to(BF16)
            assert torch.equal(dq, expected), (length, head_dim)


@pytest.mark.parametrize("head_dim", range(8, 257, 8))
def test_postprocess_of_every_width(head_dim, device):
    width = -(-head_dim // 64) * 64
    config = configs.PostprocessConfig(90, 64, width, 256, "columns")
    kernel = postprocess(config, head_dim, "float16", varlen=False, used=False)
    values = torch.randn(1, 2, 2, 64, width, device=device)
    dq = torch.full((1, 2, 100, head_dim), float("nan"), device=device, dtype=FP16)
    kernel(accumulated(values, config).flatten(), dq, 4 * 64 * width, 2 * 64 * width, 0.5, None, None, 1, 100)
    assert torch.equal(dq, (values.flatten(2, 3)[:, :, :100, :head_dim] * 0.5).to(FP16))


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("config", [POSTPROCESSES[0], POSTPROCESSES[3]], ids=str)
def test_postprocess_of_several_lengths(config, used, device):
    lengths, heads, width, tile_m = (70, 1, 200, 64, 0, 33), 2, config.width, config.tile_m
    starts = torch.tensor([0, *lengths]).cumsum(0).tolist()
    rows = starts[-1] + len(lengths) * tile_m
    values = torch.randn(heads, rows // tile_m, tile_m, width, device=device)
    sums = accumulated(values, config).flatten()
    taken = [max(length - 5, 0) if used else length for length in lengths]
    dq = torch.full((1, heads, starts[-1], width), -1.0, device=device, dtype=BF16)
    kernel = postprocess(config, width, "bfloat16", varlen=True, used=used)
    as_int = {"dtype": torch.int32, "device": device}
    kernel(
        sums, dq, 0, rows // tile_m * tile_m * width, 2.0, torch.tensor(starts, **as_int),
        torch.tensor(taken, **as_int) if used else None, len(lengths), max(lengths),
    )  # fmt: skip
    expected = torch.full_like(dq, -1.0)
    for i, length in enumerate(taken):
        first = (starts[i] + i * tile_m) // tile_m * tile_m
        part = values.flatten(1, 2)[:, first : first + length] * 2.0
        expected[0, :, starts[i] : starts[i] + length] = part.to(BF16)
    assert torch.equal(dq, expected)


# ------------------------------------------------------------------------------------------------- the preprocess


@pytest.mark.parametrize("value_dim", [8, 40, 64, 128, 192, 256])
@pytest.mark.parametrize("layout", ["dense", "expanded", "stepped"])
def test_preprocess(value_dim, layout, device):
    sizes, padded = (2, 3, 100, value_dim), 128
    out = torch.randn(sizes, device=device, dtype=BF16)
    if layout == "dense":
        grad_out = torch.randn_like(out)
    elif layout == "expanded":
        grad_out = torch.randn(2, 3, 1, 1, device=device, dtype=BF16).expand(sizes)
    else:
        grad_out = torch.randn(2, 3, 100, 3 * value_dim, device=device, dtype=BF16)[..., ::3]
    lse, grad_lse = (torch.randn(2, 100, 3, device=device).transpose(1, 2) for _ in range(2))
    lse[0, 1, 7] = -torch.inf
    key = KernelKey("backward_preprocess", calls.ARCH, ("bfloat16", value_dim, layout == "dense", True, False))
    norm, delta = (torch.full((2, 3, padded), float("nan"), device=device) for _ in range(2))
    zeros = torch.full((123456,), float("nan"), device=device)
    compiled(key, calls.build_of(key))(out, grad_out, lse, grad_lse, norm, delta, zeros)
    assert (zeros == 0).all()
    expected = (out.float() * grad_out.float()).sum(-1) - grad_lse
    torch.testing.assert_close(delta[..., :100], expected, atol=1e-4, rtol=1e-5)
    assert (delta[..., 100:] == 0).all()
    shifted = torch.where(lse == -torch.inf, torch.inf, lse * 1.4426950408889634)
    torch.testing.assert_close(norm[..., :100], shifted, atol=1e-5, rtol=1e-6)
    assert (norm[..., 100:] == torch.inf).all()
