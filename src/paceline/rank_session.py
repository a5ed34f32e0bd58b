"""One rank's side of one attempt at a run: it numbers and sends reports, saves its parts of checkpoints, has the door
to the data, and asks whether to stop. What training functions call is in `session.py`."""

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Protocol

from paceline.backends.base import BackendConfig
from paceline.checkpoints import Checkpoint, CheckpointStrategy
from paceline.checkpoints.checkpoint import PER_RANK
from paceline.checkpoints.saver import Saver, Start
from paceline.checkpoints.storage.landmark import Landmark, open_in_worker
from paceline.errors import TrainerStateError
from paceline.runs.request import RunRequest
from paceline.workers.base import Wire
from paceline.workers.reports import pack, with_rows

logger = logging.getLogger(__name__)

_STEP_S = 1.0
"""For so long after a report, further calls of should_stop belong to the same step."""
_AGREE_TIMEOUT_S = 2.0


@dataclass(frozen=True)
class Task:
    """One attempt at a run, as every rank of it gets it: what was asked, and where to begin."""

    request: RunRequest
    start: Start
    backend: BackendConfig
    landmarks: tuple[Landmark, ...] = ()
    """By which a worker knows whether it sees the driver's folders."""
    shards: Sequence[Any] | None = None
    """Of the run's dataset, by rank."""
    is_worker: bool = True
    """Whether a Trainer has called the function, in a worker of its own."""
    run_dir: str | None = None
    """The run folder, on the machine of who records."""
    attempt: int = 0
    """How often the run was started again before this."""
    is_driven: bool = False
    """Whether the driver makes every step, and reports and saves itself, as DistributedSGD does."""


class Keeper(Protocol):
    """Something of a rank's own that every checkpoint keeps without being asked: random generators, say."""

    @property
    def name(self) -> str: ...

    def state(self) -> Any:
        """What to keep, as a checkpoint holds it."""

    def restore(self, own: Any | None, everybody: Callable[[], list[Any | None]]) -> None:
        """Go on from there. `own` is None when this rank had no such state, or the number of ranks has changed;
        `everybody()` gives that of every former rank."""


