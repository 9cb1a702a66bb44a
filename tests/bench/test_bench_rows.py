import pytest
import torch

from torch_bwattn.bench.rows import BACKWARD, FORWARD, SHAPES, Row, make_inputs, parse_shape, select_rows


def test_shape_names_round_trip():
    for name in SHAPES:
        assert parse_shape(name).shape == name


def test_shape_name_without_kv_heads_means_as_many():
    assert parse_shape("B2H3S4D5") == Row(batch=2, heads=3, kv_heads=3, length=4, head_dim=5, causal=False)


@pytest.mark.parametrize("text", ["", "B4H32S8192", "b4h32s8192d64", "B4H32/32S8192D64x", "B4H32/S8D64"])
def test_other_names_raise(text):
    with pytest.raises(ValueError, match="shape: expected a name like"):
        parse_shape(text)


def test_a_window_is_a_causal_row_of_its_own():
    (row,) = select_rows(["B1H2/2S8D4W2"])
    assert (row.causal, row.window, row.shape) == (True, 2, "B1H2/2S8D4W2")
    assert row.arguments == {"is_causal": True, "window_size": (2, 0)}
    assert row.flops(FORWARD) == 4 * 2 * (1 + 2 + 6 * 3) * 4
    (wide,) = select_rows(["B1H2/2S8D4W99"])
    assert wide.flops(FORWARD) == 4 * 2 * 8 * 9 / 2 * 4
    assert select_rows(["B1H2/2S8D4W2"], causal=(False,)) == []
    with pytest.raises(ValueError, match="window"):
        Row(1, 2, 2, 8, 4, causal=False, window=2)


def test_heads_must_be_a_multiple_of_kv_heads():
    with pytest.raises(ValueError, match="kv_heads: expected a divisor of heads=4, got 3"):
        parse_shape("B1H4/3S8D8")


def test_sizes_must_be_positive():
    with pytest.raises(ValueError, match="length: expected a positive number, got 0"):
        parse_shape("B1H4S0D8")


def test_flops_are_those_of_the_anchor_tables():
    row = parse_shape("B4H32/8S4096D128")
    assert row.flops(FORWARD) == 4 * 4 * 32 * 4096 * 4096 * 128
    assert row.flops(BACKWARD) == 2.5 * row.flops(FORWARD)
    causal = select_rows(["B4H32/8S4096D128"], causal=(True,))[0]
    assert causal.flops(FORWARD) == row.flops(FORWARD) / 2
    assert row.tflops(FORWARD, 1.0) == pytest.approx(row.flops(FORWARD) / 1e9)


def test_the_table_has_twelve_rows():
    rows = select_rows()
    assert len(rows) == 12
    assert [row.shape for row in rows[::2]] == list(SHAPES)
    assert [row.causal for row in rows[:2]] == [False, True]


def test_patterns_select_from_the_table_and_names_add_to_it():
    rows = select_rows(["*D64", "B1H2S3D4", "B4H32/32S8192D64"], causal=(True,), dtype="float16")
    assert [row.name for row in rows] == ["B4H32/32S8192D64 causal", "B1H2/2S3D4 causal"]
    assert {row.dtype for row in rows} == {"float16"}


def test_a_pattern_that_matches_nothing_raises():
    with pytest.raises(ValueError, match="shape"):
        select_rows(["*D65"])


def test_inputs_are_views_of_batch_length_heads_width_memory():
    row = select_rows(["B2H4/2S8D16"], causal=(False,))[0]
    inputs = make_inputs(row, "cpu", seed=3)
    assert inputs.query.shape == (2, 4, 8, 16)
    assert inputs.key.shape == inputs.value.shape == (2, 2, 8, 16)
    for tensor in (*inputs.qkv, inputs.grad_out):
        assert tensor.dtype == torch.bfloat16
        assert tensor.transpose(1, 2).is_contiguous()
    again = make_inputs(row, "cpu", seed=3)
    assert torch.equal(inputs.value, again.value)
    assert not torch.equal(inputs.value, make_inputs(row, "cpu", seed=4).value)


def test_inputs_with_grad_share_the_storage():
    inputs = make_inputs(parse_shape("B1H1S4D8"), "cpu")
    leaves = inputs.with_grad()
    assert all(leaf.requires_grad and leaf.is_leaf for leaf in leaves.qkv)
    assert leaves.query.data_ptr() == inputs.query.data_ptr()
    assert not inputs.query.requires_grad
