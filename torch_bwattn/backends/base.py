"""The backend protocol: a verdict per problem, and callables that run it.

A backend judges a :class:`~torch_bwattn.problem.Problem` and turns one it supports into a callable for tensors of
exactly that description. Everything that depends only on the description (config, allocation, launch arguments)
happens when the callable is made, so that a warm call pays for its kernels and little else.

All backends agree on what passes between forward and backward (``out``, natural-log ``lse``, the counter-based dropout
mask of :mod:`torch_bwattn.backends.philox`), so a forward on one and a backward on another give one right answer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from ..problem import Problem


@dataclass(frozen=True)
class Verdict:
    """Whether a backend takes a problem: with which config, or why not (and the nearest thing that it does take)."""

    supported: bool
    reason: str = ""
    config: str = ""

    def __bool__(self) -> bool:
        return self.supported


def yes(config: str) -> Verdict:
    """The problem is taken, with this config."""
    return Verdict(True, config=config)


def no(reason: str) -> Verdict:
    """The problem is refused, for this reason."""
    return Verdict(False, reason=reason)


class ForwardInputs(NamedTuple):
    """Tensors of a forward: 4-D operands, the mask before broadcasting, the dropout seed (int64 ``[1]``) if any.

    ``sink`` is None or ``[Hq]``: a logit that joins the denominator of each row of its head. Where ``lse`` is not
    wanted, a backend may return anything for it.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    rng_state: Tensor | None
    sink: Tensor | None = None
    wants_lse: bool = True


class BackwardInputs(NamedTuple):
    """Tensors of a backward: the forward's, its results and their gradients (``grad_lse`` None when it has none)."""

    grad_out: Tensor
    grad_lse: Tensor | None
    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    out: Tensor
    lse: Tensor
    rng_state: Tensor | None
    sink: Tensor | None = None


Grads = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]
"""Of q, k, v, the mask and the sink."""
Wanted = tuple[bool, bool, bool, bool, bool]
"""Which of them."""
ForwardFn = Callable[[ForwardInputs], tuple[Tensor, Tensor]]
BackwardFn = Callable[[BackwardInputs, Wanted], Grads]


class Backend(ABC):
    """One family of kernels."""

    name: str

    def missing(self) -> str | None:
        """Why this installation cannot use the backend at all, or None. Cheap: loads nothing heavy."""
        return None

    @abstractmethod
    def supports(self, problem: Problem) -> Verdict:
        """The verdict on a problem, with the config it would run or the reason against it."""

    @abstractmethod
    def forward(self, problem: Problem) -> ForwardFn:
        """A callable for tensors of this description: ``(out [B, Hq, Sq, Dv], lse [B, Hq, Sq])``.

        ``out`` lies in memory as :func:`torch_bwattn.layout.dense_strides` says for the query, ``lse`` is contiguous.
        """

    @abstractmethod
    def backward(self, problem: Problem) -> BackwardFn:
        """A callable for tensors of this description: gradients of q, k, v, the mask (in its own shape) and the sink.

        The callable's second argument says which are wanted; the others may be None. Layout as in ``forward``, each
        gradient in the memory order of the tensor it belongs to.
        """
