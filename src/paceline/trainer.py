"""Trainer: call a training function on many workers."""

import argparse
import io
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from paceline import registry
from paceline.arguments import (
    bound,
    check_duration,
    check_int,
    check_timeout,
    request_of,
    resources_of,
    same_arguments_as,
    size_of,
    takes_config,
)
from paceline.backends import resolve_backend
from paceline.backends.base import BackendConfig
from paceline.callbacks import Callback, default_progress
from paceline.callbacks.dispatch import CallbackList
from paceline.checkpoints import Checkpoint, CheckpointStore, CheckpointStrategy
from paceline.control.controller import Controller, Limits
from paceline.control.crew import Crew, Setup
from paceline.control.iterator import RunIterator
from paceline.control.outcome import Budget
from paceline.control.termination import Signals, Terminated
from paceline.data.given import Supply, made_anew, resolve_dataset
from paceline.errors import (
    ArgumentError,
    CheckpointNotFoundError,
    RunNotResumableError,
    StackDumpError,
    TrainerStateError,
)
from paceline.recording.recorder import Recorder
from paceline.recording.saved import Saved
from paceline.runs import Run, RunFolder, RunRequest, checkpoint_root, claim_root, load_call, load_run, resolve_logdir
from paceline.session import call_in_worker
from paceline.workers import resolve_engine
from paceline.workers.base import Engine

if TYPE_CHECKING:
    from paceline.worker_table import WorkerTable


