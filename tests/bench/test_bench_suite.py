import dataclasses
import importlib

import pytest
import torch
import torch.nn.functional as F

from torch_bwattn.bench import document, suite
from torch_bwattn.bench.peers import OpProvider, Provider, make_peers, title_of
from torch_bwattn.bench.rows import Row, select_rows
from torch_bwattn.bench.timing import Budget

TINY = Budget(warmup_ms=0.01, rep_ms=0.1, rounds=2)


class Eager(Provider):
    """PyTorch's attention, changed by ``after``; keeps how it was used."""

    def __init__(self, name, after=lambda out: out, missing=None):
        self.name = name
        self._after = after
        self._missing = missing
        self.calls = 0

    def missing(self):
        return self._missing

    def open(self, row):
        def attention(query, key, value):
            self.calls += 1
            out = F.scaled_dot_product_attention(query, key, value, is_causal=row.causal, enable_gqa=row.gqa)
            return self._after(out)

        return attention


class Refuses(Provider):
    name = "refuses"

    def open(self, row):
        raise NotImplementedError("this width is not mine")


def raises(_):
    raise RuntimeError("no kernel image")


def plan(**changes):
    values = {
        "rows": select_rows(["B1H4/2S40D16"]),
        "suites": ("rows",),
        "device": torch.device("cpu"),
        "budget": TINY,
        "host_row": Row(1, 2, 2, 16, 8, causal=False),
        "host_calls": 2,
        "host_blocks": 2,
    }
    return suite.Plan(**{**values, **changes})


def test_every_provider_leaves_one_record_per_row_and_direction():
    providers = [
        Eager("fine"),
        Eager("off", after=lambda out: out * 1.5),
        Eager("absent", missing="not installed"),
        Eager("raises", after=raises),
        Refuses(),
    ]
    lines, saved = [], []
    made = suite.run(plan(), providers, [], save=lambda made: saved.append(len(made["rows"])), log=lines.append)
    document.validate(made)
    assert saved == [10, 20]
    assert len(made["rows"]) == 2 * 2 * 5
    by_name = {}
    for record in made["rows"]:
        by_name.setdefault(record["provider"], []).append(record)
    assert {name: {record["status"] for record in records} for name, records in by_name.items()} == {
        "fine": {"ok"},
        "off": {"wrong"},
        "absent": {"missing"},
        "raises": {"failed"},
        "refuses": {"failed"},
    }
    assert all(record["ms"] > 0 and record["tflops"] > 0 for record in by_name["fine"])
    assert all("ms" not in record for record in by_name["off"])
    assert all("FAILED" in record["reason"] for record in by_name["off"])
    assert by_name["absent"][0]["reason"] == "not installed"
    assert by_name["raises"][0]["reason"] == "RuntimeError: no kernel image"
    assert by_name["refuses"][0]["reason"] == "NotImplementedError: this width is not mine"
    assert {name for record in by_name["fine"] for name in record["check"]} == {"out", "dq", "dk", "dv"}
    assert any("TFLOP/s" in line for line in lines)
    assert any("wrong" in line for line in lines)


def test_a_wrong_result_is_not_timed():
    wrong = Eager("wrong", after=lambda out: out + 1)
    suite.run(plan(directions=("forward",)), [wrong], [], log=lambda _: None)
    assert wrong.calls == 2  # once per row


def test_one_direction_only():
    made = suite.run(plan(directions=("forward",)), [Eager("fine")], [], log=lambda _: None)
    assert {record["direction"] for record in made["rows"]} == {"forward"}


def test_a_row_without_a_reference_is_recorded(monkeypatch):
    def refuse(*_, **__):
        raise torch.OutOfMemoryError("too large")

    monkeypatch.setattr(suite.check, "Oracle", refuse)
    made = suite.run(plan(), [Eager("fine")], [], log=lambda _: None)
    document.validate(made)
    assert {record["reason"] for record in made["rows"]} == {"no reference: OutOfMemoryError: too large"}


def test_a_failure_while_timing_is_recorded():
    class Fleeting(Eager):
        def open(self, row):
            inner = super().open(row)

            def attention(*tensors):
                if self.calls > 2:
                    raise RuntimeError("device lost")
                return inner(*tensors)

            return attention

    made = suite.run(plan(directions=("forward",)), [Fleeting("fleeting")], [], log=lambda _: None)
    document.validate(made)
    assert [record["status"] for record in made["rows"]] == ["failed", "failed"]
    assert made["rows"][0]["reason"] == "RuntimeError: device lost"


