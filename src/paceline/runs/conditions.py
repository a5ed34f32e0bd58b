"""Conditions on runs, as `xp ls --filter` takes them: `metrics.loss<0.1 and (config.lr>0.01 or state=FAILED)`. Pure.

    condition   all ("or" all)*
    all         one ("and" one)*
    one         "not" one | "(" condition ")" | FIELD [OP VALUE]
    OP          < <= > >= == = != ~ (contains, or matches a pattern with *)

Nothing is evaluated but this. A field that a run does not have fits no comparison; alone, it asks whether there is one.
"""

import re
from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any

from paceline.errors import ArgumentError

FIELDS = ("name", "run", "state", "steps", "workers", "age", "duration", "tags")
GROUPS = ("metrics", "config", "min", "max")

Lookup = Callable[[str], Any]
"""The value of a field of some run; None if it has none."""
Condition = Callable[[Lookup], bool]

_TOKEN = re.compile(
    r"""\s*(?:(?P<text>"[^"]*"|'[^']*')|(?P<op><=|>=|==|!=|[<>=~()])|(?P<word>[^\s<>=!~()"']+))""", re.VERBOSE
)
_MOST_CHARS = 2_000
_MOST_DEPTH = 50
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}


def parse(text: str) -> Condition:
    """ArgumentError says where it is none."""
    if len(text) > _MOST_CHARS:
        raise ArgumentError(f"The filter has {len(text)} characters; expected at most {_MOST_CHARS}.")
    return _Parser(text).whole()


def seconds(text: str, unit: str = "") -> float:
    """`90s`, `15m`, `2h`, `2d`, `1w`, `0`. ArgumentError for anything else. Of a number alone only who waits knows the
    unit: seconds. Of an age, some would mean days, and `gc` would have removed by then what they wanted to keep."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw]?)", text.strip())
    if match is None:
        raise ArgumentError(
            f"{text!r} is no length of time: expected a number and a unit, as in 30s, 15m, 2h, 2d or 1w."
        )
    number, unit = float(match[1]), match[2] or unit
    if not unit and number:
        *most, last = (f"{match[1]}{one}" for one in _UNITS)
        raise ArgumentError(f"{text!r} has no unit: did you mean {', '.join(most)} or {last}?")
    return number * _UNITS[unit or "s"]


class _Parser:
    def __init__(self, text: str):
        self._text = text
        self._tokens = _tokens(text)
        self._place = 0
        self._depth = 0

    def whole(self) -> Condition:
        if not self._tokens:
            raise self._error("it is empty")
        found = self._any()
        if self._place < len(self._tokens):
            raise self._error(f"expected `and` or `or` before {self._tokens[self._place]!r}")
        return found

    def _any(self) -> Condition:
        parts = [self._all()]
        while self._take("or"):
            parts.append(self._all())
        return lambda lookup: any(part(lookup) for part in parts)

    def _all(self) -> Condition:
        parts = [self._one()]
        while self._take("and"):
            parts.append(self._one())
        return lambda lookup: all(part(lookup) for part in parts)

    def _one(self) -> Condition:
        self._depth += 1
        if self._depth > _MOST_DEPTH:
            raise self._error(f"it is nested more than {_MOST_DEPTH} deep")
        try:
            if self._take("not"):
                inner = self._one()
                return lambda lookup: not inner(lookup)
            if self._take("("):
                found = self._any()
                if not self._take(")"):
                    raise self._error("a `)` is missing")
                return found
            return self._comparison()
        finally:
            self._depth -= 1

    def _comparison(self) -> Condition:
        name = self._field()
        op = next((op for op in _OPS if self._take(op)), None)
        if op is None:
            return lambda lookup: lookup(name) not in (None, False, "", ())
        value, compare = self._value(name), _OPS[op]
        return lambda lookup: compare(lookup(name), value)

    def _field(self) -> str:
        token = self._next("a field")
        group, _, rest = token.partition(".")
        if token not in FIELDS and not (group in GROUPS and rest):
            known = ", ".join([*FIELDS, *(f"{group}.NAME" for group in GROUPS)])
            raise self._error(f"{token!r} is no field; expected one of {known}")
        return token

    def _value(self, name: str) -> Any:
        token = self._next("a value")
        if token[0] in "\"'":
            return token[1:-1]
        if token in _OPS or token in "()":
            raise self._error(f"expected a value before {token!r}")
        if name in ("age", "duration"):
            return seconds(token)
        return _plain(token)

    def _next(self, what: str) -> str:
        if self._place == len(self._tokens):
            raise self._error(f"{what} is missing at the end")
        self._place += 1
        return self._tokens[self._place - 1]

    def _take(self, token: str) -> bool:
        is_next = self._place < len(self._tokens) and self._tokens[self._place] == token
        self._place += is_next
        return is_next

    def _error(self, what: str) -> ArgumentError:
        return ArgumentError(
            f"The filter {self._text!r} cannot be read: {what}. An example: metrics.loss<0.1 and config.lr>0.01"
        )


def _tokens(text: str) -> list[str]:
    found, place = [], 0
    text = text.rstrip()
    while place < len(text):
        match = _TOKEN.match(text, place)
        if match is None:
            raise ArgumentError(f"The filter {text!r} cannot be read from {text[place:]!r} on.")
        found.append(match[0].strip())
        place = match.end()
    return found


def _plain(token: str) -> Any:
    words = {"true": True, "false": False, "none": None, "null": None}
    if token.lower() in words:
        return words[token.lower()]
    try:
        return float(token)
    except ValueError:
        return token


def _ordered(is_so: Callable[[float, float], bool]) -> Callable[[Any, Any], bool]:
    def compare(value: Any, other: Any) -> bool:
        if isinstance(value, int | float) and isinstance(other, int | float):
            return is_so(value, other)
        if isinstance(value, str) and isinstance(other, str):
            return is_so(value, other)  # type: ignore[arg-type]
        return False

    return compare


def _equal(value: Any, other: Any) -> bool:
    if isinstance(value, tuple):
        return other in value
    if isinstance(value, str):
        return value.lower() == str(other).lower() or _number(value) == other
    return bool(value == other) and isinstance(value, bool) == isinstance(other, bool)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _like(value: Any, other: Any) -> bool:
    if value is None:
        return False
    pattern = str(other) if "*" in str(other) else f"*{other}*"
    values = value if isinstance(value, tuple) else (value,)
    return any(fnmatchcase(str(one).lower(), pattern.lower()) for one in values)


_OPS: dict[str, Callable[[Any, Any], bool]] = {
    "<=": _ordered(lambda a, b: a <= b),
    ">=": _ordered(lambda a, b: a >= b),
    "==": _equal,
    "!=": lambda a, b: a is not None and not _equal(a, b),
    "<": _ordered(lambda a, b: a < b),
    ">": _ordered(lambda a, b: a > b),
    "=": _equal,
    "~": _like,
}
