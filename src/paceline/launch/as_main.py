"""In a worker: run a script as `__main__`, as `python` would run it.

Not by `runpy`, which takes the module away again at the end, when a thread may still pickle by its names, and whose own
lines would be in every traceback.
"""

import builtins
import importlib.util
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType
from typing import Any

from paceline.errors import ScriptExitError
from paceline.launch.ending import as_of_a_program
from paceline.launch.exit_code import check_exit_code, tell_restart_count
from paceline.launch.notice import passing_on_sigterm
from paceline.launch.program import Script, go_to


def run_as_main(script: Script) -> None:
    """An exit code other than 0 is a ScriptExitError, unless the run was asked to end."""
    go_to(script.folder)
    _set_path(script)
    sys.argv[:] = [script.target, *script.args]
    main, code = _module(script.target) if script.is_module else _file(script)
    sys.modules["__main__"] = main
    tell_restart_count()
    with _exit_code_explained(), passing_on_sigterm(), as_of_a_program():
        exec(code, vars(main))


def _set_path(script: Script) -> None:
    """`sys.path` as Python begins it: with the folder of the script, or for -m the current one."""
    if script.launcher_dir in sys.path:
        sys.path.remove(script.launcher_dir)
    if script.is_container:
        sys.path.insert(0, os.path.abspath(script.target))
    elif not script.is_path_safe:
        sys.path.insert(0, os.getcwd() if script.is_module else os.path.dirname(os.path.realpath(script.target)))


def _file(script: Script) -> tuple[ModuleType, CodeType]:
    if script.is_container:
        found = PathFinder.find_spec("__main__", [script.target])
        if found is None:
            raise ScriptExitError(f"{script.target!r} has no __main__.py: there is nothing to run.")
        return _as_main(found)
    path = os.path.abspath(script.target)
    main = ModuleType("__main__")
    loader = SourceFileLoader("__main__", path)
    vars(main).update(__file__=path, __cached__=None, __loader__=loader, __builtins__=builtins)
    try:
        with io.open_code(path) as file:
            source = file.read()
    except OSError as error:  # on another machine, say
        raise ScriptExitError(f"The script cannot be read on {os.uname().nodename}: {error}") from None
    return main, compile(source, path, "exec", dont_inherit=True)


def _module(name: str) -> tuple[ModuleType, CodeType]:
    found = importlib.util.find_spec(name)
    if found is not None and found.submodule_search_locations is not None:
        found = importlib.util.find_spec(f"{name}.__main__")
    if found is None or found.loader is None:
        raise ScriptExitError(f"There is no module {name!r} that can be run.")
    main, code = _as_main(found)
    sys.argv[0] = main.__file__ or name
    return main, code


def _as_main(found: ModuleSpec) -> tuple[ModuleType, CodeType]:
    """With the spec in it: by its name `multiprocessing` finds the module again in a process that it spawns."""
    loader: Any = found.loader
    code: CodeType | None = loader.get_code(found.name)
    if code is None:
        raise ScriptExitError(f"The module {found.name!r} has no Python code that can be run.")
    main = ModuleType("__main__")
    vars(main).update(
        __spec__=found,
        __file__=found.origin,
        __cached__=found.cached,
        __loader__=loader,
        __package__=found.parent,
        __builtins__=builtins,
    )
    return main, code


@contextmanager
def _exit_code_explained() -> Iterator[None]:
    """`sys.exit("why")` prints the reason and means 1, as everywhere. A fork of this process ends as it likes."""
    owner = os.getpid()
    try:
        yield
    except SystemExit as leave:
        if leave.code in (None, 0) or os.getpid() != owner:
            raise
        if not isinstance(leave.code, int):
            print(leave.code, file=sys.stderr)
        check_exit_code(int(leave.code) if isinstance(leave.code, int) else 1, "the script")
