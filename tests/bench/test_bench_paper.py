"""Time on paper: that it agrees with what was measured, and its parts with what they stand for."""

from __future__ import annotations

import dataclasses

import pytest

from torch_bwattn.backends.cute import configs
from torch_bwattn.bench import clocks, paper
from torch_bwattn.bench.rows import BACKWARD, DIRECTIONS, FORWARD, SHAPES, parse_shape
from torch_bwattn.bench.tiles import key_tiles, query_tiles

MOST_OFF = 1.2  # of every measured row, either way


@pytest.fixture(scope="module")
def rows():
    return paper.newest_measured()


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_every_measured_row_is_as_on_paper(rows, direction):
    found = [one for one in rows if one.estimate.direction == direction]
    assert {(shape, causal) for shape in SHAPES for causal in (False, True)} <= {
        (one.estimate.row.shape, one.estimate.row.causal) for one in found
    }
    efficiency = paper.efficiency(rows, direction)
    assert 0.7 < efficiency < 1.0
    off = {one.estimate.row.name: one.ratio(efficiency) for one in found}
    assert not {name: ratio for name, ratio in off.items() if not 1 / MOST_OFF < ratio < MOST_OFF}


def test_the_datasheets_clocks():
    assert clocks.GPUS["sm_90a"].clock_hz == pytest.approx(1.83e9, rel=1e-3)
    assert clocks.GPUS["sm_100a"].clock_hz == pytest.approx(1.856e9, rel=1e-3)


def test_clocks_of_a_query_in_the_backward():
    """Of 64 queries and 128 keys at width 128 shared memory takes 48, the tensor cores 40."""
    visit = clocks.hopper_backward(128, configs.BackwardConfig(64, 128, "groups")).visit
    assert (visit.shared / 64, visit.tensor / 64) == (48.0, 40.0)
    assert visit.bound == "shared memory"


@pytest.mark.parametrize(("width", "share"), [(64, 1 / 16), (128, 1 / 8), (256, 1 / 4)])
def test_clocks_of_a_score_in_the_forward(width, share):
    config = configs.ForwardConfig(128, 80, 2, ping_pong=False)
    visit = clocks.hopper_forward(width, config).visit
    assert visit.tensor == pytest.approx(128 * 80 * share)
    assert visit.exp2 == pytest.approx(128 * 80 / 16)


def test_two_ctas_read_half_of_b():
    """At width 128 an operand has 32 KiB: three of A, five halves of B, dS and what comes, and dQ in fp32, twice."""
    visit = clocks.blackwell_backward(128).visit
    vectors = 2 * 8 * 64 // 4
    assert (visit.shared - vectors) * 128 == (3 + 5 / 2 + 1 + 2 + 2 * 2) * 2**15


@pytest.mark.parametrize("groups", [1, 2, 3, 50])
def test_overlap_lies_between_the_sum_and_the_longer(groups):
    taken = clocks.overlapped(300.0, 200.0, groups)
    assert 300.0 <= taken <= 500.0
    assert taken == pytest.approx(clocks.overlapped(200.0, 300.0, groups))
    assert clocks.overlapped(300.0, 300.0, groups) == pytest.approx(300.0 * (groups + 1) / groups)
    assert clocks.overlapped(300.0, 0.0, groups) == 300.0
    if groups == 1:
        assert taken == 500.0
    if groups == 50:
        assert taken == pytest.approx(300.0, rel=1e-6)


@pytest.mark.parametrize(("causal", "window"), [(False, None), (True, None), (True, 0), (True, 37), (True, 200)])
@pytest.mark.parametrize(("own", "other"), [(64, 64), (128, 80), (64, 128)])
def test_tiles_are_those_with_something_to_see(causal, window, own, other):
    length = 300

    def sees(query, key):
        return (not causal or key <= query) and (window is None or key >= query - window)

    for count, of_keys in ((key_tiles, False), (query_tiles, True)):
        for first in range(0, length, own):
            some = masked = 0
            for begin in range(0, length, other):
                pairs = [(a, b) for a in range(first, first + own) for b in range(begin, begin + other)]
                seen = {sees(*(pair[::-1] if of_keys else pair)) for pair in pairs if max(pair) < length}
                # Queries past the end are as any others, keys are to be hidden.
                keys_end = (first + own if of_keys else begin + other) <= length
                past = all(sees(*(pair[::-1] if of_keys else pair)) for pair in pairs if of_keys or pair[0] < length)
                some += True in seen
                masked += True in seen and not (past and keys_end)
            assert count(first, own, other, length, causal, window) == (some, masked)


def test_more_work_takes_more_time():
    row = parse_shape("B4H32S4096D128")
    for direction in DIRECTIONS:
        for target in paper.TARGETS:
            plain = paper.estimate(row, direction, target)
            causal = paper.estimate(dataclasses.replace(row, causal=True), direction, target)
            assert 0.5 < causal.clocked_s / plain.clocked_s < 0.62
            twice = paper.estimate(dataclasses.replace(row, batch=8), direction, target)
            assert twice.clocked_s == pytest.approx(2 * plain.clocked_s, rel=0.05)
            assert plain.ms(0.8) > plain.ms(1.0)
            assert plain.efficiency(plain.ms(0.8)) == pytest.approx(0.8)


def test_memory_bounds_a_row_of_few_scores():
    row = parse_shape("B4096H16S64D128")
    short = paper.estimate(row, FORWARD, "sm_90a")
    assert short.ms(1000.0) * 1e-3 == pytest.approx(short.copied_s + paper.LAUNCH_S)


def test_b200_is_labelled_a_prediction(rows):
    text = paper.render_predicted([parse_shape(shape) for shape in paper.SEED_SHAPES], rows)
    assert "a prediction" in text
    forward = [line for line in text.splitlines() if line.startswith("| forward")]
    assert len(forward) == 2
    assert all(line.endswith("| 1605 |") for line in forward)
    assert "| exp2 |" in forward[0]
    predicted = float(forward[1].split("|")[-3])
    assert 1605 / MOST_OFF < predicted < 1605 * MOST_OFF


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target": "sm_80"}, "target: expected one of sm_90a, sm_100a, got 'sm_80'"),
        ({"direction": "up"}, "direction: expected one of forward, backward, got 'up'"),
        ({"row": parse_shape("B1H1S128D512")}, "shape: expected one that the cute backend takes, got B1H1/1S128D512"),
        ({"config": "1x1"}, "config: expected one of '192x80, 3 stages, own o'"),
        ({"target": "sm_100a", "config": "1x1"}, "config: expected None for sm_100a, got '1x1'"),
        ({"target": "sm_100a", "row": parse_shape("B1H1S128D256")}, "shape: expected a width of 64 or 128"),
    ],
    ids=str,
)
def test_misuse(change, message):
    arguments = {"row": parse_shape("B1H1S4096D128"), "direction": FORWARD, "target": "sm_90a", **change}
    with pytest.raises(ValueError, match=f"^{message}"):
        paper.estimate(**arguments)


def test_nothing_measured():
    with pytest.raises(ValueError, match="rows: expected some of the backward, got none"):
        paper.efficiency([], BACKWARD)
    with pytest.raises(ValueError, match="groups: expected a positive number, got 0"):
        clocks.overlapped(1.0, 1.0, 0)
