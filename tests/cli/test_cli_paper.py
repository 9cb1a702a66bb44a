import pytest

from torch_bwattn.cli import main


def test_hopper_stands_beside_its_measured_rows(capsys):
    assert main(["paper"]) == 0
    text = capsys.readouterr().out
    assert "| time on paper / measured |" in text
    assert "| backward | B4H32/32S8192D128 | no | 64x128 | 2560 | 3072 | 512 | 320 | shared memory |" in text


def test_blackwell_is_predicted(capsys):
    assert main(["paper", "--target", "sm_100a", "--shapes", "B1H16S16384D128", "--causal", "yes"]) == 0
    text = capsys.readouterr().out
    assert "a prediction" in text
    assert "| forward | B1H16/16S16384D128 | yes | 256x128 |" in text
    assert "| backward | B1H16/16S16384D128 | yes | 128x128 |" in text


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--target", "sm_80"], "--target: expected one of sm_90a, sm_100a, got 'sm_80'"),
        (["--causal", "yes"], "--causal: expected none for sm_90a"),
        (["--target", "sm_100a", "--shapes", "B1"], "shape: expected a name like"),
        (["--target", "sm_100a", "--shapes", "B1H1S64D32"], "shape: expected a width of 64 or 128"),
    ],
)
def test_wrong_values_are_named(argv, says, capsys):
    assert main(["paper", *argv]) == 2
    assert says in capsys.readouterr().err
