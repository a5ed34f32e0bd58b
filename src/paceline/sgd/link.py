"""The driver's side of the call that serves: commands go out to all ranks, and what came of them comes back.

Workers that are lost are noticed here, and so is one that does not answer. Nothing waits without a bound once a worker
is known to be lost: those that are left have the time of a step to come to its end, or out of a collective in which it
is missing.
"""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.backends.base import BackendConfig
from paceline.control.crew import Crew
from paceline.control.outcome import as_exception
from paceline.errors import ArgumentError, PacelineError, WorkersLostError
from paceline.rank_session import Task
from paceline.sgd.serving import DONE, FAILED, PACKED, TOPIC, Reply, serve
from paceline.sgd.side import Spec
from paceline.workers import outcome
from paceline.workers.base import (
    Asked,
    Call,
    Died,
    Event,
    Printed,
    Raised,
    Returned,
    Sent,
    WorkerGroup,
    WorkerInfo,
)

POLL_S = 0.1

SETTLE_S = 10.0
"""How long it may take until an end is known whose echo was heard; and until workers have ended in peace."""
BUSY_S = 60.0
"""How long those that are left have, at the least, when a worker was lost: they may be at the beginning of a step. One
that is longer was seen before, or hang_timeout_s allows it. Models are given so long to be made, too."""
SOON_S = 0.5
"""The same when one of them is at rest."""
PATIENCE_S = 1.0
"""How long others have to answer when one has raised, which they may wait for in a collective."""

Command = tuple[str, tuple[Any, ...]]
TaskOf = Callable[[Sequence[WorkerInfo]], tuple[Task, Mapping[int, Path]]]


class LostError(Exception):
    """Workers were lost during a command; raised when others have come to rest. Never a user's to see."""

    def __init__(self, reason: str, idle: tuple[int, ...], values: list[Any]):
        super().__init__(reason)
        self.reason, self.idle = reason, idle
        """Why, and who is left to answer."""
        self.values = values
        """What those have answered who did what they were asked for."""
        self.contributions: list[Any] = []
        """To a step, of those that have told of it."""


