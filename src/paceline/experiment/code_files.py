"""Which files of a project its code is made of: those that others of them import, read from their source.

What is loaded in this process would not do: it depends on what ran before, and imports inside functions come late.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path


def imported_files(first: Iterable[Path], root: Path) -> set[Path]:
    """These files, and all below `root` that they import, and so on. Installed packages are not among them."""
    found: set[Path] = set()
    waiting = [path.resolve() for path in first]
    while waiting:
        path = waiting.pop()
        if path in found or "site-packages" in path.parts:
            continue
        found.add(path)
        waiting += _imports(path, root.resolve())
    return found


def _imports(path: Path, root: Path) -> Iterator[Path]:
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for one in node.names:
                yield from _files(root, one.name.split("."))
        elif isinstance(node, ast.ImportFrom):
            base = root if node.level == 0 else path.parents[min(node.level, len(path.parents)) - 1]
            module = (node.module or "").split(".") if node.module else []
            yield from _files(base, module)
            for one in node.names:  # a module, or a name in one
                yield from _files(base, [*module, one.name])


def _files(base: Path, names: list[str]) -> Iterator[Path]:
    """Of a module, and of the packages that it is in."""
    for length in range(len(names) + 1):
        place = base.joinpath(*names[:length])
        for path in (place / "__init__.py", place.with_suffix(".py") if length else None):
            if path is not None and path.is_file():
                yield path.resolve()
