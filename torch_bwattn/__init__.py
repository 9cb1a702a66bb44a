"""torch_bwattn: attention as a PyTorch operator, with the best kernel for the device, forward and backward.

Importing it registers ``torch.ops.bwattn`` and loads no kernel language; those load at a backend's first use.
``flex_attention`` and its patch are imported when they are first named: PyTorch's module of that name imports all of
Dynamo.
"""

import importlib
from typing import TYPE_CHECKING, Any

from . import ops as ops
from .api import Explanation, explain, sdpa
from .errors import UnsupportedProblem
from .integrations.patch import patch_sdpa
from .ops.primitive import call_counts, reset_call_counts
from .selection.pin import backend

if TYPE_CHECKING:
    from .flex.attention import explain_flex_attention, flex_attention
    from .integrations.patch_flex import patch_flex_attention

__version__ = "0.1.0"

__all__ = [
    "Explanation",
    "UnsupportedProblem",
    "__version__",
    "backend",
    "call_counts",
    "explain",
    "explain_flex_attention",
    "flex_attention",
    "patch_flex_attention",
    "patch_sdpa",
    "reset_call_counts",
    "sdpa",
]

_LAZY = {
    "explain_flex_attention": ".flex.attention",
    "flex_attention": ".flex.attention",
    "patch_flex_attention": ".integrations.patch_flex",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found = getattr(importlib.import_module(_LAZY[name], __name__), name)
    return found
