"""The project's own code: files of the experiment's classes, and of what these import, but for installed packages."""

from __future__ import annotations

import ast
import hashlib
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

_STANDARD_LIBRARY = tuple(
    Path(path) for name in ("stdlib", "platstdlib") if (path := sysconfig.get_path(name)) is not None
)
_INSTALLED = {"site-packages", "dist-packages"}


def code_hash_of(classes: Iterable[type]) -> str:
    """The same for the same code: of the files that the classes come from, and of all modules of the same projects that
    these import, however deep. Nothing is imported for it."""
    content = hashlib.blake2b(digest_size=5)
    for name, path in sorted(own_files({cls.__module__ for cls in classes}).items()):
        content.update(f"{name} ".encode() + path.read_bytes())
    return content.hexdigest()


def own_files(modules: Iterable[str]) -> dict[str, Path]:
    """By the name of the module."""
    found: dict[str, Path] = {}
    for module in modules:
        root = root_of(module)
        if root is not None:
            _follow(module, root, found)
    return found


def root_of(module: str) -> Path | None:
    """The folder from which a module of the user's is imported. None for one that is installed, Python's or ours."""
    path = _file_of(module)
    if path is None or module.partition(".")[0] == __name__.partition(".")[0] or not is_own(path):
        return None
    is_package = path.name == "__init__.py"
    return path.parents[module.count(".") + is_package] if module != "__main__" else path.parent


def is_own(path: Path) -> bool:
    return not _INSTALLED & {*path.parts} and not any(path.is_relative_to(one) for one in _STANDARD_LIBRARY)


def _file_of(module: str) -> Path | None:
    file = getattr(sys.modules.get(module), "__file__", None)
    return Path(file).resolve() if file is not None and file.endswith(".py") and Path(file).is_file() else None


def _follow(module: str, root: Path, found: dict[str, Path]) -> None:
    """Add a module, the packages that it is in, and what they import."""
    waiting = [module]
    while waiting:
        name = waiting.pop()
        path = _file_of(name) if name == "__main__" else _in_folder(name, root)
        if path is None or name in found:
            continue
        found[name] = path
        waiting += [parent for parent in _parents(name)]
        waiting += _imported(path, name if path.name == "__init__.py" else name.rpartition(".")[0])


def _in_folder(name: str, root: Path) -> Path | None:
    place = root.joinpath(*name.split("."))
    return next((path for path in (place / "__init__.py", place.with_suffix(".py")) if path.is_file()), None)


def _parents(name: str) -> Iterator[str]:
    parts = name.split(".")
    for length in range(1, len(parts)):
        yield ".".join(parts[:length])


def _imported(path: Path, package: str) -> Iterator[str]:
    """The names that a file may import, anywhere in it. Some are no modules: nobody finds a file for these."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, RecursionError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            name = ".".join([*filter(None, base), *filter(None, [node.module])])
            yield name
            yield from (f"{name}.{alias.name}" if name else alias.name for alias in node.names)
