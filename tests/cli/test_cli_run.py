import os
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest

from torch_bwattn.cli import main
from torch_bwattn.cli.run import Script, execute, split_arguments, summary

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments, cwd=None):
    """``python -m torch_bwattn run ARGUMENTS`` in a process of its own."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    variables = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-m", "torch_bwattn", "run", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=cwd,
        env=variables,
        check=False,
    )


def write(path, *parts):
    path.write_text("".join(map(textwrap.dedent, parts)))
    return path


@pytest.fixture
def interpreter(monkeypatch):
    """Lets a script change what an interpreter has one of, and puts it back."""
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])


CALLS = """
    import torch
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q = torch.randn(1, 2, 8, 16)
    F.scaled_dot_product_attention(q, q, q)
    F.scaled_dot_product_attention(q, q, q, is_causal=True)
    with sdpa_kernel(SDPBackend.MATH):
        F.scaled_dot_product_attention(q, q, q)
"""


def test_options_end_at_the_script():
    assert split_arguments(["--backend", "aten", "x.py", "--quiet", "-m"]) == (
        ["--backend", "aten"],
        Script("x.py", False, ("--quiet", "-m")),
    )
    assert split_arguments(["--backend=aten", "-m", "pkg.mod", "-x"]) == (
        ["--backend=aten"],
        Script("pkg.mod", True, ("-x",)),
    )
    assert split_arguments(["-mpkg"]) == ([], Script("pkg", True, ()))
    assert split_arguments(["--", "-odd.py", "a"]) == ([], Script("-odd.py", False, ("a",)))
    assert split_arguments(["--quiet"]) == (["--quiet"], None)
    assert split_arguments(["-m"]) == ([], None)


def test_summary_lines():
    assert summary({}) == "torch_bwattn: scaled_dot_product_attention was not called"
    assert summary({"aten": 1}) == "torch_bwattn: 1 call of scaled_dot_product_attention: 1 on aten"
    assert summary({"pytorch": 2, "aten": 3, "helion": 9, "reference": 0}) == (
        "torch_bwattn: 14 calls of scaled_dot_product_attention: 9 on helion, 3 on aten, 2 left to PyTorch"
    )


def test_a_script_runs_as_main_with_the_patch_on(tmp_path):
    script = write(
        tmp_path / "script.py",
        """
        import sys
        import pickle
        import neighbour

        class Thing:
            pass

        if __name__ == "__main__":
            print(sys.argv, __file__, sys.path[0], __spec__, neighbour.WORD)
            assert sys.modules["__main__"].Thing is Thing
            assert isinstance(pickle.loads(pickle.dumps(Thing())), Thing)
        """,
        CALLS,
    )
    (tmp_path / "neighbour.py").write_text("WORD = 'found'\n")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    done = run(script, "a", "--b", "-m", cwd=elsewhere)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[0] == (
        f"{[str(script), 'a', '--b', '-m']} {script} {os.path.realpath(tmp_path)} None found"
    )
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("torch_bwattn: 3 calls of scaled_dot_product_attention: ")
    assert last.endswith("1 left to PyTorch")


def test_a_pinned_backend_serves_every_call_also_in_threads(tmp_path):
    script = write(
        tmp_path / "script.py",
        CALLS,
        """
        import os
        import sys
        import threading

        thread = threading.Thread(target=lambda: F.scaled_dot_product_attention(q, q, q))
        thread.start()
        thread.join()
        child = os.fork()
        if not child:
            sys.exit(0)  # runs the exit handlers, of which the summary is the parent's
        os.waitpid(child, 0)
        """,
    )
    done = run("--backend", "reference", script)
    assert done.returncode == 0, done.stderr
    assert done.stderr.strip().splitlines()[-1] == (
        "torch_bwattn: 4 calls of scaled_dot_product_attention: 3 on reference, 1 left to PyTorch"
    )
    assert done.stderr.count("torch_bwattn:") == 1


def test_an_exception_ends_the_script_as_python_would(tmp_path):
    script = write(
        tmp_path / "script.py",
        """
        import atexit
        atexit.register(lambda: print("bye"))

        def fail():
            raise ValueError("from the script")

        fail()
        """,
    )
    done = run(script)
    plain = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == plain.returncode == 1
    assert done.stdout == plain.stdout == "bye\n"
    lines = done.stderr.strip().splitlines()
    assert lines[-1] == "torch_bwattn: scaled_dot_product_attention was not called"
    assert "\n".join(lines[:-1]) == plain.stderr.strip()


@pytest.mark.usefixtures("interpreter")
def test_a_syntax_error_is_shown(tmp_path, capsys):
    script = write(tmp_path / "script.py", "def f(:\n")
    assert execute(Script(str(script), False, ())) == 1
    error = capsys.readouterr().err
    assert "SyntaxError" in error
    assert "torch_bwattn" not in error


@pytest.mark.parametrize(
    ("statement", "code"), [("sys.exit()", None), ("sys.exit(7)", 7), ("raise SystemExit('a message')", "a message")]
)
@pytest.mark.usefixtures("interpreter")
def test_exit_statuses_are_the_scripts(tmp_path, statement, code):
    script = write(tmp_path / "script.py", f"import sys\n{statement}\n")
    with pytest.raises(SystemExit) as caught:
        execute(Script(str(script), False, ()))
    assert caught.value.code == code


@pytest.mark.usefixtures("interpreter")
def test_the_scripts_own_excepthook_is_asked(tmp_path, capsys):
    script = write(
        tmp_path / "script.py", "import sys\nsys.excepthook = lambda kind, error, trace: print('mine:', error)\n1 / 0\n"
    )
    assert execute(Script(str(script), False, ())) == 1
    captured = capsys.readouterr()
    assert captured.out == "mine: division by zero\n"
    assert captured.err == ""


@pytest.mark.usefixtures("interpreter")
def test_an_interrupt_passes_through(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        execute(Script(str(write(tmp_path / "script.py", "raise KeyboardInterrupt\n")), False, ()))


def test_a_module_runs_like_python_m(tmp_path):
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    write(
        package / "tool.py",
        """
        import sys
        from . import __name__ as parent
        print(__name__, parent, sys.argv[1:], __spec__.name, sys.path[0])
        """,
        CALLS,
    )
    done = run("-m", "package.tool", "--quiet", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"__main__ package ['--quiet'] package.tool {os.path.realpath(tmp_path)}\n"
    assert "3 calls of scaled_dot_product_attention" in done.stderr


@pytest.mark.usefixtures("interpreter")
def test_a_module_that_is_not_there(capsys):
    assert execute(Script("no_such_module_here", True, ())) == 1
    assert "no_such_module_here" in capsys.readouterr().err


@pytest.mark.usefixtures("interpreter")
def test_an_archive_and_a_folder_run(tmp_path, capsys):
    code = "import sys; print(__name__, sys.argv[1:])"
    archive = tmp_path / "app.zip"
    with zipfile.ZipFile(archive, "w") as made:
        made.writestr("__main__.py", code)
    folder = tmp_path / "app"
    folder.mkdir()
    (folder / "__main__.py").write_text(code)
    assert execute(Script(str(archive), False, ("x",))) == 0
    assert execute(Script(str(folder), False, ("y",))) == 0
    assert capsys.readouterr().out == "__main__ ['x']\n__main__ ['y']\n"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "expected a script or -m MODULE"),
        (["no/such/script.py"], "no such file or directory"),
        (["--backend", "gpu9000", __file__], "--backend: expected one of"),
    ],
)
def test_wrong_usage(arguments, says, capsys):
    assert main(["run", *arguments]) == 2
    assert says in capsys.readouterr().err


def test_unknown_options_are_refused(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["run", "--no-such-option", __file__])
    assert caught.value.code == 2
    assert "--no-such-option" in capsys.readouterr().err
