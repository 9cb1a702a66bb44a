"""One call, described: validation, normalisation to 4-D, and the frozen :class:`Problem` that backends judge.

``normalize`` is the only place where arguments are checked, for every entry point (the ops, ``torch_bwattn.sdpa``,
the patch, ``explain``). It works on real, fake and functorch tensors alike, so eager and compiled calls raise the
same text.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .errors import expected
from .layout import IntLike, collapsed
from .target import target_of

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
ALIGNMENTS = ("top_left", "bottom_right")

Window = tuple[int, int]
"""(left, right): how many keys a query sees on either side of its diagonal one; -1 for all of them."""


def dtype_name(dtype: torch.dtype) -> str:
    """``"bfloat16"`` for ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")


class Call(NamedTuple):
    """A validated call in the primitive's terms: 4-D views, and how to give the result the caller's shape again."""

    q: Tensor  # [B, Hq, Sq, D]
    k: Tensor  # [B, Hkv, Skv, D]
    v: Tensor  # [B, Hkv, Skv, Dv]
    mask: Tensor | None  # [B|1, Hq|1, Sq|1, Skv|1]
    scale: float
    lead: tuple[IntLike, ...] | None  # the caller's leading dimensions; None when the call was 4-D already
    window: Window | None = None

    def restore(self, out: Tensor) -> Tensor:
        """``[B, Hq, …]`` back to the caller's leading dimensions."""
        return out if self.lead is None else out.reshape((*self.lead, *out.shape[2:]))


def check_flags(is_causal: object, enable_gqa: object) -> None:
    """Refuse ints and None as flags, as ``F.scaled_dot_product_attention`` does and a dispatcher schema does not."""
    for name, value in (("is_causal", is_causal), ("enable_gqa", enable_gqa)):
        if not isinstance(value, bool):
            raise TypeError(expected(name, "a bool", f"{value!r} ({type(value).__name__})"))


def check_tensors(query: object, key: object, value: object, attn_mask: object, sink: object = None) -> None:
    """Refuse anything but dense tensors (and None as the mask or the sink) with the argument's name."""
    operands: tuple[tuple[str, object], ...] = (
        ("query", query), ("key", key), ("value", value), ("attn_mask", attn_mask),
    )  # fmt: skip
    if sink is not None:
        operands = (*operands, ("sink", sink))
    for name, tensor in operands:
        if tensor is None and name == "attn_mask":
            continue
        if not isinstance(tensor, Tensor):
            wanted = "a Tensor or None" if name in ("attn_mask", "sink") else "a Tensor"
            raise TypeError(expected(name, wanted, type(tensor).__name__))
        if tensor.layout != torch.strided or tensor.is_nested:
            raise TypeError(expected(name, "a dense (strided) tensor", "nested" if tensor.is_nested else tensor.layout))


def resolve_bias(
    query: Tensor, key: Tensor, attn_mask: Tensor | None, is_causal: bool, causal_alignment: str
) -> tuple[Tensor | None, bool, str]:
    """``(attn_mask, is_causal, causal_alignment)`` with a ``CausalBias`` mask replaced by the causality it names.

    Raises:
        ValueError: a bias together with ``is_causal``, or a lower-right bias made for other lengths.
    """
    if attn_mask is None or type(attn_mask) is Tensor:
        return attn_mask, is_causal, causal_alignment
    from torch.nn.attention.bias import CausalBias, CausalVariant  # here, not above: it imports all of Dynamo

    if not isinstance(attn_mask, CausalBias):
        return attn_mask, is_causal, causal_alignment
    if is_causal:
        raise ValueError(expected("is_causal", "False with a CausalBias as attn_mask", is_causal))
    made_for = (attn_mask.seq_len_q, attn_mask.seq_len_kv)
    if attn_mask.variant != CausalVariant.LOWER_RIGHT or made_for[0] == made_for[1]:
        return None, True, "top_left"
    if made_for != (query.shape[-2], key.shape[-2]):
        sizes = f"sizes ({query.shape[-2]}, {key.shape[-2]}), the query's and key's lengths"
        raise ValueError(expected("attn_mask", sizes, f"CausalBias of {made_for}"))
    return None, True, "bottom_right"


