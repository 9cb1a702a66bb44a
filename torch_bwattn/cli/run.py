"""Run an unmodified script, or a module with -m, with torch_bwattn's attention.

While it runs, torch.nn.functional.scaled_dot_product_attention is this package's.
At exit one line on stderr says how many calls went to which backend.

PyTorch is imported before the script, so variables that it reads while it is
imported have to be set outside. Processes that the script starts do not inherit
the patch unless they are forked.
"""

from __future__ import annotations

import argparse
import atexit
import dataclasses
import importlib.machinery
import io
import os
import runpy
import sys
import types
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

#: The name under which the patch counts calls that it left to PyTorch.
LEFT_TO_PYTORCH = "pytorch"


@dataclasses.dataclass(frozen=True)
class Script:
    """What to run: a file, or a module, and its arguments."""

    target: str
    is_module: bool
    arguments: tuple[str, ...]


def configure(parser: argparse.ArgumentParser) -> None:
    """Declares the options that stand before the script."""
    parser.usage = f"{parser.prog} [--backend NAME] [--quiet] (SCRIPT | -m MODULE) [ARGUMENT ...]"
    parser.add_argument("--backend", metavar="NAME", help="pin this backend for the whole run")
    parser.add_argument("--quiet", action="store_true", help="say nothing at exit")


def split_arguments(argv: Sequence[str]) -> tuple[list[str], Script | None]:
    """Parts this command's options from the script and its arguments, as ``python`` itself does.

    Returns:
        The options, and the script; None where none is named.
    """
    options: list[str] = []
    index = 0
    while index < len(argv):
        word = argv[index]
        if word == "-m" or (word.startswith("-m") and not word.startswith("--")):
            rest = ([word[2:]] if word != "-m" else []) + list(argv[index + 1 :])
            return options, Script(rest[0], True, tuple(rest[1:])) if rest else None
        if word == "--":
            rest = list(argv[index + 1 :])
            return options, Script(rest[0], False, tuple(rest[1:])) if rest else None
        if not word.startswith("-") or word == "-":
            return options, Script(word, False, tuple(argv[index + 1 :]))
        options.append(word)
        if word == "--backend" and index + 1 < len(argv):
            index += 1
            options.append(argv[index])
        index += 1
    return options, None


def summary(counts: Mapping[str, int]) -> str:
    """The line printed at exit."""
    used = {name: count for name, count in counts.items() if count}
    total = sum(used.values())
    if not total:
        return "torch_bwattn: scaled_dot_product_attention was not called"
    ours = sorted((name for name in used if name != LEFT_TO_PYTORCH), key=lambda name: (-used[name], name))
    parts = [f"{used[name]} on {name}" for name in ours]
    if used.get(LEFT_TO_PYTORCH):
        parts.append(f"{used[LEFT_TO_PYTORCH]} left to PyTorch")
    return f"torch_bwattn: {total} call{'s' if total != 1 else ''} of scaled_dot_product_attention: {', '.join(parts)}"


def main(namespace: argparse.Namespace) -> int:
    """Runs the script named in ``namespace.script``.

    Returns:
        0, or 1 after an exception that the script did not catch, whose traceback has been printed.

    Raises:
        SystemExit: The script's own.
        KeyboardInterrupt: The user's.
    """
    script: Script | None = namespace.script
    from . import UsageError

    if script is None:
        raise UsageError("expected a script or -m MODULE; --help describes the command")
    if not script.is_module and not Path(script.target).exists():
        raise UsageError(f"can't open file {script.target!r}: no such file or directory")
    import torch_bwattn

    from ..selection import pin

    if namespace.backend is not None:
        if namespace.backend != "auto":
            try:
                pin.check_name("--backend", namespace.backend)
            except ValueError as error:
                raise UsageError(str(error)) from error
        # Not the context manager: a pin in the environment holds in every thread, and in processes the script starts.
        os.environ[pin.ENVIRONMENT_VARIABLE] = namespace.backend
    torch_bwattn.reset_call_counts()
    # Never removed: threads that outlive the script's main part still run it, and the process ends with them.
    torch_bwattn.patch_sdpa().install()
    if not namespace.quiet:
        process = os.getpid()

        def report() -> None:
            # A forked child inherits the exit handler; the line is the parent's to print.
            if os.getpid() == process:
                print(summary(torch_bwattn.call_counts()), file=sys.stderr)

        atexit.register(report)
    return execute(script)


def execute(script: Script) -> int:
    """Runs ``script`` as ``__main__``, as ``python SCRIPT`` or ``python -m MODULE`` does.

    An exception that leaves the script goes to ``sys.excepthook`` with a traceback that begins in the script.

    Returns:
        0, or 1 after such an exception.
    """
    try:
        if script.is_module:
            sys.argv[:] = [script.target, *script.arguments]
            runpy.run_module(script.target, run_name="__main__", alter_sys=True)
        elif _is_importable(script.target):
            sys.argv[:] = [script.target, *script.arguments]
            runpy.run_path(script.target, run_name="__main__")
        else:
            _execute_file(script)
    except Exception as error:
        _report_uncaught(error)
        return 1
    return 0


def _is_importable(path: str) -> bool:
    """Whether ``path`` is a folder or an archive with a ``__main__`` in it."""
    return Path(path).is_dir() or zipfile.is_zipfile(path)


def _execute_file(script: Script) -> None:
    sys.argv[:] = [script.target, *script.arguments]
    if not getattr(sys.flags, "safe_path", False):
        # `python -m torch_bwattn` put the current folder first; a script finds its neighbours instead.
        folder = str(Path(script.target).resolve().parent)
        if sys.path:
            sys.path[0] = folder
        else:
            sys.path.append(folder)
    with io.open_code(str(Path(script.target).absolute())) as stream:
        source = stream.read()
    module = types.ModuleType("__main__")
    # Stays in sys.modules after the script's last line: its threads, exit handlers and pickles look there.
    sys.modules["__main__"] = module
    module.__dict__.update(
        __file__=script.target,
        __builtins__=__builtins__,
        __loader__=importlib.machinery.SourceFileLoader("__main__", script.target),
        __spec__=None,
        __cached__=None,
    )
    exec(compile(source, script.target, "exec", dont_inherit=True), module.__dict__)  # noqa: S102 (the purpose)


def _report_uncaught(error: Exception) -> None:
    own = {__file__, runpy.__file__, "<frozen runpy>"}
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename in own:
        trace = trace.tb_next
    error = error.with_traceback(trace)
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace
    sys.excepthook(type(error), error, trace)
