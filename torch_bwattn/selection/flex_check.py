"""Whether kernels with mods may run a call: as :mod:`.trust` says of those without.

The code of such a kernel is made of the call's own mods, so that only what passed the accuracy rule with them is
trusted, but on targets where the package's tests passed with the versions that are installed. The check is of a corner
of the call: its mods, what they captured and its lists, at the first positions alone, with operands that are drawn. It
says nothing of what mods do elsewhere, which PyTorch's operations and the kernel take from one program.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
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
from .drawn import CHECKED_KV_LEN, CHECKED_Q_LEN, leave_nan, on_device, operand
from .tables import Tunable

_Q_LENS, _KV_LENS = (CHECKED_Q_LEN, 384), (CHECKED_KV_LEN, 640)
"""Of the check: no multiple of any tile, as without mods, or about where there are some whole ones."""
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
    aligned = _is_aligned(x)
    group, kv_heads = x.q.shape[1] // x.k.shape[1], min(x.k.shape[1], 2)
    batch = min(x.q.shape[0], 2)
    q_len = _short(x.q.shape[2], *_Q_LENS, _blocks(x)[0])
    kv_len = _short(x.k.shape[2], *_KV_LENS, _blocks(x)[1])

    def drawn(of: Tensor, heads: int, length: int) -> Tensor:
        sizes = (min(of.shape[0], batch), heads, length, of.shape[3])
        return operand(generator, sizes, of.dtype, aligned=aligned)

    q, k, v = drawn(x.q, kv_heads * group, q_len), drawn(x.k, kv_heads, kv_len), drawn(x.v, kv_heads, kv_len)
    blocks = None if x.blocks is None else cut(x.blocks, x.k.shape[2], q.shape[:2], (q_len, kv_len))
    return FlexInputs(q, k, v, x.scale, x.score_mod, x.mask_mod, blocks)


@dataclasses.dataclass(frozen=True)
class Drawing:
    """A call's corner, and what is right.

    Attributes:
        x: The corner.
        more: What a backward is given beside.
        names: Of the results.
        factor: How many times the error of ``usual`` the accuracy rule allows.
        right: In float64; None for what is not asked for.
        usual: What the operands' own precision gives.
    """

    x: FlexInputs
    more: tuple[Any, ...]
    names: Sequence[str]
    factor: float
    right: Sequence[Tensor | None]
    usual: Sequence[Tensor | None]


def draw(call: FlexCall) -> Drawing:
    """What kernels are checked on for a call: :func:`small` of it."""
    x = small(call.x)
    exact = dataclasses.replace(x, q=x.q.double(), k=x.k.double(), v=x.v.double())
    with on_device(x.q.device), torch.no_grad():
        right = flex_blockwise.forward(exact)
        if call.direction == "backward":
            return _backward(call, x, exact, *right[:2])
        names = ("out", "lse", "max_scores") if call.with_max_scores else ("out", "lse")
        return Drawing(x, (), names, OUTPUT_FACTOR, right, flex_blockwise.forward(x, held=x.q.dtype))


def _backward(call: FlexCall, x: FlexInputs, exact: FlexInputs, out: Tensor, lse: Tensor) -> Drawing:
    generator = torch.Generator(device=x.q.device).manual_seed(1)
    grad_out = torch.empty_like(out, dtype=x.q.dtype).normal_(generator=generator)
    grad_lse = torch.empty_like(lse, dtype=x.dtype).normal_(generator=generator) if call.lse_grad else None
    rounded, wanted = empty_like_order(x.q, x.v.shape[3]).copy_(out), call.wanted
    right = _flat(flex_blockwise.backward(exact, grad_out, grad_lse, lse, wanted))
    usual = _flat(flex_blockwise.backward(x, grad_out, grad_lse, lse, wanted, held_as=rounded))
    names = ("dq", "dk", "dv", *(f"captured tensor {place}" for place in range(len(wanted))))
    more = (grad_out, grad_lse, rounded, lse.to(x.dtype), wanted)
    return Drawing(x, more, names, GRADIENT_FACTOR, right, usual)


def _flat(grads: Sequence[Any]) -> tuple[Tensor | None, ...]:
    """Gradients of operands and of captured tensors in a row."""
    return (*grads[:3], *grads[3])


def failure(drawing: Drawing, run: Run) -> str:
    """By how much results break the accuracy rule, or nothing. The kernels' exceptions are the caller's."""
    x = drawing.x
    with on_device(x.q.device), torch.no_grad():
        leave_nan(x.q.device)
        results = run(x, *drawing.more)
        found = _flat(results) if drawing.more else results
        for name, one, right, usual in zip(drawing.names, found, drawing.right, drawing.usual, strict=False):
            if one is not None and right is not None and usual is not None:
                verdict = accuracy(one, right, usual, factor=drawing.factor, name=name)
                if not verdict.passed:
                    return str(verdict)
    return ""


def is_vouched_for(x: FlexInputs) -> bool:
    """Whether no kernels need a check where a call is."""
    return trust.passed_tests(target_of(x.q.device))


def recalled(call: FlexCall, tunable: Tunable) -> str | None:
    """What is known of kernels without a check: what is wrong, or nothing; None where nobody vouches for them."""
    if is_vouched_for(call.x):
        return ""
    return trust.recalled_of(target_of(call.x.q.device), features_of(call), tunable)


def why_distrusted(call: FlexCall, tunable: Tunable, run: Run, *, capturing: Callable[[], bool]) -> str:
    """What is wrong with kernels that nobody vouches for, or nothing; checks them where nobody has.

    Args:
        call: It.
        tunable: The kernels' backend and config.
        run: Runs them on a call.
        capturing: Whether a CUDA graph is being captured.

    Raises:
        NotCompiled: They would have to be checked, while a CUDA graph is being captured.
        UnsupportedProblem: They do not take its mods.
    """
    device, target, features = call.x.q.device, target_of(call.x.q.device), features_of(call)

    def check() -> str:
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()  # the check reads what was captured, on another stream
        return trust.checked(
            target,
            (features, tunable),
            lambda: draw(call),
            lambda drawing: failure(drawing, run),
            refusal=(UnsupportedProblem,),
        )

    recall = functools.partial(trust.recalled_of, target, features, tunable)
    return trust.settled(recall, check, (features, tunable), capturing=capturing)
