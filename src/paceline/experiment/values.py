"""What a configuration can hold, as plain YAML values and back as arguments."""

from collections.abc import Mapping
from enum import Enum
from pathlib import PurePath
from typing import Any

import torch

VALUES = (bool, int, float, str, Enum, PurePath, torch.dtype, torch.device)


def is_plain(value: Any) -> bool:
    """Whether a configuration can hold it: numbers, text, enums, paths, dtypes, devices, and containers of these."""
    if value is None or isinstance(value, VALUES):
        return True
    if isinstance(value, Mapping):
        return type(value) is dict and all(type(key) is str and is_plain(item) for key, item in value.items())
    return type(value) in (list, tuple, set, frozenset) and all(map(is_plain, value))


def plain(value: Any) -> Any:
    """As YAML has it: enums by name, paths and dtypes as text, every sequence as a list."""
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, PurePath | torch.device):
        return str(value)
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted((plain(item) for item in value), key=repr)
    for kind in (bool, int, float, str):  # a subclass, of numpy for instance, would not be known to YAML
        if isinstance(value, kind):
            return kind(value)
    return value
