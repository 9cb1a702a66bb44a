import contextlib
import gc
from collections import Counter
from itertools import pairwise

import pytest

from torch_bwattn.bench.timing import (
    Budget,
    Contender,
    HostStopwatch,
    HostTiming,
    Timing,
    describe_failure,
    quantile,
    time_host,
    time_interleaved,
    turns,
)


class FakeStopwatch:
    """Every call takes the milliseconds that its work returns; ``order`` keeps who was timed, and how often."""

    def __init__(self):
        self.order = []

    def laps(self, work, count):
        times = [work() for _ in range(count)]
        self.order.append((work.__name__, count))
        return times


def costing(name, ms):
    def work():
        return ms() if callable(ms) else ms

    work.__name__ = name
    return Contender(work)


@pytest.mark.parametrize("count", range(9))
def test_each_follows_each_other_equally_often(count):
    keys = list(range(count))
    rounds = turns(keys, 2 * count)
    assert all(sorted(order) == keys for order in rounds)
    followers = Counter(pair for order in rounds for pair in pairwise(order))
    assert len(followers) == count * (count - 1)
    assert set(followers.values()) <= {2}


def test_contenders_are_timed_in_alternating_turns():
    stopwatch = FakeStopwatch()
    budget = Budget(warmup_ms=10, rep_ms=40, rounds=2)
    timings = time_interleaved({"a": costing("a", 2.0), "b": costing("b", 5.0)}, stopwatch, budget)
    # Two calls to estimate, the warm-up, and then per turn one call that is not counted.
    assert stopwatch.order[:4] == [("a", 2), ("a", 5), ("b", 2), ("b", 2)]
    assert stopwatch.order[4:] == [("a", 11), ("b", 5), ("b", 5), ("a", 11)]
    assert timings["a"] == Timing(ms=2.0, p20_ms=2.0, p80_ms=2.0, laps=20, spread=0.0)
    assert timings["b"].laps == 8


def test_the_first_call_of_a_turn_is_not_counted():
    times = iter([1.0, 1.0, 1.0] + [9.0, 1.0, 1.0] * 2)
    timing = time_interleaved(
        {"a": costing("a", lambda: next(times))}, FakeStopwatch(), Budget(warmup_ms=0, rep_ms=4, rounds=2)
    )["a"]
    assert timing == Timing(ms=1.0, p20_ms=1.0, p80_ms=1.0, laps=4, spread=0.0)


def test_the_median_ignores_an_outlier_and_the_spread_tells_of_a_slow_round():
    times = iter([1.0] * 3 + [0.0, 1.0, 1.0, 50.0] + [0.0, 2.0, 2.0, 2.0])
    timing = time_interleaved(
        {"a": costing("a", lambda: next(times))}, FakeStopwatch(), Budget(warmup_ms=0, rep_ms=6, rounds=2)
    )["a"]
    assert timing.ms == 2.0
    assert timing.spread == pytest.approx(1.0)


def test_very_short_calls_are_bounded():
    stopwatch = FakeStopwatch()
    time_interleaved({"a": costing("a", 0.0)}, stopwatch, Budget(rounds=1, max_laps=7))
    assert stopwatch.order == [("a", 2), ("a", 7), ("a", 8)]


def test_a_contender_that_raises_does_not_end_the_others():
    calls = iter(range(100))

    def fails_late():
        if next(calls) > 8:
            raise RuntimeError("out of\nmemory")
        return 1.0

    def fails_at_once():
        raise ValueError("no")

    budget = Budget(warmup_ms=2, rep_ms=8, rounds=4)
    timings = time_interleaved(
        {"good": costing("good", 1.0), "late": Contender(fails_late), "never": Contender(fails_at_once)},
        FakeStopwatch(),
        budget,
    )
    assert timings["good"].laps == 8
    assert timings["late"] == "RuntimeError: out of memory"
    assert timings["never"] == "ValueError: no"


def test_calls_run_inside_their_context():
    active = []

    @contextlib.contextmanager
    def context(name):
        active.append(name)
        yield
        active.remove(name)

    def work(name):
        def run():
            assert active == [name]
            return 1.0

        run.__name__ = name
        return Contender(run, lambda: context(name))

    timings = time_interleaved({"a": work("a"), "b": work("b")}, FakeStopwatch(), Budget(rounds=2))
    assert all(isinstance(timing, Timing) for timing in timings.values())
    hosted = time_host({"a": work("a")}, synchronize=lambda: None, calls=2, blocks=2)
    assert isinstance(hosted["a"], HostTiming)


def test_no_contender():
    assert time_interleaved({}, FakeStopwatch(), Budget()) == {}


@pytest.mark.parametrize(("field", "value"), [("warmup_ms", -1), ("rep_ms", 0), ("rounds", 0), ("max_laps", 0)])
def test_a_budget_checks_its_fields(field, value):
    with pytest.raises(ValueError, match=f"{field}: expected"):
        Budget(**{field: value})


def test_host_stopwatch_measures_each_call():
    calls = []
    laps = HostStopwatch().laps(lambda: calls.append(1), 3)
    assert len(calls) == len(laps) == 3
    assert all(0 <= lap < 1e4 for lap in laps)


def test_quantiles_interpolate():
    assert quantile([4.0, 1.0, 2.0, 3.0, 5.0], 0.2) == pytest.approx(1.8)
    assert quantile([7.0], 0.8) == 7.0
    with pytest.raises(ValueError, match="at least one value"):
        quantile([], 0.5)


class FakeClock:
    """Advances by what each call costs."""

    def __init__(self):
        self.now = 0

    def __call__(self):
        return self.now


def test_host_times_are_medians_over_alternating_blocks():
    clock = FakeClock()
    order = []
    costs = {"a": 3_000, "b": 5_000}

    def work(name):
        def run():
            clock.now += costs[name]
            order.append(name)

        return Contender(run)

    synchronized = []

    def synchronize():
        synchronized.append(len(order))
        clock.now += 1_000_000  # waiting for the device is not part of a call's cost

    timings = time_host(
        {name: work(name) for name in costs},
        synchronize=synchronize,
        calls=4,
        blocks=2,
        warmup=1,
        clock_ns=clock,
    )
    assert timings["a"] == HostTiming(us=3.0, p20_us=3.0, p80_us=3.0, blocks=2)
    assert timings["b"].us == 5.0
    block = 5  # one call that is not counted, then four
    assert "".join(order) == "ab" + "a" * block + "b" * 2 * block + "a" * block
    assert gc.isenabled()


def test_host_times_leave_the_collector_as_it_was_when_a_call_raises():
    calls = iter(range(100))

    def fails():
        if next(calls) > 10:
            raise RuntimeError("gone")

    timings = time_host(
        {"fails": Contender(fails), "fine": Contender(lambda: None)},
        synchronize=lambda: None,
        calls=5,
        blocks=3,
        warmup=2,
    )
    assert timings["fails"] == "RuntimeError: gone"
    assert timings["fine"].blocks == 3
    assert gc.isenabled()


def test_failures_name_the_exception_behind():
    error = RuntimeError("outer " + "x" * 400)
    error.__cause__ = KeyError("inner")
    text = describe_failure(error)
    assert text.startswith("RuntimeError: outer xxx")
    assert text.endswith("… (from KeyError: 'inner')")
    assert describe_failure(ValueError("plain")) == "ValueError: plain"
