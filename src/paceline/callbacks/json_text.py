"""Whatever a user reports, as JSON."""

import json
import math
from collections.abc import Mapping
from typing import Any

import orjson

_OPTIONS = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS
_MAX_DEPTH = 100


def to_json(value: Any) -> bytes:
    """NaN and infinity become null, numpy and torch values numbers and lists, unknown objects their str()."""
    try:
        return orjson.dumps(value, default=_plain, option=_OPTIONS)
    except TypeError:
        # What orjson refuses without asking `default`: integers over 64 bits, odd keys, lone surrogates.
        return json.dumps(_simplify(value)).encode()


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):  # arrays in a layout or type orjson does not read, torch tensors
        return value.tolist()
    if isinstance(value, set | frozenset):
        return list(value)
    if isinstance(value, Mapping):
        return dict(value)
    return str(value)


def _simplify(value: Any, depth: int = 0) -> Any:
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if depth > _MAX_DEPTH:  # it contains itself
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _simplify(inner, depth + 1) for key, inner in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_simplify(inner, depth + 1) for inner in value]
    return _simplify(value.tolist(), depth + 1) if hasattr(value, "tolist") else str(value)
