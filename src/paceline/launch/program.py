"""What is launched, as a value: it travels to the workers, where calling it runs it, and says in run.json what it is.

The worker's side is imported there: whoever only reads a command line does not need it.
"""

import os
import sys
import zipimport
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Script:
    """`python TARGET ARGS` or `python -m TARGET ARGS`: a file, a folder or archive with a `__main__.py`, or the name of
    a module. It is looked for in `folder`."""

    target: str
    args: tuple[str, ...] = ()
    is_module: bool = False
    is_path_safe: bool = False
    """Whether Python was told, by -P, to look for modules in no folder of the user's."""
    launcher_dir: str | None = None
    """What the launcher's own `sys.path` begins with, which is none of the script's."""
    folder: str | None = None
    """Where it was launched: who resumes or retries the run may be in another one, where the same words name something
    else. None: the current directory."""

    @property
    def __name__(self) -> str:
        return self.target if self.is_module else os.path.basename(os.path.abspath(self.target))

    @property
    def is_container(self) -> bool:
        """A folder or an archive, which Python runs by the `__main__` in it."""
        if os.path.isdir(self.target):
            return not self.is_module
        with suppress(zipimport.ZipImportError, OSError):
            zipimport.zipimporter(self.target)
            return not self.is_module
        return False

    def __call__(self) -> None:
        from paceline.launch.as_main import run_as_main

        run_as_main(self)

    def describe_source(self) -> dict[str, Any]:
        file = None if self.is_module else os.path.abspath(os.path.join(self.folder or "", self.target))
        return _described(self.__name__, "__main__", file, self.args)


@dataclass(frozen=True)
class Command:
    """Any command, by its words."""

    words: tuple[str, ...]
    folder: str | None = None
    """As of a Script."""

    @property
    def __name__(self) -> str:
        return os.path.basename(self.words[0])

    def __call__(self) -> None:
        from paceline.launch.as_child import run_as_child

        run_as_child(self)

    def describe_source(self) -> dict[str, Any]:
        return _described(self.__name__, None, None, self.words[1:])


def go_to(folder: str | None) -> None:
    """In a worker: where the program was launched. If that is not here, as on another machine or of a project that was
    moved, it stays where it is, and says so."""
    if folder is None:
        return
    try:
        os.chdir(folder)
    except OSError as error:
        told = f"The folder in which this was launched cannot be entered ({error.strerror}: {folder})."
        print(f"{told} It runs in the current one.", file=sys.stderr, flush=True)


def _described(name: str, module: str | None, file: str | None, args: Sequence[str]) -> dict[str, Any]:
    from paceline.runs.environment import hide_secrets
    from paceline.runs.function_source import MAX_SOURCE_CHARS

    source = None
    with suppress(OSError, UnicodeDecodeError):
        source = Path(file).read_text("utf-8")[:MAX_SOURCE_CHARS] if file is not None else None
    line = None if source is None else 1
    return {"name": name, "module": module, "file": file, "line": line, "source": source, "args": hide_secrets(args)}
