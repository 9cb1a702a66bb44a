from pathlib import Path

import pytest
from bench_made_up import made_up_document

from torch_bwattn.bench import document, report
from torch_bwattn.cli import main

README = f"# Title\n\nText.\n\n{report.BEGIN}\nold\n{report.END}\n\nMore.\n"


def test_windows_are_explained_where_there_are_some():
    made = made_up_document()
    assert "window" not in report.render([made])
    made["rows"][0]["window"] = 5
    assert "W at the end of a name is a window" in report.render([made])


def test_tables_of_a_made_up_document():
    lines = report.render([made_up_document()]).splitlines()
    assert lines[0].startswith("NVIDIA Invented, 2031-05-06, driver 580.1, torch 2.11.0, triton 3.6.0, helion 1.5.1.")
    start = lines.index("**Forward, TFLOP/s**")
    assert lines[start + 2 : start + 6] == [
        "| shape | causal | bwattn helion | cuDNN | aten flash (FA2) | Flex (compiled) | of the best peer |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        "| B4H32/32S8192D64 | no | 500 | 600 | 350 | 450 | 0.83 |",
        "| B4H32/32S8192D64 | yes | 501 | 601 | 351 | 451 | 0.83 |",
    ]
    assert "**Backward, TFLOP/s**" in lines
    start = lines.index("**Host cost of one eager call, us: median (20 to 80 %)**")
    assert lines[start + 2 : start + 6] == [
        "| call at B1H8/8S128D64 | bwattn helion | bwattn helion (torch_bwattn.sdpa) | cuDNN |",
        "| --- | --- | --- | --- |",
        "| no grad | 30.0 (29-31) | 31.0 (30-32) | 35.5 (34-36) |",
        "| inputs that require grad, forward call | 30.0 (29-31) | 31.0 (30-32) | 35.5 (34-36) |",
    ]
    assert "| B4H32/32S8192D128 | bwattn helion | 1024.0 | 1536.0 |" in lines
    assert lines[-1] == "- FA4 (CuTe): missing (8 times): not installed"


def test_rows_come_in_the_order_of_the_table_whatever_the_order_of_the_records():
    made = made_up_document()
    shuffled = {**made, "rows": made["rows"][::-1]}
    first = [line for line in report.render([made]).splitlines() if line.startswith("| B4H32")]
    second = [line for line in report.render([shuffled]).splitlines() if line.startswith("| B4H32")]
    assert [line.split("|")[1:3] for line in first] == [line.split("|")[1:3] for line in second]


def test_ratios_against_each_peer():
    lines = report.ratios(made_up_document()["rows"], "bwattn.helion").splitlines()
    assert len(lines) == 2 + 8
    assert lines[0] == ("| direction | shape | causal | best peer | cuDNN | aten flash (FA2) | Flex (compiled) |")
    assert lines[2] == "| forward | B4H32/32S8192D64 | no | 0.83 | 0.83 | 1.43 | 1.11 |"
    assert lines[6].startswith("| backward | B4H32/32S8192D64 | no |")
    assert report.ratios([], "bwattn.helion").count("\n") == 1


def test_wrong_and_failed_results_are_shown_as_such():
    made = made_up_document()
    for record in made["rows"]:
        if record["provider"] == "bwattn.helion" and record["direction"] == "forward" and not record["causal"]:
            record.update(status=document.WRONG, reason="out: FAILED | badly")
        if record["provider"] == "cudnn" and record["causal"]:
            record.update(status=document.FAILED, reason="boom")
    lines = report.render([made]).splitlines()
    assert "| B4H32/32S8192D64 | no | wrong | 600 | 350 | 450 | - |" in lines
    assert "| B4H32/32S8192D64 | yes | 501 | - | 351 | 451 | 1.11 |" in lines
    assert "- bwattn helion: wrong (2 times): out: FAILED | badly" in lines


def test_a_section_without_figures_has_no_table():
    made = made_up_document()
    made["host"] = []
    made["memory"] = [{**made["memory"][0], "status": document.FAILED, "reason": "boom"}]
    text = report.render([made])
    assert "Host cost" not in text
    assert "Peak extra memory" not in text
    assert "- bwattn helion: failed: boom" in text


def test_no_results_is_said():
    assert report.render([]) == report.NO_RESULTS


def test_memory_over_its_bound_never_reads_as_equal():
    made = made_up_document()
    made["memory"][0].update(bound_bytes=2**30, extra_bytes=2**30 + 1)
    assert "| 1024.1 | 1024.0 |" in report.render([made])


def test_the_section_is_replaced_and_nothing_else(tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text(README)
    documents = [made_up_document()]
    assert not report.update_readme(readme, documents, check=True)
    assert readme.read_text() == README
    assert not report.update_readme(readme, documents)
    text = readme.read_text()
    assert text.startswith("# Title\n\nText.\n\n")
    assert text.endswith("\n\nMore.\n")
    assert "old" not in text
    assert report.render(documents) in text
    assert report.update_readme(readme, documents, check=True)


@pytest.mark.parametrize("text", ["no markers", f"{report.END}{report.BEGIN}", README + README])
def test_markers_must_stand_there_once_and_in_order(text):
    with pytest.raises(ValueError, match="expected the markers"):
        report.replace_section(text, "tables")


def test_the_command_writes_and_then_agrees(tmp_path, monkeypatch, capsys):
    readme = tmp_path / "README.md"
    readme.write_text(README)
    monkeypatch.setattr(report, "shipped_results", lambda: [made_up_document()])
    command = ["bench", "--report", "--readme", str(readme)]
    assert main([*command, "--check"]) == 1
    assert main(command) == 0
    assert main([*command, "--check"]) == 0
    assert "the tables are those of the shipped measurements" in capsys.readouterr().out


def test_the_command_says_when_there_is_no_readme(tmp_path, capsys):
    assert main(["bench", "--report", "--readme", str(tmp_path / "none.md")]) == 2
    assert "no such file" in capsys.readouterr().err


def test_the_readme_shows_the_shipped_results():
    readme = Path(__file__).resolve().parents[2] / "README.md"
    if not readme.is_file():
        pytest.skip("this checkout has no README")
    if report.BEGIN not in readme.read_text(encoding="utf-8"):
        pytest.skip("the README has no section for measurements")
    same = report.update_readme(readme, report.shipped_results(), check=True)
    assert same, "run: python -m torch_bwattn bench --report"
