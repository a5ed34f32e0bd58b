"""Calls a run's callbacks in order, and keeps what Callback's docstring promises about errors."""

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, cast

from paceline.callbacks.base import Callback
from paceline.callbacks.progress import ProgressCallback
from paceline.errors import ArgumentTypeError

if TYPE_CHECKING:
    from paceline.checkpoints import CheckpointInfo

logger = logging.getLogger(__name__)

_REQUIRED = ("start_training", "handle_result", "finish_training")

_CALLS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "start_training": ((), ("logdir", "config", "run_id", "num_workers", "world_size", "is_resumed")),
    "handle_result": (("results",), ()),
    "handle_checkpoint": (("checkpoint",), ()),
    "handle_restart": (("attempt", "reason"), ("cause",)),
    "handle_resize": (("world_size",), ("former", "reason")),
    "finish_training": ((), ("error", "exception", "status")),
}
"""What each method is called with: by position, and by name."""


class CallbackList:
    """What the controller talks to instead of single callbacks.

    `start_training` comes first and `finish_training` last, also after a failure; a second `finish_training`
    does nothing. After `handle_result` the dicts belong to the callbacks: the controller must not use them
    any more.
    """

    def __init__(self, callbacks: Sequence[Callback] | None = None):
        self._callbacks = _checked(callbacks)
        self.calling: Callable[[], AbstractContextManager[None]] = nullcontext
        """What surrounds each call of a callback: it is the user's code."""
        self._started: list[Callback] = []
        # An object that only has the three required methods is welcome too.
        self._on_checkpoint = [c for c in self._callbacks if hasattr(c, "handle_checkpoint")]
        self._on_restart = [c for c in self._callbacks if hasattr(c, "handle_restart")]
        self._on_resize = [c for c in self._callbacks if hasattr(c, "handle_resize")]
        self._displays = [c for c in self._callbacks if isinstance(c, ProgressCallback)]

    def __len__(self) -> int:
        return len(self._callbacks)

    def __iter__(self) -> Iterator[Callback]:
        return iter(self._callbacks)

    def start_training(self, logdir: str, config: dict[str, Any], **info: Any) -> None:
        """Starts all, or none: those that had started are finished with the error before it is raised."""
        for callback in self._callbacks:
            try:
                with self.calling():
                    callback.start_training(logdir=logdir, config=dict(config), **info)
            except BaseException as error:
                status = "FAILED" if isinstance(error, Exception) else "STOPPED"
                self.finish_training(error=status == "FAILED", exception=error, status=status)
                raise
            self._started.append(callback)

    def handle_result(self, results: list[dict[str, Any]], **info: Any) -> None:
        """Every callback gets dicts of its own. The last one gets the originals: nobody comes after it."""
        callbacks = self._callbacks
        if not callbacks:
            return
        with self.calling():
            for callback in callbacks[:-1]:
                callback.handle_result([dict(result) for result in results], **info)
            callbacks[-1].handle_result(results, **info)

    def handle_checkpoint(self, checkpoint: "CheckpointInfo", **info: Any) -> None:
        for callback in self._on_checkpoint:
            with self.calling():
                callback.handle_checkpoint(checkpoint, **info)

    def handle_restart(self, attempt: int, reason: str, **info: Any) -> None:
        for callback in self._on_restart:
            with self.calling():
                callback.handle_restart(attempt, reason, **info)

    def handle_resize(self, world_size: int, **info: Any) -> None:
        for callback in self._on_resize:
            with self.calling():
                callback.handle_resize(world_size, **info)

    def show_unfinished(self, lines: Mapping[int, str]) -> bool:
        """What workers have printed of their present lines, by rank; says whether somebody shows it."""
        for display in self._displays:
            display.show_unfinished(lines)
        return bool(self._displays)

    def show_progress(self, done: float) -> None:
        """How much of the run is done, from 0 to 1."""
        for display in self._displays:
            display.show_progress(done)

    def finish_training(
        self,
        error: bool = False,
        *,
        exception: BaseException | None = None,
        status: str = "SUCCEEDED",
        **info: Any,
    ) -> None:
        """Finishes every callback that was started, then raises the first exception of theirs.

        If the run itself failed (`error` or `exception`), theirs are logged and noted on `exception` instead:
        what went wrong first is what the user needs to see. A Ctrl-C during this is raised in any case.
        """
        started, self._started = self._started, []
        raised: list[BaseException] = []
        for callback in started:
            try:
                with self.calling():
                    callback.finish_training(error=error, exception=exception, status=status, **info)
            except BaseException as problem:
                raised.append(problem)
                if not isinstance(problem, Exception):
                    continue
                if error or exception is not None or len(raised) > 1:
                    _record(callback, problem, exception)
        interrupt = next((problem for problem in raised if not isinstance(problem, Exception)), None)
        if interrupt is not None:
            raise interrupt
        if raised and not error and exception is None:
            raise raised[0]


