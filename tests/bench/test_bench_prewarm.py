import subprocess
import sys

from torch_bwattn.bench import prewarm
from torch_bwattn.bench.rows import select_rows


def test_shapes_are_dealt_out_whole():
    rows = select_rows()
    dealt = prewarm.groups(rows, 4)
    assert [len(names) for names in dealt] == [2, 2, 1, 1]
    assert sorted(name for names in dealt for name in names) == sorted({row.shape for row in rows})
    assert prewarm.groups(rows, 0) == []
    assert len(prewarm.groups(rows[:2], 9)) == 1


def test_jobs_follow_the_cores():
    rows = select_rows()
    assert prewarm.default_jobs(rows, 16) == 6
    assert prewarm.default_jobs(rows, 4) == 2
    assert prewarm.default_jobs(rows, 2) == 0
    assert prewarm.default_jobs(rows[:2], 64) == 0
    assert prewarm.default_jobs(rows, None) == 0


def stand_in(monkeypatch, code):
    """Children run ``code`` instead of this package's command; the started ones are kept."""
    monkeypatch.setenv("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")  # so that what is set here is undone
    original, started = subprocess.Popen, []

    def start(command, **options):
        started.append((command, options["env"]))
        return original([sys.executable, "-c", code, *command[4:]], **options)

    monkeypatch.setattr(subprocess, "Popen", start)
    return started


def test_all_children_run_with_disk_caches_on(monkeypatch):
    started, lines = stand_in(monkeypatch, "pass"), []
    prewarm.prewarm([["--shapes", "a"], ["--shapes", "b"]], timeout_s=60, log=lines.append, environment={"X": "y"})
    assert [command[1:] for command, _ in started] == [
        ["-m", "torch_bwattn", "bench", "--shapes", "a"],
        ["-m", "torch_bwattn", "bench", "--shapes", "b"],
    ]
    assert all(env["FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"] == "1" and env["X"] == "y" for _, env in started)
    assert len(lines) == 1
    assert lines[0].startswith("compiled ahead in 2 processes")


def test_a_child_that_fails_is_told_of(monkeypatch):
    stand_in(monkeypatch, "import sys; sys.exit('went wrong')")
    lines = []
    prewarm.prewarm([[]], timeout_s=60, log=lines.append)
    assert lines[0] == "a process that compiled ahead ended with status 1: went wrong"


def test_children_that_take_too_long_are_ended(monkeypatch):
    stand_in(monkeypatch, "import time; time.sleep(60)")
    lines = []
    prewarm.prewarm([[], []], timeout_s=0.2, log=lines.append)
    assert lines[0].startswith("compiling ahead took longer than 0 s")
