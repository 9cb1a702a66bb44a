"""The implementations that are compared: this package's op and the public ones beside it.

Each provider is opened for one row and then called with ``[B, H, S, D]`` views; it compiles at its first call. A
provider that is missing says why, and a record keeps the reason.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from .rows import BACKWARD, Inputs, Row

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

OURS = "bwattn"


def _with_arguments(call: Any, row: Row) -> Attention:
    """``call`` with what ``row`` needs; nothing is wrapped around it otherwise, so that host costs are its own."""
    bound: Attention = functools.partial(call, **row.arguments) if row.arguments else call
    return bound


class Provider:
    """One implementation of attention.

    Attributes:
        name: Name in records.
        title: Name in tables.
        ours: Whether it is this package's.
    """

    name: str = ""
    title: str = ""
    ours: bool = False

    def missing(self) -> str | None:
        """Why this implementation cannot run here, or None."""
        return None

    def open(self, row: Row) -> Attention:
        """A callable for the tensors of ``row``; compiles nothing until it is called.

        Raises:
            Exception: Whatever the implementation raises when it refuses ``row``.
        """
        raise NotImplementedError

    def active(self) -> contextlib.AbstractContextManager[object]:
        """The context in which every call of the opened callable runs."""
        return contextlib.nullcontext()

    def backend_used(self) -> str | None:
        """The backend that served the calls since the last question, where that can be told."""
        return None

    def config(self, row: Row, inputs: Inputs, direction: str) -> str | None:
        """The kernel config that serves ``row``, where that can be told. Called inside `active`."""


class OpProvider(Provider):
    """``torch.ops.bwattn.sdpa``.

    Args:
        backend: The backend to pin, or ``"auto"`` to leave the choice to the package.
        function: Call ``torch_bwattn.sdpa``, the documented function, instead of the op itself.
    """

    ours = True

    def __init__(self, backend: str = "auto", *, function: bool = False) -> None:
        self._backend = None if backend == "auto" else backend
        self._function = function
        self.name = f"{OURS}.{backend}" + (".function" if function else "")
        self.title = f"bwattn {backend}" + (" (torch_bwattn.sdpa)" if function else "")

    def missing(self) -> str | None:
        """See `Provider.missing`."""
        if self._backend is None:
            return None
        from ..selection.choose import get_backend

        try:
            return get_backend(self._backend).missing()
        except NotImplementedError as error:
            return str(error)

    def open(self, row: Row) -> Attention:
        """See `Provider.open`."""
        import torch_bwattn

        return _with_arguments(torch_bwattn.sdpa if self._function else torch.ops.bwattn.sdpa, row)

    def active(self) -> contextlib.AbstractContextManager[object]:
        """See `Provider.active`."""
        import torch_bwattn

        return contextlib.nullcontext() if self._backend is None else torch_bwattn.backend(self._backend)

    def backend_used(self) -> str | None:
        """See `Provider.backend_used`."""
        import torch_bwattn

        counts = {name: count for name, count in torch_bwattn.call_counts().items() if count}
        torch_bwattn.reset_call_counts()
        return "+".join(sorted(counts)) or None

    def config(self, row: Row, inputs: Inputs, direction: str) -> str | None:
        """See `Provider.config`."""
        import torch_bwattn

        with contextlib.redirect_stdout(io.StringIO()):
            explained = torch_bwattn.explain(*inputs.qkv, **row.arguments)
        chosen = (explained.backward if direction == BACKWARD else explained.forward).chosen
        return None if chosen is None else chosen.verdict.config


class AtenProvider(Provider):
    """``F.scaled_dot_product_attention`` held to one of PyTorch's backends.

    Args:
        name: Name in records.
        title: Name in tables.
        backend: Name of the member of ``torch.nn.attention.SDPBackend``.
    """

    def __init__(self, name: str, title: str, backend: str) -> None:
        self.name = name
        self.title = title
        self._backend = backend

    def open(self, row: Row) -> Attention:
        """See `Provider.open`."""
        if row.window is not None:
            raise NotImplementedError("F.scaled_dot_product_attention has no windows")
        return _with_arguments(F.scaled_dot_product_attention, row)

    def active(self) -> contextlib.AbstractContextManager[object]:
        """See `Provider.active`."""
        from torch.nn.attention import SDPBackend, sdpa_kernel

        return sdpa_kernel(getattr(SDPBackend, self._backend))


def _flash_attn_func() -> Any:
    return importlib.import_module("flash_attn.cute.interface").flash_attn_func


class Fa4Provider(Provider):
    """FlashAttention 4, the CuTe-DSL package ``flash-attn-4``."""

    name = "fa4"
    title = "FA4 (CuTe)"

    def missing(self) -> str | None:
        """See `Provider.missing`."""
        try:
            _flash_attn_func()
        except Exception as error:  # it fails in many ways where its own dependencies are absent
            return f"flash_attn.cute does not import: {type(error).__name__}: {error}"
        return None

    def open(self, row: Row) -> Attention:
        """See `Provider.open`."""
        flash_attn_func = _flash_attn_func()
        arguments: dict[str, Any] = {"causal": row.causal}
        if row.window is not None:
            arguments["window_size"] = (row.window, 0)

        def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            result: Any = flash_attn_func(
                query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), **arguments
            )
            out: torch.Tensor = result[0] if isinstance(result, tuple) else result
            return out.transpose(1, 2)

        return attention


class FlexProvider(Provider):
    """FlexAttention, compiled anew for each row.

    One compiled function serves eight shapes and then falls back to eager, thirty times slower; so each row starts from
    a reset Dynamo, and ``fullgraph=True`` turns a fallback into an error.
    """

    name = "flex"
    title = "Flex (compiled)"

    def __init__(self) -> None:
        self._masks: dict[tuple[int, int | None, str], Any] = {}

    def open(self, row: Row) -> Attention:
        """See `Provider.open`."""
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        torch.compiler.reset()
        compiled: Any = torch.compile(flex_attention, dynamic=False, fullgraph=True)
        causal, gqa, window = row.causal, row.gqa, row.window

        def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            mask = None
            if causal:
                place = (query.shape[2], window, str(query.device))
                if place not in self._masks:
                    length = query.shape[2]
                    self._masks[place] = create_block_mask(_seen(window), None, None, length, length, query.device)
                mask = self._masks[place]
            out: torch.Tensor = compiled(query, key, value, block_mask=mask, enable_gqa=gqa)
            return out

        return attention

    def active(self) -> contextlib.AbstractContextManager[object]:
        """See `Provider.active`."""
        return undonated()


def undonated() -> contextlib.AbstractContextManager[object]:
    """For what is compiled: a timed backward runs many times over one graph, which donated buffers forbid."""
    import torch._functorch.config as functorch_config

    return functorch_config.patch(donated_buffer=False)


def _seen(window: int | None) -> Callable[..., Any]:
    if window is None:
        return lambda _b, _h, i, j: i >= j
    return lambda _b, _h, i, j: (i >= j) & (j >= i - window)


PEERS: dict[str, Callable[[], Provider]] = {
    "cudnn": lambda: AtenProvider("cudnn", "cuDNN", "CUDNN_ATTENTION"),
    "aten_flash": lambda: AtenProvider("aten_flash", "aten flash (FA2)", "FLASH_ATTENTION"),
    "fa4": Fa4Provider,
    "flex": FlexProvider,
}


def make_peers(names: Sequence[str]) -> list[Provider]:
    """The peers of these names.

    Raises:
        ValueError: A name is unknown.
    """
    unknown = [name for name in names if name not in PEERS]
    if unknown:
        raise ValueError(f"peers: expected names among {', '.join(PEERS)}, got {', '.join(unknown)}")
    return [PEERS[name]() for name in names]


def title_of(name: str) -> str:
    """The name of a recorded provider as tables show it."""
    if name.startswith(f"{OURS}."):
        backend, _, function = name.removeprefix(f"{OURS}.").partition(".")
        return OpProvider(backend, function=bool(function)).title
    return PEERS[name]().title if name in PEERS else FLEX_PEERS.get(name, name)


FLEX_PEERS = {"flex_triton": "Flex (Triton)", "flex_flash": "Flex (FLASH)"}
"""PyTorch's own ``flex_attention`` by its backends, of the ``flex`` suite: names and titles."""