class Link:
    """From `open` to `close`. Not thread-safe."""

    def __init__(
        self,
        new_crew: Callable[[], Crew],
        backend: BackendConfig,
        hang_timeout_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._new_crew, self._backend, self._hang_timeout_s, self._clock = new_crew, backend, hang_timeout_s, clock
        self.crew = new_crew()
        self._next_crew: Crew | None = None
        self.num_workers = 1
        """Of the last `open`."""
        self._longest_s = self._making_s = 0.0
        """That all workers have taken for a command of ours, and to be there with their models."""
        self.patience_s: float | None = None
        """Within which answers have to come: see `within`."""
        self.on_sent: Callable[[int, str, Any], None] = lambda rank, kind, value: None
        """Gets what a rank sends besides: a note, say."""
        self.on_hang: Callable[[], str] = lambda: ""
        """Called before workers that do not answer are given up; returns what to add to the error."""
        self.on_lost: Callable[[], None] = lambda: None
        """Called before others are waited for when a worker is lost: what they wait for may never come."""
        self._questions: dict[int, Asked] = {}
        self._asked: Collection[int] = ()
        """Whose replies are waited for. After a loss, another may come to rest while one that is left is asked."""
        self._replies: dict[int, Reply] = {}
        self._has_failed = False
        """Whether one of them is an error."""
        self._lost: dict[int, str] = {}
        self._told: set[int] = set()
        """Which of these were told of."""
        self.is_torn = False
        """Whether a worker owes an answer that nobody waits for any more, or workers could not be replaced."""

    def open(self, task_of: TaskOf, spec: Spec) -> list[Any]:
        """Have workers, with their replicas made; returns the layouts of those, by worker. `task_of` gets the
        workers: what they do, and where their logs are."""
        begin = self._clock()
        group = self.crew.get_ready(self.patience_s)
        self.num_workers = self.crew.world_size
        task, logs = task_of(group.infos)
        self._questions, self._lost, self._told, self.is_torn = {}, {}, set(), False
        self._expect(range(self.num_workers))
        call = Call(serve, (task, spec), label="the model_creator")
        group.submit(dict.fromkeys(self._asked, call), logs)
        layouts = self._values(group, self._asked)
        self._making_s = max(self._making_s, self._clock() - begin)
        return layouts

    def within(self, seconds: float | None) -> "_Within":
        """Answers have to come within so many seconds here, or WorkersLostError is raised. None for what a user's
        function does: it may take as long as it likes."""
        return _Within(self, seconds)

    @property
    def answering_s(self) -> float | None:
        """How long anything but a step may take. Models read data when they are made or go on in it, and a large state
        takes longer on its way than a step."""
        return None if self._hang_timeout_s is None else max(BUSY_S, self._hang_timeout_s, 3 * self._longest_s)

    @property
    def renewing_s(self) -> float:
        """The same once workers were lost: nothing waits without a bound then."""
        return max(BUSY_S, 3 * self._longest_s, 3 * self._making_s, self._hang_timeout_s or 0.0)

    def ask(self, verb: str, *args: Any) -> list[Any]:
        """The same of all workers; what each answers, by rank."""
        return self.ask_each(dict.fromkeys(range(self.num_workers), (verb, args)))

    def ask_each(self, commands: Mapping[int, Command]) -> list[Any]:
        """Of each of these workers what is its own. A user's exception is raised with its own type, LostError if a
        worker is gone, WorkersLostError if one does not answer in time."""
        begin = self._clock()
        values = self._answered(commands)
        self._longest_s = max(self._longest_s, self._clock() - begin)
        return values

    def call(
        self, fn: Callable[..., Any], *args: Any, ranks: "list[int] | None" = None, label: str = "the function"
    ) -> list[Any]:
        """Run `fn(wire, *args)` on workers, all of them if none are named, packed once. If `fn` is a user's, how
        long it takes is the user's business."""
        packed = Call(fn, args, label).packed
        return self._answered(dict.fromkeys(range(self.num_workers) if ranks is None else ranks, ("call", (packed,))))

    def _answered(self, commands: Mapping[int, Command]) -> list[Any]:
        group = self.crew.group
        assert group is not None, "ask before open"
        self._expect(frozenset(commands))  # not the commands: a state or a mean would be kept until the next one
        for rank in commands:
            if rank not in self._questions:  # it was lost since it has answered
                self._settle()
        try:
            for rank, command in commands.items():
                group.answer(self._questions.pop(rank), command)
            return self._values(group, commands)
        except BaseException as error:  # it may be that of a signal handler, in the midst of it
            is_owed = not isinstance(error, LostError) and not self._questions.keys() >= commands.keys()
            self.is_torn = self.is_torn or is_owed
            raise

    def _expect(self, ranks: Collection[int]) -> None:
        """Replies of these, and of nobody else."""
        self._replies, self._has_failed, self._asked = {}, False, ranks

    def prepare(self) -> None:
        """Have the workers of the next `open`, while those that are left come to rest. If that fails, it is tried again
        when these have ended, and its error is raised then."""
        if self._next_crew is None:
            crew = self._new_crew()
            try:
                crew.ensure(self.renewing_s)
                self._next_crew = crew
            except BaseException as error:
                crew.break_up()
                if not _is_of_workers(error):
                    raise

    def close(self) -> None:
        """Let the workers end what they do, and end them."""
        group = self.crew.group
        if group is not None and len(self._questions) == self.num_workers and not self._lost:
            for question in self._questions.values():
                group.answer(question, None)
            deadline = self._clock() + SETTLE_S
            while not group.healthy() and not self._lost and self._clock() < deadline:
                group.poll(POLL_S, self._take)
        self.crew.output.flush()
        self._questions = {}
        self.crew.break_up(grace_s=2.0)
        if self._next_crew is not None:  # the program ends well, in the middle of a recovery
            self._next_crew.break_up()

    def give_up(self) -> None:
        """End the workers at once, whatever they do. The next `open` has new ones."""
        self._questions = {}
        try:
            self.crew.release(self._show)
            self.crew.output.flush()
        finally:
            if self._next_crew is not None:
                self.crew.break_up()
                self.crew, self._next_crew = self._next_crew, None

    def _values(self, group: WorkerGroup, ranks: Collection[int]) -> list[Any]:
        """Of those that were asked, in their order."""
        self._await(group, ranks)
        if self._has_failed:
            failed = self._failed()
            own = [error for error in failed if not self._backend.is_broken_collective(error)]
            raise as_exception((own or failed)[0], failed)
        return [self._unpacked(rank, self._replies[rank]) for rank in ranks]

    def _unpacked(self, rank: int, reply: Reply) -> Any:
        kind, value = reply
        if kind != PACKED:
            return value
        event = outcome.returned(rank, value)
        if isinstance(event, Raised):
            raise as_exception(event)
        return event.value

    def _await(self, group: WorkerGroup, ranks: Collection[int]) -> None:
        deadline = None if self.patience_s is None else self._clock() + self.patience_s
        while len(self._replies) < len(ranks):
            group.poll(POLL_S, self._take)
            self._raise_if_lost()
            if self._has_failed:
                self._await_rest(group, ranks)
                return
            if deadline is not None and self._clock() > deadline:
                self._hang(ranks)

    def _await_rest(self, group: WorkerGroup, ranks: Collection[int]) -> None:
        """One has raised. The others may wait for it in a collective; or what it has raised is the echo of an end that
        is not known yet."""
        begin = self._clock()
        while self._clock() < begin + (PATIENCE_S if self._all_own() else SETTLE_S):
            if len(self._replies) == len(ranks) and self._all_own():
                return
            group.poll(POLL_S, self._take)
            self._raise_if_lost()
        self.is_torn = len(self._replies) < len(ranks)

    def _raise_if_lost(self) -> None:
        if self._lost and self._lost.keys() - self._told:
            self._settle()

    @property
    def all_busy(self) -> bool:
        """Whether those that are left are all in the middle of what they do."""
        return not self._questions and len(self._lost) < self.num_workers

    def _all_own(self) -> bool:
        """Whether somebody has raised what is no echo of another rank's end."""
        return any(not self._backend.is_broken_collective(error) for error in self._failed())

    def _failed(self) -> list[Raised]:
        return [outcome.raised(rank, value) for rank, (kind, value) in self._replies.items() if kind == FAILED]

    def _settle(self) -> None:
        """A worker is lost: wait for others to come to rest, and raise. One that is at rest is enough, since all have
        the same state; those that are soon at rest may have more to tell."""
        self.on_lost()
        group, begin = self.crew.group, self._clock()
        assert group is not None
        busy_s = max(BUSY_S, 3 * self._longest_s, self._hang_timeout_s or 0.0)
        while silent := [rank for rank in range(self.num_workers) if rank not in self._questions | self._lost]:
            if self._clock() > begin + (SOON_S if self._questions else busy_s):
                break
            group.poll(POLL_S, self._take)
        self._told = set(self._lost)
        reasons = [f"rank {rank} {reason}" for rank, reason in sorted(self._lost.items())]
        if not self._questions:
            reasons += [f"rank {rank} did not come to the end of its step" for rank in silent]
        values = [value for kind, value in self._replies.values() if kind == DONE]
        told = "; ".join(reasons) or "a worker does not answer any more"
        raise LostError(told, tuple(sorted(self._questions)), values)

    def _hang(self, ranks: Collection[int]) -> None:
        silent = ", ".join(str(rank) for rank in ranks if rank not in self._replies)
        is_users = self.patience_s == self._hang_timeout_s
        limit = f"hang_timeout_s={self._hang_timeout_s:g}" if is_users else f"{self.patience_s:g} s"
        raise WorkersLostError(
            f"Rank {silent} did not answer within {limit}.{self.on_hang()} Raise hang_timeout_s if a step, a state "
            "on its way, or making the models may take so long."
        )

    def _take(self, event: Event) -> None:
        match event:
            case Asked(rank, _, topic, value):
                self._take_question(event, rank, topic, value)
            case Died(rank, reason):
                self._questions.pop(rank, None)
                self._lost[rank] = reason
            case Raised(rank):  # the serving itself, which is ours
                self.is_torn = True
                self._reply(rank, (FAILED, (event.type_name, event.message, event.traceback, None)))
            case Returned():
                pass
            case Printed(rank, text):
                self.crew.output.take(rank, text)
            case Sent(_, "imported", files):
                self.crew.learn_imports(files)
            case Sent(rank, kind, value):
                self.on_sent(rank, kind, value)

    def _show(self, event: Event) -> None:
        """Of what workers had sent when they were ended: what they have printed, which may tell why."""
        if isinstance(event, Printed):
            self.crew.output.take(event.rank, event.text)

    def _take_question(self, question: Asked, rank: int, topic: str, value: Any) -> None:
        if topic == TOPIC:
            self._questions[rank] = question
            self._reply(rank, value)
        elif self.crew.group is not None:
            self.crew.group.answer(question, ArgumentError(f"nobody knows an answer to {topic!r} here"))

    def _reply(self, rank: int, reply: Reply) -> None:
        if rank in self._asked:
            self._replies[rank] = reply
            self._has_failed = self._has_failed or reply[0] == FAILED


class _Within:
    """See `Link.within`. A generator would cost every step a few microseconds more."""

    __slots__ = ("_link", "_other_s")

    def __init__(self, link: Link, seconds: float | None):
        self._link, self._other_s = link, seconds

    def __enter__(self) -> None:
        self._swap()

    def __exit__(self, *raised: object) -> None:
        self._swap()

    def _swap(self) -> None:
        self._link.patience_s, self._other_s = self._other_s, self._link.patience_s


def _is_of_workers(error: BaseException) -> bool:
    """Whether they could not be had, or one has raised it: then it has a note. What a signal handler raises is
    neither."""
    return isinstance(error, PacelineError) or (isinstance(error, Exception) and hasattr(error, "__notes__"))
