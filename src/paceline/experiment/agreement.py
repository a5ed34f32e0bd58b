"""Decisions that all ranks make as one: a rank that leaves its loop alone would leave the others waiting for it."""

from __future__ import annotations

from typing import Any

import torch

from paceline.prepare.device import get_device


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


def let_agree(tool: Any) -> None:
    """From now on, if calling the tool gives True or False, that is True on all ranks as soon as it is on one.

    So `if self.tools.early_stoppage(loss): break` is left by all ranks together, also where each has seen another loss.
    The object keeps its class's name, its attributes and its isinstance; a class says `agree = False` to stay as it is.
    """
    cls = type(tool)
    if not callable(tool) or isinstance(tool, torch.nn.Module | type) or getattr(cls, "agree", True) is False:
        return
    if not cls.__flags__ & _HEAP_TYPE or getattr(cls, "_agrees", False):
        return
    tool.__class__ = type(cls.__name__, (cls,), {"__slots__": (), "__call__": _agreed, "_agrees": True, **_names(cls)})


_HEAP_TYPE = 1 << 9
"""Of classes that are written in Python, whose objects can change their class."""


def _agreed(self: Any, *args: Any, **kwargs: Any) -> Any:
    answer = super(type(self), self).__call__(*args, **kwargs)
    return any_rank([bool(answer)])[0] if _is_flag(answer) else answer


def _is_flag(answer: Any) -> bool:
    """Whether it is True or False, also as torch and numpy have them: `loss > best` of a tensor is one."""
    is_scalar = getattr(answer, "shape", None) == () and str(getattr(answer, "dtype", "")) in ("torch.bool", "bool")
    return isinstance(answer, bool) or is_scalar


def _names(cls: type) -> dict[str, Any]:
    return {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
