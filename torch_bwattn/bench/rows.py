"""The measured problems: which shapes, how many floating-point operations each takes, and random inputs for it.

A row is named like the tables of the README, ``B4H32/8S4096D128``: batch, query heads / key-value heads, length, head
width. Tensors lie in memory as batch, length, heads, width and are passed as ``[B, H, S, D]`` views, which is what the
projection of a transformer layer gives.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import re
from collections.abc import Iterable, Sequence

import torch

FORWARD = "forward"
BACKWARD = "backward"
DIRECTIONS = (FORWARD, BACKWARD)

#: The backward runs five matrix products where the forward runs two.
BACKWARD_OVER_FORWARD = 2.5

_NAME = re.compile(r"B(\d+)H(\d+)(?:/(\d+))?S(\d+)D(\d+)")


@dataclasses.dataclass(frozen=True)
class Row:
    """One attention problem that is timed forward, backward or both.

    Attributes:
        batch: Number of sequences.
        heads: Number of query heads.
        kv_heads: Number of key and value heads; divides ``heads``.
        length: Tokens of queries and of keys.
        head_dim: Width of queries, keys and values.
        causal: Whether query i sees only keys j <= i.
        dtype: Name of the element type, as in ``getattr(torch, dtype)``.
    """

    batch: int
    heads: int
    kv_heads: int
    length: int
    head_dim: int
    causal: bool
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        for field in ("batch", "heads", "kv_heads", "length", "head_dim"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field}: expected a positive number, got {getattr(self, field)}")
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads: expected a divisor of heads={self.heads}, got {self.kv_heads}")

    @property
    def shape(self) -> str:
        """The name of the shape, without the mask: ``B4H32/8S4096D128``."""
        return f"B{self.batch}H{self.heads}/{self.kv_heads}S{self.length}D{self.head_dim}"

    @property
    def name(self) -> str:
        """The name of the row: the shape, and ``causal`` if it is."""
        return f"{self.shape} causal" if self.causal else self.shape

    @property
    def gqa(self) -> bool:
        """Whether several query heads share one key-value head."""
        return self.heads != self.kv_heads

    def flops(self, direction: str) -> float:
        """Floating-point operations of one call: 4 B H Sq Skv D forward, half of it when causal, 2.5 times backward."""
        forward = 4.0 * self.batch * self.heads * self.length * self.length * self.head_dim
        if self.causal:
            forward /= 2
        return forward * BACKWARD_OVER_FORWARD if direction == BACKWARD else forward

    def tflops(self, direction: str, ms: float) -> float:
        """TFLOP/s of a call that took ``ms`` milliseconds."""
        return self.flops(direction) / ms * 1e-9


def parse_shape(text: str) -> Row:
    """Reads a shape name such as ``B4H32/8S4096D128`` (``B4H32S4096D128`` when all heads have keys of their own).

    Raises:
        ValueError: ``text`` is no such name.
    """
    match = _NAME.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"shape: expected a name like B4H32/8S4096D128, got {text!r}")
    batch, heads, kv_heads, length, head_dim = match.groups()
    return Row(int(batch), int(heads), int(kv_heads or heads), int(length), int(head_dim), causal=False)


#: The rows that every release is measured on, in the order of the tables.
SHAPES = (
    "B4H32/32S8192D64",
    "B4H32/32S8192D128",
    "B1H16/16S16384D128",
    "B2H16/16S8192D256",
    "B4H32/8S4096D128",
    "B32H16/16S512D128",
)


def select_rows(
    patterns: Iterable[str] | None = None,
    *,
    causal: Sequence[bool] = (False, True),
    dtype: str = "bfloat16",
) -> list[Row]:
    """The rows of the table, or those that ``patterns`` name.

    Args:
        patterns: Shape names (any shape, of the table or not) and shell patterns over the table's names (``*D64``).
            None takes the whole table.
        causal: Which masks each shape is measured with.
        dtype: Name of the element type.

    Raises:
        ValueError: A pattern is neither a shape's name nor matches one.
    """
    names: list[str] = []
    for pattern in SHAPES if patterns is None else patterns:
        matched = fnmatch.filter(SHAPES, pattern) or [parse_shape(pattern).shape]
        names += [name for name in matched if name not in names]
    return [dataclasses.replace(parse_shape(name), causal=mask, dtype=dtype) for name in names for mask in causal]


@dataclasses.dataclass
class Inputs:
    """Random inputs of one row; all four are ``[B, H, S, D]`` views of B, S, H, D memory."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    grad_out: torch.Tensor

    @property
    def qkv(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The three operands of a call."""
        return self.query, self.key, self.value

    def with_grad(self) -> Inputs:
        """The same storage as leaves that require grad."""
        query, key, value = (tensor.detach().requires_grad_() for tensor in self.qkv)
        return Inputs(query, key, value, self.grad_out)


def make_inputs(row: Row, device: torch.device | str, seed: int = 0) -> Inputs:
    """Standard normal inputs of ``row`` on ``device``; the same ``seed`` gives the same values."""
    generator = torch.Generator(device=device).manual_seed(seed)
    dtype = getattr(torch, row.dtype)

    def draw(heads: int) -> torch.Tensor:
        size = (row.batch, row.length, heads, row.head_dim)
        return torch.randn(size, device=device, dtype=dtype, generator=generator).transpose(1, 2)

    return Inputs(draw(row.heads), draw(row.kv_heads), draw(row.kv_heads), draw(row.heads))
