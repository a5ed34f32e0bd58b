"""What to tell a person whose value a checkpoint cannot hold: where it is, what it is, and what to save
instead.
"""

import dataclasses
import enum
from typing import Any

from paceline.errors import CheckpointValueError

_OR_FILES = (
    "or write it yourself into a directory and call save_checkpoint(directory=...). "
    "(A checkpoint holds plain values, arrays and tensors only, so that loading one never runs code.)"
)


def refuse(value: object, path: str, remedy: str | None = None) -> CheckpointValueError:
    kind = type(value)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    remedy = remedy or _remedy(value, path)
    return CheckpointValueError(f"'{path}' is a {name}, which a checkpoint cannot hold: {remedy}, {_OR_FILES}")


def refuse_cycle(path: str) -> CheckpointValueError:
    return CheckpointValueError(
        f"'{path}' contains itself. A checkpoint is a tree: save the parts without the link back."
    )


def refuse_depth(path: str, limit: int) -> CheckpointValueError:
    return CheckpointValueError(
        f"'{path[:80]}…' is nested deeper than {limit} levels, the most that a checkpoint holds: "
        "save a flatter structure."
    )


def _remedy(value: Any, path: str) -> str:
    if callable(getattr(value, "state_dict", None)):
        return f"save {path}.state_dict()"
    if dataclasses.is_dataclass(value):
        return "save dataclasses.asdict(...) of it"
    if isinstance(value, enum.Enum):
        return "save its .value"
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return "save its ._asdict()"
    for base in (dict, list, tuple, set, frozenset, str, bytes, int, float):
        if isinstance(value, base):
            return f"save {base.__name__}(...) of it"
    return "convert it to plain values"
