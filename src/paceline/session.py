"""Inside a worker: the only door between the training function and the driver.

The functions here work in a worker and outside of one. Outside, nothing is recorded, which is said once, and the ranks
are those of the launcher that has started the process, or rank 0 of 1: the same training function also runs by hand.
Only `get_data_shard` needs a run, which has the dataset.
"""

import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from paceline.checkpoints import Checkpoint
from paceline.errors import ArgumentError, ArgumentTypeError, TrainerStateError
from paceline.frameworks import every
from paceline.rank_session import Session, Task
from paceline.workers.base import Place, Wire, place_from_environ

logger = logging.getLogger(__name__)

_ALONE = Place()

_current: Session | None = None
_open: list[Session] = []
_noticed = False


def current() -> Session | None:
    return _current


def train(wire: Wire, task: Task) -> tuple[Any, bool]:
    """Run the user's function in a session: what the driver submits to every rank. Returns its value and whether the
    process group is still fit for another run."""
    with open_session(wire, task) as session:
        for put_back in (framework.putting_back() for framework in every()):
            if put_back is not None:
                session.cleanups.callback(put_back)
        value = _value_of(task.request.call)
        session.close()
    return value, task.backend.intact()


def _value_of(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What the user's function returns: None for `sys.exit(0)`, by which a script says that all went well. A process
    that the function has forked must not come back from it as this worker."""
    try:
        with EndingForks():
            return fn(*args, **kwargs)
    except SystemExit as leave:
        if leave.code not in (None, 0):
            raise
        return None


class EndingForks:
    """A process that is forked inside ends with the block, in its own way: what comes after, locks that others held
    and files that are removed among it, is its parent's. A generator would cost every step of a DistributedSGD a few
    microseconds more."""

    __slots__ = ("_owner_pid",)

    def __enter__(self) -> None:
        self._owner_pid = os.getpid()

    def __exit__(
        self, kind: type[BaseException] | None, caught: BaseException | None, trace: TracebackType | None
    ) -> None:
        if os.getpid() != self._owner_pid:
            end_fork(caught)


def end_fork(caught: BaseException | None = None) -> NoReturn:
    """End this process, which the user's code has forked, as Python would end with what it has raised."""
    code = 1
    try:
        code = _exit_code_of(caught)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    finally:  # whatever is wrong with the streams, which it may have closed: it must not go on in its parent's name
        os._exit(code)


def _exit_code_of(caught: BaseException | None) -> int:
    """As Python ends with it, which shows what is no exit."""
    if caught is None:
        return 0
    if not isinstance(caught, SystemExit):
        sys.excepthook(type(caught), caught, caught.__traceback__)
        return 1
    return caught.code if isinstance(caught.code, int) else int(caught.code is not None)


@contextmanager
def open_session(wire: Wire, task: Task) -> Iterator[Session]:
    """Inside, `session` is the current one. It may be opened within another, which then goes on. Those of two threads
    may also overlap: whichever ends first, none that has ended is ever the current one."""
    session = Session(wire, task)
    with within(session):
        try:
            yield session
        finally:
            session.abandon()


@contextmanager
def within(session: Session) -> Iterator[None]:
    """Inside, this is the current one: of a session that outlives a call, and in whose process there may be others."""
    global _current
    _current = session
    _open.append(session)
    try:
        yield
    finally:
        _open.remove(session)
        _current = _open[-1] if _open else None


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