def _check_no_bias(attn_mask: Tensor | None) -> None:
    """Refuse a ``CausalBias`` at the operators: its own memory holds nothing."""
    module = sys.modules.get("torch.nn.attention.bias")
    if module is not None and isinstance(attn_mask, module.CausalBias):
        wanted = "a Tensor or None (torch_bwattn.sdpa and the patch take a CausalBias)"
        raise TypeError(expected("attn_mask", wanted, "CausalBias"))


def resolve_window(window_size: Sequence[int] | None, is_causal: bool) -> Window | None:
    """The window that a call means, None where it hides nothing that causality does not hide already.

    Raises:
        TypeError: not None or a pair of ints.
        ValueError: not two of them, or one below -1.
    """
    if window_size is None:
        return None
    wanted = "None or two ints (left, right), each -1 (unlimited) or more"
    if not isinstance(window_size, (tuple, list)):
        raise TypeError(expected("window_size", wanted, f"{window_size!r} ({type(window_size).__name__})"))
    if any(not isinstance(side, int) or isinstance(side, bool) for side in window_size):
        raise TypeError(expected("window_size", wanted, tuple(window_size)))
    if len(window_size) != 2 or min(window_size) < -1:
        raise ValueError(expected("window_size", wanted, tuple(window_size)))
    left, right = window_size
    if is_causal:
        return None if left == -1 else (left, 0)
    return None if left == right == -1 else (left, right)


def normalize(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    causal_alignment: str,
    window_size: Sequence[int] | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
) -> Call:
    """Validate one call and view its tensors as the 4-D primitive takes them.

    Args:
        query: ``[..., Sq, D]``, rank 2 or more, one of :data:`DTYPES`.
        key: ``[..., Skv, D]``; leading dimensions broadcast against the query's.
        value: ``[..., Skv, Dv]``; likewise.
        attn_mask: bool (True keeps), the query's dtype or float32; broadcasts to ``[..., Sq, Skv]``.
        dropout_p: in [0, 1].
        is_causal: not together with ``attn_mask``.
        scale: None means ``1 / sqrt(D)``.
        enable_gqa: the query's head count is a multiple of the key's and of the value's.
        causal_alignment: ``"top_left"`` or ``"bottom_right"``; the latter needs ``is_causal`` or a window.
        window_size: None or ``(left, right)``, each -1 or more.
        softcap: None or a finite number above 0.
        sink: None or ``[Hq]``, the query's dtype or float32.

    Returns:
        Views (an expanded operand of rank above 4 may be copied, at most its own broadcast size, never Sq x Skv).

    Raises:
        TypeError: a dtype that is not supported, or that differs between operands.
        ValueError: any other misuse.
    """
    check_tensors(query, key, value, attn_mask, sink)
    _check_no_bias(attn_mask)
    _check_operands(query, key, value)
    window = resolve_window(window_size, is_causal)
    _check_options(attn_mask is not None, dropout_p, is_causal, causal_alignment, window_size is not None)
    _check_softcap(softcap)
    head_dim = query.shape[-1]
    if scale is None:
        scale = 1.0 / math.sqrt(head_dim) if head_dim > 0 else 1.0
    if enable_gqa:
        key, value = _group_heads(query, key, value)
    lead = _lead_shape(query, key, value, enable_gqa)
    mask = None if attn_mask is None else _check_mask(attn_mask, query, key, enable_gqa)
    if sink is not None:
        _check_sink(sink, query, lead[-1] if lead else 1)
    if query.dim() == key.dim() == value.dim() == 4 and query.shape[:2] == lead:
        same_batch = key.shape[0] == value.shape[0] == query.shape[0]
        if same_batch and key.shape[1] == value.shape[1] and (enable_gqa or key.shape[1] in (1, query.shape[1])):
            return Call(query, key, value, _mask_4d(mask, lead, query.shape[0]), scale, None, window)
    batch: IntLike = 1
    for size in lead[:-1]:
        batch = batch * size
    heads = lead[-1] if lead else 1
    kv_heads = heads
    if lead and key.dim() > 2 and value.dim() > 2 and key.shape[-3] == value.shape[-3]:
        kv_heads = key.shape[-3]  # fewer than the query's: grouped, or one head for all; never repeated in memory

    def flat(tensor: Tensor, count: IntLike) -> Tensor:
        sizes = (*lead[:-1], count) if lead else ()
        return tensor.expand(*sizes, *tensor.shape[-2:]).reshape(batch, count, *tensor.shape[-2:])

    views = flat(query, heads), flat(key, kv_heads), flat(value, kv_heads)
    return Call(*views, _mask_4d(mask, lead, batch), scale, lead, window)


