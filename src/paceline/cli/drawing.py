"""Text for a terminal: clean, in columns, in colour where that is wanted. Pure but for questions to the terminal."""

import functools
import math
import os
import re
import shutil
import sys
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_BAD = (
    *range(0x20),
    *range(0x7F, 0xA0),
    *(0x200B, 0x200E, 0x200F, 0xFEFF),
    *range(0x2028, 0x202F),  # line ends, and marks that turn the direction of writing
    *range(0x2060, 0x2070),
    *range(0xD800, 0xE000),  # halves of characters, as which bytes of file names come that are not UTF-8
)
_COLOURING = re.compile(r"\x1b\[[0-9;]*m")
_ACTING = re.compile(r"[\x7f-\x9f\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff]")
_BARS = "▁▂▃▄▅▆▇█"
_COLOURS = {"red": 31, "green": 32, "yellow": 33, "blue": 34, "cyan": 36, "grey": 90, "bold": 1}
STATE_COLOURS = {
    "SUCCEEDED": "green",
    "RUNNING": "cyan",
    "PENDING": "blue",
    "FAILED": "red",
    "LOST": "red",
    "STOPPED": "yellow",
}


def clean(text: str) -> str:
    """On one line, and without characters that do something in a terminal: these are shown as escapes."""
    return text if text.isascii() and text.isprintable() else text.translate(_escapes())


def clean_lines(text: str) -> list[str]:
    """The lines of a log, of each what is seen of it in the end: a bar that is redrawn ends in its last state."""
    lines = _COLOURING.sub("", text).replace("\r\n", "\n").split("\n")
    return [clean(line.rstrip("\r").rpartition("\r")[2]) for line in lines]


def clean_json(text: str) -> str:
    """JSON that stays the same value: what a terminal would act on is escaped."""
    return _ACTING.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


@functools.cache
def _escapes() -> dict[int, str]:
    return {code: _escape(code) for code in _BAD} | {ord("\t"): " "}


def _escape(code: int) -> str:
    if 0xDC80 <= code <= 0xDCFF:
        return f"\\x{code - 0xDC00:02x}"
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"


def is_coloured() -> bool:
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb" and sys.stdout.isatty()


def width() -> int | None:
    """Of the terminal; None where the output goes elsewhere, and is not to be cut."""
    return shutil.get_terminal_size((80, 24)).columns if sys.stdout.isatty() else None


def paint(text: str, colour: str | None, is_on: bool) -> str:
    return f"\x1b[{_COLOURS[colour]}m{text}\x1b[0m" if is_on and colour and text else text


def cells(text: str) -> int:
    """How many columns it takes."""
    if text.isascii():
        return len(text)
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def cut(text: str, most: int) -> str:
    """In the middle: the end of a name tells as much as its beginning."""
    if cells(text) <= most:
        return text
    if most < 2:
        return "…" * most
    head, tail = "", ""
    while True:
        part = "head" if cells(head) <= cells(tail) else "tail"
        longer = (text[: len(head) + 1], tail) if part == "head" else (head, text[len(text) - len(tail) - 1 :])
        if cells(longer[0]) + cells(longer[1]) + 1 > most:
            return f"{head}…{tail}"
        head, tail = longer


@dataclass(frozen=True)
class Column:
    """`rank` says what goes first where there is no room: the highest. Of rank 0, it is shortened instead."""

    title: str
    rank: int = 0
    is_right: bool = False
    least: int = 8


def table(
    columns: Sequence[Column],
    rows: Sequence[Sequence[str]],
    most: int | None,
    colours: Mapping[int, Mapping[str, str]] | None = None,
    is_on: bool = False,
) -> list[str]:
    """Lines of at most `most` columns; None: as wide as it is. Cells are clean text already."""
    widths = _widths(columns, rows)
    if most is not None:
        widths = _fit(columns, widths, most)
    lines = [paint(_line([c.title for c in columns], columns, widths), "bold", is_on)]
    for row in rows:
        lines.append(_line(row, columns, widths, colours or {}, is_on))
    return lines


