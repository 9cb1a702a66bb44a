"""Whether kernels with mods may run a call: as :mod:`.trust` says of those without.

The code of such a kernel is made of the call's own mods, so that only what passed the accuracy rule with them is
trusted, but on targets where the package's tests passed with the versions that are installed. The check is of a corner
of the call: its mods, what they captured and its lists, at the first positions alone, with operands that are drawn. It
says nothing of what mods do elsewhere, which PyTorch's operations and the kernel take from one program.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..backends import flex_blockwise
from ..backends.flex_blocks import cut
from ..backends.flex_inputs import FlexInputs, Mod
from ..errors import UnsupportedProblem
from ..layout import empty_like_order
from ..problem import dtype_name, suits_bulk_copies
from ..target import target_of
from ..testing import GRADIENT_FACTOR, OUTPUT_FACTOR, accuracy
from . import trust
from .drawn import leave_nan, on_device
from .tables import Tunable

_Q_LENS, _KV_LENS = (330, 384), (590, 640)
"""Of the check: past the largest tiles and no multiple of any, or about where there are some whole ones."""
_TILE = 128

Run = Callable[..., tuple[Any, ...]]
"""``run(x)`` gives ``(out, lse, max_scores)``; ``run(x, grad_out, grad_lse, out, lse, wanted)`` the gradients."""


@dataclasses.dataclass(frozen=True)
class FlexCall:
    """A call of kernels with mods.

    Attributes:
        direction: ``"forward"`` or ``"backward"``.
        x: Its operands, mods and lists.
        with_max_scores: Whether a forward gives these.
        wanted: Of each captured tensor of ``score_mod``, whether a backward gives its gradient.
        lse_grad: Whether a backward is given one of lse.
    """

    direction: str
    x: FlexInputs
    with_max_scores: bool = False
    wanted: Sequence[bool] = ()
    lse_grad: bool = False


def _blocks(x: FlexInputs) -> tuple[int, int]:
    """Queries and keys of a block, or of what is a multiple of all tiles where there are no lists."""
    return (_TILE, _TILE) if x.blocks is None else x.blocks.sizes


def _short(length: int, ragged: int, whole: int, block: int) -> int:
    """A length like another: of whole blocks if that one is."""
    return min(length, ragged if length % block else max(whole // block, 1) * block)


def _is_aligned(x: FlexInputs) -> bool:
    return all(map(suits_bulk_copies, (x.q, x.k, x.v)))


def features_of(call: FlexCall) -> str:
    """What decides a kernel's code and whether it is right, as a line of words: everything but how large a call is."""
    x = call.x
    group = x.q.shape[1] // x.k.shape[1]
    words = ["flex", call.direction, target_of(x.q.device), dtype_name(x.q.dtype), f"D{x.q.shape[3]}/{x.v.shape[3]}"]
    for what, mod in (("score", x.score_mod), ("mask", x.mask_mod)):
        if mod is not None:
            words.append(f"{what}-{_hash_of(mod)}")
    if x.blocks is not None:
        words.append(f"blocks{x.blocks.sizes[0]}x{x.blocks.sizes[1]}{'' if x.blocks.full_count is None else '-full'}")
    whole_q, whole_kv = (
        length % block == 0 for length, block in zip((x.q.shape[2], x.k.shape[2]), _blocks(x), strict=True)
    )
    more = {
        f"group{group}": group > 1,
        "whole-q": whole_q,
        "whole-kv": whole_kv,
        "one-key": x.k.shape[2] == 1,
        "keys-of-one": x.k.shape[0] < x.q.shape[0],
        "unaligned": not _is_aligned(x),
        "scale<0": x.scale < 0.0,
        "scale-0": x.scale == 0.0,
        "max-scores": call.with_max_scores,
        f"learned{''.join(str(int(want)) for want in call.wanted)}": any(call.wanted),
        "lse-grad": call.lse_grad,
    }
    return " ".join([*words, *(word for word, holds in more.items() if holds)])


def _hash_of(mod: Mod) -> str:
    kinds = (f"{dtype_name(one.dtype)}:{one.dim()}" for one in mod.captured)
    return _hashed(mod.program.text, *kinds, str(len(mod.numbers)))


_hashed = functools.lru_cache(maxsize=1024)(trust.hashed)