def _check_operands(query: Tensor, key: Tensor, value: Tensor) -> None:
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() < 2:
            raise ValueError(expected(name, "at least 2 dimensions (..., sequence, width)", f"{tensor.dim()}"))
        if tensor.dtype not in DTYPES:
            raise TypeError(expected(name, "dtype bfloat16, float16, float32 or float64", tensor.dtype))
        if tensor.dtype != query.dtype:
            raise TypeError(expected(name, f"dtype {query.dtype}, the query's", tensor.dtype))
        if tensor.device != query.device:
            raise ValueError(expected(name, f"device {query.device}, the query's", tensor.device))
    if key.shape[-1] != query.shape[-1]:
        raise ValueError(expected("key", f"last size {query.shape[-1]}, the query's width", key.shape[-1]))
    if value.shape[-2] != key.shape[-2]:
        raise ValueError(
            expected("value", f"sequence length {key.shape[-2]}, the key's", f"sequence length {value.shape[-2]}")
        )


def _check_options(masked: bool, dropout_p: float, is_causal: bool, causal_alignment: str, windowed: bool) -> None:
    if not 0.0 <= dropout_p <= 1.0:
        raise ValueError(expected("dropout_p", "a probability in [0, 1]", dropout_p))
    if masked and is_causal:
        raise ValueError(expected("attn_mask", "None when is_causal=True", "both; fold causality into the mask"))
    if causal_alignment not in ALIGNMENTS:
        raise ValueError(expected("causal_alignment", "'top_left' or 'bottom_right'", repr(causal_alignment)))
    if causal_alignment == "bottom_right" and not (is_causal or windowed):
        wanted = "'top_left' unless is_causal=True or with a window_size"
        raise ValueError(expected("causal_alignment", wanted, repr(causal_alignment)))


def _check_softcap(softcap: float | None) -> None:
    wanted = "None or a finite number above 0"
    if softcap is None:
        return
    if not isinstance(softcap, (int, float)) or isinstance(softcap, bool):
        raise TypeError(expected("softcap", wanted, f"{softcap!r} ({type(softcap).__name__})"))
    if not (math.isfinite(softcap) and softcap > 0.0):
        raise ValueError(expected("softcap", wanted, softcap))


def _check_sink(sink: Tensor, query: Tensor, heads: IntLike) -> None:
    if sink.dtype not in (torch.float32, query.dtype):
        raise TypeError(expected("sink", f"dtype {query.dtype} (the query's) or float32", sink.dtype))
    if sink.device != query.device:
        raise ValueError(expected("sink", f"device {query.device}, the query's", sink.device))
    if sink.dim() != 1 or sink.shape[0] != heads:
        raise ValueError(expected("sink", f"shape ({heads},), one logit a query head", tuple(sink.shape)))


