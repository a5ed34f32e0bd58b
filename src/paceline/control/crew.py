"""The workers of one Trainer, made ready: started, joined into a group by the backend, and set up as the user asked.

A crew outlives runs. One that was left broken, by a failure or on purpose, is made whole again before its next use.
"""

import itertools
import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from paceline.backends.base import BackendConfig
from paceline.control.outcome import as_exception
from paceline.control.output import RankOutput
from paceline.errors import TrainerStateError, WorkersLostError, WorkerStartError
from paceline.session import call_in_worker, make_instance
from paceline.workers.base import (
    Asked,
    Call,
    Died,
    Engine,
    Event,
    Preload,
    Printed,
    Raised,
    Resources,
    Returned,
    Sent,
    Size,
    WorkerGroup,
)
from paceline.workers.edits import Edits
from paceline.workers.stacks import rank_names

logger = logging.getLogger(__name__)

POLL_S = 0.1
JOIN_S = 60.0
"""How long workers have to join their group, at the least, where that has a bound: it is no step, which a user's bound
may be made for."""


@dataclass(frozen=True)
class Setup:
    """What happens on every worker once the group is joined: a hook, and the object of the class API."""

    hook: Callable[[], Any] | None = None
    cls: Callable[..., Any] | None = None
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


class Crew:
    def __init__(
        self,
        engine: Engine,
        backend: BackendConfig,
        size: Size,
        resources: Resources,
        max_retries: int = 0,
        preload: Preload | None = None,
    ):
        """`preload` is that of the backend, if none is given."""
        self._engine, self._backend, self._max_retries = engine, backend, max_retries
        self._preload = backend.preload if preload is None else preload
        self.size, self.resources = size, replace(resources, sees_all_gpus=backend.sees_all_gpus)
        self._setup = Setup()
        self._group: WorkerGroup | None = None
        self._owner_pid = 0
        self.output = RankOutput()
        self._fit = self._is_released = False
        self._deadline: float | None = None
        """Of `time.monotonic`, while workers join."""
        self._edits, self._called_ns = Edits(), 0

    @property
    def group(self) -> WorkerGroup | None:
        """None before the start, and in a fork of the process that has started it: the workers are that one's."""
        return self._group if self._owner_pid == os.getpid() else None

    @property
    def world_size(self) -> int:
        """The number of workers; before they are started, the least that there will be."""
        num_workers = len(self.group.infos) if self.group is not None else 0
        return num_workers or max(1, self.size.min)

    def start(self, setup: Setup) -> None:
        self._setup = setup
        self.get_ready()

    @property
    def is_set_up(self) -> bool:
        """Whether the workers have something of the user's."""
        return self.group is not None and self._setup != Setup()

    def move_to(self, engine: Engine) -> None:
        """Live there from the next use on."""
        self.break_up(grace_s=2.0)
        self._engine = engine

    def get_ready(self, join_s: float | None = None) -> WorkerGroup:
        """Like `ensure`, but tried again when workers are lost on the way. For calls outside of a run, which has a
        budget of its own for this."""
        for number in itertools.count(1):
            try:
                return self.ensure(join_s)
            except (WorkersLostError, WorkerStartError) as error:
                if 0 <= self._max_retries < number:
                    raise
                logger.warning("Workers could not be made ready, trying again (%d): %s", number, error)
        raise AssertionError("not reached")

    def renew_if_edited(self) -> None:
        """Before a run: end workers that have imported a module of the user's which has been edited since. New ones
        import it as it is now."""
        if self.group is None or not (edited := self._edits.edited()):
            return
        if self._setup.cls is not None:
            logger.warning(
                "%s was edited, and the workers have imported it before. They go on with what they have, since an "
                "object of %s lives in them: shutdown() and start() make new ones.",
                ", ".join(edited),
                getattr(self._setup.cls, "__qualname__", self._setup.cls),
            )
            return
        logger.info("%s was edited: the workers are renewed.", ", ".join(edited))
        self.break_up(grace_s=2.0)

    def learn_imports(self, files: list[str]) -> None:
        """A worker has imported these files of the user's in its last call."""
        self._edits.learn(files, self._called_ns)

    def ensure(self, join_s: float | None = None) -> WorkerGroup:
        """A whole group, ready for a call: the present one if it is fit, else a new one. Blocking. With `join_s`, a
        worker that has not joined by then counts as lost; else the backend alone says how long one waits for another,
        and nobody knows of one that is stopped."""
        self._called_ns = time.time_ns()
        group = self.group
        if group is not None and self._fit and group.healthy():
            return group
        self._backend.check()
        if group is None:
            group = self._group = self._engine.group(self.size, self.resources, self._preload)
            self._owner_pid = os.getpid()
        elif not self._is_released:
            self.release()
        try:
            self._is_released = False
            group.start()
            self._join(join_s)
            if self._setup.hook is not None:
                self.all(call_in_worker, self._setup.hook, (), {})
            if self._setup.cls is not None:
                self.all(make_instance, self._setup.cls, self._setup.args, dict(self._setup.kwargs))
        except BaseException:
            self.break_up()
            raise
        self._fit = True
        return group

    def _join(self, join_s: float | None) -> None:
        self._deadline = None if join_s is None else time.monotonic() + join_s
        try:
            self._backend.join(self, use_gpu=self.resources.gpus > 0)
        finally:
            self._deadline = None  # what a user does with the workers takes as long as it takes

    def mark_unfit(self) -> None:
        """The workers may not serve another call, though they may still be of use in this one."""
        self._fit = False

    def release(self, deliver: Callable[[Event], None] = lambda event: None) -> None:
        """End what the workers are doing, and hand over what they had sent. The engine decides which of them stay for
        the next use."""
        self._fit = False
        if self.group is not None:
            self.group.abort(deliver)
            self._is_released = True

    def break_up(self, grace_s: float = 0.0) -> None:
        """End the workers."""
        if self.group is not None:
            group, self._group = self.group, None
            self._fit = False
            self._edits.clear()
            group.close(grace_s)

    def one(self, rank: int, fn: Callable[..., Any], *args: Any) -> Any:
        return self._call({rank: Call(fn, args)})[rank]

    def all(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """Run `fn(wire, *args)` on every rank and wait for the values, in rank order.

        When a rank raises, the others get a moment to end too; if they do not, they wait for the one that failed, and
        the group is unfit.
        """
        call = Call(fn, args)
        values = self._call(dict.fromkeys(range(self.world_size), call))
        return [values[rank] for rank in sorted(values)]

    def _call(self, calls: Mapping[int, Call], logs: Mapping[int, Path] | None = None) -> dict[int, Any]:
        if self.group is None:
            raise TrainerStateError("There are no workers: call start() first.")
        answers = _Answers(self.output.take, self.learn_imports, self._refuse)
        self.group.submit(calls, logs)
        patience = 1.0
        try:
            while len(answers.ended) < len(calls) and patience > 0:
                self.group.poll(POLL_S, answers.take)
                if answers.died:
                    break
                if answers.raised:
                    patience -= POLL_S
                elif self._deadline is not None and time.monotonic() > self._deadline:
                    break
        except BaseException:  # Ctrl-C, say: the workers are still at it
            self.release()
            raise
        self.output.flush()
        if len(answers.ended) < len(calls):
            self.mark_unfit()
        if answers.died:
            self.mark_unfit()
            died = answers.died[0]
            raise WorkersLostError(f"Rank {died.rank} {died.reason} while the workers were called.")
        if not answers.raised and (silent := sorted(calls.keys() - answers.ended)):
            raise WorkersLostError(
                f"No answer came in time from {rank_names(silent)} while the workers joined their group: stopped or "
                "stuck, or waiting for one that is."
            )
        if answers.raised:
            own = [error for error in answers.raised if not self._backend.is_broken_collective(error)]
            raise as_exception((own or answers.raised)[0], answers.raised)
        return answers.values

    def _refuse(self, question: Asked) -> None:
        """There is nobody to answer it, and who has asked would wait for ever."""
        assert self.group is not None
        self.group.answer(question, TrainerStateError(f"nobody knows an answer to {question.topic!r} outside of a run"))


def join_limit(hang_timeout_s: float | None) -> float | None:
    """What a user's limit on silence means for workers that join: see `Crew.ensure`."""
    return None if hang_timeout_s is None else max(JOIN_S, hang_timeout_s)


class _Answers:
    """The ends of one round of calls."""

    def __init__(
        self,
        on_print: Callable[[int, str], None],
        on_import: Callable[[list[str]], None],
        on_question: Callable[[Asked], None],
    ):
        self.values: dict[int, Any] = {}
        self.raised: list[Raised] = []
        self.died: list[Died] = []
        self.ended: set[int] = set()
        self._on_print, self._on_import, self._on_question = on_print, on_import, on_question

    def take(self, event: Event) -> None:
        match event:
            case Returned(rank, value):
                self.values[rank] = value
                self.ended.add(rank)
            case Raised(rank):
                self.raised.append(event)
                self.ended.add(rank)
            case Died(rank) if rank not in self.ended:  # else it has answered, and is replaced before the next call
                self.died.append(event)
            case Sent(_, "imported", files):
                self._on_import(files)
            case Printed(rank, text):
                self._on_print(rank, text)
            case Asked():
                self._on_question(event)
