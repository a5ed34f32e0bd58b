"""A user's state as a JSON tree beside raw blocks of array data, and back, without pickle: decoding runs no
code.

JSON's own values stand for themselves. Everything else is an object with a tag under "$", such as
{"$": "tuple", "items": [...]} or {"$": "tensor", "array": "model.weight"}; a dict with other than plain
string keys is {"$": "dict", "items": [[key, value], ...]}. An array that occurs twice (tied weights) is one
block, and decodes to one object.
"""

import base64
import math
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from datetime import date, datetime, timedelta, timezone
from pathlib import Path, PosixPath, PurePath, PurePosixPath, PureWindowsPath, WindowsPath
from typing import Any, Protocol

from paceline import frameworks
from paceline.checkpoints.checkpoint import Checkpoint
from paceline.checkpoints.content.refusal import refuse, refuse_cycle, refuse_depth
from paceline.checkpoints.content.tensorfile import Entry
from paceline.errors import MissingDependencyError
from paceline.frameworks.base import ArrayCodec, Block, Framework

TAG = "$"
MAX_DEPTH = 100  # well inside Python's recursion limit, also when the caller is deep in frames already
_MAX_INLINE_BYTES = 1024

# A place in the tree: (the place above it, its key there). Rendered only when someone reads it.
_Place = tuple[Any, object] | None


class ArrayReader(Protocol):
    """Where decoding gets the blocks from: a file, or memory."""

    def entry(self, key: str) -> Entry: ...

    def read_into(self, key: str, memory: memoryview) -> None: ...


class Encoder:
    """Encodes one state. `blocks` fills up with the arrays found; nothing is copied yet."""

    def __init__(self) -> None:
        self.blocks: dict[str, Block] = {}
        self._keys: dict[tuple[object, ...], tuple[str, dict[str, Any]]] = {}
        self._open: set[int] = set()
        self._inside_key = False

    def encode(self, value: Any, place: _Place = None) -> Any:
        kind = type(value)
        if kind is str or kind is bool or value is None:
            return value
        if kind is float:
            return value if math.isfinite(value) else {TAG: "float", "value": repr(value)}
        if kind is int:
            # hex, because Python refuses to print or parse very long decimal numbers
            return value if -(2**63) <= value < 2**63 else {TAG: "int", "value": hex(value)}
        if kind in _CONTAINERS:
            return self._container(value, place)
        if kind in _SCALARS:
            return _SCALARS[kind](value)
        if kind is bytes or kind is bytearray:
            return self._bytes(value, place)
        if kind is datetime:
            return _datetime_node(value, place)
        node = self._framework_value(value, place)
        if node is None:
            raise refuse(value, render(place))
        return node

    def _container(self, value: Any, place: _Place) -> Any:
        if id(value) in self._open:
            raise refuse_cycle(render(place))
        if len(self._open) >= MAX_DEPTH:
            raise refuse_depth(render(place), MAX_DEPTH)
        self._open.add(id(value))
        try:
            tag = _CONTAINERS[type(value)]
            if tag in _MAPPINGS:
                return self._mapping(tag, value, place)
            items = [self.encode(item, (place, index)) for index, item in enumerate(value)]
            return items if tag == "list" else {TAG: tag, "items": items}
        finally:
            self._open.discard(id(value))

    def _mapping(self, tag: str, value: dict[Any, Any], place: _Place) -> Any:
        if tag == "dict" and TAG not in value and all(type(key) is str for key in value):
            return {key: self.encode(item, (place, key)) for key, item in value.items()}
        items = [[self._key(key, place), self.encode(item, (place, key))] for key, item in value.items()]
        return {TAG: tag, "items": items}

    def _key(self, key: object, place: _Place) -> Any:
        self._inside_key = True
        try:
            return self.encode(key, (place, key))
        finally:
            self._inside_key = False

    def _bytes(self, value: bytes | bytearray, place: _Place) -> Any:
        tag = type(value).__name__
        if len(value) <= _MAX_INLINE_BYTES:
            return {TAG: tag, "base64": base64.b64encode(value).decode()}

        def copy_into(memory: memoryview) -> None:
            memory[:] = value

        return {TAG: tag, "array": self._add(Block("U8", (len(value),), len(value), 1, copy_into), place)}

    def _framework_value(self, value: Any, place: _Place) -> Any:
        framework = frameworks.of(value)
        codec = framework.codec() if framework is not None else None
        if framework is None or codec is None:
            return None
        is_array = codec.is_array(value)
        if is_array and self._inside_key:
            raise refuse(value, "a dict key", "a dict finds it by identity, which no copy keeps: use another key")
        if remedy := codec.problem(value):
            raise refuse(value, render(place), remedy)
        if is_array:
            return {TAG: framework.array_tag, **self._block(codec, value, place)}
        if (node := codec.value_node(value)) is None:
            return None
        tag, fields = node
        return {TAG: tag, **{name: self.encode(value, (place, name)) for name, value in fields.items()}}

    def _block(self, codec: ArrayCodec, array: Any, place: _Place) -> dict[str, Any]:
        identity = codec.identity(array)
        if identity is None or identity not in self._keys:
            block, extra = codec.block_of(array)
            known = self._add(block, place), self._plain(extra)
            if identity is not None:
                self._keys[identity] = known
        else:
            known = self._keys[identity]
        key, extra = known
        return {"array": key, **extra}

    def _plain(self, extra: dict[str, Any]) -> dict[str, Any]:
        return {name: self.encode(value) for name, value in extra.items()}

    def _add(self, block: Block, place: _Place) -> str:
        wanted = key = render(place)
        count = 1
        while key in self.blocks or key == "__metadata__":  # {"a": {"b": x}} and {"a.b": x} have one rendering
            count += 1
            key = f"{wanted}#{count}"
        self.blocks[key] = block
        return key


