"""What a script has set up around itself, for its functions in the workers: directory, paths, arguments, environment,
logging, warnings, a framework's settings. It goes with every call; what has changed since the last one is adopted.

    driver    pack_call(fn, args)       the call, with `now()` in front of it and what it brings at its end
    worker    _arrive(surroundings)     while it is unpacked, before the modules that it needs are imported
    worker    _call(...)                the rest, when they are there; then the function itself
"""

import contextlib
import io
import os
import pickle
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from paceline import frameworks
from paceline.errors import TrainerStateError
from paceline.workers import log_setup, main_module, parcel
from paceline.workers.edits import user_files
from paceline.workers.place import Place, rank_environ

Filter = tuple[str, Any, str, Any, int]
"""Of warnings. The category is named, since a worker need not import a package to ignore its warnings."""

_environ_before = dict(os.environ)
"""On the driver, before it has any worker. What is changed afterwards, warm workers have to be told."""
_changed: set[str] = set()
"""Names of variables that were changed at any time since."""

_adopted: "Surroundings | None" = None
"""In a worker. Of the process, as what it describes: there is one environment, one directory, one `logging`."""


@dataclass(frozen=True)
class Surroundings:
    cwd: str | None
    sys_path: tuple[str, ...]
    argv: tuple[str, ...]
    main_file: str | None
    environ: Mapping[str, str | None]
    """What has changed in it since before the first worker; None is what was removed."""
    loggers: log_setup.Loggers
    filters: tuple[Filter, ...]
    settings: Mapping[str, Mapping[str, Any]]
    """By the name of the framework."""


def pack_call(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """`fn(wire, *args)` as a worker unpacks it: a function of the wire and arguments."""
    return parcel.dumps((_call, (_Opening(now()), fn, args, parcel.Brought())))


def now() -> Surroundings:
    """Those of this process."""
    return Surroundings(
        cwd=cwd(),
        sys_path=tuple(sys.path),
        argv=tuple(getattr(sys, "argv", ("",))),
        main_file=_main_file(),
        environ=_changes(),
        loggers=log_setup.loggers(),
        filters=tuple(_named(one) for one in warnings.filters),
        settings={one.name: found for one in frameworks.loaded() if (found := one.settings())},
    )


@dataclass(frozen=True)
class _Opening:
    """Comes first in a parcel, and acts when it is unpacked."""

    surroundings: Surroundings

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrive, (pickle.dumps(self.surroundings),)  # nothing in it that has to travel by value


def _arrive(packed: bytes) -> Surroundings:
    """In a worker: be where the driver is, as far as that exists here."""
    new: Surroundings = pickle.loads(packed)
    former = _adopted
    main_module.become_main(new.main_file)
    if former is None:
        sys.stdin = _NoInput(io.BufferedReader(io.FileIO(os.devnull)))
        if os.environ.get("PYTHONBREAKPOINT") == "ray.util.rpdb._driver_set_trace":  # set by Ray, for a driver
            del os.environ["PYTHONBREAKPOINT"]
    if new.cwd is not None and (former is None or new.cwd != former.cwd):
        with contextlib.suppress(OSError):
            os.chdir(new.cwd)
    if former is None or new.sys_path != former.sys_path:
        known = {*new.sys_path, *(former.sys_path if former is not None else ())}
        sys.path[:] = [*new.sys_path, *(entry for entry in sys.path if entry not in known)]
    if former is None or new.argv != former.argv:
        sys.argv[:] = new.argv
    if former is None or new.environ != former.environ:
        for name, value in new.environ.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
    return new


def _call(wire: Any, new: Surroundings, fn: Callable[..., Any], args: tuple[Any, ...], brought: parcel.Brought) -> Any:
    """In a worker."""
    main_module.publish(brought)
    _adopt(new)
    try:
        return fn(wire, *args)
    finally:
        if files := user_files.news():
            wire.send("imported", files)


def _adopt(new: Surroundings) -> None:
    global _adopted
    former, _adopted = _adopted, new
    if former is None or new.loggers != former.loggers:
        log_setup.adopt(new.loggers, former.loggers if former is not None else {})
    if former is None or new.filters != former.filters:
        _adopt_filters(new.filters, former.filters if former is not None else ())
    for framework in frameworks.every():
        settings = new.settings.get(framework.name, {})
        if settings != (former.settings.get(framework.name, {}) if former is not None else {}):
            framework.adopt(settings)


def cwd() -> str | None:
    """The current directory, if there is one."""
    try:
        return os.getcwd()
    except FileNotFoundError:  # somebody has removed it
        return None


def _main_file() -> str | None:
    file = getattr(sys.modules["__main__"], "__file__", None)
    return os.path.normpath(os.path.join(cwd() or "", file)) if file else None


def _changes() -> dict[str, str | None]:
    environ = dict(os.environ)
    if environ != _environ_before:
        names = environ.keys() | _environ_before.keys()
        _changed.update(name for name in names if environ.get(name) != _environ_before.get(name))
    return {name: environ.get(name) for name in _changed if not _needs_engine(name, environ.get(name))}


def _needs_engine(name: str, value: str | None) -> bool:
    """Whether a variable is not the script's to set in a worker. Ray has one for its own debugger, too."""
    ours = {*rank_environ(Place()), *frameworks.thread_variables(1), "MASTER_ADDR", "MASTER_PORT"}
    return (
        name in ours
        or name == "CUDA_VISIBLE_DEVICES"
        or name.startswith("RAY_")
        or (value or "").startswith("ray.util.rpdb.")
    )


def _named(one: Any) -> Filter:
    action, message, category, module, lineno = one
    return action, message, f"{category.__module__}:{category.__qualname__}", module, lineno


def _adopt_filters(new: tuple[Filter, ...], former: tuple[Filter, ...]) -> None:
    """The driver's come first; those that packages of this process have added themselves stay behind them."""
    own = [one for one in warnings.filters if _named(one) not in new and _named(one) not in former]
    theirs = [(*one[:2], category, *one[3:]) for one in new if (category := _category(one[2])) is not None]
    warnings.filters[:] = [*theirs, *own]  # type: ignore[index]
    warnings._filters_mutated()  # type: ignore[attr-defined]


def _category(name: str) -> Any:
    """None where nothing is loaded that could give such warnings."""
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    return found


class _NoInput(io.TextIOWrapper):
    """The standard input of a worker. Who waits for somebody to type, `breakpoint()` as well, is told where that works.
    A debugger that reads nothing there is not concerned: that of PYTHONBREAKPOINT, or Ray's own."""

    def _refuse(self, *args: Any) -> Any:
        raise TrainerStateError(
            "input() and breakpoint() need somebody who types, and a worker has no terminal. Use "
            "Trainer(num_workers=0): the function then runs in your own process, where both work."
        )

    read = readline = readlines = __next__ = _refuse
