"""Run an experiment: on workers, in a run folder that has its configuration."""

from __future__ import annotations

import logging
import os
import secrets
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import paceline
from paceline.arguments import request_of
from paceline.backends.torch import TorchConfig
from paceline.callbacks import Callback, default_progress
from paceline.callbacks.dispatch import CallbackList
from paceline.checkpoints import CheckpointStrategy
from paceline.control.termination import Signals
from paceline.errors import ConfigError, MissingDependencyError, RunNotFoundError
from paceline.experiment.base import LoopStopped
from paceline.experiment.binding import dump
from paceline.experiment.building import build_experiment
from paceline.experiment.plan import Plan, targets
from paceline.experiment.project import load_plan
from paceline.experiment.run_folders import config_of, logdir_of
from paceline.experiment.shards import datasets_in, makes_ray, shards_of
from paceline.experiment.signatures import path_of
from paceline.prepare.rng import RandomStream, check_seed
from paceline.registry import EXPERIMENT_WORKER_MODULES
from paceline.runs import Run, load_run
from paceline.runs.driver_lock import alone_in
from paceline.runs.durable import write_atomic
from paceline.runs.function_source import describe_function
from paceline.trainer import Trainer
from paceline.workers import resolve_engine
from paceline.workers.base import Engine
from paceline.workers.local import LocalEngine

logger = logging.getLogger(__name__)

CONF_FILE = "conf.yaml"


@dataclass(frozen=True)
class ExperimentRun:
    path: Path
    """The run folder."""
    config_hash: str
    values: list[Any]
    """What `worker_loop` returned, by rank."""


def run_experiment(
    experiment: type,
    conf: str | os.PathLike[str] | None = None,
    overrides: Sequence[str] = (),
    *,
    engine: str | Engine | None = None,
    callbacks: Sequence[Callback] = (),
    parent: Mapping[str, Any] | None = None,
    prepare_batches: bool = False,
) -> ExperimentRun:
    """Train an experiment as its configuration says. Blocking.

    The configuration is checked, and the experiment built once in this process, before any worker starts. Then
    `cfg.start_workers` workers build it and run its `worker_loop`.

    Args:
        experiment: a class that derives from BaseModule.
        conf: a conf.yaml. Default: src/conf.yaml or conf.yaml of its project; without one, all is as in the code.
        overrides: changes such as "optimizers.adam.lr=1e-3".
        engine: where workers live, whatever `cfg.engine` says.
        callbacks: as for `Trainer.run`.
        parent: what the run is a part of, for the run folder: of a sweep, say.
        prepare_batches: map datasets by their `ray_map_batches` ahead of time, into a cache that later runs use too.
    """
    plan = load_plan(experiment, conf, overrides)
    options: dict[str, Any] = {"engine": engine, "callbacks": callbacks, "parent": parent}
    return run_plan(plan, overrides=overrides, prepare_batches=prepare_batches, **options)


def run_plan(
    plan: Plan,
    *,
    overrides: Sequence[str] = (),
    engine: str | Engine | None = None,
    callbacks: Sequence[Callback] = (),
    parent: Mapping[str, Any] | None = None,
    prepare_batches: bool = False,
    say: Callable[[str], None] = logger.info,
    before_begin: Callable[[], None] = lambda: None,
) -> ExperimentRun:
    """The same for a configuration that is loaded. `say` is told how batches are prepared. `before_begin` may still
    refuse by raising, when all is ready and nobody else can make a run of that name until there is a folder."""
    cfg = config_of(plan)
    work = Work(plan, secrets.randbits(32) if cfg.seed is None else check_seed(cfg.seed))
    told = {
        "experiment": path_of(plan.experiment),
        "config_hash": plan.config_hash,
        "code_hash": plan.code_hash,
        "overrides": list(overrides),
        **({"sweep": parent["sweep"]} if parent and "sweep" in parent else {}),  # by which a filter finds its runs
    }
    logdir, backend = logdir_of(plan), TorchConfig()
    is_rays = makes_ray_data(plan)
    made = _engine(engine or cfg.engine or ("ray" if is_rays else None), cfg.start_workers)
    text = dump(plan.as_document()).encode()
    made.warm(backend.preload)
    built = _try(work)  # what is wrong shows here, with a traceback of its own, and not on every worker
    with (
        _prepared(built, plan, say if prepare_batches else None) as prepared,
        Trainer(
            backend,
            num_workers=cfg.start_workers if cfg.max_workers is None else (cfg.start_workers, cfg.max_workers),
            use_gpu=cfg.use_gpu,
            logdir=logdir,
            max_retries=cfg.max_retries,
            engine=made,
        ) as trainer,
    ):
        request = request_of(
            train_func=replace(work, prepared=prepared),
            dataset=ray_datasets(built),
            config={**told, **plan.resolved()},
            checkpoint=_checkpoint(cfg.restore_checkpoint_path),
            checkpoint_strategy=_strategy(cfg),
            parent=parent,
            trainer=trainer.arguments,
        )
        progress = default_progress()
        listeners = CallbackList([*callbacks, *([] if progress is None else [progress])])
        with Signals().watching() as signals:
            with alone_in(logdir):
                before_begin()
                folder = trainer.new_folder(request)
            folder.write_document(CONF_FILE, text)
            with trainer.drive(request, folder, listeners, signals) as iterator:
                values = iterator.get_final_results(force=True)
    assert values is not None
    return ExperimentRun(folder.path, plan.config_hash, values)