def test_this_package_is_measured_through_its_op_and_its_function():
    chosen = plan(suites=("rows", "host"), rows=select_rows(["B1H2/1S24D16"], dtype="float32"))
    providers = [OpProvider("reference")]
    made = suite.run(chosen, providers, [*providers, OpProvider("reference", function=True)], log=lambda _: None)
    document.validate(made)
    assert {record["status"] for record in made["rows"]} == {"ok"}
    assert {record["backend"] for record in made["rows"] if record["direction"] == "forward"} == {"reference"}
    assert {record["provider"] for record in made["host"]} == {"bwattn.reference", "bwattn.reference.function"}
    assert {record["call"] for record in made["host"]} == {"no_grad", "grad", "forward_backward"}
    assert {record["status"] for record in made["host"]} == {"ok"}


def test_an_unpinned_provider_records_the_backend_that_served_it():
    made = suite.run(
        plan(directions=("forward",), rows=select_rows(["B1H2/2S24D16"], dtype="float32")),
        [OpProvider("auto")],
        [],
        log=lambda _: None,
    )
    assert {record["provider"] for record in made["rows"]} == {"bwattn.auto"}
    assert all(record["backend"] in ("aten", "reference") for record in made["rows"])


def test_a_backend_of_another_version_is_missing():
    reason = OpProvider("cute").missing()
    assert reason is None or "cute" in reason


def test_host_failures_are_recorded():
    made = suite.run(
        plan(suites=("host",)),
        [],
        [Eager("fine"), Eager("absent", missing="gone"), Eager("raises", after=raises), Refuses()],
        log=lambda _: None,
    )
    document.validate(made)
    statuses = {(record["provider"], record["status"]) for record in made["host"]}
    assert statuses == {("fine", "ok"), ("absent", "missing"), ("raises", "failed"), ("refuses", "failed")}


def test_memory_is_measured_on_cuda_only():
    lines = []
    made = suite.run(plan(suites=("memory",)), [Eager("fine")], [], log=lines.append)
    assert made["memory"] == []
    assert lines == ["memory: the peak is known on CUDA devices only"]


def test_the_bound_on_memory_is_outputs_and_statistics_and_an_fp32_accumulator():
    elements = 4 * 32 * 8192 * 128
    statistics = 2 * 4 * 32 * 8192 * 4
    assert suite.memory_bound(suite.MEMORY_ROW) == 4 * elements * 2 + statistics + elements * 4
    grouped = dataclasses.replace(suite.MEMORY_ROW, kv_heads=8)
    assert suite.memory_bound(grouped) == elements * 2 * 2 + elements // 2 * 2 + statistics + elements * 4


def test_compiling_only_calls_everything_once():
    fine, lines = Eager("fine"), []
    suite.compile_only(plan(), [fine, Eager("raises", after=raises), Refuses()], lines.append)
    assert fine.calls == 4
    assert sum("no kernel image" in line for line in lines) == 2


def test_peers_by_name():
    assert [peer.name for peer in make_peers(["flex", "cudnn", "aten_flash", "fa4"])] == [
        "flex",
        "cudnn",
        "aten_flash",
        "fa4",
    ]
    with pytest.raises(ValueError, match="peers: expected names among cudnn, aten_flash, fa4, flex, got fa9"):
        make_peers(["fa9"])


def test_titles_of_recorded_names():
    assert title_of("cudnn") == "cuDNN"
    assert title_of("bwattn.helion") == "bwattn helion"
    assert title_of("bwattn.helion.function") == "bwattn helion (torch_bwattn.sdpa)"
    assert title_of("somebody") == "somebody"


def test_the_aten_peer_is_right_on_the_cpu():
    made = suite.run(plan(), make_peers(["aten_flash"]), [], log=lambda _: None)
    assert {record["status"] for record in made["rows"]} == {"ok"}


def test_flex_is_compiled_anew_for_each_row(monkeypatch):
    resets, compiled = [], []

    def attention(query, key, value, *, block_mask, enable_gqa):
        return F.scaled_dot_product_attention(
            query, key, value, is_causal=block_mask is not None, enable_gqa=enable_gqa
        )

    def fake_compile(function, **options):
        compiled.append(options)
        assert function is attention
        return function

    module = importlib.import_module("torch.nn.attention.flex_attention")
    monkeypatch.setattr(module, "flex_attention", attention)
    monkeypatch.setattr(module, "create_block_mask", lambda *arguments: arguments)
    monkeypatch.setattr(torch.compiler, "reset", lambda: resets.append(1))
    monkeypatch.setattr(torch, "compile", fake_compile)
    made = suite.run(plan(), make_peers(["flex"]), [], log=lambda _: None)
    assert {record["status"] for record in made["rows"]} == {"ok"}
    assert len(resets) == 2
    assert compiled == [{"dynamic": False, "fullgraph": True}] * 2
