"""The forward over lists of blocks: what it takes, its lists, its values through Triton, its tcgen05 body."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

from torch_bwattn import testing
from torch_bwattn.backends.base import ForwardInputs
from torch_bwattn.backends.helion import flash, flash_blocks
from torch_bwattn.backends.helion.backend import HelionBackend
from torch_bwattn.backends.materialised import visible
from torch_bwattn.layout import dense_strides
from torch_bwattn.problem import Problem, describe

pytestmark = pytest.mark.usefixtures("fast_row_maximum")

BLACKWELL = Problem("sm_100a", torch.bfloat16, 2, 8, 2, 300, 400, 96, 64, 0.3, diagonal=0)


@pytest.fixture(autouse=True)
def cute_is_there(monkeypatch):
    monkeypatch.setattr(flash.cute_loader, "why_missing", lambda: None)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({}, ""), ({"dtype": torch.float16, "low_diagonal": -9}, ""), ({"diagonal": -30, "kv_len": 1}, ""),
        ({"dtype": torch.float32}, "float32"), ({"value_dim": 136}, "Dv=136"), ({"q_len": 64}, "64 queries"),
        ({"kv_len": 0}, "nothing to attend"), ({"q_len": 131073, "kv_len": 131072}, "1572864"),
        ({"batch": 1024, "q_len": 4096}, "elements"), ({"mask_dtype": torch.bool, "mask_sizes": (1, 1, 1, 1)}, ""),
        ({"mask_dtype": torch.float16, "mask_sizes": (1, 1, 300, 400)}, ""),
        ({"mask_dtype": torch.float32, "mask_sizes": (1, 1, 300, 400)}, "float32"),
        ({"mask_dtype": torch.bool, "mask_sizes": (2, 8, 300, 400)}, ""),
        ({"mask_dtype": torch.bool, "q_len": 999, "kv_len": 999, "mask_sizes": (2, 8, 999, 999)}, "copies the mask"),
        ({"mask_dtype": torch.bool, "q_len": 9999, "kv_len": 65536, "mask_sizes": (1, 8, 9999, 65536)}, "masks of up"),
        ({"dropout_p": 0.1}, "dropout"), ({"softcap": 1e4}, "soft cap"),
        ({"softcap": 9.0, "sink_dtype": torch.float32}, ""),
        ({"scale": -0.1}, "-0.1"), ({"scale": 0.0}, "above 0"),
    ],
    ids=str,
)  # fmt: skip
def test_refusals_name_their_reason(changes, word):
    problem = dataclasses.replace(BLACKWELL, **changes)
    offer, *others = HelionBackend().offers(problem)
    assert offer.config == flash.NAME
    assert bool(offer) == (not word)
    assert word in offer.reason
    assert HelionBackend().supports(problem) == (offer or others[0])


@pytest.mark.parametrize("version", ["12.8", "13.0"])
def test_it_needs_a_recent_cuda(monkeypatch, version):
    monkeypatch.setattr(torch.version, "cuda", version)
    assert flash.why_not(BLACKWELL) == ("" if version == "13.0" else flash.why_not(BLACKWELL))
    assert ("12.8" in flash.why_not(BLACKWELL)) == (version == "12.8")


def test_it_needs_cute_dsl(monkeypatch):
    monkeypatch.setattr(flash.cute_loader, "why_missing", lambda: "cutlass is not installed")
    assert HelionBackend().offers(BLACKWELL)[0].reason == "cutlass is not installed"


@pytest.mark.parametrize("target", ["sm_80", "sm_90a", "sm_120a"])
def test_only_targets_with_tcgen05_have_it(target):
    offers = HelionBackend().offers(dataclasses.replace(BLACKWELL, target=target))
    assert flash.NAME not in [offer.config for offer in offers]


def test_it_goes_first_and_by_name():
    backend = HelionBackend()
    usual = backend.offers(BLACKWELL)[1].config
    for config in ("", flash.NAME):
        assert isinstance(backend.forward(BLACKWELL, config), flash.Forward)
    assert not isinstance(backend.forward(BLACKWELL, usual), flash.Forward)
    with pytest.raises(ValueError, match="config"):
        backend.forward(BLACKWELL, "8x8")


def test_few_padded_lengths_serve_all():
    lengths = range(1, 131073)
    padded = [flash_blocks.padded_length(length) for length in lengths]
    assert len(set(padded)) == 19
    assert len({flash_blocks.padded_length(length, 8, 256) for length in lengths}) < 64
    assert all(length <= most and most % 128 == 0 for length, most in zip(lengths, padded, strict=True))
    assert all(most <= 1.5 * length for length, most in zip(lengths, padded, strict=True) if length > 256)


@pytest.mark.parametrize(
    "diagonals", [(None, None), (0, None), (-200, None), (70, -130), (None, 5), (900, -900)], ids=str
)
@pytest.mark.parametrize("lengths", [(300, 520), (256, 256), (1000, 130), (65, 1)], ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_blocks_are_listed_as_they_are_visible(lengths, diagonals, masked):
    problem = dataclasses.replace(
        BLACKWELL, batch=1, q_len=lengths[0], kv_len=lengths[1], diagonal=diagonals[0], low_diagonal=diagonals[1]
    )
    bounds = flash_blocks.bounds(*lengths, *diagonals)
    listed = flash_blocks.blocks(*lengths, *bounds, torch.device("cpu"), masked)
    rows, columns = (flash_blocks.padded_length(length) // 128 for length in lengths)
    shown = torch.zeros(rows * 128, columns * 128, dtype=torch.bool)
    sight = visible(problem, torch.device("cpu"))
    shown[: lengths[0], : lengths[1]] = True if sight is None else sight
    ignored = torch.arange(rows * 128) >= lengths[0]  # whether a padded row counts as visible is nobody's business
    for row in range(rows):
        block_rows = slice(row * 128, row * 128 + 128)
        found = {}
        for name, count, index in (("full", *listed[:2]), ("part", *listed[2:])):
            found[name] = index[0, 0, row, : count[0, 0, row]].tolist()
        for column in range(columns):
            block = shown[block_rows, column * 128 : column * 128 + 128]
            whole = not masked and bool((block | ignored[block_rows, None]).all()) and bool(block.any())
            assert (column in found["full"]) == whole
            assert (column in found["part"]) == (bool(block.any()) and not whole)


def test_blocks_are_built_once_and_outside_of_inference_mode():
    with torch.inference_mode():
        first = flash_blocks.blocks(300, 300, 0, -300, torch.device("cpu"))
    assert first is flash_blocks.blocks(300, 300, 0, -300, torch.device("cpu"))
    assert not any(tensor.is_inference() or tensor.dtype != torch.int32 for tensor in first)


def test_what_fits_is_a_view_and_the_rest_is_padded_with_zeros():
    fits = torch.randn(2, 3, 256, 64)
    view = flash.padded(fits, 256, 64)
    assert view.data_ptr() == fits.data_ptr()
    assert view.shape == (1, 6, 256, 64)
    for tensor in (fits.transpose(1, 2).contiguous().transpose(1, 2), fits[:, :, :200, :40], fits[:, :, :, 1:]):
        with torch.random.fork_rng():
            copy = flash.padded(tensor, 384, 128).view(2, 3, 384, 128)
        rows, columns = tensor.shape[2:]
        assert torch.equal(copy[:, :, :rows, :columns], tensor)
        assert not copy[:, :, :256, columns:].any()
        assert not copy[:, :, rows:256].any()


def test_a_mask_that_fits_is_a_view_and_others_are_padded():
    fits = torch.rand(2, 1, 256, 384) > 0.5
    sized = dataclasses.replace(BLACKWELL, mask_dtype=torch.bool, q_len=256, kv_len=384)
    view = flash._padded_mask(fits, flash._mask_sizes(dataclasses.replace(sized, mask_sizes=(2, 1, 256, 384))))
    assert (view.data_ptr(), view.dtype) == (fits.data_ptr(), torch.uint8)
    for mask in (fits[:, :, :200, :1], fits[:1, :, 1:2, :300], fits.transpose(2, 3)):
        sizes = {"q_len": max(2, mask.shape[2]), "kv_len": max(2, mask.shape[3]), "mask_sizes": tuple(mask.shape)}
        copy = flash._padded_mask(mask, flash._mask_sizes(dataclasses.replace(sized, **sizes)))
        assert torch.equal(copy[:, :, : mask.shape[2], : mask.shape[3]].bool(), mask)
        assert copy.is_contiguous()
        assert all(size == 1 or size % 128 == 0 for size in copy.shape[2:])


def drawn_mask(*sizes, dtype=torch.float32):
    """A mask that hides some keys of each row, and a whole row."""
    kept = torch.rand(sizes, generator=torch.Generator().manual_seed(1)) > 0.3
    if sizes[2] > 1:
        kept[:, :, 3] = False
    if dtype == torch.bool:
        return kept
    return torch.randn(sizes, generator=torch.Generator().manual_seed(2)).masked_fill(~kept, -torch.inf).to(dtype)


# Each way to a mask's plane, with and without rows and columns, hiding or added in turns: each is a kernel of its own.
MASKS = [
    drawn_mask(*sizes, dtype=dtype)
    for sizes, dtype in zip(
        ((1, 1, 1, 1), (2, 1, 70, 130), (1, 2, 70, 130), (2, 2, 70, 130), (2, 1, 1, 130), (1, 2, 70, 1)),
        itertools.cycle((torch.bool, torch.float32)),
        strict=False,
    )
]
CALLS = (
    *({"lengths": (70, 130), "batch": 2, "mask": mask} for mask in MASKS),
    {"lengths": (100, 130), "mask": drawn_mask(1, 1, 100, 130, dtype=torch.bool), "sink": True, "window": (40, 40)},
    {"lengths": (65, 300), "batch": 2, "mask": drawn_mask(1, 2, 65, 300), "softcap": 3.0},
    {"lengths": (70, 256), "batch": 2, "mask": drawn_mask(1, 1, 1, 256, dtype=torch.bool).expand(2, 2, 70, 256)},
    {"lengths": (70, 128), "batch": 2, "mask": drawn_mask(2, 1, 128, 70).mT},
    {"lengths": (100, 130), "widths": (16, 24), "is_causal": True, "causal_alignment": "bottom_right"},
    {"lengths": (256, 256), "widths": (64, 64), "is_causal": True, "batch": 2, "heads": 1, "contiguous": True},
    {"lengths": (300, 290), "widths": (40, 64), "window": (50, 7)},
    {"lengths": (300, 90), "is_causal": True, "causal_alignment": "bottom_right"},
    {"lengths": (130, 300), "window": (20, -1), "kv_heads": 2},
    {"lengths": (65, 1)},
    {"lengths": (100, 90), "is_causal": True, "causal_alignment": "bottom_right", "softcap": 2.0, "sink": True},
)


def called(
    lengths, widths=(64, 64), batch=1, heads=2, kv_heads=1, dtype=torch.float32, contiguous=False, mask=None, **options
):
    """A call's problem, its inputs (in the memory order of models unless contiguous), and the references' options."""
    torch.manual_seed(0)

    def drawn(count, length, width):
        tensor = torch.randn(batch, length, count, width).to(dtype).transpose(1, 2)
        return tensor.contiguous() if contiguous else tensor

    q, k, v = (
        drawn(heads, lengths[0], widths[0]),
        drawn(kv_heads, lengths[1], widths[0]),
        drawn(kv_heads, lengths[1], widths[1]),
    )
    settings = {"scale": 0.3, "is_causal": False, "causal_alignment": "top_left", "dropout_p": 0.0, **options}
    settings["sink"] = torch.randn(heads) if settings.pop("sink", False) else None
    problem = describe(q, k, v, mask, **settings)
    settings["window_size"] = settings.pop("window", None)
    return (
        problem,
        ForwardInputs(q, k, v, mask, None, settings["sink"]),
        {**settings, "enable_gqa": True, "attn_mask": mask},
    )


def check(forward, problem, x, settings):
    out, lse = forward(x)
    references = (of(x.q, x.k, x.v, **settings) for of in (testing.oracle, testing.pt_reference))
    for verdict in testing.judge(testing.Results(out=out, lse=lse), *references):
        verdict.check()
    assert out.stride() == dense_strides(x.q, out.shape)
    assert lse.is_contiguous()
    assert lse.shape == out.shape[:3]


@pytest.mark.interpreted
def test_values_through_triton():
    for call in CALLS:
        problem, *rest = called(**call)
        check(flash.Forward(problem), problem, *rest)


@pytest.mark.compile_only
def test_what_helion_does_not_recognise_is_an_error():
    from torch_bwattn.backends.helion import backward, cute_lowering, flash_cute, pretend, runtime

    dims = {name: " ".join(sizes) for name, sizes in backward.DELTA.dims.items()}
    other = runtime.KernelFamily(backward.attention_delta, dims=dims, cute=flash_cute.FLASH.cute)
    o, lse = torch.empty(1, 1, 256, 64, dtype=torch.float16), torch.empty(1, 1, 256)
    with pretend.pretend_cuda((10, 0)), pytest.raises(RuntimeError, match="recognise it, which it does not: flex:"):
        cute_lowering.lowered(other, (o, o.clone(), lse, None, lse.clone(), lse.clone(), 1.0, False), {})
