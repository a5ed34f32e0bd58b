"""Any value as JSON: what a run records must never stop it by its type.

NaN and infinity are written as null, arrays and tensors as numbers and lists, sets as lists, and an
object that JSON does not know as its repr.
"""

import itertools
import os
from typing import Any

import orjson

from paceline import frameworks

_OPTIONS = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS
_LINE = _OPTIONS | orjson.OPT_APPEND_NEWLINE
_DOCUMENT = _LINE | orjson.OPT_INDENT_2
_MAX_REPR_CHARS = 1_000
_MAX_ARRAY_BYTES = 65_536
_MAX_DEPTH = 100
_MIN_INT, _MAX_INT = -(2**63), 2**64 - 1


def encode(obj: Any) -> bytes:
    """One JSON value."""
    return _encode(obj, _OPTIONS)


def encode_line(obj: Any) -> bytes:
    """One JSON value and its newline."""
    return _encode(obj, _LINE)


def encode_document(obj: Any) -> bytes:
    """The same, indented for people."""
    return _encode(obj, _DOCUMENT)


def decode(data: bytes) -> Any:
    """The value, or None for what is not JSON (which is also what null gives)."""
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        return None


def pruned(value: Any, depth: int = 20, most: int = 2_000) -> Any:
    """A decoded value without what is nested deeper, or comes after so many others: for who walks or prints what
    somebody else has written, and must not run out of stack."""
    left = [most]

    def prune(one: Any, depth: int) -> Any:
        left[0] -= 1
        if not isinstance(one, dict | list):
            return one
        if depth == 0 or left[0] <= 0:
            return "…"
        if isinstance(one, dict):
            return {key: prune(inner, depth - 1) for key, inner in itertools.islice(one.items(), max(0, left[0]))}
        return [prune(inner, depth - 1) for inner in itertools.islice(one, max(0, left[0]))]

    return prune(value, depth)


def _encode(obj: Any, option: int) -> bytes:
    try:
        return orjson.dumps(obj, default=_plain, option=option)
    except TypeError:
        # A tuple as key, an integer over 64 bits, a lone surrogate, a cycle: rare enough to walk in Python.
        return orjson.dumps(_simplify(obj, frozenset()), default=_plain, option=option)


def _plain(obj: Any) -> Any:
    if isinstance(obj, set | frozenset):
        return list(obj)
    if isinstance(obj, os.PathLike):
        return os.fspath(obj)
    try:
        value = frameworks.plain(obj)
        if value is not obj and not hasattr(value, "nbytes"):  # a tensor that held one number
            return value
        if value.nbytes <= _MAX_ARRAY_BYTES:  # an array that was a tensor, or one that orjson does not take
            return value.tolist()
    except Exception:  # it is no array, or one that cannot be read here
        pass
    return _safe_repr(obj)


def _simplify(obj: Any, ancestors: frozenset[int]) -> Any:
    if isinstance(obj, str):
        return _printable(obj)
    if isinstance(obj, int) and not _MIN_INT <= obj <= _MAX_INT:
        return _safe_repr(obj)
    if not isinstance(obj, dict | list | tuple | set | frozenset):
        return obj if _is_encodable(obj) else _safe_repr(obj)
    if id(obj) in ancestors or len(ancestors) >= _MAX_DEPTH:
        return "..."
    ancestors |= {id(obj)}
    if isinstance(obj, dict):
        return {_key(key): _simplify(value, ancestors) for key, value in obj.items()}
    return [_simplify(value, ancestors) for value in obj]


def _is_encodable(obj: Any) -> bool:
    try:
        orjson.dumps(obj, default=_plain, option=_OPTIONS)
    except TypeError:
        return False
    return True


def _key(key: Any) -> str:
    return _printable(key) if isinstance(key, str) else _safe_repr(key)


def _safe_repr(obj: Any) -> str:
    try:
        text = repr(obj)
    except Exception:  # the object's own code failed
        text = f"<{type(obj).__qualname__} object without a repr>"
    if len(text) > _MAX_REPR_CHARS:
        text = text[:_MAX_REPR_CHARS] + "..."
    return _printable(text)


def _printable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()
