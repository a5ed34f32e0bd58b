"""Decisions that all ranks make as one: a rank that leaves its loop alone would leave the others waiting for it."""

from __future__ import annotations

import zlib
from datetime import timedelta
from typing import Any

import torch

from paceline.errors import TrainerStateError
from paceline.prepare.device import get_device

TIMEOUT_S = 600.0
"""For so long a rank waits for the others to call what it has called. A class may have its own `agree_timeout_s`."""


def is_together() -> bool:
    """Whether there are other ranks to agree with."""
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def any_rank(flags: list[bool]) -> list[bool]:
    """Each flag, true on every rank if it is true on one. Collective."""
    if not flags or not is_together():
        return flags
    told = torch.tensor([int(flag) for flag in flags], device=get_device())
    torch.distributed.all_reduce(told, torch.distributed.ReduceOp.MAX)
    return [bool(flag) for flag in told.tolist()]


class Agreement:
    """Decisions of all ranks. It has a group of its own: a call that one rank makes alone must not be taken for its
    part of another exchange, that of gradients say, nor wait for ever. Made on all ranks together."""

    def __init__(self) -> None:
        self._group: Any = None
        if is_together():
            self._group = torch.distributed.new_group(backend="gloo")  # what is decided is on no device

    def decide(self, name: str, flag: bool, timeout_s: float = TIMEOUT_S) -> bool:
        """True on every rank if it is true on one. Collective. TrainerStateError if the others do not call it too."""
        if self._group is None:
            return flag
        mark = zlib.crc32(name.encode())
        told = torch.tensor([int(flag), mark, -mark])
        work = torch.distributed.all_reduce(told, torch.distributed.ReduceOp.MAX, group=self._group, async_op=True)
        try:
            work.wait(timedelta(seconds=timeout_s))
        except RuntimeError as error:
            rank = torch.distributed.get_rank()
            raise TrainerStateError(
                f"{name} was called on rank {rank}, and not on all others within {timeout_s:g} s. What decides for all "
                "ranks has to be called on all of them; a tool that decides for one rank says so: give its class "
                "`agree = False`."
            ) from error
        decided, most, least = told.tolist()
        if most != -least:
            raise TrainerStateError(
                f"{name} was called on rank {torch.distributed.get_rank()} while another rank has called something "
                "else that decides for all ranks. Call them on all ranks, in one order."
            )
        return bool(decided)


def let_agree(tool: Any, name: str, agreement: Agreement) -> None:
    """From now on, if calling the tool gives True or False, that is True on all ranks as soon as it is on one.

    So `if self.tools.early_stoppage(loss): break` is left by all ranks together, also where each has seen another loss.
    The object keeps its class's name, its attributes and its isinstance; a class says `agree = False` to stay as it is.
    """
    cls = type(tool)
    if not callable(tool) or isinstance(tool, torch.nn.Module | type) or getattr(cls, "agree", True) is False:
        return
    if not cls.__flags__ & _HEAP_TYPE or getattr(cls, "_agreement", None) is not None:
        return
    made = {"__slots__": (), "__call__": _agreed, "_agreement": (agreement, name), **_names(cls)}
    tool.__class__ = type(cls.__name__, (cls,), made)


_HEAP_TYPE = 1 << 9
"""Of classes that are written in Python, whose objects can change their class."""


def _agreed(self: Any, *args: Any, **kwargs: Any) -> Any:
    answer = super(type(self), self).__call__(*args, **kwargs)
    if not _is_flag(answer):
        return answer
    agreement, name = self._agreement
    return agreement.decide(name, bool(answer), getattr(self, "agree_timeout_s", TIMEOUT_S))


def _is_flag(answer: Any) -> bool:
    """Whether it is True or False, also as torch and numpy have them: `loss > best` of a tensor is one."""
    is_scalar = getattr(answer, "shape", None) == () and str(getattr(answer, "dtype", "")) in ("torch.bool", "bool")
    return isinstance(answer, bool) or is_scalar


def _names(cls: type) -> dict[str, Any]:
    return {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
