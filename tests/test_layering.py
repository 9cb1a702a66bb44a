"""Imports go one way, and importing the package loads no kernel language and takes no time."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import torch_bwattn

PACKAGE = Path(torch_bwattn.__file__).parent
KERNEL_LANGUAGES = {"triton", "helion", "cutlass", "cuda", "tvm_ffi"}
# Lowest first. A module imports from its own line and from those above it only.
LAYERS = (
    ("errors", "target", "testing", "layout", "storage", "environment"),
    ("problem", "mods"),
    ("backends",),
    ("selection",),
    ("ops",),
    ("api", "flex"),
    ("integrations", "bench", "tuning", "crosscompile"),
    ("cli",),
    ("__main__", "__init__"),
)
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
# Backends know kernels, and of the package only what describes a call.
BACKENDS_MAY_IMPORT = {"errors", "target", "testing", "layout", "storage", "problem", "mods", "backends"}


def part_of(module: str) -> str:
    """The first component below torch_bwattn."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def modules():
    for path in sorted(PACKAGE.rglob("*.py")):
        relative = path.relative_to(PACKAGE).with_suffix("")
        yield path, ".".join(("torch_bwattn", *relative.parts)).removesuffix(".__init__")


def imports_of(path: Path, module: str):
    """Every module that an import statement names, wherever it stands, and whether it runs at import."""
    tree = ast.parse(path.read_text())
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    inside = set()
    for node in ast.walk(tree):
        typing_only = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) or typing_only:
            inside.update(id(child) for child in ast.walk(node))
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            stem = ".".join([*base, *([node.module] if node.module else [])])
            # `from . import x` names the module x, and `from .x import y` the module x.
            names = [f"{stem}.{alias.name}" for alias in node.names] if not node.module else [stem]
        for name in names:
            yield name, id(node) not in inside


@pytest.mark.parametrize(("path", "module"), list(modules()), ids=[name for _, name in modules()])
def test_imports_go_one_way(path, module):
    own = part_of(module)
    assert own in RANK, f"{module} has no layer"
    for name, _ in imports_of(path, module):
        if name.split(".")[0] != "torch_bwattn":
            continue
        other = part_of(name)
        if other == "__version__" or name == "torch_bwattn":
            # The tools use the package as anybody does.
            assert own in {"bench", "cli", "__main__", "__init__"}, f"{module} imports the whole package"
            continue
        if other not in RANK:
            continue  # a name of the package itself, as in `from torch_bwattn import sdpa`
        assert RANK[other] <= RANK[own] or other == own, f"{module} imports {name}"
        if own == "backends":
            assert other in BACKENDS_MAY_IMPORT, f"{module} imports {name}"


@pytest.mark.parametrize(("path", "module"), list(modules()), ids=[name for _, name in modules()])
def test_kernel_languages_only_in_their_backends(path, module):
    parts = module.split(".")
    if parts[1:2] == ["backends"] and len(parts) > 2 and parts[2] in {"helion", "cute"}:
        return
    for name, at_import in imports_of(path, module):
        if name.split(".")[0] in KERNEL_LANGUAGES:
            assert not at_import, f"{module} imports {name}"
            assert parts[1] in {"cli", "bench"}, f"{module} imports {name}"


_PROBE = """
import json, sys, time
import torch
before, start = set(sys.modules), time.process_time()
import torch_bwattn
spent = time.process_time() - start
loaded = sorted(set(sys.modules) - before)
print(json.dumps({"seconds": spent, "loaded": loaded, "cuda": torch.cuda.is_initialized()}))
"""


@pytest.fixture(scope="module")
def probes():
    runs = [
        subprocess.run([sys.executable, "-c", _PROBE], capture_output=True, text=True, check=True) for _ in range(3)
    ]
    return [json.loads(run.stdout) for run in runs]


def test_import_loads_no_kernel_language(probes):
    roots = {name.split(".")[0] for name in probes[0]["loaded"]}
    assert not roots & KERNEL_LANGUAGES
    assert "hypothesis" not in roots
    assert "pytest" not in roots
    assert not probes[0]["cuda"]


def test_import_is_quick(probes):
    """Under 0.3 s of processor time, the best of three: others may be using the machine."""
    assert min(probe["seconds"] for probe in probes) < 0.3


def test_cpu_calls_load_no_kernel_language():
    script = """
import sys, torch
before = set(sys.modules)
import torch_bwattn
query = torch.randn(1, 2, 40, 8, requires_grad=True)
torch_bwattn.sdpa(query, query, query, is_causal=True).sum().backward()
print(",".join(sorted({name.split(".")[0] for name in set(sys.modules) - before})))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert not set(done.stdout.strip().split(",")) & KERNEL_LANGUAGES


def test_public_names():
    for name in ("sdpa", "backend", "explain", "patch_sdpa", "call_counts", "reset_call_counts", "UnsupportedProblem"):
        assert name in torch_bwattn.__all__
        assert getattr(torch_bwattn, name).__doc__, f"{name} has no docstring"
