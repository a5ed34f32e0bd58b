"""The rows as a table in the terminal, as Markdown, and as JSON."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks.figures import Figure, Row

_COLUMNS = ("what", "target", "ours", "peers", "ratio", "met")
_MET = {True: "yes", False: "NO", None: "–"}
_LEGEND = "Ratio: how many times better we are than the peer beside it. In brackets: smallest and largest sample."


_WIDTH = 150
"""Of the table where no terminal says how wide it is."""


def print_table(rows: Sequence[Row]) -> None:
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = _WIDTH
    table = Table()
    for column in _COLUMNS:
        table.add_column(column, overflow="fold")
    for row in rows:
        peers = _peers(row) or [("", "")]
        for number, (peer, ratio) in enumerate(peers):
            ours = _ours(row) if number == 0 else ("", "", "", "")
            *cells, met = (escape(text) for text in (*ours[:3], peer, ratio, ours[3]))
            colour = {"yes": "green", "NO": "red", "failed": "red"}.get(met, "default")
            table.add_row(*cells, f"[{colour}]{met}[/]", end_section=number == len(peers) - 1)
    console.print(table)
    console.print(_LEGEND)


def markdown(rows: Sequence[Row], facts: Mapping[str, str], title: str) -> str:
    lines = [f"# {title}", "", *(f"- {name}: {value}" for name, value in facts.items()), ""]
    lines += [f"| {' | '.join(_COLUMNS)} |", f"|{'---|' * len(_COLUMNS)}"]
    for row in rows:
        peers = _peers(row)
        what, target, ours, met = _ours(row)
        ratios = "\n".join(text for _, text in peers) if row.has_ratios else ""
        cells = [what, target, ours, "\n".join(text for text, _ in peers), ratios, met]
        lines.append("| " + " | ".join(cell.replace("|", "\\|").replace("\n", "<br>") for cell in cells) + " |")
    return "\n".join([*lines, "", _LEGEND, ""])


def save(folder: Path, stem: str, rows: Sequence[Row], facts: Mapping[str, str], title: str) -> list[Path]:
    json_path, markdown_path = folder / f"{stem}.json", folder / f"{stem}.md"
    records = [{**asdict(row), "ratios": {peer.system: row.ratio(peer) for peer in row.peers}} for row in rows]
    json_path.write_text(json.dumps({"title": title, "machine": facts, "rows": records}, indent=1) + "\n")
    markdown_path.write_text(markdown(rows, facts, title))
    return [json_path, markdown_path]


def _ours(row: Row) -> tuple[str, str, str, str]:
    """What, target, our figure, met."""
    what = f"{row.what}\n({row.note})" if row.note else row.what
    met = "failed" if row.ours.value is None else _MET[row.is_met]
    return what, row.target, _figure(row, row.ours), met


def _peers(row: Row) -> list[tuple[str, str]]:
    """Each peer's figure and the ratio to it."""
    return [(f"{peer.system}: {_figure(row, peer)}", _ratio(row.ratio(peer))) for peer in row.peers]


def _figure(row: Row, figure: Figure) -> str:
    parts = []
    if figure.value is not None:
        parts.append(row.unit.show(figure.value))
        if len(figure.samples) > 1:
            parts.append(f"({row.unit.number(min(figure.samples))}–{row.unit.number(max(figure.samples))})")
    if figure.note:
        parts.append(f"· {figure.note}")
    if figure.problem:
        parts.append(f"failed: {figure.problem}")
    return " ".join(parts) or "not measured"


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}" if value < 10 else f"{value:,.0f}"
