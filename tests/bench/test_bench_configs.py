import json
import math

import pytest
import torch
import torch.nn.functional as F

from torch_bwattn.bench import configs
from torch_bwattn.bench.rows import make_inputs, parse_shape
from torch_bwattn.bench.timing import Budget, HostStopwatch, Timing
from torch_bwattn.problem import describe

SHORT = {"tile_m": 128, "tile_n": 64, "num_warps": 8, "num_stages": 3}


def record(**changes):
    return {"kernel": "forward", "head_dim": 128, "causal": True, "config": SHORT, **changes}


def test_a_candidate_is_read():
    candidate = configs.read_candidate(record())
    assert candidate.row.name == "B4H32/32S8192D128 causal"
    assert configs.is_short(candidate.config)
    assert candidate.label == "tile_m=128 tile_n=64 num_warps=8 num_stages=3"


def test_a_full_config_and_another_shape_are_taken_as_they_are():
    full = {"block_sizes": [64, 32], "indexing": "tensor_descriptor"}
    candidate = configs.read_candidate(record(config=full, shape="B1H2/1S64D128", dtype="float16", causal=False))
    assert candidate.config == full
    assert not configs.is_short(full)
    assert candidate.row.shape == "B1H2/1S64D128"
    assert candidate.row.dtype == "float16"
    assert "indexing=tensor_descriptor" in candidate.label


def test_widths_without_a_shape_of_their_own_have_one():
    assert configs.read_candidate(record(head_dim=96)).row.shape == "B4H16/16S4096D96"


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"kernel": 3}, "candidate.kernel: expected str, got 3"),
        ({"config": None}, "candidate.config: expected dict, got None"),
        ({"extra": 1}, "expected fields among .*, got extra"),
        ({"shape": "B1H1S8D64"}, "candidate.shape: expected D128, got B1H1/1S8D64"),
        ({"config": {"tile_m": 64, "warps": 4}}, "candidate.config: expected fields among tile_m, tile_n, .*, got"),
    ],
)
def test_wrong_records_raise(changes, complaint):
    with pytest.raises(ValueError, match=complaint):
        configs.read_candidate(record(**changes))


def test_a_file_is_a_list(tmp_path):
    path = tmp_path / "candidates.json"
    path.write_text(json.dumps([record(), record(causal=False)]))
    assert [candidate.row.causal for candidate in configs.read_candidates(path)] == [True, False]
    path.write_text("{}")
    with pytest.raises(ValueError, match="expected a list"):
        configs.read_candidates(path)


def test_kernels_are_named_by_their_ending():
    assert configs.names("forward", "attention_forward")
    assert configs.names("attention_forward", "attention_forward")
    assert not configs.names("ward", "attention_forward")
    assert configs.direction_of("forward") == configs.direction_of("attention_forward") == "forward"
    assert configs.direction_of("dq") == "backward"


class FakeFamily:
    """Stands in for the runtime's kernel family: a config says what its launch does."""

    name = "attention_forward"

    def prepare(self, _args, config):
        if config.get("broken"):
            raise RuntimeError("out of registers")

        def launch(*arguments):
            out, inputs = arguments[0], arguments[1:]
            out.copy_(F.scaled_dot_product_attention(*inputs) * config.get("times", 1.0))

        return launch


@pytest.fixture
def fake_kernels(monkeypatch):
    from torch_bwattn.backends.helion import backend, runtime
    from torch_bwattn.backends.helion import configs as table

    class FakeBackend:
        def forward(self, problem):
            def run(x):
                out = torch.empty_like(x.q)
                runtime.KernelFamily.prepare(FakeFamily(), (), table.forward(problem).helion())(out, x.q, x.k, x.v)
                return out, None

            return run

    monkeypatch.setattr(backend, "HelionBackend", FakeBackend)
    monkeypatch.setattr(table, "backward", lambda _: {}, raising=False)
    monkeypatch.setattr(runtime.KernelFamily, "prepare", FakeFamily.prepare)
    return runtime.KernelFamily


def measure(candidates, lines=None):
    return configs.measure(
        candidates,
        device=torch.device("cpu"),
        budget=Budget(warmup_ms=0.01, rep_ms=0.1, rounds=2),
        stopwatch=HostStopwatch(),
        log=(lines if lines is not None else []).append,
    )


def candidate(**config):
    row = configs.read_candidate(record(shape="B1H2/2S32D8", head_dim=8, causal=False)).row
    return configs.Candidate("forward", row, config)


