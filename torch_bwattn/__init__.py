"""torch_bwattn: attention as a PyTorch operator, with the best kernel for the device, forward and backward.

Importing it registers ``torch.ops.bwattn`` and loads no kernel language; those load at a backend's first use.
"""

from . import ops as ops
from .api import Explanation, explain, sdpa
from .errors import UnsupportedProblem
from .integrations.patch import patch_sdpa
from .ops.primitive import call_counts, reset_call_counts
from .selection.pin import backend

__version__ = "0.1.0"

__all__ = [
    "Explanation",
    "UnsupportedProblem",
    "__version__",
    "backend",
    "call_counts",
    "explain",
    "patch_sdpa",
    "reset_call_counts",
    "sdpa",
]
