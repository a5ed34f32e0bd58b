"""A table as a notebook shows it."""

from collections.abc import Sequence
from html import escape


def html_table(rows: Sequence[Sequence[str]], header: Sequence[str] = (), caption: str = "") -> str:
    """Everything in it is text, and shown as it is."""
    top = f"<caption>{escape(caption)}</caption>" if caption else ""
    head = f"<thead>{_row(header, 'th')}</thead>" if header else ""
    body = "".join(_row(row, "td") for row in rows)
    return f"<table>{top}{head}<tbody>{body}</tbody></table>"


def _row(cells: Sequence[str], tag: str) -> str:
    return "<tr>" + "".join(f'<{tag} style="text-align: left">{escape(cell)}</{tag}>' for cell in cells) + "</tr>"
