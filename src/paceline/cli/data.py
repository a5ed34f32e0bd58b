"""`paceline data`: the storage that runs share."""

import os
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli import data_gc, data_jobs
from paceline.cli.asking import Json, Root, Yes, add_command, confirm, give, give_json, new_group, say

if TYPE_CHECKING:
    from paceline.cli.storage_tree import Entry

_HELP = """Look at shared storage, fill it by data jobs, and remove what is not needed.

\b
  paceline data show
  paceline data new images && cd images && paceline data run
  paceline data rm old/images
  paceline data gc

The storage is what --root or PACELINE_STORAGE names.
"""
_SHOW = """Show the storage as a tree, with sizes.

\b
  paceline data show                            two levels of PACELINE_STORAGE
  paceline data show images --depth 4
  paceline data show --root /mnt/shared --json

Links are shown, and not followed.
"""
_RM = """Remove a folder or a file from the storage, for good, after a question.

\b
  paceline data rm old/images
  paceline data rm old/images --yes

What is outside of the storage is never touched, whatever the path says: a path through a link is refused, and of a link
itself only the link goes.
"""


def show(
    path: Annotated[str, typer.Argument(metavar="[PATH]", show_default=False, help="Below the root.")] = "",
    root: Root = None,
    depth: Annotated[int, typer.Option("--depth", "-d", min=1, help="How many levels.")] = 2,
    json: Json = False,
) -> None:
    from paceline.cli import drawing
    from paceline.cli.storage_tree import measure, storage_root

    top = storage_root(root)
    entry = measure(top, path, depth)
    if json:
        give_json(_as_json(entry))
        return
    rows = list(_rows(entry, "", ""))
    most = drawing.width()
    size = max(len(drawing.size_of(one.num_bytes)) for _, one in rows)
    for text, one in rows:
        number = drawing.size_of(one.num_bytes).rjust(size)
        files = "" if one.kind != "folder" else f"  {_files(one)}"
        name = text if most is None else drawing.cut(text, max(20, most - size - 2 - len(files)))
        give([f"{number}  {name}{files}"])
    if entry.num_unread:
        say(f"{entry.num_unread} folders could not be read, and do not count.")


def _files(entry: "Entry") -> str:
    return f"{entry.num_files} files" if entry.num_files != 1 else "1 file"


def _rows(entry: "Entry", lead: str, below: str) -> Any:
    from paceline.cli.drawing import clean

    yield lead + clean(entry.name) + {"folder": "/", "link": " (link)"}.get(entry.kind, ""), entry
    for place, one in enumerate(entry.entries):
        is_last = place == len(entry.entries) - 1
        yield from _rows(one, below + ("└─ " if is_last else "├─ "), below + ("   " if is_last else "│  "))


def _as_json(entry: "Entry") -> dict[str, Any]:
    found = {"name": entry.name, "kind": entry.kind, "num_bytes": entry.num_bytes, "num_files": entry.num_files}
    return {**found, "entries": [_as_json(one) for one in entry.entries]} if entry.kind == "folder" else found


def rm(
    path: Annotated[str, typer.Argument(metavar="PATH", show_default=False, help="Below the root.")],
    root: Root = None,
    yes: Yes = False,
    json: Json = False,
) -> None:
    from paceline.cli.drawing import clean, size_of
    from paceline.cli.storage_tree import check_removable, measure, remove, storage_root

    top = storage_root(root)
    check_removable(top, path)  # nobody is asked whether to do what will be refused
    entry = measure(top, path, 1)
    size = size_of(entry.num_bytes)
    told = {"folder": f"{size}, {_files(entry)}", "link": "a link; what it leads to stays"}.get(entry.kind, size)
    what = f"{clean(os.path.join(top, path))} ({told})"
    if not confirm(f"Remove {what} for good?", yes):
        raise typer.Exit(2)
    remove(top, path)
    say(f"{path} is removed.")
    if json:
        give_json({"removed": path, "num_bytes": entry.num_bytes, "num_files": entry.num_files})


def add_to(app: typer.Typer) -> None:
    group = new_group("data", _HELP)
    add_command(group, "show", _SHOW, show)
    add_command(group, "rm", _RM, rm)
    add_command(group, "gc", data_gc.HELP, data_gc.gc)
    data_jobs.add_to(group)
    app.add_typer(group)
