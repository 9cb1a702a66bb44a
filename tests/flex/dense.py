"""A dense statement of ``flex_attention`` in float64, and the comparison of a function with it, gradients included."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_mask
from torch.overrides import TorchFunctionMode

from torch_bwattn.flex.attention import flex_attention


class _Index(TorchFunctionMode):
    """Indexing by scalars under vmap, also of rows, whose gradients PyTorch's own ``mod_index`` has not."""

    def __torch_function__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__getitem__:
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(isinstance(one, Tensor) for one in index) and all(isinstance(one, (Tensor, int)) for one in index):
                narrow = args[0].is_floating_point() and args[0].itemsize == 2  # gradients add up in it
                table = args[0].float() if narrow else args[0]
                return torch.ops.aten.index.Tensor(table, [torch.as_tensor(one) for one in index])
        return func(*args, **(kwargs or {}))


def operands(
    heads: int = 2, q_len: int = 64, kv_len: int | None = None, *, batch: int = 2, kv_heads: int | None = None,
    kv_batch: int | None = None, width: int = 8, v_width: int | None = None, dtype: torch.dtype = torch.float32,
    seed: int = 0, device: torch.device | str = "cpu",
) -> list[Tensor]:  # fmt: skip
    """Query, key and value that require gradients, of the same values on each device."""
    generator = torch.Generator().manual_seed(seed)
    kv_len = q_len if kv_len is None else kv_len
    outer = kv_batch or batch, kv_heads or heads, kv_len
    shapes = (batch, heads, q_len, width), (*outer, width), (*outer, v_width or width)
    drawn = (torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu") for shape in shapes)
    return [one.to(device, dtype).requires_grad_() for one in drawn]


def shown_by(mask_mod: Callable[..., Any], query: Tensor, key: Tensor) -> Tensor:
    """What a mask shows, [B, H, L, S]."""
    return create_mask(mask_mod, *query.shape[:3], key.shape[2], device=query.device)


def _modified(raw: Tensor, score_mod: Callable[..., Any], hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Scores after a mod, and what is hidden then.

    What the mod hides it is not differentiated at: there a product with its -inf would make autograd's zeros NaN.
    """

    def modified(at: Sequence[Tensor]) -> Tensor:
        if not len(at[0]):
            return raw[at]
        with _Index():
            found: Tensor = torch.vmap(score_mod)(raw[at], *at).double()
        return found

    at = (~hidden).nonzero(as_tuple=True)
    with torch.no_grad():
        hidden = hidden.index_put(at, modified(at) == -torch.inf)
    at = (~hidden).nonzero(as_tuple=True)
    return raw.index_put(at, modified(at)), hidden


def dense(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Callable[..., Any] | None = None,
    shown: Tensor | None = None, scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(out, lse, max_scores) in float64."""
    (batch, heads, _, width), kv_len = query.shape, key.shape[2]
    scale = 1.0 / math.sqrt(width) if scale is None else scale
    group = heads // key.shape[1]
    k, v = (one.double().repeat_interleave(group, 1).expand(batch, -1, -1, -1) for one in (key, value))
    s = scale * (query.double() @ k.mT)
    hidden = torch.zeros_like(s, dtype=torch.bool) if shown is None else ~shown
    if score_mod is not None:
        s, hidden = _modified(s, score_mod, hidden.expand_as(s))
    s = s.masked_fill(hidden, -torch.inf)
    most = s.amax(-1) if kv_len else s.new_full(s.shape[:3], -torch.inf)
    top = most.detach().nan_to_num(neginf=0.0).unsqueeze(-1)
    e = torch.where(hidden, 0.0, (s.masked_fill(hidden, 0.0) - top).exp())
    total = e.sum(-1, keepdim=True)
    dead = total == 0.0
    total = total.masked_fill(dead, 1.0)
    return (e / total) @ v, (top + total.log()).masked_fill(dead, -torch.inf).squeeze(-1), most


def close(found: Tensor, wanted: Tensor, tolerance: float, what: str) -> None:
    """Compares up to a share of the largest value."""
    finite = wanted.detach().nan_to_num(neginf=0.0)
    most = float(finite.abs().max()) if finite.numel() else 0.0
    torch.testing.assert_close(
        found.detach().double(), wanted.detach().double(), rtol=tolerance, atol=tolerance * max(1.0, most),
        msg=lambda text: f"{what}: {text}",
    )  # fmt: skip


def _gradients(
    results: Sequence[Tensor], by: Sequence[Tensor], leaves: Sequence[Tensor], *, retain: bool = False
) -> Sequence[Tensor]:
    some = [(one, grad) for one, grad in zip(results, by, strict=True) if one.requires_grad]
    if not some:
        return [torch.zeros_like(leaf) for leaf in leaves]
    return torch.autograd.grad(
        [one for one, _ in some], leaves, [grad for _, grad in some], retain_graph=retain, allow_unused=True,
        materialize_grads=True,
    )  # fmt: skip


def check(
    q_k_v: Sequence[Tensor], score_mod: Callable[..., Any] | None = None, block_mask: BlockMask | None = None,
    captured: Sequence[Tensor] = (), *, shown: Tensor | None = None, tolerance: float = 2e-5,
    attend: Callable[..., Any] = flex_attention, **options: Any,
) -> None:  # fmt: skip
    """Output, lse, and gradients of operands and captured tensors, against the dense statement."""
    query, key, value = q_k_v
    if shown is None and block_mask is not None:
        shown = shown_by(block_mask.mask_mod, query, key)
    out, lse = attend(query, key, value, score_mod, block_mask, return_lse=True, **options)
    wanted_out, wanted_lse, _ = dense(query, key, value, score_mod, shown, options.get("scale"))
    assert out.dtype == query.dtype
    assert lse.dtype == (torch.float64 if query.dtype == torch.float64 else torch.float32)
    close(out, wanted_out, tolerance, "out")
    close(lse, wanted_lse, tolerance, "lse")
    leaves = [*(one for one in q_k_v if one.requires_grad), *captured]
    if not leaves:
        return
    generator = torch.Generator().manual_seed(7)
    by_out, by_lse = (
        torch.randn(one.shape, generator=generator, dtype=torch.float64, device="cpu").to(one.device)
        for one in (out, lse)
    )
    by_out = by_out.to(out.dtype)
    by_lse = by_lse.masked_fill(wanted_lse == -torch.inf, 0.0)
    alive = wanted_lse.masked_fill(wanted_lse == -torch.inf, 0.0)
    wanted = _gradients((wanted_out, alive), (by_out.double(), by_lse), leaves, retain=True)
    grads = _gradients((out, lse), (by_out, by_lse.to(lse.dtype)), leaves)
    names = ["query", "key", "value"] if len(leaves) - len(captured) == 3 else []
    names += [f"leaf {number}" for number in range(len(leaves) - len(names))]
    for name, one, expected in zip(names, grads, wanted, strict=True):
        close(one, expected, tolerance, f"gradient of {name}")
