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
from typing import ClassVar, NamedTuple

from torch import Tensor

from ..errors import expected
from ..problem import Problem


@dataclass(frozen=True)
class Verdict:
    """Whether a backend takes a problem: with which config, or why not (and the nearest thing that it does take).

    ``last_resort`` is why a config that does take the problem must not compete for it, if it must not; ``note`` is what
    else to know of it.
    """

    supported: bool
    reason: str = ""
    config: str = ""
    last_resort: str = ""
    note: str = ""

    def __bool__(self) -> bool:
        return self.supported


def yes(config: str, last_resort: str = "", note: str = "") -> Verdict:
    """The problem is taken, with this config."""
    return Verdict(True, config=config, last_resort=last_resort, note=note)


def no(reason: str, config: str = "") -> Verdict:
    """The problem is refused, for this reason; by one config of several where one is named."""
    return Verdict(False, reason=reason, config=config)


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
    can_hang: ClassVar[bool] = False
    """Whether its kernels' parts wait for each other at barriers written by hand: a wrong one may never end."""

    def is_checked_apart(self, config: str) -> bool:
        """Whether a config's check needs a process of its own: its parts wait for each other, as a compiler has it."""
        return False

    def missing(self) -> str | None:
        """Why this installation cannot use the backend at all, or None. Cheap: loads nothing heavy."""
        return None

    @abstractmethod
    def supports(self, problem: Problem) -> Verdict:
        """The verdict on a problem, with the config that the backend chooses itself or the reason against it."""

    def offers(self, problem: Problem) -> tuple[Verdict, ...]:
        """A verdict on each of the configs that may compete for a problem, in the backend's own order."""
        return (self.supports(problem),)

    @abstractmethod
    def forward(self, problem: Problem, config: str = "") -> ForwardFn:
        """A callable for tensors of this description: ``(out [B, Hq, Sq, Dv], lse [B, Hq, Sq])``.

        ``out`` lies in memory as :func:`torch_bwattn.layout.dense_strides` says for the query, ``lse`` is contiguous.
        ``config`` is one that :meth:`offers` names; without, the backend chooses.
        """

    @abstractmethod
    def backward(self, problem: Problem, config: str = "") -> BackwardFn:
        """A callable for tensors of this description: gradients of q, k, v, the mask (in its own shape) and the sink.

        The callable's second argument says which are wanted; the others may be None. Layout as in ``forward``, each
        gradient in the memory order of the tensor it belongs to.
        """


def named(offers: tuple[Verdict, ...], config: str) -> int:
    """Which offer a config's name means: the first without a name.

    Raises:
        ValueError: No offer has that name.
    """
    names = [offer.config for offer in offers]
    if not config:
        return 0
    if config not in names:
        raise ValueError(expected("config", f"one of {', '.join(names)}", repr(config)))
    return names.index(config)


_SMALL_MASK = 2**22
"""Elements that may be copied beside inputs of any size: at most 16 MiB."""


def mask_copy_refusal(problem: Problem, elements: int) -> str:
    """Why a kernel that copies a mask, to so many elements, does not take a problem, or nothing."""
    if problem.mask_sizes is None or elements <= max(problem.input_count, _SMALL_MASK):
        return ""
    return f"it copies the mask, {elements} elements, more than query, key and value have, {problem.input_count}"
