"""A run without a Trainer: the process that trains records itself."""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from paceline.arguments import request_of
from paceline.backends.base import BackendConfig
from paceline.callbacks import Callback
from paceline.callbacks.dispatch import CallbackList
from paceline.checkpoints import CheckpointStrategy
from paceline.checkpoints.saver import Start
from paceline.checkpoints.storage.landmark import Landmark
from paceline.errors import TrainerStateError
from paceline.recording.recorder import Recorder
from paceline.recording.wire import RecorderWire
from paceline.runs import RunFolder, RunRequest, claim_root, resolve_logdir
from paceline.session import Task, current, open_session, place


@contextmanager
def record_run(
    config: dict[str, Any] | None = None,
    *,
    callbacks: Sequence[Callback] | None = None,
    logdir: str | os.PathLike[str] | None = None,
    checkpoint: dict[str, Any] | str | os.PathLike[str] | None = None,
    checkpoint_strategy: CheckpointStrategy | None = None,
) -> Iterator[Path | None]:
    """Inside the block, `report`, `save_checkpoint` and `load_checkpoint` work in this very process, and leave a run
    folder as `Trainer.run` does. Gives the folder's path.

    >>> with record_run({"lr": 0.1}) as run_dir:
    ...     train(0.1)

    Under a launcher such as torchrun, every rank enters it. Rank 0 records; what the others report and save is dropped,
    their `per_rank` and random generators too, and they get None. Such a run is continued by giving its checkpoint to
    the next one, not by `Trainer.resume`.
    """
    if current() is not None:
        raise TrainerStateError("record_run() cannot begin here: this code is being recorded already.")
    request = request_of(_this_script, config=config, checkpoint=checkpoint, checkpoint_strategy=checkpoint_strategy)
    if place().world_rank != 0:
        with open_session(RecorderWire(place(), None), _unrecorded(request)):
            yield None
        return
    folder = RunFolder.create(resolve_logdir(logdir))
    root = claim_root(request, folder)
    function = {"name": Path(sys.argv[0]).name or "python", "file": os.path.abspath(sys.argv[0])}
    folder.write_request({"engine": "none", "checkpoint_root": root, **request.for_folder(), "function": function})
    recorder = Recorder(request, folder, CallbackList(callbacks), root)
    with _recorded(recorder):
        yield folder.path


@contextmanager
def _recorded(recorder: Recorder) -> Iterator[None]:
    """One attempt from its beginning to its end, whatever that is."""
    state, error = "FAILED", None
    try:
        recorder.open(num_workers=1, world_size=1)
        start, landmarks = recorder.begin([os.getpid()], told_size=place().world_size)
        task = Task(recorder.request, start, BackendConfig(), landmarks, is_worker=False)
        wire = RecorderWire(place(), recorder)
        with open_session(wire, task) as session:
            yield
            if wire.delivery_error is not None:
                raise wire.delivery_error
            session.close()  # raises what comes of the last checkpoint
        recorder.end(0)
        state = "SUCCEEDED"
    except BaseException as caught:
        error = caught
        state = "FAILED" if isinstance(caught, Exception) else "STOPPED"
        raise
    finally:
        recorder.close(state, None if error is None else f"{type(error).__qualname__}: {error}", error)


def _unrecorded(request: RunRequest) -> Task:
    nowhere = "unrecorded"
    start = Start(request.checkpoint, 0, first_id=1, root=nowhere, token="0")
    return Task(request, start, BackendConfig(), (Landmark(os.path.abspath(nowhere), "", None),), is_worker=False)


def _this_script() -> None:
    """Stands for the function of a run that is none."""
