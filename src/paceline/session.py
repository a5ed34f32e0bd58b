"""Inside a worker: the only door between the training function and the driver.

The functions here work in a worker and outside of one. Outside, nothing is recorded, which is said once, and the ranks
are those of the launcher that has started the process, or rank 0 of 1: the same training function also runs by hand.
Only `get_data_shard` needs a run, which has the dataset.
"""

import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Protocol

from paceline.backends.base import BackendConfig
from paceline.checkpoints import Checkpoint, CheckpointStrategy
from paceline.checkpoints.checkpoint import PER_RANK
from paceline.checkpoints.saver import Saver, Start
from paceline.checkpoints.storage.landmark import Landmark, open_in_worker
from paceline.errors import ArgumentError, ArgumentTypeError, TrainerStateError
from paceline.runs.request import RunRequest
from paceline.workers.base import Place, Wire, place_from_environ
from paceline.workers.reports import pack, with_rows

logger = logging.getLogger(__name__)

_ALONE = Place()

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
    """The state behind the functions below, for the time of one call of the training function."""

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
        self.seed: int | None = None
        """Of `enable_reproducibility`."""
        self._door: Any = None
        self._waited_s = 0.0
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

    def kept(self, name: str) -> Any | None:
        """What a keeper of that name had of this rank in the checkpoint that the function began with."""
        return None if self._resumed is None else (self._resumed.own_part() or {}).get(name)

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

    def door(self, what: str) -> Any:
        """To the data that the run was given."""
        if self._task.shards is None:
            raise TrainerStateError(
                f"{what}: this run was given no dataset. Pass one: trainer.run(train_func, dataset=...)."
            )
        if self._door is None:
            from paceline.data.door import Door  # with it comes numpy

            handout = self._task.shards[self.place.world_rank]
            if self._request.record_ids:
                from paceline.data.row_log import RowLog

                column = self._request.record_ids
                self._rows = RowLog(column if isinstance(column, str) else None, self._send_rows)
            self._door = Door(handout, self.place, lambda: self.seed or 0, self.keep, self._rows)
            self.cleanups.callback(self._door.close)
        return self._door

    @property
    def _is_repeating(self) -> bool:
        """In a fold that was done before the checkpoint was saved from which the function goes on: see get_datasets."""
        return self._door is not None and bool(self._door.is_repeating)

    @property
    def is_stop_wanted(self) -> bool:
        """Whether the run was asked to end, on which the ranks have agreed nothing yet. For who passes it on."""
        return self._wire.stopping

    def should_stop(self) -> bool:
        """Once the run is asked to end, all ranks agree on the call at which this becomes true: see StopAgreement. Not
        at the second call of a step, if that can be told: a loop may save at the first."""
        self._num_checks += 1
        is_first, self._has_checked = not self._has_checked, True
        if not self.look() or self.place.world_size == 1:
            return self._wire.stopping
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


_current: Session | None = None
_noticed = False


def current() -> Session | None:
    return _current


def train(wire: Wire, task: Task) -> tuple[Any, bool]:
    """Run the user's function in a session: what the driver submits to every rank. Returns its value and whether the
    process group is still fit for another run."""
    with open_session(wire, task) as session:
        value = _value_of(task.request.call)
        session.close()
    return value, task.backend.intact()