def small(x: FlexInputs) -> FlexInputs:
    """A corner of a call, with operands that are drawn: normal values, in ``[B, S, H, D]`` order in memory."""
    generator = torch.Generator(device=x.q.device).manual_seed(0)
    shift = 0 if _is_aligned(x) else 1
    group, kv_heads = x.q.shape[1] // x.k.shape[1], min(x.k.shape[1], 2)
    batch = min(x.q.shape[0], 2)
    q_len = _short(x.q.shape[2], *_Q_LENS, _blocks(x)[0])
    kv_len = _short(x.k.shape[2], *_KV_LENS, _blocks(x)[1])

    def operand(of: Tensor, heads: int, length: int) -> Tensor:
        shape = (min(of.shape[0], batch), length, heads, of.shape[3] + shift)
        drawn = torch.randn(shape, generator=generator, device=of.device, dtype=torch.float32)
        return drawn.to(of.dtype)[..., shift:].transpose(1, 2)

    q, k, v = operand(x.q, kv_heads * group, q_len), operand(x.k, kv_heads, kv_len), operand(x.v, kv_heads, kv_len)
    blocks = None if x.blocks is None else cut(x.blocks, x.k.shape[2], q.shape[:2], (q_len, kv_len))
    return FlexInputs(q, k, v, x.scale, x.score_mod, x.mask_mod, blocks)


def failure(call: FlexCall, run: Run) -> str:
    """By how much the results of a call's corner break the accuracy rule, or nothing. Exceptions are the caller's."""
    x = small(call.x)
    exact = dataclasses.replace(x, q=x.q.double(), k=x.k.double(), v=x.v.double())
    with on_device(x.q.device), torch.no_grad():
        for name, factor, *results in (_forward if call.direction == "forward" else _backward)(call, x, exact, run):
            found, right, usual = results
            if found is not None and right is not None and usual is not None:
                verdict = accuracy(found, right, usual, factor=factor, name=name)
                if not verdict.passed:
                    return str(verdict)
    return ""


_Compared = tuple[str, float, Tensor | None, Tensor | None, Tensor | None]
"""A result's name, its factor in the rule, what was found, what is right, and what its own precision gives."""


def _forward(call: FlexCall, x: FlexInputs, exact: FlexInputs, run: Run) -> Iterator[_Compared]:
    right, usual = flex_blockwise.forward(exact), flex_blockwise.forward(x, held=x.q.dtype)
    leave_nan(x.q.device)
    found = run(x)
    for place, name in enumerate(("out", "lse", "max_scores") if call.with_max_scores else ("out", "lse")):
        yield name, OUTPUT_FACTOR, found[place], right[place], usual[place]


def _backward(call: FlexCall, x: FlexInputs, exact: FlexInputs, run: Run) -> Iterator[_Compared]:
    generator = torch.Generator(device=x.q.device).manual_seed(1)
    out, lse, _ = flex_blockwise.forward(exact)
    grad_out = torch.empty_like(out, dtype=x.q.dtype).normal_(generator=generator)
    grad_lse = torch.empty_like(lse, dtype=x.dtype).normal_(generator=generator) if call.lse_grad else None
    rounded, wanted = empty_like_order(x.q, x.v.shape[3]).copy_(out), call.wanted
    right = _flat(flex_blockwise.backward(exact, grad_out, grad_lse, lse, wanted))
    usual = _flat(flex_blockwise.backward(x, grad_out, grad_lse, lse, wanted, held_as=rounded))
    leave_nan(x.q.device)
    found = _flat(run(x, grad_out, grad_lse, rounded, lse.to(x.dtype), wanted))
    for place, name in enumerate(("dq", "dk", "dv", *(f"captured tensor {i}" for i in range(len(wanted))))):
        yield name, GRADIENT_FACTOR, found[place], right[place], usual[place]


def _flat(grads: Sequence[Any]) -> tuple[Tensor | None, ...]:
    """Gradients of operands and of captured tensors in a row."""
    return (*grads[:3], *grads[3])


def recalled(call: FlexCall, tunable: Tunable) -> str | None:
    """What is known of kernels without a check: what is wrong, or nothing; None where nobody vouches for them."""
    target = target_of(call.x.q.device)
    return "" if trust.passed_tests(target) else trust.recalled_of(target, features_of(call), tunable)


def why_distrusted(call: FlexCall, tunable: Tunable, run: Run, *, capturing: Callable[[], bool]) -> str:
    """What is wrong with kernels for a call, or nothing; checks them where nobody has.

    Args:
        call: It.
        tunable: The kernels' backend and config.
        run: Runs them on a call.
        capturing: Whether a CUDA graph is being captured.

    Raises:
        NotCompiled: They would have to be checked, while a CUDA graph is being captured.
        UnsupportedProblem: They do not take its mods.
    """
    known = recalled(call, tunable)
    if known is not None:
        return known
    device, features = call.x.q.device, features_of(call)

    def checked() -> str:
        found, raised = trust.judged(functools.partial(failure, call, run), refusal=(UnsupportedProblem,))
        if not raised:
            trust.keep_of(target_of(device), features, tunable, found)
        return found

    def check() -> str:
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()  # the check reads what was captured, on another stream
        return trust.in_a_thread(checked)

    return trust.settled(lambda: recalled(call, tunable), check, (features, tunable), capturing=capturing)
