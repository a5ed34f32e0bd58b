"""A training function as a class Trainable of Ray Tune: one object a trial, or with `reuse_actors` one for many.

setup, reset   a Trainer; its workers come with the first trial and stay for the next ones
load           what Tune restores becomes the newest checkpoint of the trial's run folder
step           the next step of the run; the workers wait in `report` while Tune decides
save           the newest committed checkpoint, copied to where Tune wants it
"""

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ray import tune
from ray.tune.result import DONE, RESULT_DUPLICATE, SHOULD_CHECKPOINT, TRAINING_ITERATION  # type: ignore[attr-defined]
from ray.tune.trainable.trainable import _TrainingResult  # type: ignore[attr-defined]

from paceline.callbacks.dispatch import CallbackList
from paceline.checkpoints import CheckpointInfo, CheckpointStore, copy, read_info
from paceline.control.iterator import RunIterator
from paceline.runs import Run, RunRequest, checkpoint_root
from paceline.search.handover import Watch, claim
from paceline.trainer import Trainer
from paceline.workers import contents, parcel
from paceline.workers.ray import RayEngine
from paceline.workers.ray_slots import bundle_of

ENDED = "Ray Tune stopped the trial, or paused it to go on later"


@dataclass(frozen=True)
class Recipe:
    """What every trial has in common: how to make its Trainer, and where it would have run without Tune."""

    arguments: Mapping[str, Any]
    request: RunRequest
    all_ranks: bool
    cwd: str


def make_trainable(trainer: Trainer, request: RunRequest, all_ranks: bool) -> type["Trial"]:
    arguments, resources = trial_of(trainer)
    name = request.name.strip("<>")
    shared = replace(request, train_func=_in_its_place, trainer=arguments, in_step=True, abandoned=ENDED)
    recipe = Recipe(arguments, shared, all_ranks, os.getcwd())
    label = f"train_func {name!r}, or an argument of its Trainer,"
    with contents.explained(lambda: {"train_func": request.train_func, "the Trainer's arguments": recipe}, label):
        packed = parcel.dumps((request.train_func, recipe))
    return type(name, (Trial,), {"packed": packed, "sys_path": list(sys.path), "resources": resources})


def _in_its_place() -> None:
    """Stands for the function, which travels beside the recipe."""


def trial_of(trainer: Trainer) -> tuple[dict[str, Any], tune.PlacementGroupFactory]:
    """The arguments of a trial's Trainer, and the resources of a trial: those of its workers and nothing besides.

    On Ray each worker has a bundle. Elsewhere the workers are processes of the trial itself, whose only bundle is the
    sum of theirs; then there are never more than was reserved.
    """
    size, bundle = trainer.size, bundle_of(trainer.resources)
    arguments = {**trainer.arguments, "logdir": trainer.logdir}
    if arguments["engine"] is None:
        arguments["engine"] = "ray"
    engine = RayEngine() if arguments["engine"] == "ray" else trainer.engine
    if isinstance(engine, RayEngine):
        bundles = [bundle] * (size.min + engine.spare_workers)
        return arguments, tune.PlacementGroupFactory([{}, *bundles], strategy=engine.placement)
    arguments |= {"num_workers": size.min, "cpus_per_worker": bundle.get("CPU", 0)}
    return arguments, tune.PlacementGroupFactory([{name: size.min * amount for name, amount in bundle.items()}])


class Trial(tune.Trainable):
    """See `ray.tune.Trainable` for the contract. Tune makes one call at a time."""

    packed: bytes
    sys_path: list[str]
    resources: tune.PlacementGroupFactory

    _handles_checkpoint_at_end = True  # a checkpoint that is newer than the last result comes with a last one

    @classmethod
    def default_resource_request(cls, config: dict[str, Any]) -> tune.PlacementGroupFactory:
        return cls.resources

    def setup(self, config: dict[str, Any]) -> None:
        sys.path += [entry for entry in self.sys_path if entry not in sys.path]
        self._fn, self._recipe = parcel.loads(self.packed)
        self._trainer = Trainer(**self._recipe.arguments)
        self._busy = threading.RLock()
        self._life: Life | None = None

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """The workers stay, also those that have to be called back from a trial that Tune has stopped."""
        with self._busy:
            self._end_life()
        return True

    def load_checkpoint(self, checkpoint: Any) -> None:
        with self._busy, _chdir(self._recipe.cwd):
            self._end_life()
            self._life = self._begin_life(Path(checkpoint))

    def step(self) -> dict[str, Any]:
        with self._busy, _chdir(self._recipe.cwd):
            if self._life is None:
                self._life = self._begin_life(None)
            return self._life.step()

    def save(self, checkpoint_dir: str | None = None) -> Any:
        """Without a checkpoint there is nothing to restore: a trial that is paused then begins anew."""
        with self._busy:
            if self._life is None or self._life.checkpoint() is None:
                return _TrainingResult(checkpoint=None, metrics=dict(self._last_result or {}))
            return super().save(checkpoint_dir)

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        assert self._life is not None
        path = self._life.checkpoint()
        assert path is not None
        copy(path, checkpoint_dir)

    def cleanup(self) -> None:
        with self._busy:
            self._end_life()
            self._trainer.shutdown()

    def _begin_life(self, restored: Path | None) -> "Life":
        info = self._trial_info  # None for somebody who makes a Trial by hand
        parent = {
            "kind": "tune",
            "experiment": info.experiment_name if info else None,
            "trial_id": info.trial_id if info else None,
            "trial_dir": self._storage.trial_fs_path if self._storage else self.logdir,
        }
        request = replace(self._recipe.request, train_func=self._fn, config=dict(self.config), parent=parent)
        origin = Origin(restored, self.iteration) if restored else None
        return Life(self._trainer, request, origin, self._let_go, self._recipe.all_ranks)

    def _end_life(self) -> None:
        life, self._life = self._life, None
        if life is not None:
            life.end()

    def _let_go(self) -> bool:
        """Another process goes on with this trial. If we are in the middle of something, we are not the former one."""
        if not self._busy.acquire(blocking=False):
            return False
        try:
            self._end_life()
        finally:
            self._busy.release()
        return True