def _group_heads(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Check grouped-query head counts; a key and value that differ in theirs are brought to the larger one."""
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() < 3:
            raise ValueError(expected(name, "a head dimension (rank 3 or more) with enable_gqa=True", tensor.dim()))
    heads = query.shape[-3]
    for name, tensor in (("key", key), ("value", value)):
        count = tensor.shape[-3]
        if heads != count and (count == 0 or heads % count != 0):
            raise ValueError(expected(name, f"a head count that divides the query's {heads} (enable_gqa)", count))
    most = max(key.shape[-3], value.shape[-3])
    if key.shape[-3] == value.shape[-3]:
        return key, value
    if most % min(key.shape[-3], value.shape[-3]) != 0:
        most = heads
    return _repeat_heads(key, most), _repeat_heads(value, most)


def _repeat_heads(tensor: Tensor, count: IntLike) -> Tensor:
    return tensor if tensor.shape[-3] == count else tensor.repeat_interleave(count // tensor.shape[-3], -3)


def _lead_shape(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> tuple[IntLike, ...]:
    """The broadcast leading dimensions; with grouped queries the query's head count stands for all."""
    lead = list(query.shape[:-2])
    for name, tensor in (("key", key), ("value", value)):
        other = list(tensor.shape[:-2])
        if enable_gqa:
            other[-1] = query.shape[-3]
        if len(other) > len(lead):
            lead = [1] * (len(other) - len(lead)) + lead
        for i in range(1, len(other) + 1):
            if lead[-i] == 1:
                lead[-i] = other[-i]
            elif other[-i] != 1 and other[-i] != lead[-i]:
                raise ValueError(
                    expected(name, f"leading dimensions that broadcast with {tuple(lead)}", tuple(tensor.shape[:-2]))
                )
    return tuple(lead)


def _check_mask(mask: Tensor, query: Tensor, key: Tensor, enable_gqa: bool) -> Tensor:
    if mask.dtype not in (torch.bool, torch.float32, query.dtype):
        raise TypeError(expected("attn_mask", f"dtype bool, {query.dtype} (the query's) or float32", mask.dtype))
    if mask.device != query.device:
        raise ValueError(expected("attn_mask", f"device {query.device}, the query's", mask.device))
    scores = (*_lead_shape(query, key, key, enable_gqa), query.shape[-2], key.shape[-2])
    fits = mask.dim() <= len(scores)
    for i in range(1, mask.dim() + 1):
        fits = fits and (mask.shape[-i] == 1 or mask.shape[-i] == scores[-i])
    if not fits:
        raise ValueError(expected("attn_mask", f"a shape that broadcasts to {scores}", tuple(mask.shape)))
    return mask


def _mask_4d(mask: Tensor | None, lead: tuple[IntLike, ...], batch: IntLike) -> Tensor | None:
    """The mask as ``[B|1, Hq|1, Sq|1, Skv|1]``: a view, unless several batch dimensions are partly broadcast."""
    if mask is None:
        return None
    while mask.dim() < 4:
        mask = mask.unsqueeze(0)
    if mask.dim() == 4 and len(lead) <= 2:
        return mask
    outer = tuple(mask.shape[:-3])
    outer = (1,) * (len(lead) - 1 - len(outer)) + outer
    if all(size == 1 for size in outer):
        return mask.reshape(1, *mask.shape[-3:])
    return mask.expand(*lead[:-1], *mask.shape[-3:]).reshape(batch, *mask.shape[-3:])


@dataclass(frozen=True)
class Problem:
    """One 4-D call as backends and the choice see it: features, sizes and alignment, never tensors.

    Sizes count elements. ``diagonal`` is the offset of the last visible key, of the causal rule or of a window: key j
    is visible to query i when ``j <= i + diagonal``; None where no rule hides later keys. ``low_diagonal`` is that of a
    window's first key: ``j >= i + low_diagonal``; None where no window hides earlier keys. ``mask_sizes`` is the mask's
    shape as it lies in memory: 1 where it is broadcast or expanded.
    """

    target: str
    dtype: torch.dtype
    batch: int
    heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int
    value_dim: int
    scale: float
    diagonal: int | None = None
    low_diagonal: int | None = None
    softcap: float | None = None
    sink_dtype: torch.dtype | None = None
    mask_dtype: torch.dtype | None = None
    mask_sizes: tuple[int, ...] | None = None
    mask_grad: bool = False
    dropout_p: float = 0.0
    unit_last_strides: bool = True
    aligned: bool = True  # base pointers and all outer strides are multiples of 16 bytes
    bulk_copies: bool = True  # both hold for q, k and v, whatever the result and its gradient are like
    wide_index: bool = False  # some tensor reaches past 2^31 - 1 elements from its base
    deterministic: bool = False
    backward: bool = False
    lse_grad: bool = False

    @property
    def empty(self) -> bool:
        """Nothing to attend: some size that a score needs is 0."""
        return 0 in (self.batch, self.heads, self.q_len, self.kv_len, self.value_dim)

    @property
    def sees_one_key(self) -> bool:
        """No row sees more than one key, whether or not there is a sink beside it.

        Then what PyTorch computes has no rounding that counts, and gradients of q and k, without a sink, are exactly
        those of lse.
        """
        most = self.kv_len
        if self.diagonal is not None:
            most = min(most, self.q_len + self.diagonal)  # of the last row
            if self.low_diagonal is not None:
                most = min(most, self.diagonal - self.low_diagonal + 1)
        return most <= 1

    @property
    def input_count(self) -> int:
        """Elements of query, key and value: what a path may take as much memory as."""
        of_keys = self.kv_heads * self.kv_len * (self.head_dim + self.value_dim)
        return self.batch * (self.heads * self.q_len * self.head_dim + of_keys)

    @property
    def mask_rows_apart(self) -> bool:
        """Whether rows of a dense mask begin at multiples of 16 bytes, as TMA needs them."""
        return self.mask_dtype is not None and self.kv_len * self.mask_dtype.itemsize % 16 == 0

    @property
    def score_count(self) -> int:
        """Entries of the full score matrix, which no path may allocate."""
        return self.batch * self.heads * self.q_len * self.kv_len


_INT32_MAX = 2**31 - 1


def describe(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    *,
    scale: float,
    is_causal: bool,
    causal_alignment: str,
    dropout_p: float,
    window: Sequence[int] | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    backward: bool = False,
    mask_grad: bool = False,
    lse_grad: bool = False,
    more: tuple[Tensor, ...] = (),
) -> Problem:
    """The :class:`Problem` of one 4-D call on real tensors; ``more`` are further operands (grad_out, out)."""
    offset = k.shape[2] - q.shape[2] if causal_alignment == "bottom_right" else 0
    diagonal = offset if is_causal else None
    low_diagonal = None
    window = resolve_window(window, is_causal)
    if window is not None:
        # Beyond these ends a diagonal hides all or nothing; within them its sums with positions fit kernels' integers.
        first, last = -q.shape[2], k.shape[2]
        if window[0] >= 0:
            low_diagonal = min(max(offset - window[0], first), last)
        if window[1] >= 0:
            diagonal = min(max(offset + window[1], first), last)
    operands = (q, k, v, *more) if mask is None else (q, k, v, mask, *more)
    return Problem(
        target=target_of(q.device),
        dtype=q.dtype,
        batch=q.shape[0],
        heads=q.shape[1],
        kv_heads=k.shape[1],
        q_len=q.shape[2],
        kv_len=k.shape[2],
        head_dim=q.shape[3],
        value_dim=v.shape[3],
        scale=scale,
        diagonal=diagonal,
        low_diagonal=low_diagonal,
        softcap=softcap,
        sink_dtype=None if sink is None else sink.dtype,
        mask_dtype=None if mask is None else mask.dtype,
        mask_sizes=None if mask is None else tuple(collapsed(mask).shape),
        mask_grad=mask_grad,
        dropout_p=dropout_p,
        unit_last_strides=all(map(_unit_last_stride, (q, k, v, *more))),
        aligned=all(map(_aligned, (q, k, v, *more))),
        bulk_copies=all(map(suits_bulk_copies, (q, k, v))),
        wide_index=any(extent(t) > _INT32_MAX for t in operands) or _broadcast_extent(q, k) > _INT32_MAX,
        deterministic=torch.are_deterministic_algorithms_enabled(),
        backward=backward,
        lse_grad=lse_grad,
    )


def extent(tensor: Tensor) -> int:
    """Elements between the first and the last one a tensor reaches: what an index must be able to hold."""
    return sum((size - 1) * abs(step) for size, step in zip(tensor.shape, tensor.stride(), strict=True) if size > 0)


def _broadcast_extent(q: Tensor, k: Tensor) -> int:
    """The extent of the dense outputs and gradients, whose strides the layout rule fixes."""
    return max(q.numel(), k.numel())


def suits_bulk_copies(tensor: Tensor) -> bool:
    """Whether a 4-D tensor's rows are contiguous and start at multiples of 16 bytes, as TMA and wide loads need."""
    return _unit_last_stride(tensor) and _aligned(tensor)


def _unit_last_stride(tensor: Tensor) -> bool:
    return tensor.stride(3) == 1 or tensor.shape[3] <= 1


def _aligned(tensor: Tensor) -> bool:
    per_16_bytes = max(1, 16 // tensor.element_size())
    outer = all(
        step % per_16_bytes == 0 or size <= 1 for size, step in zip(tensor.shape[:3], tensor.stride()[:3], strict=True)
    )
    return outer and tensor.data_ptr() % 16 == 0
