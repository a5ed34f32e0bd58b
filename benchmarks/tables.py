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
_MET = {True: "yes", False: "NO", None: ""}


def print_table(console: Console, rows: Sequence[Row]) -> None:
    table = Table(show_lines=True)
    for column in _COLUMNS:
        table.add_column(column, overflow="fold")
    for row in rows:
        *cells, met = _cells(row)
        colour = {"yes": "green", "NO": "red"}.get(met, "default")
        table.add_row(*(escape("\n".join(lines)) for lines in cells), f"[{colour}]{met}[/]")
    console.print(table)
    console.print("ratio: how many times better we are than the peer beside it; in brackets, smallest to largest sample")


def markdown(rows: Sequence[Row], facts: Mapping[str, str], title: str) -> str:
    lines = [f"# {title}", "", *(f"- {name}: {value}" for name, value in facts.items()), ""]
    lines += [f"| {' | '.join(_COLUMNS)} |", f"|{'---|' * len(_COLUMNS)}"]
    for row in rows:
        *cells, met = _cells(row)
        texts = ["<br>".join(cell).replace("|", "\\|") for cell in cells]
        lines.append(f"| {' | '.join([*texts, met])} |")
    lines += ["", "Ratio: how many times better we are than the peer beside it. In brackets: smallest to largest sample.", ""]
    return "\n".join(lines)


def save(folder: Path, stem: str, rows: Sequence[Row], facts: Mapping[str, str], title: str) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    json_path, markdown_path = folder / f"{stem}.json", folder / f"{stem}.md"
    records = [{**asdict(row), "ratios": {peer.system: row.ratio(peer) for peer in row.peers}} for row in rows]
    json_path.write_text(json.dumps({"title": title, "machine": facts, "rows": records}, indent=1) + "\n")
    markdown_path.write_text(markdown(rows, facts, title))
    return [json_path, markdown_path]


def _cells(row: Row) -> tuple[list[str], list[str], list[str], list[str], list[str], str]:
    peers = [f"{peer.system}: {_figure(row, peer)}" for peer in row.peers]
    ratios = [_ratio(row.ratio(peer)) for peer in row.peers]
    met = "failed" if row.ours.value is None else _MET[row.is_met]
    what = [row.what, row.note] if row.note else [row.what]
    return what, [row.target], [_figure(row, row.ours)], peers, ratios, met


def _figure(row: Row, figure: Figure) -> str:
    parts = []
    if figure.value is not None:
        parts.append(row.unit.show(figure.value))
        if len(figure.samples) > 1:
            least, most = (row.unit.show(end).removesuffix(f" {row.unit.name}") for end in (min(figure.samples), max(figure.samples)))
            parts.append(f"({least}–{most})")
    if figure.problem:
        parts.append(f"failed: {figure.problem}")
    return " ".join(parts) or "not measured"


def _ratio(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}" if value < 10 else f"{value:,.0f}"
