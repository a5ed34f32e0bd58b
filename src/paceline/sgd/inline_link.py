"""The link to a worker that is this very process."""

from collections.abc import Callable, Mapping
from typing import Any

from paceline.rank_session import Session, Task
from paceline.session import EndingForks, within
from paceline.sgd.link import Command, Link, TaskOf
from paceline.sgd.serving import SIDE, set_up
from paceline.sgd.side import Spec
from paceline.workers.base import Wire


class InlineLink(Link):
    """In this very process, where a call cannot wait for commands: each of them is a call of its own. Exceptions keep
    their traceback."""

    def open(self, task_of: TaskOf, spec: Spec) -> list[Any]:
        group = self.crew.get_ready()
        task, _ = task_of(group.infos)
        return self.crew.all(_begin_session, task, spec)

    def ask_each(self, commands: Mapping[int, Command]) -> list[Any]:
        [(verb, args)] = commands.values()
        return self.crew.all(_perform, verb, args)

    def call(
        self, fn: Callable[..., Any], *args: Any, ranks: "list[int] | None" = None, label: str = "the function"
    ) -> list[Any]:
        return self.crew.all(_call, fn, args)

    def close(self) -> None:
        try:
            if self.crew.group is not None:
                self.crew.all(_end_session)
        finally:
            self.crew.break_up()

    def give_up(self) -> None:
        self.close()


_SESSION = "sgd_session"
"""Where it is kept from one command to the next. Between them, what the user's program does is none of its business."""


def _begin_session(wire: Wire, task: Task, spec: Spec) -> Any:
    session = wire.shared[_SESSION] = Session(wire, task)
    with within(session), EndingForks():
        return set_up(wire, spec)


def _end_session(wire: Wire) -> None:
    session: Session | None = wire.shared.pop(_SESSION, None)
    if session is not None:
        with within(session):
            session.abandon()


def _perform(wire: Wire, verb: str, args: tuple[Any, ...]) -> Any:
    with within(wire.shared[_SESSION]), EndingForks():
        return getattr(wire.shared[SIDE], verb)(*args)


def _call(wire: Wire, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    with within(wire.shared[_SESSION]), EndingForks():
        return fn(wire, *args)
