"""Which rows were handed out, as bytes: what a rank sends to the driver, and the run folder keeps.

    message   the step it belongs to and the id of the rank's next checkpoint (8 bytes each), its number among the
              messages of the rank in this attempt (4), then items
    item      kind (1 byte), which data (2), which epoch (4), length of what follows (4), and that:
        1     ids, as distances from the least of them:         least (8), width (1), and one number for each
        2     ids that follow each other, as (first, count):    least (8), width of firsts (1), of counts (1), all
              firsts, and all counts
        3     the epoch was read to its end:                    how many rows at the most were left out of it (8)
        4     what the data is, as JSON. Comes before anything of it

Numbers are little-endian, and as narrow as they can be: 1, 2, 4 or 8 bytes. Reading runs no code, and needs memory for
what is there, not for what it says: rows that follow each other stay a pair of numbers.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from operator import sub
from typing import Any, NamedTuple

import numpy as np

MESSAGE = struct.Struct("<QQI")
ITEM = struct.Struct("<BHII")
_PLAIN = struct.Struct("<qB")
_RUNS = struct.Struct("<qBB")
_LEFT_OUT = struct.Struct("<Q")
PLAIN, RUNS, ENDED, DATA = 1, 2, 3, 4
_TYPES: dict[int, Any] = {1: np.dtype("<u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4"), 8: np.dtype("<u8")}
_CODES = {1: "B", 2: "H", 4: "I", 8: "Q"}
_MOST_RUN = 2**32


class Spans(NamedTuple):
    """Rows, as stretches of consecutive numbers: from each of `firsts` to that of `lasts`, which is one of them."""

    firsts: Any
    lasts: Any


class Item(NamedTuple):
    kind: int
    data: int
    epoch: int
    content: bytes


class Message(NamedTuple):
    """What one rank has taken since it last told: with its report `step`, and before its checkpoint `save`."""

    step: int
    save: int
    number: int
    """From 0 on. By it a reader knows one that is there twice, or missing."""
    items: tuple[Item, ...]


def item(kind: int, data: int, epoch: int, content: bytes) -> bytes:
    return ITEM.pack(kind, data, epoch, len(content)) + content


def encoded_ids(data: int, epoch: int, ids: Any) -> bytes:
    """One item, of at least one id. Some microseconds for a thousand: a worker does it in every step."""
    size = len(ids)
    breaks = ids[1:] - ids[:-1] != 1
    num_breaks = int(np.count_nonzero(breaks))
    if num_breaks * 32 < size:  # few of them, which are smaller in any case
        return item(RUNS, data, epoch, _encoded_runs(ids, breaks, num_breaks))
    least = int(ids.min())
    width = _width_of(int(ids.max()) - least)
    return item(PLAIN, data, epoch, _PLAIN.pack(least, width) + (ids - least).astype(_TYPES[width]).tobytes())


def _encoded_runs(ids: Any, breaks: Any, num_breaks: int) -> bytes:
    """Most batches have a few runs, one for each place at which the data is read: then numpy is the slower way."""
    places = [0, *(end + 1 for end in breaks.nonzero()[0].tolist())] if num_breaks else [0]
    firsts = [ids.item(place) for place in places]
    counts = [*map(sub, places[1:], places), len(ids) - places[-1]]
    least = min(firsts)
    widths = _width_of(max(firsts) - least), _width_of(max(counts))
    size = len(places)
    return (
        _RUNS.pack(least, *widths)
        + struct.pack(f"<{size}{_CODES[widths[0]]}", *[first - least for first in firsts])
        + struct.pack(f"<{size}{_CODES[widths[1]]}", *counts)
    )


def _width_of(most: int) -> int:
    return 1 if most < 1 << 8 else 2 if most < 1 << 16 else 4 if most < 1 << 32 else 8


def encoded_end(data: int, epoch: int, num_left_out: int) -> bytes:
    return item(ENDED, data, epoch, _LEFT_OUT.pack(num_left_out))


def decoded(message: bytes | memoryview) -> Message:
    """ValueError for what is none."""
    if len(message) < MESSAGE.size:
        raise ValueError("a message of rows is too short")
    step, save, number = MESSAGE.unpack_from(message)
    return Message(step, save, number, tuple(_items(message)))


def _items(message: bytes | memoryview) -> Iterator[Item]:
    place = MESSAGE.size
    while place < len(message):
        if len(message) - place < ITEM.size:
            raise ValueError("an item of rows has no beginning")
        kind, data, epoch, size = ITEM.unpack_from(message, place)
        place += ITEM.size
        if kind not in (PLAIN, RUNS, ENDED, DATA) or len(message) - place < size:
            raise ValueError(f"an item of rows is of kind {kind} and {size} bytes; there are {len(message) - place}")
        yield Item(kind, data, epoch, bytes(message[place : place + size]))
        place += size


def spans_of(one: Item) -> Spans:
    """Of an item with ids. ValueError if it has none that make sense."""
    if one.kind == PLAIN:
        least, width = _head(_PLAIN, one)
        [firsts] = _columns(one.content[_PLAIN.size :], width)
        firsts = _moved(firsts, least)
        return Spans(firsts, firsts)
    least, width, width_of_counts = _head(_RUNS, one)
    firsts, counts = _columns(one.content[_RUNS.size :], width, width_of_counts)
    firsts, counts = _moved(firsts, least), counts.astype(np.uint64)
    if len(counts) and (int(counts.min()) < 1 or int(counts.max()) > _MOST_RUN):
        raise ValueError("a stretch of rows has none, or too many")
    lasts = firsts + counts.astype(np.int64) - 1
    if (lasts < firsts).any():
        raise ValueError("a stretch of rows goes on beyond the last number")
    return Spans(firsts, lasts)


def left_out_of(one: Item) -> int:
    return int(_head(_LEFT_OUT, one)[0])


def _head(layout: struct.Struct, one: Item) -> tuple[int, ...]:
    if len(one.content) < layout.size:
        raise ValueError("an item of rows is too short")
    return layout.unpack_from(one.content)


def _columns(content: bytes, *widths: int) -> list[Any]:
    """Equally many numbers of each width, one kind after the other."""
    if not all(width in _TYPES for width in widths) or len(content) % sum(widths):
        raise ValueError(f"{len(content)} bytes hold no numbers of {widths} bytes")
    size, place, found = len(content) // sum(widths), 0, []
    for width in widths:
        found.append(np.frombuffer(content, _TYPES[width], size, place))
        place += size * width
    return found


def _moved(distances: Any, least: int) -> Any:
    """Beyond the last number it begins anew, as the distances of far apart ids do."""
    return distances.astype(np.uint64).view(np.int64) + np.int64(least)