def _value_of(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What the user's function returns: None for `sys.exit(0)`, by which a script says that all went well. A process
    that the function has forked must not come back from it as this worker: it ends here."""
    owner = os.getpid()
    try:
        value = fn(*args, **kwargs)
    except SystemExit as leave:
        if os.getpid() == owner and leave.code not in (None, 0):
            raise
        value, code = None, leave.code
    except BaseException:
        if os.getpid() == owner:
            raise
        sys.excepthook(*sys.exc_info())
        code = 1
    else:
        code = 0
    if os.getpid() != owner:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code if isinstance(code, int) else int(code is not None))
    return value


@contextmanager
def open_session(wire: Wire, task: Task) -> Iterator[Session]:
    """Inside, `session` is the current one. It may be opened within another, which then goes on."""
    global _current
    session = Session(wire, task)
    former, _current = _current, session
    try:
        yield session
    finally:
        try:
            session.abandon()
        finally:
            _current = former


def report(*args: Any, **metrics: Any) -> None:
    """Send metrics of this step to the driver: `report(loss=0.1, accuracy=0.9)`.

    Returns at once; nothing waits for the driver or for the other ranks. The k-th reports of all ranks make one step:
    report equally often on every rank, or on rank 0 alone. Tensors arrive as numbers (if they hold one) or as numpy
    arrays.
    """
    if args:
        raise ArgumentTypeError(
            f"report() takes keywords only, got {args[0]!r}: write report(loss=0.1), or report(**metrics) for a dict."
        )
    if _current is None:
        _notice("report")
    else:
        _current.report(metrics)


def report_progress(progress: float) -> None:
    """Tell how much of the training is done, from 0 to 1: `report_progress(epoch / num_epochs)`. That of rank 0 is
    shown, with the time that is left."""
    if isinstance(progress, bool) or not isinstance(progress, int | float) or not 0 <= progress <= 1:
        raise ArgumentError(f"report_progress({progress!r}): expected a number from 0 to 1.")
    if _current is None:
        _notice("report_progress")
    else:
        _current.report_progress(float(progress))


def save_checkpoint(
    directory: str | Path | None = None, *, per_rank: dict[str, Any] | None = None, **state: Any
) -> None:
    """Save the state of the training: `save_checkpoint(epoch=3, model=model.state_dict())`.

    The state that is kept is rank 0's. What differs from rank to rank goes into `per_rank={...}`, which every rank gets
    back as `load_checkpoint().per_rank`. The n-th call on all ranks makes one checkpoint: call it equally often on all
    of them, or on rank 0 alone. Report a step before you save it: whoever goes on from a checkpoint reports again what
    comes after it. The state is copied in memory and written in the background; nobody waits for another rank. It may
    hold numbers, text, arrays, tensors, and containers of these. Give a directory to keep files:
    `save_checkpoint("my_dir", epoch=3)`; they are found in `load_checkpoint().directory`.
    """
    if directory is not None and not isinstance(directory, str | os.PathLike):
        raise ArgumentTypeError(
            "save_checkpoint() takes keywords, and a directory before them if you like; "
            f"got {type(directory).__name__}. Write save_checkpoint(epoch=3, model=model.state_dict()), or "
            "save_checkpoint(**state) for a dict."
        )
    if per_rank is not None and not isinstance(per_rank, dict):
        raise ArgumentTypeError(
            f"save_checkpoint(per_rank=...) is a {type(per_rank).__name__}; expected a dict of what is this rank's own."
        )
    if _current is None:
        _notice("save_checkpoint")
    else:
        _current.save_checkpoint(state, directory, per_rank)


def load_checkpoint() -> Checkpoint | None:
    """The checkpoint to go on from, or None.

    It is what this rank has saved last (rank 0's state, on every rank that calls `save_checkpoint` too, and this rank's
    own part); before that, what the run is resumed from after a failure; before that, the checkpoint given to `run`.
    When the number of workers has changed since, no part is this rank's: `all_ranks` has those of all former ranks. Its
    `directory` is there for as long as the function runs.
    """
    if _current is None:
        _notice("load_checkpoint")
        return None
    return _current.load_checkpoint()


def get_data_shard(name: str | None = None) -> Any:
    """This rank's part of the dataset that was given to `run`; with a name, of that one among several. Outside a run
    there is none: TrainerStateError.

    Loop over `shard.to_torch(batch_size=64)` or `shard.iter_batches(64)`, once for each epoch: see `Shard`. A run that
    is resumed goes on at the row where its checkpoint was taken. Of a Ray dataset it is a `ray.data.DataIterator`.
    """
    what = f"get_data_shard({'' if name is None else repr(name)})"
    return _door(what).dataset(name, what).get_split()


def get_dataset(name: str | None = None) -> Any:
    """The dataset that was given to `run`, not cut yet: `get_dataset().get_split()` is this rank's part. Here it can be
    shuffled or filtered as the config says, equally on all ranks."""
    what = f"get_dataset({'' if name is None else repr(name)})"
    return _door(what).dataset(name, what)


def get_datasets() -> Any:
    """The folds that were given to `run`, as pairs (train, val) of datasets: a sequence, to loop over once.

    `for index, (train, val) in get_datasets().items()` goes on with the fold that was under way when the checkpoint was
    saved that `load_checkpoint()` gives. A plain loop, as in `enumerate(get_datasets())`, comes to the earlier ones
    too: they have no batches then, and what is reported and saved in them is dropped, since it was before.
    """
    return _door("get_datasets()").folds()


def _door(what: str) -> Any:
    if _current is None:
        raise TrainerStateError(
            f"{what} is for training functions: outside of a run there is no dataset. To run the function in "
            "this process: Trainer(num_workers=0).run(train_func, dataset=...)."
        )
    return _current.door(what)


def should_stop() -> bool:
    """Whether the run was asked to end. A long loop looks at it, saves a checkpoint and returns.

    It becomes true at the same call on all ranks, if all of them call it, equally often: then they leave their loops at
    the same step.
    """
    if _current is None or not _current.should_stop():
        return False
    _current.leave()
    return True


def in_worker() -> bool:
    """Whether this code runs in a function that a Trainer has called."""
    return (_current is not None and _current.is_worker) or _worker_place is not None


def place() -> Place:
    """Where this process stands among the workers: in a worker, or as the launcher says that has started it (torchrun,
    srun); else rank 0 of 1."""
    if _current is not None:
        return _current.place
    return _worker_place or place_from_environ(os.environ) or _ALONE


def world_rank() -> int:
    return place().world_rank


def local_rank() -> int:
    """The rank among the workers of this machine."""
    return place().local_rank


def node_rank() -> int:
    """The number of this machine among those of the run."""
    return place().node_rank


def world_size() -> int:
    return place().world_size


def local_world_size() -> int:
    return place().local_world_size


def note(kind: str, **fields: Any) -> None:
    """Write a line into the run's `events.jsonl`. Does nothing outside a worker."""
    if _current is not None:
        _current.note(kind, **fields)


_worker_place: Place | None = None
"""In a call that has no session."""


def call_in_worker(wire: Wire, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run `Trainer.execute`'s function: ranks are known, but there is no run to report to."""
    global _worker_place
    former, _worker_place = _worker_place, wire.place
    try:
        if "instance" in wire.shared:
            args = (wire.shared["instance"], *args)
        return _value_of(fn, *args, **kwargs)
    finally:
        _worker_place = former


def make_instance(wire: Wire, cls: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Create the class API's object on this worker, where `execute` finds it."""
    wire.shared.pop("instance", None)
    wire.shared["instance"] = call_in_worker(wire, cls, args, kwargs)


def _notice(name: str) -> None:
    global _noticed
    if not _noticed:
        _noticed = True
        if world_rank() == 0:
            logger.warning("%s() was called outside a Paceline run: going on, but nothing is recorded.", name)


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
