"""The driver's end: commands go to the workers in order, as many at once as have come together, and nobody waits for
them before something is asked.

    send ─► waiting ─► under way, in one call of each worker ─► told, by number
                            │
                            └─ raised, died, or no sign of life: the error names the line that had sent the command
"""

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from paceline.control.crew import POLL_S, Crew, join_limit
from paceline.control.outcome import as_exception
from paceline.control.termination import Signals
from paceline.driven.commands import Command, Forget, Line, Order
from paceline.driven.worker import FAILED, run
from paceline.errors import StackDumpError, TrainerStateError, WorkersLostError
from paceline.workers import outcome
from paceline.workers.base import Call, Died, Event, Printed, Raised, Returned, Sent, WorkerGroup

_MOST_WAITING = 1000
_PATIENCE_S = 1.0
"""How long ranks have to end too when one has raised: the others may wait for it in a collective."""


class Pipeline:
    """`is_echo` tells an exception that is only what a rank notices of another one's end."""

    def __init__(
        self, crew: Crew, group_id: str, is_apart: bool, is_echo: Callable[[Raised], bool], hang_timeout_s: float | None
    ):
        self._crew, self._group_id, self._is_apart, self._is_echo = crew, group_id, is_apart, is_echo
        self._hang_timeout_s = hang_timeout_s
        self._workers: WorkerGroup | None = None
        self._waiting: list[Order] = []
        self._flight: _Flight | None = None
        self._told: dict[int, list[bytes]] = {}
        self._expected: set[int] = set()
        self.forgotten: deque[int] = deque()
        """Numbers of values that the driver has let go of; whatever thread does that may put them here."""
        self._over = ""
        """Why there are no more workers."""
        self._one_call, self._owner_pid = threading.Lock(), os.getpid()

    def start(self) -> None:
        """Idempotent. Blocking, the first time."""
        if self._over:
            raise TrainerStateError(f"This WorkerGroup {self._over}: its models and values are gone. Make a new one.")
        if self._workers is None:
            self._workers = self._crew.get_ready(join_limit(self._hang_timeout_s))
            self._owner_pid = os.getpid()

    def send(self, command: Command) -> None:
        """Returns at once, unless very much is waiting. Raises what an earlier command has come to."""
        with self._alone():
            self.start()
            if command.tells:
                self._expected.add(command.number)
            self._put_forgotten()  # in order: a worker that is behind holds no more than the loop did
            self._waiting.append(command)
            self._go_on(0.0)
            while len(self._waiting) >= _MOST_WAITING:
                self._go_on(POLL_S)

    def told(self, number: int) -> list[Any]:
        """What a command tells, by rank. Blocking. Unpacked here: what cannot be is an error of who asks, and of nobody
        else whose answer came with it."""
        if number not in self._expected:
            raise TrainerStateError(
                "The workers were not asked this: a command before it had failed, and those that were on their way "
                "were left out. Begin the loop again."
            )
        with self._alone():
            while number not in self._told:
                self._go_on(POLL_S)
        packed = self._told[number]
        self.ignore(number)
        return [_unpacked(rank, part) for rank, part in enumerate(packed)]

    def ignore(self, number: int) -> None:
        """Nobody will ask for what it tells."""
        self._expected.discard(number)
        self._told.pop(number, None)

    def drain(self) -> None:
        """Until all that was sent is done, and what was let go of is forgotten. Blocking."""
        with self._alone():
            while self._workers is not None and (self._waiting or self.forgotten or self._flight is not None):
                self._go_on(POLL_S)

    def close(self, reason: str = "is closed") -> None:
        """End the workers. Idempotent. Ctrl-C waits until it is done: half of it would leave workers behind."""
        if self._over:
            return
        signals = Signals()
        with signals.watching():
            self._over = reason
            self._waiting.clear()
            self._expected.clear()
            flight, self._flight, self._workers = self._flight, None, None
            self._crew.break_up(grace_s=2.0 if flight is None else 0.0)
        signals.release()
        signals.check(1)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Around whatever talks to the workers: two at once would take each other's answers. Whoever is interrupted
        here leaves the workers in the middle of something, on whatever line it was."""
        if self._workers is not None and self._owner_pid != os.getpid():
            raise TrainerStateError(
                f"The workers of this WorkerGroup are those of process {self._owner_pid}; this one, {os.getpid()}, is "
                "a fork of it: make a new one here."
            )
        if not self._one_call.acquire(blocking=False):
            raise TrainerStateError(
                "This WorkerGroup is in the middle of a call of another thread, or of the code that a signal has "
                "interrupted: a group is for one thread."
            )
        try:
            yield
        except Exception:
            raise
        except BaseException:
            self.close("was interrupted")
            raise
        finally:
            self._one_call.release()

    def _go_on(self, timeout_s: float) -> None:
        """Send what is waiting if the workers are free, and see what has happened."""
        try:
            error = self._error_of_next(timeout_s)
        except BaseException:  # of a signal handler, of whatever kind, on whatever line
            self.close("was interrupted")
            raise
        if error is not None:
            raise error

    def _error_of_next(self, timeout_s: float) -> Exception | None:
        if self._flight is None and not self._take_off():
            return None
        assert self._workers is not None
        assert self._flight is not None
        self._workers.poll(timeout_s, self._flight.take)
        if self._flight.is_over:
            return self._land(self._flight)
        if self._hang_timeout_s is not None and self._flight.silence_s > self._hang_timeout_s:
            return self._give_up_waiting(self._flight)
        return None

    def _put_forgotten(self) -> None:
        """Whatever uses these values is on its way already."""
        if self.forgotten:
            self._waiting.append(Forget(tuple(self.forgotten.popleft() for _ in range(len(self.forgotten)))))

    def _take_off(self) -> bool:
        self._put_forgotten()
        orders, self._waiting = self._waiting, []
        if not orders or self._workers is None:
            return False
        call = Call(run, (self._group_id, orders, self._is_apart))
        self._flight = _Flight(self._crew, orders, len(self._workers.infos))
        self._workers.submit(dict.fromkeys(range(self._flight.num_ranks), call))
        return True

    def _land(self, flight: "_Flight") -> Exception | None:
        self._flight = None
        self._crew.output.flush()
        if flight.died or flight.raised:
            return self._failure(flight)
        for number in self._expected & flight.told[0].keys():
            self._told[number] = [flight.told[rank][number] for rank in range(flight.num_ranks)]
        self._take_off()  # the workers go on while the driver looks at what it was told
        return None

    def _failure(self, flight: "_Flight") -> Exception:
        """What was sent after it is left out. The group lives on if all ranks have stopped at the same command: then
        they are still alike."""
        self._waiting.clear()
        self._expected.clear()
        self._told.clear()
        if flight.lost or not flight.raised:
            died = (flight.lost or flight.died)[0]
            self.close(f"has ended, since rank {died.rank} {died.reason}")
            return WorkersLostError(
                f"Rank {died.rank} {died.reason}, while the workers did what was sent from {flight.lines()}. The "
                "replicas of a driven loop live in its workers alone: make a new WorkerGroup, and load what you have "
                "saved."
            )
        raised = next((one for one in flight.raised if not self._is_echo(one)), flight.raised[0])
        error = as_exception(raised, flight.raised)
        line = flight.line(raised.rank)
        if line is not None:
            error.add_note(f"The driver had sent it from {line}")
        if flight.died or not flight.is_the_same_everywhere:
            self.close(f"has ended, since rank {raised.rank} raised {raised.type_name} and others did not")
            error.add_note("The workers have ended, since their replicas may differ: make a new WorkerGroup.")
        return error

    def _give_up_waiting(self, flight: "_Flight") -> Exception:
        assert self._workers is not None
        try:
            stacks = self._workers.stacks()
        except StackDumpError:
            stacks = {}
        self.close(f"has ended, since it did nothing for {self._hang_timeout_s} s")
        error = WorkersLostError(
            f"The workers have been silent for {self._hang_timeout_s} s (hang_timeout_s), at what was sent from "
            f"{flight.lines()}, and were ended."
        )
        for rank, text in stacks.items():
            error.add_note(f"Rank {rank}:\n{text}")
        return error


def _unpacked(rank: int, packed: bytes) -> Any:
    event = outcome.returned(rank, packed)
    if isinstance(event, Raised):
        raise as_exception(event)
    return event.value


class _Flight:
    """One call on every rank: its commands, and what has become of them."""

    def __init__(self, crew: Crew, orders: Sequence[Order], num_ranks: int):
        self.num_ranks = num_ranks
        self.told: dict[int, dict[int, bytes]] = {}
        self.raised: list[Raised] = []
        self.died: list[Died] = []
        self._failed: dict[int, int] = {}
        """By rank, the number of the command that raised."""
        self._crew = crew
        self._commands = {order.number: order for order in orders if isinstance(order, Command)}
        self._latest_s = self._raised_s = time.monotonic()

    def take(self, event: Event) -> None:
        self._latest_s = time.monotonic()
        match event:
            case Returned(rank, told):
                self.told[rank] = told
            case Raised():
                if not self.raised:
                    self._raised_s = self._latest_s
                self.raised.append(event)
            case Died():  # told once: the next call would wait for a rank that had answered this one for ever
                self.died.append(event)
            case Sent(rank, kind, number) if kind == FAILED:
                self._failed[rank] = number
            case Sent(_, "imported", files):
                self._crew.learn_imports(files)
            case Printed(rank, text):
                self._crew.output.take(rank, text)

    @property
    def _ended(self) -> set[int]:
        return {*self.told, *(one.rank for one in self.raised)}

    @property
    def lost(self) -> list[Died]:
        """Those that did not live to answer."""
        return [one for one in self.died if one.rank not in self._ended]

    @property
    def is_over(self) -> bool:
        if self.lost or len(self._ended) == self.num_ranks:
            return True
        return bool(self.raised) and time.monotonic() - self._raised_s > _PATIENCE_S

    @property
    def silence_s(self) -> float:
        return time.monotonic() - self._latest_s

    @property
    def is_the_same_everywhere(self) -> bool:
        return len(self._failed) == len(self.raised) == self.num_ranks and len(set(self._failed.values())) == 1

    def line(self, rank: int) -> Line | None:
        number = self._failed.get(rank)
        return None if number is None else self._commands[number].line

    def lines(self) -> str:
        """From where all of it was sent."""
        found = list(dict.fromkeys(command.line for command in self._commands.values()))
        if not found:
            return "nowhere"
        return str(found[0]) if len(found) == 1 else f"{found[0].file}, lines {found[0].number} to {found[-1].number}"
