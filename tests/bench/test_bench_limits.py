import pytest
from bench_made_up import made_up_document, row_record

from torch_bwattn.bench import document, limits
from torch_bwattn.bench.rows import FORWARD, select_rows


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


def hopper_document(ours, fa4, shapes=("*",)):
    made = {**made_up_document(), "rows": [], "memory": [], "host": []}
    for row in select_rows(shapes):
        for provider, tflops in (("bwattn.cute", ours), ("fa4", fa4), ("cudnn", fa4 - 1.0)):
            made["rows"].append(row_record(row, FORWARD, provider, tflops))
    return made


def test_the_hopper_kernels_are_held_to_the_best_peer_of_each_row_and_to_a_mean():
    found = limits.findings(hopper_document(660.0, 600.0), "bwattn.cute")
    assert all(finding.met for finding in found)
    assert len(found) == 12 + 2 + 1
    assert found[-1].text == "forward, geometric mean of 12 rows: 1.100 times the best peer, at least 1.05"
    found = limits.findings(hopper_document(624.0, 600.0), "bwattn.cute")
    missed = [finding.text for finding in found if finding.met is False]
    assert missed[0] == "forward B4H32/32S8192D64: 1.040 times fa4, at least 1.08"
    assert missed[1:] == [
        "forward B4H32/32S8192D64 causal: 1.040 times fa4, at least 1.08",
        "forward, geometric mean of 12 rows: 1.040 times the best peer, at least 1.05",
    ]


def test_a_mean_of_some_rows_stays_open():
    found = limits.findings(hopper_document(660.0, 600.0, ("*D64",)), "bwattn.cute")
    assert found[-1].met is None


@pytest.mark.parametrize(("share", "met"), [(1.2, True), (1.3, False)])
def test_a_window_is_held_to_its_share_of_the_tiles(share, met):
    made = hopper_document(660.0, 600.0, ("B1H1/1S4096D128", "B1H1/1S4096D128W511"))
    ours = [one for one in made["rows"] if one["provider"] == "bwattn.cute" and one["causal"]]
    causal, window = (next(one for one in ours if one["shape"].endswith(end)) for end in ("D128", "W511"))
    # 32 tiles of queries: the i-th sees i + 1 tiles of keys, in the window at most 5.
    window.update(window=511, config="128x128, 2 stages", ms=share * causal["ms"] * (10 + 5 * 28) / 528)
    found = [finding for finding in limits.findings(made, "bwattn.cute") if "tiles' share" in finding.text]
    assert [finding.met for finding in found] == [met]
    assert f"{share:.3f} times its 150 of 528" in found[0].text