def _record(callback: Callback, problem: Exception, training_error: BaseException | None) -> None:
    """For an exception that is not going to be raised, because an earlier one is."""
    name = type(callback).__name__
    logger.exception("%s.finish_training failed", name, exc_info=problem)
    if training_error is not None:
        training_error.add_note(f"After this, {name}.finish_training failed too: {type(problem).__name__}: {problem}")


def _checked(callbacks: Sequence[Callback] | None) -> list[Callback]:
    if callbacks is None:
        return []
    if not isinstance(callbacks, list | tuple):
        hint = " Put it in a list: callbacks=[...]." if _is_callback(callbacks) or _is_class(callbacks) else ""
        raise ArgumentTypeError(f"callbacks must be a list of Callback objects, got {_type_name(callbacks)}.{hint}")
    for position, callback in enumerate(callbacks):
        _check_one(position, callback)
    return list(callbacks)


def _check_one(position: int, callback: object) -> None:
    if _is_class(callback):
        name = cast(type, callback).__name__
        raise ArgumentTypeError(
            f"callbacks[{position}] is the class {name} itself, expected an instance. Write {name}(...)."
        )
    if not _is_callback(callback):
        missing = [name for name in _REQUIRED if not callable(getattr(callback, name, None))]
        raise ArgumentTypeError(
            f"callbacks[{position}] is of type {_type_name(callback)}, expected a Callback. "
            f"Derive its class from paceline.Callback, or give it the missing {', '.join(missing)}."
        )
    for name in _CALLS:
        _check_signature(position, callback, name)


def _check_signature(position: int, callback: object, name: str) -> None:
    """That it can be called as it will be, perhaps hours from now."""
    method = getattr(callback, name, None)
    if method is None:
        return
    given, named = _CALLS[name]
    what = f"callbacks[{position}]: {_type_name(callback)}.{name}"
    if inspect.iscoroutinefunction(method):
        raise ArgumentTypeError(f"{what} is a coroutine function, which nobody would await. Make it a plain `def`.")
    try:
        signature = inspect.signature(method)
    except (TypeError, ValueError):  # of a builtin that does not tell
        return
    try:
        signature.bind(*given, **dict.fromkeys(named))
    except TypeError as error:
        parameters = inspect.signature(getattr(Callback, name)).parameters.values()
        wanted = ", ".join(f"**{one.name}" if one.kind is one.VAR_KEYWORD else one.name for one in parameters)
        raise ArgumentTypeError(
            f"{what}{signature} cannot be called as it will be ({error}). Write it as `def {name}({wanted})`."
        ) from None


def _is_callback(value: object) -> bool:
    if isinstance(value, Callback):
        return True
    return not isinstance(value, type) and all(callable(getattr(value, name, None)) for name in _REQUIRED)


def _is_class(value: object) -> bool:
    return isinstance(value, type)


def _type_name(value: object) -> str:
    return type(value).__qualname__
