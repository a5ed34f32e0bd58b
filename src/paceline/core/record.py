"""A run without a Trainer: the process that trains records itself."""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from paceline.arguments import checkpoint_of, config_of, strategy_of
from paceline.backends.base import BackendConfig
from paceline.callbacks import SGDCallback
from paceline.callbacks.dispatch import CallbackList
from paceline.checkpoints import CheckpointStrategy
from paceline.checkpoints.saver import Start
from paceline.checkpoints.storage.landmark import Landmark
from paceline.errors import CheckpointNotFoundError, TrainerStateError
from paceline.recording.recorder import Recorder
from paceline.recording.wire import RecorderWire
from paceline.runs import RunFolder, RunRequest, checkpoint_root, resolve_logdir
from paceline.session import Task, current, open_session, place
from paceline.workers.base import Place


@contextmanager
def record_run(
    config: dict[str, Any] | None = None,
    *,
    callbacks: Sequence[SGDCallback] | None = None,
    logdir: str | os.PathLike[str] | None = None,
    checkpoint: dict[str, Any] | str | os.PathLike[str] | None = None,
    checkpoint_strategy: CheckpointStrategy | None = None,
) -> Iterator[Path | None]:
    """Inside the block, `report`, `save_checkpoint` and `load_checkpoint` work in this very process, and leave a run
    folder as `Trainer.run` does. Gives the folder's path.

    >>> with record_run({"lr": 0.1}) as run_dir:
    ...     train(0.1)

    Under a launcher such as torchrun, every rank enters it. Rank 0 records; what the others report and save is dropped,
    and they get None.
    """
    if current() is not None:
        raise TrainerStateError("record_run() is for scripts: this function is recorded by its Trainer already.")
    request = RunRequest(
        train_func=_this_script,
        config=config_of(config),
        checkpoint=checkpoint_of(checkpoint),
        checkpoint_strategy=strategy_of(checkpoint_strategy),
    )
    if place().world_rank != 0:
        with open_session(_DeafWire(place()), _unrecorded(request)):
            yield None
        return
    folder = RunFolder.create(resolve_logdir(logdir))
    root = checkpoint_root(request.checkpoint_strategy, folder)
    function = {"name": Path(sys.argv[0]).name or "python", "file": os.path.abspath(sys.argv[0])}
    folder.write_request({"engine": "none", "checkpoint_root": root, **request.for_folder(), "function": function})
    recorder = Recorder(request, folder, CallbackList(callbacks), root)
    with _recorded(recorder):
        yield folder.path


@contextmanager
def _recorded(recorder: Recorder) -> Iterator[None]:
    """One attempt from its beginning to its end, whatever that is."""
    recorder.open(num_workers=1, world_size=1)
    state, error = "FAILED", None
    try:
        start, landmarks = recorder.begin([os.getpid()])
        task = Task(recorder.request, start, BackendConfig(), landmarks)
        with open_session(RecorderWire(recorder, place()), task) as session:
            yield
            session.close()
        recorder.end(0)
        state = "SUCCEEDED"
    except BaseException as caught:
        error = caught
        state = "FAILED" if isinstance(caught, Exception) else "STOPPED"
        raise
    finally:
        recorder.close(state, None if error is None else f"{type(error).__qualname__}: {error}", error)


class _DeafWire:
    """Of a rank that nobody listens to."""

    def __init__(self, place: Place):
        self.place = place
        self.address = "127.0.0.1"
        self.shared: dict[str, Any] = {}
        self.leaving = ExitStack()
        self.stopping = False

    def report(self, packed: bytes) -> None:
        pass

    def send(self, kind: str, value: Any) -> None:
        pass

    def ask(self, topic: str, value: Any, timeout_s: float | None = None) -> Any:
        if topic == "checkpoint":
            raise CheckpointNotFoundError(
                "record_run() records rank 0 alone: another rank cannot load what was saved in the block."
            )

    def flush(self) -> None:
        pass


def _unrecorded(request: RunRequest) -> Task:
    nowhere = "unrecorded"
    start = Start(request.checkpoint, 0, first_id=1, root=nowhere, token="0")
    return Task(request, start, BackendConfig(), (Landmark(os.path.abspath(nowhere), "", None),))


def _this_script() -> None:
    """Stands for the function of a run that is none."""