class Decoder:
    """Decodes one tree. Raises KeyError, TypeError or ValueError for a tree that no Encoder made."""

    def __init__(self, arrays: ArrayReader):
        self._reader = arrays
        self._made: dict[tuple[str, str], Any] = {}

    def decode(self, node: Any) -> Any:
        if isinstance(node, list):
            return [self.decode(item) for item in node]
        if not isinstance(node, dict):
            return node
        if TAG not in node:
            return {key: self.decode(item) for key, item in node.items()}
        tag = node[TAG]
        if tag in _MAPPINGS:
            pairs = [(self.decode(key), self.decode(item)) for key, item in node["items"]]
            return Counter(dict(pairs)) if tag == "Counter" else _MAPPINGS[tag](pairs)
        if tag in _SEQUENCES:
            return _SEQUENCES[tag](self.decode(item) for item in node["items"])
        if tag in _VALUES:
            return _VALUES[tag](node["value"])
        return self._special(tag, node)

    def _special(self, tag: str, node: dict[str, Any]) -> Any:
        if tag in ("bytes", "bytearray"):
            make = bytes if tag == "bytes" else bytearray
            return make(self._raw(node["array"]) if "array" in node else base64.b64decode(node["base64"]))
        if tag == "datetime":
            return _datetime_of(node)
        framework = frameworks.by_tag(tag)
        if framework is None:
            raise ValueError(f"unknown kind of value '{tag}'")
        fields = {name: self.decode(value) for name, value in node.items() if name not in (TAG, "array")}
        if tag != framework.array_tag:
            return _codec(framework).value_of(tag, fields)
        if (tag, node["array"]) not in self._made:
            self._made[tag, node["array"]] = self._make_array(_codec(framework), node["array"], fields)
        return self._made[tag, node["array"]]

    def _make_array(self, codec: ArrayCodec, key: str, extra: dict[str, Any]) -> Any:
        def fill(memory: memoryview) -> None:
            self._reader.read_into(key, memory)

        return codec.array_of(extra, self._reader.entry(key), fill)

    def _raw(self, key: str) -> bytearray:
        raw = bytearray(self._reader.entry(key).num_bytes)
        self._reader.read_into(key, memoryview(raw))
        return raw