class Trainer:
    """Calls a training function on `num_workers` workers, as often as you like.

    >>> with Trainer(backend="torch", num_workers=2) as trainer:
    ...     results = trainer.run(train_func, config={"lr": 0.1})

    Args:
        backend: how the workers become one group: "torch", "tensorflow", "jax", "horovod", or a config object such as
            `TorchConfig(timeout_s=60)`; `BackendConfig()` makes none.
        num_workers: 0 runs the function in this process, where a debugger works. A pair (min, max) is elastic: as many
            as can be had, more when there is room, fewer when a lost one is not replaced; max may be `math.inf`.
        use_gpu: one GPU for each worker, unless `gpus_per_worker` says how many.
        cpus_per_worker, gpus_per_worker, resources_per_worker: what a worker may use; the dict has "CPU" and "GPU".
        logdir: where the runs of this Trainer go; a relative path is below the results folder (`~/paceline_results`,
            or the environment variable PACELINE_RESULTS). Default: a new folder named after the present time.
        max_retries: how often a run may be restarted after workers have died; negative means always. As often, `start`
            and `execute` make workers anew that die before they are ready.
        engine: where the workers live: "local" (this machine), "ray", or an engine object. By default Ray, if this
            process is connected to it, RAY_ADDRESS is set or the dataset is Ray's, else this machine.
        hang_timeout_s: treat a rank that sends nothing for so long as failed, and keep its stacks. Default: wait.
        replacement_timeout_s: how long an elastic group waits for a lost worker to be replaced before it shrinks.
        max_preemptions: how often a run may be restarted because workers were taken away on purpose (SIGTERM, a node
            that is drained); negative means always.
        preemption_grace_s: how long the function has, from such a notice on, to save and return: `should_stop()` is
            true meanwhile.
    """

    def __init__(
        self,
        backend: str | BackendConfig = "torch",
        num_workers: int | tuple[int, float] = 1,
        use_gpu: bool = False,
        cpus_per_worker: float | None = None,
        gpus_per_worker: float | None = None,
        resources_per_worker: Mapping[str, float] | None = None,
        logdir: str | os.PathLike[str] | None = None,
        max_retries: int = 3,
        engine: str | Engine | None = None,
        hang_timeout_s: float | None = None,
        replacement_timeout_s: float = 30.0,
        max_preemptions: int = -1,
        preemption_grace_s: float = 30.0,
    ):
        self.arguments = _given(locals())
        """By which another Trainer like this one can be made."""
        self.backend = resolve_backend(backend)
        self.num_workers = num_workers
        self.size = size_of(num_workers, replacement_timeout_s)
        self.resources = resources_of(use_gpu, cpus_per_worker, gpus_per_worker, resources_per_worker)
        self.limits = Limits(
            Budget(check_int("max_retries", max_retries), check_int("max_preemptions", max_preemptions)),
            grace_s=check_duration("preemption_grace_s", preemption_grace_s),
            hang_timeout_s=check_timeout("hang_timeout_s", hang_timeout_s),
        )
        self.engine = resolve_engine(engine, max_workers=self.size.max)
        self.logdir: Path = resolve_logdir(logdir)
        self._crew = Crew(self.engine, self.backend, self.size, self.resources, max_retries)
        self._iterator: RunIterator | None = None
        self._controller: Controller | None = None
        self._recorder: Recorder | None = None
        self._last_saving: Recorder | None = None
        self._loaded: tuple[str, Checkpoint] | None = None
        self.engine.warm(self.backend.preload)

    def start(
        self,
        execution_class: Callable[..., Any] | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        initialization_hook: Callable[[], Any] | None = None,
    ) -> None:
        """Start the workers and join them into a group. `run` does it by itself when it has not been done.

        With a class, each worker makes an object `execution_class(*args, **kwargs)`, which `execute` then works on. The
        hook is called on every worker. Both are done again when workers had to be renewed. Calling it on a started
        Trainer without arguments does nothing.
        """
        setup = Setup(initialization_hook, execution_class, tuple(args), dict(kwargs or {}))
        if self._crew.group is not None:
            if setup == Setup():
                return
            raise TrainerStateError(
                "The workers are started already: call shutdown() before start() with new arguments."
            )
        self._crew.start(setup)

    def run(
        self,
        train_func: Callable[..., Any],
        config: Mapping[str, Any] | argparse.Namespace | None = None,
        callbacks: Sequence[Callback] | None = None,
        dataset: Any = None,
        checkpoint: dict[str, Any] | str | os.PathLike[str] | None = None,
        checkpoint_strategy: CheckpointStrategy | None = None,
        record_ids: bool | str = False,
    ) -> list[Any]:
        """Call the function on every worker and return what it returned, by rank. Blocking.

        Args:
            train_func: takes nothing, or the config.
            config: given to the function; each worker has a copy. A dict, or an argparse.Namespace, which the function
                gets as one; OmegaConf's DictConfig it gets as a dict, resolved.
            callbacks: told about the run in this process; see `Callback`.
            dataset: what to read: a torch, Hugging Face or Ray dataset, arrays, a frame, a table, or files
                (`paceline.data.read_parquet`); several in a dict; folds in a list of (train, val) pairs. Each rank gets
                its part from `get_data_shard()`.
            checkpoint: what `load_checkpoint()` returns at the start: a dict, or the path or URL of a checkpoint.
            checkpoint_strategy: which checkpoints are kept, and where.
            record_ids: keep in the run folder which rows of the dataset went into which step, for
                `paceline.data.audit`. True: by their numbers; a str: by the column of that name.

        An exception of the function is raised here with its own type and a note with the rank and its traceback.
        """
        return self._run_to_end(partial(self.run_iterator, **_given(locals())))

    @same_arguments_as(run)
    def run_iterator(self, *args: Any, **kwargs: Any) -> RunIterator:
        """The same as `run`, but hands out each step: iterate to get the reports of all ranks as they come."""
        given = bound(Trainer.run, self, *args, **kwargs)
        listeners = _callbacks(given.pop("callbacks"))
        request = request_of(**given, trainer=self.arguments)
        self._end_former_run()
        with Signals().watching() as signals:
            return self.drive(request, self.new_folder(request), listeners, signals)

    @classmethod
    def resume(
        cls,
        run_dir: str | os.PathLike[str],
        train_func: Callable[..., Any] | None = None,
        callbacks: Sequence[Callback] | None = None,
        *,
        dataset: Any = None,
        trusted: bool = False,
    ) -> list[Any]:
        """Go on with a run whose driver died, or that failed or was stopped: with the same function, config and Trainer
        arguments, from its last committed checkpoint, in the same run folder. Blocking; returns what `run` would have.
        The folder may have been moved. Checkpoints that are outside of it are looked for where they were written, and
        if none is left of those that were committed, that is a CheckpointNotFoundError: it never begins anew.

        Args:
            run_dir: the run folder, or the logdir of a Trainer, for its newest run.
            train_func: a mended function to go on with.
            callbacks: they are not part of the folder: give them again.
            dataset: the one of the run, if it has one. Of those, only files are named in the folder and found again; an
                experiment makes its own.
            trusted: open a folder that this user's account has not written, which may run any code that is in it.
        """
        run = load_run(run_dir)
        if run.status.state == "SUCCEEDED":
            raise RunNotResumableError(f"{run.path} has succeeded: there is nothing left to do.")
        if run.is_alive:
            raise TrainerStateError(f"{run.path} is going on, driven by process {run.status.pid} on {run.status.host}.")
        request = load_call(run.path, train_func, trusted)
        takes = takes_config(request.train_func, has_config=bool(request.config))
        supply = request.dataset if dataset is None else resolve_dataset(dataset)
        is_lacking = supply is None and run.request.get("dataset") is not None
        supply = made_anew(request.train_func) if is_lacking else supply
        request = replace(request, takes_config=takes, dataset=supply)
        if is_lacking and supply is None:
            raise RunNotResumableError(
                f"{run.path} was given a dataset, which is not part of the folder: make it again, and say "
                "Trainer.resume(run_dir, dataset=...)."
            )
        _check_checkpoints(run, request)
        listeners = _callbacks(callbacks)
        trainer = cls(**{**request.trainer, "logdir": run.path.parent})
        try:
            trainer._suit(request.dataset)
            trainer.engine.connect()  # or the run stays what it is
            with Signals().watching() as signals:
                folder = RunFolder.reopen(run.path)
                return trainer._run_to_end(partial(trainer.drive, request, folder, listeners, signals))
        finally:
            trainer.shutdown()

    def to_tune_trainable(
        self,
        train_func: Callable[..., Any],
        dataset: Any = None,
        all_ranks: bool = False,
        checkpoint_strategy: CheckpointStrategy | None = None,
        record_ids: bool | str = False,
    ) -> type[Any]:
        """The function as a trainable for Ray Tune: `tune.run(trainable, config=...)`, or `tune.Tuner(trainable, ...)`.

        Each trial runs the function on workers of its own, made as this Trainer's would be, and is a run in this
        Trainer's logdir. What rank 0 reports is Tune's result, and `save_checkpoint` and `load_checkpoint` are Tune's
        checkpoints.

        Args:
            train_func: takes nothing, or the config of the trial.
            dataset: as for `run`: every trial has all of it, cut into shards for its workers.
            all_ranks: also give Tune what every rank reports, as `rank_0`, `rank_1` …
            checkpoint_strategy: which checkpoints the run folders keep; Tune's CheckpointConfig says which it keeps.
            record_ids: as for `run`.
        """
        if self._crew.group is not None:
            raise TrainerStateError(
                "The workers of this Trainer are started, and hold resources that the trials will need: call "
                "shutdown() before to_tune_trainable(). Each trial starts workers of its own."
            )
        request = request_of(
            train_func=train_func,
            dataset=dataset,
            checkpoint_strategy=checkpoint_strategy,
            record_ids=record_ids,
            trainer=self.arguments,
        )
        self._suit(request.dataset)
        made: type[Any] = registry.find("search", "tune")(self, request, all_ranks)
        return made

    def execute(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Call `fn(*args, **kwargs)` on every worker and return the values by rank. With the class API, the worker's
        object is its first argument: `execute(lambda w: w.train())`."""
        self._end_former_run()
        self._crew.get_ready()
        return self._crew.all(call_in_worker, fn, args, kwargs)

    def execute_single(self, fn: Callable[..., Any], *args: Any, rank: int = 0, **kwargs: Any) -> Any:
        """The same on one worker."""
        if not 0 <= rank < self._crew.world_size:
            raise ArgumentError(f"rank={rank}: there are {self._crew.world_size} workers, from rank 0 on.")
        self._end_former_run()
        self._crew.get_ready()
        return self._crew.one(rank, call_in_worker, fn, args, kwargs)

    def stop(self) -> None:
        """Ask the running function to end: `should_stop()` becomes true on every rank.

        For callbacks and other threads.
        """
        if self._controller is not None:
            self._controller.request_stop()

    def stacks(self) -> dict[int, str]:
        """What every rank is doing right now, as Python stacks. For callbacks and other threads."""
        if self._crew.group is None:
            raise StackDumpError("There are no workers: stacks can be had between start() and shutdown().")
        return self._crew.group.stacks()

    def shutdown(self) -> None:
        """End the workers. Idempotent; what the last run left stays readable, and the Trainer can start again."""
        try:
            self._end_former_run()
        except (KeyboardInterrupt, Terminated):  # it came since somebody last asked for a step of that run
            self._crew.break_up()
            raise
        self._crew.break_up(grace_s=2.0)

    def __enter__(self) -> "Trainer":
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    @property
    def latest_run_dir(self) -> Path | None:
        return self._recorder.folder.path if self._recorder else None

    @property
    def latest_checkpoint_dir(self) -> Path | str | None:
        """The folder with the checkpoints of the latest run that has saved one; before that, of the latest run. A URL
        (str) when the strategy says so."""
        return _as_path(self._saved.root) if self._saved else None

    @property
    def latest_checkpoint_path(self) -> Path | str | None:
        """The newest committed checkpoint, of the latest run that has saved one; None when there is none, or it is in
        memory only."""
        saved = self._saved
        if saved is None or saved.latest is None or saved.is_in_memory:
            return None
        return _as_path(saved.latest.path)

    @property
    def latest_checkpoint(self) -> dict[str, Any] | None:
        """The newest checkpoint, of the latest run that has saved one; before that, the one that the latest run was
        given. Read when asked for."""
        if self._saved is None:
            return None
        latest = self._saved.latest
        return self._load(latest.path) if latest is not None else self._saved.load_latest()

    @property
    def best_checkpoint_path(self) -> Path | str | None:
        """The best checkpoint of the latest run that has saved one, by its CheckpointStrategy."""
        best = self._saved.best() if self._saved else None
        return _as_path(best.path) if best else None

    @property
    def best_checkpoint(self) -> dict[str, Any] | None:
        path = self.best_checkpoint_path
        return self._load(str(path)) if path is not None else None

    def __str__(self) -> str:
        """A table of the workers, their devices and what they use."""
        from rich.console import Console

        console = Console(file=io.StringIO(), width=100)
        console.print(self._table())
        text = console.file.getvalue()  # type: ignore[attr-defined]
        return "\n".join(line.rstrip() for line in text.splitlines())

    def _repr_html_(self) -> str:
        """The same in a notebook."""
        return self._table().html()

    def _table(self) -> "WorkerTable":
        from paceline.worker_table import WorkerTable

        return WorkerTable(self.engine, self.backend, self._crew.world_size, self.resources, self._crew.group)

    def __repr__(self) -> str:
        return f"Trainer(backend={self.backend.name!r}, num_workers={self.num_workers}, logdir={str(self.logdir)!r})"

    def _end_former_run(self) -> None:
        iterator = self._iterator
        if iterator is None or iterator.is_finished():
            return
        if iterator.is_running():
            raise TrainerStateError(
                "This Trainer is in the middle of a run: a callback or another thread called it again. "
                "Use a second Trainer, or wait until the run has ended."
            )
        iterator.close()

    def _suit(self, supply: Supply | None) -> None:
        """Have workers that can read the data; by default that decides where they live."""
        engine = supply.engine if supply is not None else None
        if engine is None or self.engine.name in (engine, "inline"):
            return
        if self.arguments["engine"] is not None or self._crew.is_set_up:
            raise ArgumentError(
                f"The dataset can be read on engine={engine!r} only; the workers of this Trainer live on "
                f"{self.engine.name!r}. Make it with Trainer(engine={engine!r})."
            )
        self.engine = resolve_engine(engine, max_workers=self.size.max)
        self._crew.move_to(self.engine)

    def new_folder(self, request: RunRequest) -> RunFolder:
        """Makes a run folder for what is asked, and writes that down. For those who drive a run themselves."""
        self._suit(request.dataset)
        storage_path = request.checkpoint_strategy.storage_path
        if storage_path is not None and storage_path.startswith("memory:") and self.size.max > 0:
            raise ArgumentError(
                f"storage_path={storage_path!r}: every worker has a memory of its own, so nobody would find what the "
                "others save. Give a path or the URL of a place that all of them see; num_to_keep=0 keeps the latest "
                "checkpoint in the memory of this process."
            )
        folder = RunFolder.create(self.logdir)
        root = claim_root(request, folder)
        folder.write_request(
            {
                "engine": self.engine.name,
                "backend": repr(self.backend),
                "num_workers": self.num_workers,
                "resources": {"cpus": self.resources.cpus, "gpus": self.resources.gpus, **self.resources.custom},
                "max_retries": self.limits.budget.max_retries,
                "checkpoint_root": root,
                **request.for_folder(),
            }
        )
        folder.keep_call(replace(request, checkpoint_root=root if storage_path is not None else None))
        return folder

    def drive(
        self, request: RunRequest, folder: RunFolder, callbacks: CallbackList, signals: Signals | None = None
    ) -> RunIterator:
        """Begin the run in this folder; whoever iterates over what is returned drives it. `signals` is what is watched
        already."""
        if self._recorder is not None and self._recorder.saved.latest is not None:
            self._last_saving = self._recorder
        self._recorder = Recorder(request, folder, callbacks, checkpoint_root(request, folder))
        self._controller = Controller(self._crew, self.backend, self.limits, self._recorder, signals)
        self._iterator = RunIterator(self._controller)
        return self._iterator

    def _run_to_end(self, begin: Callable[[], RunIterator]) -> list[Any]:
        try:
            with begin() as iterator:
                values = iterator.get_final_results(force=True)
        except KeyboardInterrupt as interrupt:  # no error of ours: its traceback need not lead through our rooms
            said = interrupt.args
            try:
                self._end_former_run()  # it may have come before the block was entered
            except KeyboardInterrupt as farewell:
                said = farewell.args
            raise KeyboardInterrupt(*said) from None
        assert values is not None
        return values

    @property
    def _saved(self) -> Saved | None:
        """The checkpoints of the latest run that has any, else those to come of the latest run."""
        recorder = self._recorder
        if recorder is not None and recorder.saved.latest is None and self._last_saving is not None:
            recorder = self._last_saving
        return recorder.saved if recorder is not None else None

    def _load(self, path: str) -> Checkpoint:
        if self._loaded is None or self._loaded[0] != path:
            assert self._saved is not None
            self._loaded = (path, self._saved.load(path))
        return self._loaded[1]


def _given(names: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a method, from its locals() at its first line."""
    return {name: value for name, value in names.items() if name not in ("self", "__class__")}


def _check_checkpoints(run: Run, request: RunRequest) -> None:
    """CheckpointNotFoundError if a run that has committed checkpoints would begin anew without them."""
    committed = [event for event in run.events if event.get("kind") == "checkpoint"]
    if not committed or request.checkpoint_strategy.num_to_keep == 0:
        return
    root = request.checkpoint_root or str(run.path / "checkpoints")
    if CheckpointStore(root).latest() is None:
        raise CheckpointNotFoundError(
            f"{run.path} has saved {len(committed)} checkpoint(s), the last one as {committed[-1].get('path')}, but "
            f"there is none in {root}: they were moved or deleted, or that place is not in reach. Put them there to "
            "resume the run, or start a new one with run(..., checkpoint=...)."
        )


def _callbacks(callbacks: Sequence[Callback] | None) -> CallbackList:
    listeners = CallbackList(callbacks)
    progress = default_progress()
    if progress is None or any(type(listener) is type(progress) for listener in listeners):
        return listeners
    return CallbackList([*listeners, progress])


def _as_path(path: str) -> Path | str:
    return path if "://" in path else Path(path)
