import argparse

import pytest
import torch

from torch_bwattn.bench import document, suite
from torch_bwattn.cli import bench, main

QUICK = ["--device", "cpu", "--backend", "reference", "--rep-ms", "1", "--warmup-ms", "0", "--rounds", "1"]


def parse(*argv):
    parser = argparse.ArgumentParser()
    bench.configure(parser)
    return parser.parse_args(list(argv))


def test_a_run_writes_a_document_and_prints_tables(tmp_path, capsys):
    path = tmp_path / "out.json"
    status = main(
        ["bench", *QUICK, "--peers", "aten_flash,fa4", "--shapes", "B1H2/1S48D16", "--rows", "fwd", "--out", str(path),
         "--commit", "abc"]
    )  # fmt: skip
    assert status == 0
    made = document.load(path)
    assert made["environment"]["commit"] == "abc"
    assert {(record["provider"], record["direction"]) for record in made["rows"]} == {
        ("bwattn.reference", "forward"),
        ("aten_flash", "forward"),
        ("fa4", "forward"),
    }
    text = capsys.readouterr().out
    assert "| shape | causal | bwattn reference | aten flash (FA2) | of the best peer |" in text
    assert "missing" in text


def test_a_wrong_result_of_ours_is_a_failure(monkeypatch, capsys):
    monkeypatch.setattr(suite.check.Check, "ok", property(lambda self: self.accuracies[0].name != "out"), raising=True)
    status = main(["bench", *QUICK, "--peers", "none", "--shapes", "B1H1S32D16", "--causal", "no"])
    assert status == 1
    assert "bwattn.reference: wrong" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--rows", "sideways"], "--rows: expected fwd, bwd"),
        (["--rows", ""], "--rows: expected fwd, bwd"),
        (["--shapes", "B1"], "shape: expected a name like"),
        (["--peers", "fa9"], "peers: expected names among"),
        (["--backend", "fast"], "--backend: expected one of"),
        (["--slices", "0"], "--slices: expected a positive number or all"),
        (["--rounds", "0"], "rounds: expected a positive number"),
        (["--device", "tpu!"], "--device"),
        (["--device", "meta"], "--device: expected cuda or cpu"),
    ],
)
def test_wrong_values_are_named(argv, says, capsys):
    assert main(["bench", "--device", "cpu", "--backend", "reference", *argv]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert "Traceback" not in error


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_command_says_so(capsys):
    assert main(["bench"]) == 2
    assert "expected a CUDA GPU" in capsys.readouterr().err


def test_directions():
    assert bench.directions_of("bwd,fwd,bwd") == ("backward", "forward")
    assert bench.directions_of("forward") == ("forward",)


def test_quick_checks_fewer_slices_in_less_time():
    quick = bench.make_plan(parse("--device", "cpu", "--quick"))
    usual = bench.make_plan(parse("--device", "cpu"))
    assert quick.slices == 4
    assert usual.slices is None
    assert quick.budget.rep_ms < usual.budget.rep_ms
    assert bench.make_plan(parse("--device", "cpu", "--quick", "--slices", "all")).slices is None
    assert len(usual.rows) == 12
    assert bench.make_plan(parse("--device", "cpu", "--suite", "all")).suites == suite.SUITES
