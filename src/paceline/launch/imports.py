"""What a script will need: found in its text, and in that of the user's own modules which it imports.

Nothing is imported for that. What is found is loaded once, where workers are forked from, and not by every rank at
every start; what is not found is loaded when it is needed.
"""

import ast
import os
import re
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache
from importlib.machinery import PathFinder
from pathlib import Path

from paceline.registry import TORCH_WORKER_MODULES

_MOST_FILES = 30
_NEEDS_DYNAMO = re.compile(
    r"DistributedDataParallel|torch\.compile|fully_shard|FullyShardedDataParallel|prepare_model|paceline\.accelerate"
)
_NEEDS_US = re.compile(r"\bpaceline\b")
_INSTALLED = re.compile(r"/(site|dist)-packages/")
"""Also those of another Python's folders, which a virtual environment may see, and of the user's in ~/.local."""


def modules_needed(script: str, path: Sequence[str]) -> tuple[str, ...]:
    """Slow ones of torch's, and ours, that this script or a module of the user's on the path has in its text.
    SyntaxError if the script is none; what is wrong with the others, the script itself will say."""
    source = Path(script).read_bytes()
    ast.parse(source, script)
    needs_dynamo = needs_us = False
    for text in _texts(source.decode(errors="replace"), [os.path.dirname(os.path.realpath(script)), *path]):
        needs_dynamo = needs_dynamo or _NEEDS_DYNAMO.search(text) is not None
        needs_us = needs_us or _NEEDS_US.search(text) is not None
        if needs_dynamo and needs_us:
            break
    dynamo = ("torch._dynamo", "torch.nn.parallel") if needs_dynamo else ()  # imported by the first DDP model
    return (*dynamo, *(TORCH_WORKER_MODULES if needs_us else ()))


def _texts(text: str, path: list[str]) -> Iterator[str]:
    """This one, and those of what it imports, one after the other."""
    yield text
    waiting, seen = [text], set[str]()
    while waiting and len(seen) < _MOST_FILES:
        for name in sorted(_names_imported(waiting.pop(0))):
            file = file_of(name, path)
            if file is not None and file not in seen:
                seen.add(file)
                with suppress(OSError):
                    waiting.append(Path(file).read_bytes().decode(errors="replace"))
                    yield waiting[-1]


def _names_imported(text: str) -> set[str]:
    """With `from a import b`, b may be a module too. Relative imports are left out: nobody gets lost by that."""
    names: set[str] = set()
    with suppress(SyntaxError, ValueError, RecursionError):
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def file_of(name: str, path: Sequence[str]) -> str | None:
    """Of a module that is the user's own: not one of Python's, nor one that is installed. Imports nothing."""
    places: Sequence[str] | None = path
    origin = ""
    for part in name.split("."):
        found = PathFinder.find_spec(part, places) if part else None
        origin = (found.origin if found is not None else None) or ""
        if found is None or origin.startswith(_library_dirs()) or _INSTALLED.search(origin):
            return None
        places = found.submodule_search_locations
        if places is None:
            break
    return origin if origin.endswith(".py") else None


@cache
def _library_dirs() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    dirs = [paths[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")]
    return (*dirs, str(Path(__file__).parents[1]))