def left_out(columns: Sequence[Column], rows: Sequence[Sequence[str]], most: int | None) -> list[str]:
    """The titles of what `table` has no room for."""
    widths = _widths(columns, rows)
    shown = widths if most is None else _fit(columns, dict(widths), most)
    return [columns[place].title for place in widths if place not in shown]


def _widths(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> dict[int, int]:
    """Of what has something to show, by its place."""
    shown = [place for place, _ in enumerate(columns) if any(row[place] for row in rows) or columns[place].rank == 0]
    return {place: max(cells(text) for text in [columns[place].title, *(r[place] for r in rows)]) for place in shown}


def _fit(columns: Sequence[Column], widths: dict[int, int], most: int) -> dict[int, int]:
    def over() -> int:
        return sum(widths.values()) + 2 * (len(widths) - 1) - most

    def shrink(least_of: int) -> None:
        for place in sorted((p for p in widths if columns[p].rank == 0), key=lambda p: -widths[p]):
            widths[place] = max(min(widths[place], least_of), widths[place] - max(0, over()))

    # Long names give way before a column goes that says something; what says little goes before names are cut short.
    for length, lowest in ((28, 5), (14, 1)):
        shrink(length)
        while over() > 0 and max(columns[place].rank for place in widths) >= lowest:
            del widths[max(widths, key=lambda place: columns[place].rank)]
    shrink(1)
    return widths


def _line(
    row: Sequence[str],
    columns: Sequence[Column],
    widths: Mapping[int, int],
    colours: Mapping[int, Mapping[str, str]] | None = None,
    is_on: bool = False,
) -> str:
    found = []
    for place, size in widths.items():
        text = cut(row[place], size)
        gap = " " * (size - cells(text))
        painted = paint(text, (colours or {}).get(place, {}).get(row[place]), is_on)
        found.append(gap + painted if columns[place].is_right else painted + gap)
    return "  ".join(found).rstrip()


def spark(values: Sequence[float], size: int = 8) -> str:
    """A curve in one line."""
    values = [value for value in values if math.isfinite(value)]
    if not values:
        return ""
    if len(values) > size:
        values = [values[round(place * (len(values) - 1) / (size - 1))] for place in range(size)]
    low, high = min(values), max(values)
    if high == low:
        return _BARS[0] * len(values)
    return "".join(_BARS[min(7, int(8 * share(value, low, high)))] for value in values)


def share(value: float, low: float, high: float) -> float:
    """Where it is between two others, from 0 to 1. Halved, since the distance of the largest floats is none."""
    return (value / 2 - low / 2) / (high / 2 - low / 2) if high / 2 > low / 2 else 0.0


def plain(value: object) -> str:
    """Any value of a configuration, on one line; nothing for None."""
    return "" if value is None else clean(f"{value:.6g}" if isinstance(value, float) else str(value))


def number(value: float | None) -> str:
    if value is None:
        return ""
    if not math.isfinite(value):
        return str(value)
    return str(int(value)) if value == int(value) and abs(value) < 1e9 else f"{value:.4g}"


def span(seconds: float | None, is_rough: bool = False) -> str:
    """A length of time in a few characters; roughly, in its largest unit alone."""
    if seconds is None or seconds < 0:
        return ""
    if seconds < 10 and not is_rough:
        return f"{seconds:.1f}s"
    for size, unit, smaller, name in ((86400, "d", 3600, "h"), (3600, "h", 60, "m"), (60, "m", 1, "s")):
        if seconds >= size:
            rest = int(seconds % size // smaller)
            is_whole = is_rough or rest == 0 or seconds >= 10 * size
            return f"{int(seconds // size)}{unit}" + ("" if is_whole else f"{rest}{name}")
    return f"{int(seconds)}s"


def size_of(num_bytes: float) -> str:
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if num_bytes < 1000 or unit == "TB":
            return f"{num_bytes:.0f} {unit}" if unit == "B" or num_bytes >= 100 else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    raise AssertionError("the last unit is for all that is left")
