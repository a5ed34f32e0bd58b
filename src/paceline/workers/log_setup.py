"""How a process has set up `logging`, as a value that another one adopts: levels, and what goes to the terminal.

A file that the driver logs to is not shared: every worker has a log of its own.
"""

import contextlib
import logging
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from paceline.workers import parcel


@dataclass(frozen=True)
class Console:
    """A handler that writes to a standard stream. `formatter` is packed; None where there is none that travels."""

    stream: str
    level: int
    formatter: bytes | None


@dataclass(frozen=True)
class LoggerSetup:
    level: int
    consoles: tuple[Console, ...] = ()


Loggers = Mapping[str, LoggerSetup]
"""Those that differ from a new one, by name; that of the root is empty."""

_NEW: Mapping[bool, LoggerSetup] = {True: LoggerSetup(logging.WARNING), False: LoggerSetup(logging.NOTSET)}
"""A logger that nobody has touched: the root, or another one."""


def loggers() -> Loggers:
    """Of this process."""
    known = list(logging.root.manager.loggerDict.items())
    touched = [(name, one) for name, one in known if isinstance(one, logging.Logger) and (one.level or one.handlers)]
    setups = {name: _setup(name, one) for name, one in [("", logging.root), *touched]}
    return {name: setup for name, setup in setups.items() if setup != _NEW[name == ""]}


def adopt(new: Loggers, former: Loggers) -> None:
    """Do the same as another process; `former` is what was adopted from it before."""
    for name in former.keys() | new.keys():
        logger, setup = logging.getLogger(name), new.get(name, _NEW[name == ""])
        logger.setLevel(setup.level)
        logger.handlers[:] = [one for one in logger.handlers if not isinstance(one, _Adopted)]
        if not any(map(_console, logger.handlers)):  # else somebody here has already seen to it
            for console in setup.consoles:
                logger.addHandler(_Adopted.of(console))


def _setup(name: str, logger: logging.Logger) -> LoggerSetup:
    """A logger that is named after a package has the handlers which that package gives it, in a worker too."""
    package = name.partition(".")[0]
    if package in sys.modules and package != "__main__":
        return LoggerSetup(logger.level)
    return LoggerSetup(logger.level, tuple(filter(None, map(_console, logger.handlers))))


def _console(handler: logging.Handler) -> Console | None:
    stream = getattr(handler, "stream", None)
    for name in ("stdout", "stderr"):
        if stream is not None and (stream is getattr(sys, name) or stream is getattr(sys, f"__{name}__")):
            return Console(name, handler.level, _packed(handler.formatter))
    return None


@lru_cache(maxsize=64)
def _packed(formatter: logging.Formatter | None) -> bytes | None:
    """Once for each, since it is asked for with every call."""
    with contextlib.suppress(Exception):
        return parcel.dumps(formatter)
    return None


class _Adopted(logging.StreamHandler[Any]):
    """Writes to what the standard stream is at the time: a worker's goes from one log to the next."""

    def __init__(self, stream_name: str):
        self._stream_name = stream_name
        logging.Handler.__init__(self)

    @classmethod
    def of(cls, console: Console) -> "_Adopted":
        handler = cls(console.stream)
        handler.setLevel(console.level)
        if console.formatter is not None:
            with contextlib.suppress(Exception):  # of a class that is not to be had here
                handler.setFormatter(parcel.loads(console.formatter))
        return handler

    @property
    def stream(self) -> Any:
        return getattr(sys, self._stream_name)