def test_candidates_are_checked_and_then_timed(fake_kernels):
    original = fake_kernels.prepare
    lines = []
    outcomes = measure([candidate(broken=True), candidate(), candidate(times=1.5), candidate(num_warps=4)], lines)
    assert fake_kernels.prepare is original
    assert [isinstance(outcome.timing, Timing) for outcome in outcomes] == [True, True, False, False]
    assert outcomes[0].timing.ms <= outcomes[1].timing.ms
    troubles = {json.dumps(outcome.candidate.config): outcome.trouble for outcome in outcomes}
    assert troubles['{"broken": true}'] == "RuntimeError: out of registers"
    assert troubles['{"times": 1.5}'].startswith("wrong: out: FAILED")
    assert lines[-1].splitlines()[0] == "forward B1H2/2S32D8 bfloat16"
    assert len(lines[-1].splitlines()) == 5
    assert "1.00 of the best" in lines[-1].splitlines()[1]


@pytest.mark.usefixtures("fake_kernels")
def test_a_kernel_that_does_not_run_is_named():
    outcomes = measure([configs.Candidate("other_forward", candidate().row, {})])
    assert outcomes[0].timing is None
    assert outcomes[0].trouble == ("LookupError: no kernel named other_forward ran; those that ran: attention_forward")


def test_the_table_of_a_group_in_which_nothing_runs():
    lines = configs.table([configs.Outcome(candidate(a=1), None, "boom", "")])
    assert lines.splitlines()[1].split() == ["-", "boom", "a=1"]


@pytest.mark.usefixtures("fake_kernels")
def test_groups_are_kept_apart():
    other = configs.Candidate("forward", configs.read_candidate(record(shape="B1H1/1S16D8", head_dim=8)).row, {})
    outcomes = measure([candidate(), other, candidate(num_warps=2)])
    assert [outcome.candidate.row.length for outcome in outcomes] == [32, 32, 16]
    # The fake forgets the causal mask, and the check sees it.
    assert outcomes[2].trouble.startswith("wrong")
    assert all(outcome.timing and math.isfinite(outcome.timing.ms) for outcome in outcomes[:2])


@pytest.mark.usefixtures("fake_kernels")
def test_a_file_is_measured_and_a_group_without_a_survivor_is_a_failure(tmp_path):
    class Plan:
        device = torch.device("cpu")
        budget = Budget(warmup_ms=0.01, rep_ms=0.1, rounds=1)
        slices = None

    path = tmp_path / "candidates.json"
    base = {"kernel": "forward", "head_dim": 8, "causal": False, "shape": "B1H2/2S32D8"}
    path.write_text(json.dumps([{**base, "config": {}}, {**base, "config": {"broken": True}}]))
    lines = []
    assert configs.run_file(str(path), Plan, jobs=None, part=None, log=lines.append) == 0
    assert configs.run_file(str(path), Plan, jobs=None, part="1/2", log=lines.append) == 0
    assert "out of registers" in lines[-1]
    path.write_text(json.dumps([{**base, "config": {"broken": True}}]))
    assert configs.run_file(str(path), Plan, jobs=None, part=None, log=lines.append) == 1


@pytest.mark.usefixtures("fake_kernels")
def test_a_backend_that_ignores_the_config_is_found_out(monkeypatch):
    from torch_bwattn.backends.helion import backend, runtime

    class Deaf:
        def forward(self, _problem):
            return lambda _: runtime.KernelFamily.prepare(FakeFamily(), (), {"other": 1})

    monkeypatch.setattr(backend, "HelionBackend", Deaf)
    trouble = measure([candidate()])[0].trouble
    assert "attention_forward: the backend passed another config than the one under test: {'other': 1}" in trouble


@pytest.mark.parametrize(
    ("kernel", "block_sizes"), [("forward", [32, 16]), ("dkv", [16, 32]), ("attention_dq", [32, 16]), ("delta", [32])]
)
def test_short_configs_take_the_place_of_an_entry_of_the_table(kernel, block_sizes):
    from torch_bwattn.backends.helion import configs as table

    inputs = make_inputs(parse_shape("B1H2S32D64"), "cpu")
    common = {"scale": 1.0, "is_causal": False, "causal_alignment": "top_left", "dropout_p": 0.0}
    problem = describe(*inputs.qkv, None, **common)
    usual = {"forward": table.forward(problem), **table.backward(problem)}
    probe = configs.Probe({kernel: {"tile_m": 32, "tile_n": 16, "num_warps": 2}})
    with probe.active():
        changed = {"forward": table.forward(problem), **table.backward(problem)}
    assert {"forward": table.forward(problem), **table.backward(problem)} == usual
    key = kernel.removeprefix("attention_")
    assert changed[key].helion()["block_sizes"] == block_sizes
    assert changed[key].helion()["num_warps"] == 2
    assert changed[key].helion()["num_stages"] == usual[key].helion()["num_stages"]
    del changed[key], usual[key]
    assert changed == usual
