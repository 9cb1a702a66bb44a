"""Replacing ``torch.nn.attention.flex_attention.flex_attention`` under code that calls it.

Importing this imports all of Dynamo, as PyTorch's module does.
"""

from __future__ import annotations

from typing import Any

from torch.nn.attention import flex_attention as torch_flex

from ..flex.attention import flex_attention
from .patching import Patch

_original = torch_flex.flex_attention
_installed = 0


class patch_flex_attention(Patch):
    """Replace PyTorch's ``flex_attention`` by this package's while the patch is on.

    Used as ``patch_sdpa`` is. It reaches ``torch.nn.attention.flex_attention.flex_attention`` looked up when it is
    called, and names bound earlier by ``from torch.nn.attention.flex_attention import flex_attention`` in modules that
    are passed to it, for example ``patch_flex_attention(transformers.integrations.flex_attention)``.

    Args:
        modules: Modules (or other objects) whose attribute ``flex_attention`` is PyTorch's function.

    Raises:
        ValueError: One of them has no such attribute.
    """

    def __init__(self, *modules: Any) -> None:
        super().__init__()
        for module in modules:
            if getattr(module, "flex_attention", None) not in (_original, flex_attention):
                raise ValueError(
                    "patch_flex_attention: modules: expected ones whose flex_attention is PyTorch's, got "
                    f"{getattr(module, '__name__', module)!r}"
                )
        self._modules = modules

    def _recreate_cm(self) -> patch_flex_attention:
        return patch_flex_attention(*self._modules)

    def _begin(self) -> None:
        global _installed
        _installed += 1
        if _installed == 1:
            _replace(torch_flex, _original, flex_attention)
        for module in self._modules:
            _replace(module, _original, flex_attention)

    def _end(self) -> None:
        global _installed
        _installed -= 1
        if _installed == 0:
            _replace(torch_flex, flex_attention, _original)
        if self._depth == 0:
            for module in self._modules:
                _replace(module, flex_attention, _original)


def _replace(owner: Any, old: Any, new: Any) -> None:
    """Swap the attribute, unless somebody else has put a third function there, which stays theirs."""
    if owner.flex_attention is old:
        owner.flex_attention = new