def render(place: _Place) -> str:
    """The place as a person would write it: `model.layers[2]`."""
    parts: list[str] = []
    while place is not None:
        place, key = place
        parts.append(f".{key}" if isinstance(key, str) else f"[{_shown(key)}]")
    return "".join(reversed(parts)).removeprefix(".") or "state"


def _shown(key: object) -> str:
    try:
        return repr(key)
    except ValueError:  # there is an integer in it with more digits than Python prints
        return f"a very large {type(key).__name__}"


def _codec(framework: Framework) -> ArrayCodec:
    """That of a framework which has tags, and so has a codec."""
    try:
        codec = framework.codec()
    except ModuleNotFoundError as error:
        if error.name != framework.name:
            raise
        purpose = f"loading a checkpoint that holds values of {framework.name}"
        raise MissingDependencyError(framework.name, framework.name, purpose) from error
    assert codec is not None
    return codec


def _datetime_node(value: datetime, place: _Place) -> dict[str, Any]:
    node: dict[str, Any] = {TAG: "datetime", "value": value.isoformat(), "fold": value.fold}
    zone = getattr(value.tzinfo, "key", None)
    if zone is not None:
        node |= {"value": value.replace(tzinfo=None).isoformat(), "zone": zone}
    elif value.tzinfo is not None and type(value.tzinfo) is not timezone:
        raise refuse(value, render(place), "its time zone has no name: convert it with .astimezone(datetime.UTC)")
    return node


def _datetime_of(node: dict[str, Any]) -> datetime:
    value = datetime.fromisoformat(node["value"]).replace(fold=node["fold"])
    if "zone" not in node:
        return value
    from zoneinfo import ZoneInfo

    return value.replace(tzinfo=ZoneInfo(node["zone"]))


def _path_of(value: list[str]) -> PurePath:
    kind, text = value
    kinds: dict[str, type[PurePath]] = {
        "Path": Path,
        "PurePosixPath": PurePosixPath,
        "PureWindowsPath": PureWindowsPath,
    }
    return kinds[kind](text)


_CONTAINERS: dict[type, str] = {
    list: "list", tuple: "tuple", set: "set", frozenset: "frozenset",
    dict: "dict", OrderedDict: "OrderedDict", defaultdict: "dict", Checkpoint: "dict", Counter: "Counter",
}  # fmt: skip
_MAPPINGS: dict[str, Callable[[Any], Any]] = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}
_SEQUENCES: dict[str, Callable[[Any], Any]] = {"tuple": tuple, "set": set, "frozenset": frozenset}

_SCALARS: dict[type, Callable[[Any], Any]] = {
    complex: lambda value: {TAG: "complex", "value": [repr(value.real), repr(value.imag)]},
    PosixPath: lambda value: {TAG: "path", "value": ["Path", str(value)]},
    WindowsPath: lambda value: {TAG: "path", "value": ["Path", str(value)]},
    PurePosixPath: lambda value: {TAG: "path", "value": ["PurePosixPath", str(value)]},
    PureWindowsPath: lambda value: {TAG: "path", "value": ["PureWindowsPath", str(value)]},
    date: lambda value: {TAG: "date", "value": value.isoformat()},
    timedelta: lambda value: {TAG: "timedelta", "value": [value.days, value.seconds, value.microseconds]},
}
_VALUES: dict[str, Callable[[Any], Any]] = {
    "float": float,
    "int": lambda value: int(value, 16),
    "complex": lambda value: complex(float(value[0]), float(value[1])),
    "path": _path_of,
    "date": date.fromisoformat,
    "timedelta": lambda value: timedelta(*value),
}
