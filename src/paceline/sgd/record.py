"""The run of a DistributedSGD: a folder like that of any other run, of which the driver reports every step itself."""

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.backends.base import BackendConfig
from paceline.callbacks import Callback, default_progress
from paceline.callbacks.dispatch import CallbackList
from paceline.checkpoints import snapshot
from paceline.checkpoints.content.files import record_of
from paceline.checkpoints.part import CommittedFound, Part
from paceline.checkpoints.storage.base import open_storage
from paceline.errors import CheckpointWriteError
from paceline.rank_session import Task
from paceline.recording.recorder import Recorder
from paceline.runs import RunFolder, RunRequest, claim_root
from paceline.sgd.result import StepResult
from paceline.workers.outcome import message_of


class RunRecord:
    """From `open` to `close`."""

    def __init__(self, request: RunRequest, logdir: Path, callbacks: CallbackList, facts: Mapping[str, Any]):
        folder = RunFolder.create(logdir)
        root = claim_root(request, folder)
        folder.write_request({**facts, "checkpoint_root": root, **request.for_folder()})
        self._recorder = Recorder(request, folder, callbacks, root)
        self._request, self.path = request, folder.path
        self._next_id = 1
        self._world_size = 1
        self._last: dict[str, Any] = {}
        """What was told of the last step."""

    def open(self, num_workers: int) -> None:
        self._recorder.open(num_workers=num_workers, world_size=max(1, num_workers))

    def begin(self, infos: Sequence[Any], backend: BackendConfig) -> tuple[Task, dict[int, Path]]:
        """Of workers that are new: what they are given, and where their output goes."""
        self._world_size = len(infos)
        start, landmarks = self._recorder.begin([info.pid for info in infos])
        self._next_id = start.first_id
        dataset = self._request.dataset
        task = Task(
            request=self._request.for_workers(),
            start=start,
            backend=backend,
            landmarks=landmarks,
            shards=dataset.cut(infos) if dataset is not None else None,
            run_dir=str(self.path),
            attempt=self._recorder.attempt,
            is_driven=True,
        )
        return task, {rank: self._recorder.folder.log_path(rank) for rank in range(len(infos))}

    def step(self, result: StepResult, worker_losses: Mapping[int, float]) -> None:
        """Every rank tells the loss of all, since it is that of the model, and besides the one of its own data. One
        that was lost in the step did not live to tell that."""
        stamps = {"_timestamp": int(time.time()), "_time_this_iter_s": result.timings["step"]}
        told = {"loss": float(result)}
        self._last = told | result.metrics | told  # in front, and whatever else is called so
        common = {**self._last, **stamps, "_training_iteration": result.step}
        reports = [dict(common) for _ in range(self._world_size)]
        for rank, loss in worker_losses.items():
            reports[rank]["worker_loss"] = loss
        self._recorder.take_step(reports)

    def restart(self, reason: str, step: int) -> None:
        self._recorder.settle()
        self._recorder.restart(reason, "loss")
        self._recorder.folder.record_event("recovered", step=step, reason=reason)

    def note(self, kind: str, **fields: Any) -> None:
        self._recorder.folder.record_event(kind, **fields)

    def progress(self, done: float) -> None:
        self._recorder.take(0, "progress", done)

    def keeps_in(self, folder: str) -> bool:
        """Whether these are its own checkpoints: what somebody else put there would take the number of its next one."""
        places = (open_storage(folder).root, self._recorder.saved.root)
        return len(set(map(os.path.realpath, places))) == 1

    def write(self, state: dict[str, Any], step: int) -> Part:
        """What is to be the next checkpoint of this run; `commit` makes it one. Its score is what was told of the last
        step."""
        saved, files = self._recorder.saved, snapshot(state).files()
        score = saved.strategy.score_of(self._last)
        id, self._next_id = self._next_id, self._next_id + 1
        try:
            saved.put(id, files)
        except BaseException as error:
            saved.discard([id])  # on a disk that is full, the rest would miss its room
            if not isinstance(error, OSError):
                raise
            self.note("save_failed", id=id, rank=None, reason=str(error))
            raise CheckpointWriteError(f"The checkpoint of step {step} could not be written: {error}.") from error
        return Part(id, 0, step, time.time(), tuple(map(record_of, files)), score, is_alone=True)

    def commit(self, part: Part) -> None:
        """If storage lets it: `path_of` knows. Raises what a callback does."""
        self._recorder.take(0, "part", part)

    def path_of(self, part: Part) -> str:
        """Of the checkpoint that it has become. CheckpointWriteError if it has not."""
        found = self._recorder.find(part.id)
        if isinstance(found, CommittedFound) and found.problem is None:
            return found.path
        raise CheckpointWriteError(found.problem if isinstance(found, CommittedFound) else str(found))

    def keep_stacks(self, stacks: Mapping[int, str]) -> Path:
        path = self._recorder.folder.logs_dir / f"hang_{self._recorder.attempt}.txt"
        path.write_text("\n".join(f"--- rank {rank}\n{text}" for rank, text in sorted(stacks.items())), "utf-8")
        return path

    def close(self, state: str, error: BaseException | None = None) -> None:
        reason = None if error is None else f"{type(error).__qualname__}: {message_of(error)}"
        self._recorder.close(state, reason, error)


def listeners_of(callbacks: Sequence[Callback] | None, is_quiet: bool) -> CallbackList:
    """With the progress display, unless lines are printed at every step anyway."""
    listeners = CallbackList(callbacks)
    progress = default_progress() if is_quiet else None
    if progress is None or any(type(one) is type(progress) for one in listeners):
        return listeners
    return CallbackList([*listeners, progress])
