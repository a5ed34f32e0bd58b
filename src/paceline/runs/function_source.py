"""What a function is, for run.json: its name, where it stands, and its text at the time of the run."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

MAX_SOURCE_CHARS = 200_000


@runtime_checkable
class Described(Protocol):
    """Something that can be called, and knows better what it is than `inspect` does: a script, say."""

    def describe_source(self) -> dict[str, Any]:
        """With the keys of `describe_function`, and others. Raises nothing."""


def describe_function(fn: Callable[..., Any]) -> dict[str, Any]:
    """Keys name, module, file, line, source; None where Python does not know. Raises nothing.

    A partial is described by the function in it (of its arguments, which may be anything, the keywords are
    kept), a decorated function by what was decorated, and an object that can be called by its class.
    """
    if isinstance(fn, Described) and not isinstance(fn, type):
        return fn.describe_source()
    bound = None
    while isinstance(fn, functools.partial):
        bound = [*(bound or []), *fn.keywords]
        fn = fn.func
    definition = _definition(fn)
    described = {
        "name": getattr(definition, "__qualname__", None) or type(fn).__qualname__,
        "module": getattr(definition, "__module__", None),
        "file": _quietly(inspect.getsourcefile, definition),
        "line": None,
        "source": None,
    }
    lines = _quietly(inspect.getsourcelines, definition)
    if lines is not None:
        described["line"] = max(lines[1], 1)
        described["source"] = "".join(lines[0])[:MAX_SOURCE_CHARS]
    if bound is not None:
        described["partial"] = bound
    return described


def _definition(fn: Any) -> Any:
    fn = getattr(fn, "__func__", fn)
    unwrapped = _quietly(inspect.unwrap, fn)
    fn = fn if unwrapped is None else unwrapped
    is_defined = inspect.isroutine(fn) or inspect.isclass(fn)
    return fn if is_defined else type(fn)


def _quietly(ask: Callable[[Any], Any], subject: Any) -> Any:
    """inspect fails in many ways on a REPL, on builtins and on files that changed: all mean "not known"."""
    try:
        return ask(subject)
    except Exception:
        return None