@dataclass(frozen=True)
class Origin:
    """What Tune restores: a checkpoint, and the number of the result that it came with."""

    path: Path
    iteration: int


class Life:
    """A trial from its start, or from where it was paused or failed, to where it ends or is paused again."""

    def __init__(
        self,
        trainer: Trainer,
        request: RunRequest,
        origin: Origin | None,
        let_go: Callable[[], bool],
        all_ranks: bool,
    ):
        assert request.parent is not None
        self._trainer, self._all_ranks = trainer, all_ranks
        self._iterator: RunIterator | None = None
        self._last: dict[str, Any] = {}
        former = _run_of(trainer.logdir, request.parent)
        reopened = claim(former.path) if former is not None else None
        self._folder = reopened or trainer.new_folder(request)
        self._watch = Watch(self._folder.path, let_go)
        store = CheckpointStore(checkpoint_root(request, self._folder))
        start = _start(store, origin, has_failed=former is not None and not _was_stopped(former))
        self._known = start.path if start else None
        """The checkpoint that Tune was told about last."""
        self._request = replace(
            request,
            checkpoint=self._known,
            first_iteration=start.iteration if start else 0,
            first_checkpoint_id=store.next_id(),
        )

    def step(self) -> dict[str, Any]:
        """The next result for Tune. At the end, what makes Tune take the last one for the final one."""
        if self._iterator is None:
            self._iterator = self._trainer.drive(self._request, self._folder, CallbackList(()))
        reports = next(self._iterator, None)
        if reports is not None:
            self._last = dict(reports[0])
            self._last[TRAINING_ITERATION] = self._last["_training_iteration"]  # true also after a restart
            if self._all_ranks:
                self._last |= {f"rank_{rank}": report for rank, report in enumerate(reports)}
            return {**self._last, SHOULD_CHECKPOINT: True} if self._has_news() else dict(self._last)
        if self._has_news():
            return {**self._last, SHOULD_CHECKPOINT: True, DONE: True}
        return {RESULT_DUPLICATE: True}

    def checkpoint(self) -> str | None:
        """The newest one, once it is whole: of this life, else what it began with."""
        if self._iterator is not None:
            self._iterator.finish_saving()
            if self._iterator.recorder.saved.latest is not None:
                self._known = self._iterator.recorder.saved.latest.path
        return self._known

    def end(self) -> None:
        self._watch.stop()
        if self._iterator is not None:
            self._iterator.close()
        else:
            self._folder.set_state("STOPPED", reason=ENDED)
            self._folder.close()

    def _has_news(self) -> bool:
        assert self._iterator is not None
        recorder = self._iterator.recorder
        latest = recorder.saved.latest
        return recorder.is_saving() or (latest is not None and latest.path != self._known)


def _run_of(logdir: Path, parent: Mapping[str, Any]) -> Run | None:
    """The run of the same trial, if it had a former life."""
    names = ("kind", "experiment", "trial_id")
    for path in sorted(logdir.glob("run_*"), reverse=True) if parent["trial_id"] else ():
        run = Run(path)
        theirs = run.request.get("parent") or {}
        if all(theirs.get(name) == parent[name] for name in names):
            return run
    return None


def _was_stopped(run: Run) -> bool:
    """Whether its last driver ended it on purpose."""
    events = run.events
    return bool(events) and events[-1].get("kind") == "end" and events[-1].get("state") == "STOPPED"


def _start(store: CheckpointStore, origin: Origin | None, has_failed: bool) -> CheckpointInfo | None:
    """The checkpoint to begin with, which is the newest of the store afterwards.

    A trial that failed may have saved after its last result, which Tune does not know: it goes on from its own newest.
    Any other goes on from what Tune restores, which may be another trial's.
    """
    own = store.list()
    newest = own[-1] if own else None
    if origin is None:
        return newest
    wanted = read_info(origin.path)
    if newest is not None and newest.time == wanted.time:
        return replace(newest, iteration=origin.iteration)
    if newest is not None and has_failed and any(info.time == wanted.time for info in own):
        return newest
    return replace(copy(origin.path, store.path_of(store.next_id())), iteration=origin.iteration)


@contextlib.contextmanager
def _chdir(path: str) -> Iterator[None]:
    """Be where the trainable was made, as far as that exists here: Tune has moved us to the trial's own folder."""
    former = os.getcwd()
    with contextlib.suppress(OSError):
        os.chdir(path)
    try:
        yield
    finally:
        os.chdir(former)
