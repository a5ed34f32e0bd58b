"""A configuration as it stands in a file: plain values, each with the place where it was written.

Reading makes nothing but numbers, text, lists and dicts: no tag, no anchor that grows, no interpolation is followed.
"""

from __future__ import annotations

import datetime
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from paceline.errors import ConfigError

_MOST_VALUES = 20_000
"""Each takes about 0.2 ms to read, anchor or not, and `bind` reads twice."""
_MOST_DEPTH = 60
_MOST_BITS = 4096
_MOST_PROBLEMS = 50
_TAG = "tag:yaml.org,2002:"
_SCALARS = {f"{_TAG}{name}" for name in ("str", "int", "float", "bool", "null", "timestamp")}


@dataclass(frozen=True)
class Entry:
    """A value, and who has said so: `where` is "line 3", or an override; None if it is a default of the code."""

    value: Any
    """A scalar, a list of entries or a dict of entries."""
    where: str | None = None

    @property
    def is_map(self) -> bool:
        return isinstance(self.value, dict)

    def bare(self) -> Any:
        """Without places."""
        if isinstance(self.value, dict):
            return {key: entry.bare() for key, entry in self.value.items()}
        if isinstance(self.value, list):
            return [entry.bare() for entry in self.value]
        return self.value


def entry_of(value: Any, where: str | None = None) -> Entry:
    if isinstance(value, dict):
        return Entry({key: entry_of(item, where) for key, item in value.items()}, where)
    if isinstance(value, list):
        return Entry([entry_of(item, where) for item in value], where)
    return Entry(value, where)


def parse(text: str, name: str = "conf.yaml") -> Entry:
    """A whole file: a dict of sections. ConfigError says where it is no such thing."""
    parsed = _Reader(name).read(text)
    if parsed.value is None:
        return Entry({}, "line 1")
    if not parsed.is_map:
        raise refusal(name, [f"line 1: expected sections, each under the dotted name of a class, not {text[:40]!r}"])
    return parsed


def parse_value(text: str, where: str) -> Entry:
    """One value of a command line, in YAML's way of writing: 1e-3, null, [1, 2], {a: 1}, text."""
    parsed = _Reader(where).read(text) if text else Entry("")
    return entry_of(parsed.bare(), where)


def refusal(name: str, problems: list[str]) -> ConfigError:
    """One error that tells all of them; of very many the first, as a terminal has room for no more."""
    what = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    told = problems[:_MOST_PROBLEMS]
    if len(problems) > len(told):
        told = [*told, f"and {len(problems) - len(told)} more"]
    error = ConfigError("\n".join([f"{name}: {what}", *(f"  {problem}" for problem in told)]))
    error.problems = tuple(problems)
    return error


class _Reader:
    def __init__(self, name: str):
        self._name, self._num_values = name, 0

    def read(self, text: str) -> Entry:
        from ruamel.yaml import YAML
        from ruamel.yaml.composer import Composer
        from ruamel.yaml.error import YAMLError

        check, composed = self._check, itertools.count(1)

        class Counting(Composer):
            """Stops where it is too much, as parsing takes most of the time. A key, which has no index, is no value.
            An anchor may come again, as YAML has it: a warning for each would be as long as the file."""

            def __init__(self, loader: Any = None) -> None:
                super().__init__(loader)
                self.warn_double_anchors = False

            def compose_node(self, parent: Any, index: Any) -> Any:
                is_key = parent is not None and index is None
                check(self.parser.peek_event(), 0 if is_key else next(composed), self.depth)
                return super().compose_node(parent, index)

        yaml = YAML(typ="safe", pure=True)
        yaml.Composer = Counting
        try:
            node = yaml.compose(text)
            return Entry(None, "line 1") if node is None else self._entry(node, yaml.constructor, 0)
        except YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            place = f"line {mark.line + 1}: " if mark is not None else ""
            raise refusal(self._name, [f"{place}not YAML: {getattr(error, 'problem', None) or error}"]) from None
        except (RecursionError, ValueError, OverflowError, TypeError, AttributeError, IndexError, KeyError) as error:
            if isinstance(error, ConfigError):
                raise
            raise refusal(self._name, [f"it cannot be read ({type(error).__name__}: {error})"]) from None

    def _check(self, node: Any, num_values: int, depth: int) -> None:
        if num_values > _MOST_VALUES or depth > _MOST_DEPTH:
            where = f"line {node.start_mark.line + 1}"
            raise refusal(
                self._name, [f"{where}: more than {_MOST_VALUES} values, or deeper than {_MOST_DEPTH} levels"]
            )

    def _entry(self, node: Any, constructor: Any, depth: int) -> Entry:
        where = f"line {node.start_mark.line + 1}"
        self._num_values += 1
        self._check(node, self._num_values, depth)
        tag = str(node.tag)
        if tag == f"{_TAG}map":
            return Entry(dict(self._items(node, constructor, depth)), where)
        if tag == f"{_TAG}seq":
            return Entry([self._entry(item, constructor, depth + 1) for item in node.value], where)
        if tag not in _SCALARS:
            raise refusal(self._name, [f"{where}: the tag {tag.replace(_TAG, '!!')} is not known; write plain values"])
        value = constructor.construct_object(node)
        if isinstance(value, datetime.date):  # a date is text to us
            value = node.value
        if isinstance(value, int) and value.bit_length() > _MOST_BITS:  # Python itself would not write it down
            raise refusal(self._name, [f"{where}: a number of more than {_MOST_BITS} bits"])
        if isinstance(value, str) and not _is_writable(value):
            raise refusal(self._name, [f"{where}: {value!r} has half a character, which no file can hold"])
        if isinstance(value, str) and "${" in value:
            raise refusal(self._name, [f"{where}: {value!r} has an interpolation, which is not followed: write it out"])
        return Entry(value, where)

    def _items(self, node: Any, constructor: Any, depth: int) -> Iterator[tuple[str, Entry]]:
        seen = set()
        for key, value in node.value:
            where = f"line {key.start_mark.line + 1}"
            if str(key.tag) != f"{_TAG}str":
                raise refusal(self._name, [f"{where}: the key {key.value!r} is no text; expected a name"])
            if key.value in seen:
                raise refusal(self._name, [f"{where}: {key.value!r} comes twice"])
            seen.add(key.value)
            entry = self._entry(value, constructor, depth + 1)
            yield key.value, Entry(entry.value, where)


def _is_writable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