class Session:
    """The state behind the functions of `session.py`, for the time of one call of the training function."""

    def __init__(self, wire: Wire, task: Task):
        self.place, self.is_worker, self.attempt = wire.place, task.is_worker, task.attempt
        self.extras: dict[str, Any] = {}
        self.cleanups = ExitStack()
        """Called when the function has ended: a warm worker starts its next run as a fresh one would."""
        self._wire = wire
        self._task, self._request = task, task.request
        self._iteration = task.start.iteration
        self._start = self._last_report = time.perf_counter()
        self._total_s = 0.0
        self._numbering = threading.RLock()
        self.has_looked = False
        """Whether the function wants to know when it should end."""
        self._num_checks, self._has_checked = 0, False
        """Calls of should_stop, and whether there was one since the last report."""
        self._stop_at: int | None = None
        self._is_leaving = False
        self._keepers: dict[str, Keeper] = {}
        self._resumed: Checkpoint | None = None
        self._former: Sequence[Mapping[str, Any] | None] = ()
        """See `restore_keepers`."""
        self.seed: int | None = None
        """Of `enable_reproducibility`."""
        self._door: Any = None
        self._offered: Mapping[str | None, Any] | None = None
        """Data that the function has made itself."""
        self._waited_s = 0.0
        self._in_vain: set[str] = set()
        self._rows: Any = None
        """With `record_ids`, a RowLog: what was read since the last report."""
        self.saver = Saver(
            task.start,
            self._request.checkpoint_strategy,
            self.place.world_rank,
            self.place.world_size,
            wire,
            partial(open_in_worker, landmarks=task.landmarks, ask=partial(wire.ask, "storage")),
        )
        self.saver.num_collectives = task.backend.num_collectives

    def report(self, metrics: dict[str, Any]) -> None:
        """Number and send. The values are serialized here: what happens to them afterwards does not matter, and one
        that cannot be sent is an error on the user's own line. Then nothing was reported, and no number is used up.
        Threads report one after the other, in the order of the numbers; a signal handler takes one of its own."""
        self._has_checked = False
        if self._is_repeating:
            return
        if self._task.is_driven:
            self._tell_in_vain("report()", "let get_metrics() return it")
            return
        with self._numbering:
            self._iteration += 1
            now, number, total_s = time.perf_counter(), self._iteration, self._total_s
            elapsed_s = now - self._last_report
            try:
                if self._request.detailed_metrics:
                    total_s += metrics.get("_time_this_iter_s", elapsed_s)
                    metrics |= _detailed(total_s) | self._data_wait()
                packed = pack(metrics, time.time(), elapsed_s, number)
                if self._rows is not None:
                    packed = with_rows(packed, self._rows.message(number, self.saver.next_id))
            except BaseException:
                if self._iteration == number:
                    self._iteration -= 1
                raise
            self._last_report, self._total_s = now, total_s
            self._wire.report(packed)
        if self._request.in_step:
            self._wire.ask("turn", number)
            self._last_report = time.perf_counter()

    def save_checkpoint(
        self, state: dict[str, Any], directory: str | Path | None, per_rank: dict[str, Any] | None
    ) -> None:
        if self._is_repeating:  # a model that was not trained now must not pass for the one that was
            return
        if self._task.is_driven:
            self._tell_in_vain("save_checkpoint()", "call that of the DistributedSGD")
            return
        own = {} if per_rank is None else {PER_RANK: per_rank}
        own |= {name: keeper.state() for name, keeper in self._keepers.items()}
        self._send_rows()  # before it: they belong to this checkpoint
        self.saver.save(state, directory, own or None, self._iteration)

    def upload(self, state: dict[str, Any], directory: str | Path | None, *, is_alone: bool, timeout_s: float) -> str:
        """Save, on all ranks or on rank 0 alone, files of each rank that saves, and wait until it is a checkpoint.
        Returns its name."""
        is_alone = is_alone and self.place.world_size > 1
        own = None if is_alone else {name: keeper.state() for name, keeper in self._keepers.items()}
        self._send_rows()
        id = self.saver.save(
            state,
            directory,
            own or None,
            self._iteration,
            has_files=True,
            is_alone=is_alone,
        )
        self.saver.wait(id, timeout_s)
        return self.saver.name_of(id)

    @property
    def address(self) -> str:
        """Where the other ranks can reach this one."""
        return self._wire.address

    def put(self, name: str, text: str) -> None:
        """Leave a note for the other ranks of this attempt."""
        self._wire.ask("put", (name, text))

    def get(self, name: str, timeout_s: float) -> str:
        """Wait for a note of that name. TimeoutError if there is none in time."""
        text: str = self._wire.ask("get", name, timeout_s)
        return text

    def delete_checkpoint(self, id: int) -> None:
        self._wire.ask("delete", id)

    @property
    def run_dir(self) -> Path | None:
        """The run folder. None in a worker of a Trainer that does not see it."""
        told = self._task.run_dir
        return None if told is None or (self.is_worker and not os.path.isdir(told)) else Path(told)

    def report_progress(self, progress: float) -> None:
        if self.place.world_rank == 0:
            self._wire.send("progress", progress)

    @property
    def strategy(self) -> CheckpointStrategy:
        """Which checkpoints are kept."""
        return self.saver.strategy

    def set_strategy(self, strategy: CheckpointStrategy) -> None:
        """From now on. On every rank."""
        self.saver.strategy = strategy
        if self.place.world_rank == 0:
            self._wire.send("strategy", strategy)

    @property
    def next_checkpoint_path(self) -> str:
        """Of the one that the next `save_checkpoint` is a part of, once it is committed."""
        return self.saver.path_of(self.saver.name_of(self.saver.next_id))

    def settle(self) -> None:
        """Block until what was saved is committed, as far as it depends on this rank; raises what went wrong."""
        self.saver.settle()

    def _send_rows(self) -> None:
        """What was read and is not reported yet."""
        with self._numbering:
            rows = None if self._rows is None else self._rows.message(self._iteration + 1, self.saver.next_id)
            if rows is not None:
                self._wire.send("rows", rows)

    def load_checkpoint(self) -> Checkpoint | None:
        checkpoint, is_initial = self.saver.load()
        if is_initial and checkpoint is not None and self._resumed is None:
            self._resumed = checkpoint
            for keeper in self._keepers.values():
                self._restore(keeper, checkpoint)
        return checkpoint

    def keep(self, keeper: Keeper) -> None:
        """From now on its state is part of this rank's checkpoints; it is restored with the one that the function
        begins with, when that is loaded."""
        self._keepers[keeper.name] = keeper
        if self._resumed is not None:
            self._restore(keeper, self._resumed)
        if self._former:
            self._restore_from_former(keeper)

    def kept(self, name: str) -> Any | None:
        """What a keeper of that name had of this rank in the checkpoint that the function began with."""
        return None if self._resumed is None else (self._resumed.own_part() or {}).get(name)

    def keepers_state(self) -> dict[str, Any]:
        """What all keepers have, for who holds it somewhere else than in this session's checkpoints."""
        return {name: keeper.state() for name, keeper in self._keepers.items()}

    def restore_keepers(self, states: Sequence[Mapping[str, Any] | None]) -> None:
        """Go on from what every rank had then, each its own; their number may be another now. Keepers that come later
        do so when they come."""
        self._former = states
        for keeper in self._keepers.values():
            self._restore_from_former(keeper)

    def _restore_from_former(self, keeper: Keeper) -> None:
        states = [(state or {}).get(keeper.name) for state in self._former]
        own = states[self.place.world_rank] if len(states) == self.place.world_size else None
        keeper.restore(own, lambda: states)

    @staticmethod
    def _restore(keeper: Keeper, checkpoint: Checkpoint) -> None:
        own = (checkpoint.own_part() or {}).get(keeper.name)
        keeper.restore(own, lambda: [(part or {}).get(keeper.name) for part in checkpoint.parts()])

    def _data_wait(self) -> dict[str, float]:
        """How long this rank has waited for data since it was last asked, if it reads any."""
        if self._door is None:
            return {}
        former, self._waited_s = self._waited_s, self._door.wait_s
        return {"_data_wait_s": self._waited_s - former}

    def latest_batch(self) -> Any:
        """How many rows this rank, and all ranks together, have in the batch that a loop over a shard is at."""
        return None if self._door is None else self._door.latest

    def end_epoch_of_data(self, *, is_over: bool) -> None:
        """Whoever loops over the shards of this rank knows that an epoch is over, though its loops were not told; or,
        without `is_over`, that it is if all rows were had."""
        if self._door is not None:
            self._door.end_epoch(is_over=is_over)

    def offer(self, datasets: Mapping[str | None, Any]) -> None:
        """Datasets by name that the function has made itself, equally on all ranks: `door` leads to these, and their
        positions are kept as those of data that the run was given, which is there besides. Before the first use of the
        door."""
        if self._door is not None:
            raise TrainerStateError("The data of this run is in use already.")
        self._offered = datasets

    def door(self, what: str) -> Any:
        """To the data that the run was given."""
        if self._task.shards is None and self._offered is None:
            raise TrainerStateError(
                f"{what}: this run was given no dataset. Pass one: trainer.run(train_func, dataset=...)."
            )
        if self._door is None:
            from paceline.data.door import Door  # with it comes numpy

            handout = self._handout()
            if self._request.record_ids:
                from paceline.data.row_log import RowLog

                column = self._request.record_ids
                self._rows = RowLog(column if isinstance(column, str) else None, self._send_rows)
            self._door = Door(handout, self.place, lambda: self.seed or 0, self.keep, self._rows)
            self.cleanups.callback(self._door.close)
        return self._door

    def _handout(self) -> Any:
        if self._offered is not None:
            from paceline.data.given import Handout

            given = {} if self._task.shards is None else self._task.shards[self.place.world_rank].items
            return Handout({**given, **self._offered})
        assert self._task.shards is not None
        return self._task.shards[self.place.world_rank]

    @property
    def _is_repeating(self) -> bool:
        """In a fold that was done before the checkpoint was saved from which the function goes on: see get_datasets."""
        return self._door is not None and bool(self._door.is_repeating)

    def _tell_in_vain(self, what: str, instead: str) -> None:
        """Say once of what is the driver's business alone that it does nothing here."""
        if what not in self._in_vain:
            self._in_vain.add(what)
            logger.warning("%s in a model does nothing: %s.", what, instead)

    @property
    def is_stop_wanted(self) -> bool:
        """Whether the run was asked to end, on which the ranks have agreed nothing yet. For who passes it on."""
        return self._wire.stopping

    def should_stop(self) -> bool:
        """Once the run is asked to end, all ranks agree on the call at which this becomes true: see StopAgreement. Not
        at the second call of a step, if that can be told: a loop may save at the first."""
        self._num_checks += 1
        is_first, self._has_checked = not self._has_checked, True
        is_wanted = self.look()  # once: a moment later it may be another answer, on which nobody has agreed
        if not is_wanted or self.place.world_size == 1:
            return is_wanted
        if self._stop_at is None:
            has_reported = self._iteration > self._task.start.iteration
            if not is_first and has_reported and time.perf_counter() - self._last_report < _STEP_S:
                return False
            with suppress(TimeoutError):  # the driver is busy: go on, since to leave alone would leave others behind
                self._stop_at = self._wire.ask("stop", self._num_checks, _AGREE_TIMEOUT_S)
        return self._stop_at is not None and self._num_checks >= self._stop_at

    def look(self) -> bool:
        """Whether somebody wants an end, as far as this rank knows: others may not know it yet."""
        self.has_looked = True
        return self._wire.stopping

    def leave(self) -> None:
        """The function has seen that it should stop: what it returns from now on may not be its last word."""
        if not self._is_leaving:
            self._is_leaving = True
            self._wire.send("leaving", None)

    def note(self, kind: str, **fields: Any) -> None:
        self._wire.send("note", (kind, fields))

    def close(self) -> None:
        """Wait until the last checkpoint is durable."""
        self._send_rows()
        self.saver.close()

    def abandon(self) -> None:
        """The function has ended, in whatever way: nothing of it writes from now on. Idempotent."""
        self.cleanups.close()
        self.saver.abandon()


def _detailed(total_s: float) -> dict[str, Any]:
    hostname = socket.gethostname()
    return {
        "_date": time.strftime("%Y-%m-%d_%H-%M-%S"),
        "_hostname": hostname,
        "_node_ip": _node_ip(hostname),
        "_pid": os.getpid(),
        "_time_total_s": total_s,
    }


@cache
def _node_ip(hostname: str) -> str:
    try:
        return socket.gethostbyname(hostname)
    except OSError:
        return "127.0.0.1"
