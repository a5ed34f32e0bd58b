"""Curves drawn with dots of braille: two by four of them in each character. Pure."""

import itertools
import math
from collections.abc import Mapping, Sequence

from paceline.cli.drawing import cells, cut, number, paint, share

_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
_PALETTE = ("cyan", "yellow", "green", "red", "blue")

Points = Sequence[tuple[float, float]]


def draw(curves: Mapping[str, Points], size: tuple[int, int], is_coloured: bool = False) -> list[str]:
    """Lines of at most `size[0]` characters, the plot itself `size[1]` high, names above and steps below.
    Without colours each of several curves has a plot of its own, since nobody could tell them apart."""
    curves = {name: [(x, y) for x, y in points if math.isfinite(y)] for name, points in curves.items()}
    curves = {name: points for name, points in curves.items() if points}
    if not curves:
        return []
    if len(curves) > 1 and not is_coloured:
        plots = [draw({name: points}, size) for name, points in curves.items()]
        return [line for plot in plots for line in plot]
    xs, ys = ([point[axis] for points in curves.values() for point in points] for axis in (0, 1))
    box = min(xs), max(xs), min(ys), max(ys)
    labels = [number(box[3]), number(box[2])]
    margin = max(map(cells, labels))
    columns = max(10, size[0] - margin - 2)
    grid = [[(0, "")] * columns for _ in range(size[1])]
    for place, points in enumerate(curves.values()):
        _dot(grid, points, box, _PALETTE[place % len(_PALETTE)])
    lines = []
    for row, marks in enumerate(grid):
        label = labels[0] if row == 0 else labels[1] if row == size[1] - 1 else ""
        drawn = "".join(paint(chr(0x2800 + bits), colour, is_coloured) if bits else " " for bits, colour in marks)
        lines.append(f"{label:>{margin}} ┤{drawn}".rstrip())
    first, last = number(box[0]), number(box[1])
    lines.append(" " * (margin + 2) + first + last.rjust(columns - len(first)))
    names = [
        paint(cut(name, size[0] - 2), _PALETTE[place % len(_PALETTE)], is_coloured) for place, name in enumerate(curves)
    ]
    return [*(" " * (margin + 2) + name for name in names), *lines]


def _dot(
    grid: list[list[tuple[int, str]]], points: Points, box: tuple[float, float, float, float], colour: str
) -> None:
    width, height = 2 * len(grid[0]) - 1, 4 * len(grid) - 1
    places = [(_scaled(x, box[0], box[1], width), height - _scaled(y, box[2], box[3], height)) for x, y in points]
    for (x0, y0), (x1, y1) in itertools.pairwise(places if len(places) > 1 else places * 2):
        steps = max(abs(x1 - x0), abs(y1 - y0))
        for part in range(steps + 1):
            x = x0 + round((x1 - x0) * part / max(1, steps))
            y = y0 + round((y1 - y0) * part / max(1, steps))
            bits, _ = grid[y // 4][x // 2]
            grid[y // 4][x // 2] = bits | _DOTS[y % 4][x % 2], colour


def _scaled(value: float, low: float, high: float, most: int) -> int:
    return round(share(value, low, high) * most)
