"""Changes to a configuration from a command line: `optimizers.adam.lr=1e-3`, and sweeps over several values.

| | |
|---|---|
| `a.b=value` | set what is there |
| `+a.b=value` | add what is not |
| `++a.b=value` | either |
| `~a.b` | remove |

A path begins with a section (`models`, or its full dotted name), or is the end of exactly one path: `lr=1e-3`.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from paceline.errors import ConfigError
from paceline.experiment.document import Entry, parse_value
from paceline.experiment.schema import Node, Schema
from paceline.experiment.signatures import path_of
from paceline.experiment.suggestions import did_you_mean

_FORM = re.compile(r"(?P<sign>\+\+|\+|~)?(?P<path>[^=\s]+)(?:=(?P<value>.*))?", re.DOTALL)
_CALL = re.compile(r"(?P<name>[a-z]+)\((?P<inside>.*)\)", re.DOTALL)
_MOST_RUNS = 10_000


@dataclass(frozen=True)
class Override:
    sign: str
    """"", "+", "++" or "~"."""
    path: str
    value: str | None
    text: str


def parse_override(text: str) -> Override:
    match = _FORM.fullmatch(text.strip())
    if match is None or (match["value"] is None) != (match["sign"] == "~"):
        raise ConfigError(
            f"{text!r} is no override; expected path=value, such as optimizers.adam.lr=1e-3, +path=value to add, or "
            "~path to remove."
        )
    return Override(match["sign"] or "", match["path"], match["value"], text.strip())


def apply(schema: Schema, document: Entry, overrides: Sequence[str], errors: list[ConfigError] | None = None) -> Entry:
    """The configuration with all overrides, one after the other. The document is complete: see `loading.completed`.
    With `errors`, one that cannot be applied is left out and noted there, so that others can be told with it."""
    for text in overrides:
        try:
            document = _applied(schema, document, parse_override(text))
        except ConfigError as error:
            if errors is None:
                raise
            errors.append(error)
    return document


def _applied(schema: Schema, document: Entry, override: Override) -> Entry:
    value = None if override.value is None else parse_value(override.value, f"override {override.text!r}")
    section, *keys = _resolve(schema, document, override)
    return _changed_section(schema, document, section, keys, override, value)


def _changed_section(
    schema: Schema, document: Entry, key: str, keys: list[str], override: Override, value: Entry | None
) -> Entry:
    [section] = [one for one in schema.sections if one.key == key]
    others = {name: one for name, one in document.value.items() if name != key}
    if keys:
        given = document.value.get(key, Entry({}))
        changed: Entry | None = _changed(given, keys, override, value, section.role, section.node)
    else:
        changed = value
    return Entry(others if changed is None else {**others, key: changed}, document.where)


def expand(overrides: Sequence[str]) -> list[list[str]]:
    """Every combination of the values of a sweep, the last one varying fastest: `a=1,2`, `a=range(0,10,2)`,
    `a=choice(x,y)`. Overrides without several values are in each."""
    choices = [[*_choices(text)] for text in overrides]
    total = 1
    for one in choices:
        total *= len(one)
    if total > _MOST_RUNS:
        raise ConfigError(f"This sweep has {total} runs, more than {_MOST_RUNS}: give fewer values.")
    return [list(combination) for combination in itertools.product(*choices)]


def _choices(text: str) -> Iterator[str]:
    override = parse_override(text)
    if override.value is None:
        yield text
        return
    head = f"{override.sign}{override.path}="
    for value in _values(override.value, text):
        yield f"{head}{value}"


def _values(value: str, text: str) -> list[str]:
    call = _CALL.fullmatch(value.strip())
    if call is None:
        return _split(value)
    inside = _split(call["inside"]) if call["inside"].strip() else []
    if call["name"] == "choice" and inside:
        return inside
    if call["name"] == "range":
        return _range(inside, text)
    raise ConfigError(f"{text!r}: expected choice(a,b,...), range(start,stop[,step]) or values with commas between.")


def _range(words: list[str], text: str) -> list[str]:
    try:
        if not 1 <= len(words) <= 3:
            raise ValueError
        numbers: list[int | float] = [int(word) if _is_int(word) else float(word) for word in words]
        start, stop, step = (0, *numbers, 1) if len(numbers) == 1 else (*numbers, 1)[:3]
        # In decimals, as they are written: of floats, 0.1 thrice is not 0.3, and some ranges would have one more.
        first, last, by = (Fraction(repr(number)) for number in (start, stop, step))
        count = math.ceil((last - first) / by)
        if count < 1:
            raise ValueError
    except (ValueError, ZeroDivisionError):
        raise ConfigError(f"{text!r}: expected range(stop), range(start,stop) or range(start,stop,step).") from None
    if count > _MOST_RUNS:
        raise ConfigError(f"{text!r} has more than {_MOST_RUNS} values: expected fewer.")
    kind = float if isinstance(start, float) or isinstance(step, float) else int
    return [repr(kind(first + number * by)) for number in range(count)]


def _is_int(word: str) -> bool:
    return re.fullmatch(r"[+-]?\d+", word) is not None


def _split(text: str) -> list[str]:
    """At commas that are in no brackets and no quotes."""
    parts, depth, quote, start = [], 0, "", 0
    for place, sign in enumerate(text):
        if quote:
            quote = "" if sign == quote else quote
        elif sign in "\"'":
            quote = sign
        elif sign in "[{(":
            depth += 1
        elif sign in "]})":
            depth -= 1
        elif sign == "," and depth == 0:
            parts.append(text[start:place].strip())
            start = place + 1
    return [*parts, text[start:].strip()]


def _resolve(schema: Schema, document: Entry, override: Override) -> list[str]:
    """The keys that lead to a value: that of the section, which may have dots in it, first."""
    section, rest = _section(schema, override.path)
    if section is not None:
        return [section, *_keys(rest)]
    paths = [(one.key, path) for one in schema.sections for path in _paths(document.value.get(one.key, Entry({})))]
    wanted = _keys(override.path)
    matches = [[key, *path] for key, path in paths if path[-len(wanted) :] == wanted]
    roles = {one.key: one.role for one in schema.sections}
    if len(matches) == 1:
        return matches[0]
    if matches:
        told = ", ".join(".".join([roles[key], *path]) for key, *path in matches)
        raise ConfigError(f"{override.text!r}: {override.path!r} may be any of {told}. Write more of its path.")
    known = [*roles.values(), *(".".join([roles[key], *path]) for key, path in paths)]
    raise ConfigError(f"{override.text!r}: there is no {override.path!r}.{did_you_mean(override.path, known)}")


def _section(schema: Schema, path: str) -> tuple[str | None, str]:
    """Its key, and what of the path is left."""
    path = re.sub(r"^\[([^\]]+)\]", r"\1", path)
    names: dict[str, str] = {}
    for one in schema.sections:
        short = one.node.target.__name__
        names |= {short: one.key, short.lower(): one.key}
    for one in schema.sections:  # a role is sure; the name of a class may be that of two
        names |= {one.role: one.key, one.key: one.key}
    for name in sorted(names, key=len, reverse=True):
        if path == name or path.startswith(f"{name}."):
            return names[name], path[len(name) + 1 :]
    return None, path


def _keys(path: str) -> list[str]:
    return [key for key in re.sub(r"\[(\d+)\]", r".\1", path).split(".") if key]


def _paths(entry: Entry, path: tuple[str, ...] = ()) -> Iterator[list[str]]:
    items = enumerate(entry.value) if isinstance(entry.value, list) else entry.value.items() if entry.is_map else ()
    for key, item in ((str(key), item) for key, item in items):
        yield [*path, key]
        yield from _paths(item, (*path, key))


def _changed(
    entry: Entry, keys: list[str], override: Override, value: Entry | None, done: str, node: Any = None
) -> Entry:
    """`node` is what the code has in this place, if that is an object."""
    key, *rest = keys
    here = f"{done}.{key}"
    children: Any = entry.value
    if isinstance(children, list) and key.isdigit() and int(key) < len(children):
        if not rest and value is None:
            return Entry([one for number, one in enumerate(children) if number != int(key)], entry.where)
        new = value if not rest else _changed(children[int(key)], rest, override, value, here)
        return Entry([new if number == int(key) else one for number, one in enumerate(children)], entry.where)
    if not isinstance(children, dict):
        raise ConfigError(f"{override.text!r}: {done} has nothing inside it.")
    if rest and key in children:
        known = node.field(key) if isinstance(node, Node) else None
        inside = None if known is None else known.value
        return Entry({**children, key: _changed(children[key], rest, override, value, here, inside)}, entry.where)
    is_there = key in children
    if rest or (is_there != (override.sign != "+") and override.sign != "++"):
        may_add = not rest and value is not None and _takes_others(node, children)
        raise ConfigError(_wrong(override, here, key, children, may_add))
    if value is None:
        return Entry({name: one for name, one in children.items() if name != key}, entry.where)
    if key == "_target_":  # what was said to the class before is no mistake if the new one does not take it
        children = {name: Entry(one.value) for name, one in children.items()}
    return Entry({**children, key: value}, entry.where)


def _takes_others(node: Any, children: dict[str, Entry]) -> bool:
    """Whether more keys may be added to it. Of a class that the code does not have here, loading will say."""
    is_own = isinstance(node, Node) and children.get("_target_", Entry(None)).value == path_of(node.target)
    return not is_own or node.takes_kwargs


def _wrong(override: Override, here: str, key: str, children: dict[str, Entry], may_add: bool) -> str:
    if key in children:
        return f"{override.text!r}: {here} is there already; without the +, it is set."
    known = [name for name in children if name != "_target_"]
    advice = f" To add it, say +{override.path}=..." if may_add else ""
    return f"{override.text!r}: there is no {here}.{did_you_mean(key, known)}{advice}"