def resume_plan(plan: Plan, former: Run, callbacks: Sequence[Callback] = ()) -> list[Any]:
    """Go on with a run of this configuration that has not succeeded. Gives what `worker_loop` returned, by rank. Its
    driver may have been killed before conf.yaml was there."""
    path = former.path / CONF_FILE
    if not path.exists() and not former.is_alive:
        with suppress(OSError):
            write_atomic(path, dump(plan.as_document()).encode())
    return Trainer.resume(former.path, callbacks=callbacks)


def ray_datasets(experiment: Any) -> dict[str, Any] | None:
    """Those of its datasets that are Ray's, made anew."""
    found = {name: one.ray_dataset() for name, one in datasets_in(experiment.datasets).items() if makes_ray(one)}
    return found or None


def makes_ray_data(plan: Plan) -> bool:
    """Whether a class of the plan has a method `ray_dataset`."""
    section = plan.sections.get("datasets")
    return section is not None and any(hasattr(cls, "ray_dataset") for cls in targets(section))


@contextmanager
def _prepared(experiment: Any, plan: Plan, say: Callable[[str], None] | None) -> Iterator[tuple[tuple[str, str], ...]]:
    """The datasets that are in the cache, which stay there meanwhile."""
    if say is None:
        yield ()
        return
    if find_spec("pyarrow") is None:
        raise MissingDependencyError("pyarrow", "data", "Preparing batches")
    from paceline.experiment.preparing import prepare_datasets

    prepared = prepare_datasets(experiment, plan, say)
    try:
        yield tuple(prepared.paths.items())
    finally:
        prepared.release()


@dataclass(frozen=True)
class Work:
    """What every worker calls. It carries the plan, so that a worker reads no YAML and decides nothing."""

    plan: Plan
    building_seed: int
    """For random numbers that constructors draw: on every rank, and after every restart, the same."""
    prepared: tuple[tuple[str, str], ...] = ()
    """Of each dataset that is in the cache of prepared batches, its name and its folder there."""

    @property
    def __name__(self) -> str:
        return self.plan.experiment.__name__

    def __call__(self) -> Any:
        if config_of(self.plan).seed is not None:
            paceline.enable_reproducibility(config_of(self.plan).seed)
        experiment = self.build()
        experiment.enter_worker()
        shards = shards_of(experiment.datasets, dict(self.prepared))
        experiment.restore_checkpoint()
        try:
            return experiment.worker_loop(shards)
        except LoopStopped:
            return None

    def build(self) -> Any:
        """Data made of random numbers is then the same on all ranks, and so is a model that nobody synchronises."""
        with RandomStream(self.building_seed).lent():
            return build_experiment(self.plan)

    def make_dataset(self) -> dict[str, Any] | None:
        """For a run that goes on, or is made again: data made of random numbers is the same as it was then."""
        return ray_datasets(self.build())

    def describe_source(self) -> dict[str, Any]:
        return describe_function(self.plan.experiment)


def _try(work: Work) -> Any:
    """Build the experiment once. If it ended this process, with exit code 0 even, that would look like a run that is
    done."""
    try:
        return work.build()
    except SystemExit as leave:
        raise ConfigError(f"{work.__name__} cannot be built: a constructor called sys.exit({leave.code!r}).") from leave


def _engine(engine: str | Engine | None, num_workers: int) -> Engine:
    resolved = resolve_engine(engine, max_workers=num_workers)
    if resolved.name != "local" or engine not in (None, "local"):
        return resolved
    used = [name for name in EXPERIMENT_WORKER_MODULES if name.startswith("paceline.") or name in sys.modules]
    return LocalEngine(preload=used)


def _strategy(cfg: Any) -> CheckpointStrategy:
    if cfg.best_metric is None:
        return CheckpointStrategy(num_to_keep=cfg.keep_checkpoints)
    return CheckpointStrategy(cfg.keep_checkpoints, cfg.best_metric, cfg.best_mode)


def _checkpoint(path: str | None) -> str | None:
    """A checkpoint, or the last one of a run."""
    if path is None:
        return None
    try:
        saved = load_run(path).checkpoints
    except RunNotFoundError:
        return path
    if not saved:
        raise ConfigError(f"cfg.restore_checkpoint_path is {path!r}, a run that has no checkpoint.")
    return max(saved, key=lambda one: one.id).path
