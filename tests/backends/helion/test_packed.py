"""fp32 arithmetic on two values at a time: what its PTX computes, and that the PTX for Blackwell has it.

No machine here runs that PTX, so a few lines do: :func:`run_ptx` knows the instructions that the package writes.
"""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest
import torch

from torch_bwattn.backends.helion import configs
from torch_bwattn.problem import Problem
from torch_bwattn.testing import Results, judge, oracle, pt_reference

BLACKWELL = Problem("sm_100a", torch.bfloat16, 1, 2, 1, 300, 300, 64, 64, 0.125)


def run_ptx(asm: str, *operands: np.ndarray) -> np.ndarray:
    """What the assembly makes of neighbouring elements, which it is given in twos."""
    pairs = [operand.reshape(-1, 2) for operand in operands]
    values = {f"${2 + 2 * i + j}": pair[:, j] for i, pair in enumerate(pairs) for j in range(2)}
    for line in asm.strip().strip("{}").split(";"):
        name, _, rest = line.strip().partition(" ")
        words = re.findall(r"\$\d+|\w+", rest)
        if name == "mov.b64" and rest.lstrip().startswith("{"):
            values[words[0]], values[words[1]] = values[words[2]]
        elif name == "mov.b64":
            values[words[0]] = values[words[1]], values[words[2]]
        elif name == "mul.rn.f32x2":
            a, b = (values[word] for word in words[1:])
            values[words[0]] = tuple(x * y for x, y in zip(a, b, strict=True))
        elif name == "fma.rn.f32x2":
            wide = [[lane.astype(np.float64) for lane in values[word]] for word in words[1:]]
            values[words[0]] = tuple((x * y + z).astype(np.float32) for x, y, z in zip(*wide, strict=True))
        else:
            assert name in ("", ".reg"), f"no such instruction here: {line}"
    return np.stack([values["$0"], values["$1"]], axis=1).reshape(operands[0].shape)


@pytest.fixture
def parts():
    return pytest.importorskip("torch_bwattn.backends.helion.parts", exc_type=ImportError)


def test_the_multiplication(parts):
    a, b = np.random.default_rng(0).standard_normal((2, 4, 6)).astype(np.float32)
    assert np.array_equal(run_ptx(parts.MULTIPLY_TWO, a, b), a * b)


def test_the_multiplication_and_addition_reads_all_three_and_rounds_once(parts):
    a = np.array([3.0, 1 + 2.0**-12, -2.0, 1.5], np.float32)
    b = np.array([5.0, 1 + 2.0**-12, 0.5, 4.0], np.float32)
    c = np.array([7.0, -1 - 2.0**-11, 0.25, -6.0], np.float32)
    assert run_ptx(parts.MULTIPLY_ADD_TWO, a, b, c).tolist() == [22.0, 2.0**-24, -0.75, 0.0]


@pytest.mark.interpreted
def test_the_forward_with_it(parts, monkeypatch):
    """In Triton's interpreter, which has no assembly."""
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    from torch_bwattn.backends.helion import forward

    ran = []

    def inline_asm_elementwise(asm, constraints, args, dtype, is_pure, pack):
        assert (constraints.count("=r"), constraints.count(",r"), is_pure, pack) == (2, 2 * len(args), True, 2)
        ran.append(asm)
        values = run_ptx(asm, *np.broadcast_arrays(*(arg.handle.data for arg in args)))
        return tl.tensor(TensorHandle(values, dtype), tl.block_type(dtype, list(values.shape)))

    monkeypatch.setattr(tl, "inline_asm_elementwise", inline_asm_elementwise)
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 2, 40, 16), torch.randn(1, 1, 70, 16), torch.randn(1, 1, 70, 16)
    out, lse = torch.full((1, 2, 40, 16), torch.nan), torch.full((1, 2, 40), torch.nan)
    options = {"scale": 0.3, "dropout_p": 0.0, "causal": True, "diagonal": 30}
    arguments = forward.forward_arguments(q, k, v, None, None, out, lse, packed=True, **options)
    forward.FORWARD.prepare(arguments, {"block_sizes": [32, 16], "num_warps": 4, "num_stages": 1})(*arguments)
    assert set(ran) == {parts.MULTIPLY_TWO, parts.MULTIPLY_ADD_TWO}
    call = {"is_causal": True, "scale": 0.3, "enable_gqa": True, "causal_alignment": "bottom_right"}
    for verdict in judge(Results(out=out, lse=lse), oracle(q, k, v, **call), pt_reference(q, k, v, **call)):
        verdict.check()


def test_it_is_for_those_who_have_it():
    for target in ("sm_80", "sm_90a", "sm_100a", "sm_103a", "sm_120a"):
        for dtype in (torch.bfloat16, torch.float32):
            problem = dataclasses.replace(BLACKWELL, target=target, dtype=dtype)
            packed = target in ("sm_100a", "sm_103a") and dtype == torch.bfloat16
            assert {config.packed for config in configs.forward_choices(problem)} == {packed}
    assert str(configs.forward(BLACKWELL)) == "64x64, 4 warps, 3 stages, packed"


@pytest.mark.compile_only
def test_blackwells_ptx_has_it():
    from torch_bwattn.backends.helion import report
    from torch_bwattn.selection import drawn
    from torch_bwattn.selection.choose import get_backend

    config = configs.forward(BLACKWELL)
    x = drawn.inputs(BLACKWELL, "cpu")
    with report.collected() as prepared:
        get_backend("helion").forward(BLACKWELL, str(config))(x)
    ((family, arguments, made),) = prepared
    found = report.compile_report(family, arguments, made, capability=(10, 0))
    # Each of a tile's scores once in the loop, and each of its outputs.
    threads = 32 * config.num_warps
    assert found.ptx.count("fma.rn.f32x2") >= config.tile_m * config.tile_n // 2 // threads
    assert found.ptx.count("mul.rn.f32x2") >= config.tile_m * BLACKWELL.value_dim // 2 // threads
    assert found.counts["tcgen05"]
    assert not found.stack_bytes
