from bench_made_up import made_up_document

from torch_bwattn.bench import document, limits


def test_each_limit_speaks_about_each_of_its_rows():
    found = limits.findings(made_up_document())
    assert sum("times flex" in finding.text for finding in found) == 4
    assert sum("times aten_flash" in finding.text for finding in found) == 4
    assert all(finding.met for finding in found)
    assert "memory B4H32/32S8192D128: 1024.0 of 1536.0 MiB" in [finding.text for finding in found]
    assert "host no_grad: 30.0 of 35 us" in [finding.text for finding in found]


def test_a_missed_limit():
    made = made_up_document()
    for record in made["rows"]:
        if record["provider"] == "bwattn.helion" and record["shape"] == "B4H32/32S8192D64" and not record["causal"]:
            record["tflops"] = 349.0
    made["host"][0]["us"] = 35.1
    made["memory"][0]["extra_bytes"] = made["memory"][0]["bound_bytes"] + 1
    missed = [finding.text for finding in limits.findings(made) if finding.met is False]
    assert missed == [
        "forward B4H32/32S8192D64: 0.776 times flex, at least 0.95",
        "backward B4H32/32S8192D64: 0.997 times aten_flash, at least 1.0",
        "memory B4H32/32S8192D128: 1536.0 of 1536.0 MiB",
        "host no_grad: 35.1 of 35 us",
    ]


def test_without_a_peers_figure_a_limit_stays_open_and_without_ours_it_is_missed():
    made = made_up_document()
    made["rows"] = [record for record in made["rows"] if record["provider"] != "flex"]
    for record in made["rows"]:
        if record["provider"] == "bwattn.helion" and record["direction"] == "backward":
            record.update(status=document.WRONG, reason="dq: FAILED")
    found = limits.findings(made)
    assert {finding.met for finding in found if finding.text.startswith("forward")} == {None}
    backward = [finding for finding in found if finding.text.startswith("backward")]
    assert len(backward) == 4
    assert {finding.met for finding in backward} == {False}
    assert backward[0].text == "backward B4H32/32S8192D64: wrong: dq: FAILED"


def test_wide_heads_and_other_backends_and_cpus_have_no_limits():
    made = made_up_document(("B2H16/16S8192D256",))
    assert not [finding for finding in limits.findings(made) if "D256" in finding.text]
    assert limits.findings(made_up_document(), "bwattn.aten") == []
    made = made_up_document()
    made["environment"] = {**made["environment"], "device": {"name": "cpu", "capability": None}}
    assert limits.findings(made) == []
