"""DistributedSGD: data-parallel training, one step at a time, driven by an ordinary loop on the driver."""

import copy
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from paceline import checkpoints
from paceline.arguments import config_of, resources_of, strategy_of
from paceline.callbacks import Callback
from paceline.checkpoints import CheckpointStore, CheckpointStrategy
from paceline.data.given import Supply, resolve_dataset
from paceline.errors import ArgumentError, ArgumentTypeError, CheckpointWriteError, TrainFunctionError
from paceline.runs import RunRequest, resolve_logdir
from paceline.sgd import model_calls
from paceline.sgd.life import Life
from paceline.sgd.options import BUCKET_BYTES, Options, check_state, options_of
from paceline.sgd.record import RunRecord, listeners_of
from paceline.sgd.reduction import combined
from paceline.sgd.result import StepResult, timing_lines
from paceline.sgd.team import Team
from paceline.workers import parcel, resolve_engine
from paceline.workers.base import Engine
from paceline.workers.outcome import pack_value


class DistributedSGD:
    """Trains copies of a model, each on data of its own, with the mean of their gradients.

    >>> sgd = DistributedSGD(lambda worker_idx, device_idx: MyModel(), num_workers=2)
    >>> for _ in range(100):
    ...     loss = sgd.step()
    ...     print("Current loss", loss)

    Args:
        model_creator: `model_creator(worker_idx, device_idx)` is called in the workers, once for each replica, and
            returns a model with its data: see `TorchModel` and `NumpyModel`. It may take fewer arguments.
        num_workers: 0 trains in this process, where a debugger works.
        devices_per_worker: replicas in each worker.
        use_cpus, gpu: which devices; one of them says it. By default GPUs, if this machine has any.
        strategy: how gradients become one mean: "allreduce", "ps" or "simple".
        verbose: print what each step has taken, phase by phase.
        device_reduce: "mean" over all replicas; "sum" adds up those of one worker, as in 2018.
        max_retries: how often lost workers are replaced; negative means always.
        hang_timeout_s: a step in which a worker does not answer for so long has failed; stacks are kept. What makes the
            models, and loads or saves their state, has at least a minute. Default: wait.
        engine, cpus_per_worker, resources_per_worker, logdir: as for `Trainer`.
        config: for the run folder.
        callbacks: told about the run in this process; see `Callback`.
        dataset: what the models read, by `paceline.get_data_shard()`; as for `Trainer.run`.
        checkpoint_strategy: which checkpoints of the run folder are kept, and where. Their score is a metric of the
            step before, or its "loss".
        bucket_bytes: how much of the gradients "allreduce" sends at once.
        grad_shard_bytes, all_reduce_alg, use_plasma_op: names of 2018, which still work; see the documentation.
    """

    def __init__(
        self,
        model_creator: Callable[..., Any],
        num_workers: int = 1,
        devices_per_worker: int = 1,
        use_cpus: bool | None = None,
        gpu: bool | None = None,
        strategy: str = "allreduce",
        *,
        verbose: bool = True,
        device_reduce: str = "mean",
        max_retries: int = 3,
        hang_timeout_s: float | None = None,
        engine: str | Engine | None = None,
        cpus_per_worker: float | None = None,
        resources_per_worker: Mapping[str, float] | None = None,
        logdir: str | os.PathLike[str] | None = None,
        config: Any = None,
        callbacks: Sequence[Callback] | None = None,
        dataset: Any = None,
        checkpoint_strategy: CheckpointStrategy | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        grad_shard_bytes: int | None = None,
        all_reduce_alg: str | None = None,
        use_plasma_op: bool | None = None,
    ):
        self.options: Options = options_of(
            model_creator,
            num_workers=num_workers,
            devices_per_worker=devices_per_worker,
            use_cpus=use_cpus,
            gpu=gpu,
            strategy=strategy,
            device_reduce=device_reduce,
            bucket_bytes=bucket_bytes,
            max_retries=max_retries,
            hang_timeout_s=hang_timeout_s,
            grad_shard_bytes=grad_shard_bytes,
            all_reduce_alg=all_reduce_alg,
            use_plasma_op=use_plasma_op,
        )
        self.verbose = verbose
        request = RunRequest(
            train_func=model_creator,
            config=config_of(config),
            checkpoint_strategy=strategy_of(checkpoint_strategy),
            dataset=resolve_dataset(dataset),
        )
        if request.dataset is not None and devices_per_worker > 1:
            raise ArgumentError(
                f"devices_per_worker={devices_per_worker} with a dataset: its shards are dealt to workers, so the "
                "replicas of one worker would read the same rows. Ask for more workers instead."
            )
        if request.checkpoint_strategy.num_to_keep == 0:
            raise ArgumentError(
                "CheckpointStrategy(num_to_keep=0) keeps checkpoints in memory, for whoever is started again. Here the "
                "workers have the state that a lost one needs: leave the strategy out, or keep 1 or more."
            )
        gpus = float(devices_per_worker) if self.options.use_gpu else None
        self._team = Team(
            self.options,
            request,
            _engine_of(engine, num_workers, request.dataset),
            resources_of(self.options.use_gpu, cpus_per_worker, gpus, resources_per_worker),
            listeners_of(callbacks, is_quiet=not verbose),
        )
        self.logdir: Path = resolve_logdir(logdir)
        self._life = Life(self._team)

    def start(self) -> None:
        """Have the workers and their models; whatever is called first does it too. Blocking, idempotent."""
        with self._life.turn():
            if self._team.record is None:
                with self._life.begin():
                    self._team.open(self.logdir)

    def step(self, fetch_stats: bool = True) -> StepResult:
        """One step of all replicas: each computes the gradients of its next batch, and all apply the mean. Returns the
        mean loss, a float that has more to tell. `fetch_stats` is of 2018, and changes nothing."""
        with self._life.turn(), self._life.failing():
            if self._team.record is None:
                self.start()
            made = self._team.step()
            losses = [loss for part in made.contributions for loss in part.losses]
            metrics = combined([one for part in made.contributions for one in part.metrics])
            result = StepResult(losses, metrics, made.timings, self.num_steps)
            self._record.step(result, {part.rank: sum(part.losses) / len(part.losses) for part in made.contributions})
        if self.verbose:
            print("\n".join(timing_lines(result.timings)), flush=True)
        return result

    def validate(self) -> dict[str, Any]:
        """What the models' `validate()` return, combined: numbers as the mean over the replicas."""
        return combined([one for worker in self._call(model_calls.validate, is_users=True) for one in worker])

    def warmup(self) -> None:
        """Have everything that the first step needs, without making one: workers, models, the memory that they share,
        and connections between them."""
        with self._life.turn(), self._life.failing():
            self.start()
            self._team.surely(lambda: self._team.link.ask("warm_up"))

    # --- the models ---------------------------------------------------------------------------------------------------

    def foreach_model(self, fn: Callable[[Any], Any]) -> list[Any]:
        """`fn(model)` for each replica: those of worker 0, by device, then those of worker 1 … The model is what the
        model_creator returned; what `fn` returns has to travel."""
        return [value for worker in self._call(model_calls.foreach_model, fn, is_users=True) for value in worker]

    def foreach_worker(self, fn: Callable[[list[Any]], Any]) -> list[Any]:
        """`fn(models)` on each worker, with the models of its replicas."""
        return self._call(model_calls.foreach_worker, fn, is_users=True)

    def for_model(self, fn: Callable[[Any], Any]) -> Any:
        """`fn(model)` for the first replica alone."""
        return self._call(model_calls.for_model, fn, ranks=[0], is_users=True)[0]

    def get_model(self) -> Any:
        """The trained model, on the CPU: the `nn.Module` of a PyTorch model, else the object that the model_creator
        returned."""
        try:
            found = self._call(model_calls.model, ranks=[0], is_users=True)[0]
            # In this process, too, a copy: later steps would train it, and model.eval() would change them.
            return found if self.options.num_workers > 0 else parcel.loads(pack_value(found))
        except TrainFunctionError as error:
            error.add_note(
                "get_model() brings the whole model here: give it a __getstate__ that leaves out what cannot travel, "
                "such as a loop over its data, or take get_weights()."
            )
            raise

    def get_weights(self) -> dict[str, Any]:
        """As numpy arrays by name, those of the first replica. Weights that are trained are the same in all."""
        found: dict[str, Any] = self._call(model_calls.weights, ranks=[0])[0]
        return found

    def set_weights(self, weights: Mapping[str, Any]) -> None:
        """In all replicas. The optimizers keep what they have."""
        if not isinstance(weights, Mapping):
            raise ArgumentTypeError(
                f"set_weights() has got {type(weights).__qualname__}; expected a dict of arrays by name, as "
                "get_weights() returns it."
            )
        self._call(model_calls.set_weights, dict(weights))

    # --- its state ----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All that the next step depends on: weights, optimizer, the number of steps, and where the workers are in
        their data, if their models say so."""
        with self._life.turn():
            state = self._call(model_calls.state, ranks=[0])[0]
            positions = copy.deepcopy(self._team.positions)  # without workers, they may be the model's own
            return {"replica": state, "step": self.num_steps, "positions": positions}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there, in all replicas."""
        check_state(state)
        with self._life.turn():
            self.start()
            packed, positions = parcel.dumps(state["replica"]), copy.deepcopy(state["positions"])
            self._life.staying(lambda: self._team.load(packed, state["step"], positions))

    def save_checkpoint(self, directory: str | os.PathLike[str] | None = None) -> str:
        """Write the state as a checkpoint, and return its path: the next one in that folder, or among those of the run.
        Blocking; when it returns, the checkpoint is whole and durable. CheckpointWriteError if that cannot be."""
        with self._life.turn():
            state = self.state_dict()
            if directory is None or self._record.keeps_in(os.fspath(directory)):
                part = self._record.write(state, self.num_steps)
                with self._life.failing():  # what a callback raises ends the run, as in a step
                    self._record.commit(part)
                return self._record.path_of(part)
            store, kept = CheckpointStore(os.fspath(directory)), checkpoints.snapshot(state)
            try:
                return store.write(store.next_id(), kept, iteration=self.num_steps).path
            except OSError as error:
                raise CheckpointWriteError(f"No checkpoint could be written to {directory}: {error}.") from error

    def restore_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Go on from a checkpoint; of a folder of several, from the newest. Before the first step: models that are in
        the middle of a loop over their data go on in that."""
        newest = CheckpointStore(os.fspath(path)).latest()
        self.load_state_dict(checkpoints.load(newest.path if newest is not None else os.fspath(path)))

    # --- its end ------------------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """End the workers; the run has succeeded. Idempotent."""
        self._life.shut_down()

    def __enter__(self) -> "DistributedSGD":
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._life.end_with(error)

    def __repr__(self) -> str:
        one = self.options
        return (
            f"DistributedSGD(num_workers={one.num_workers}, devices_per_worker={one.devices_per_worker}, "
            f"strategy={one.strategy!r}, steps={self.num_steps})"
        )

    @property
    def num_steps(self) -> int:
        """How many steps the model has made, those before the checkpoint that was restored among them."""
        return self._team.step_number

    @property
    def run_dir(self) -> Path | None:
        """The run folder, once it is there."""
        return None if self._team.record is None else self._team.record.path

    def report_progress(self, progress: float) -> None:
        """Tell how much of the training is done, from 0 to 1, for who shows it."""
        if isinstance(progress, bool) or not isinstance(progress, int | float) or not 0 <= progress <= 1:
            raise ArgumentError(f"report_progress({progress!r}): expected a number from 0 to 1.")
        with self._life.turn(), self._life.failing():
            self.start()
            self._record.progress(float(progress))

    @property
    def _record(self) -> RunRecord:
        assert self._team.record is not None
        return self._team.record

    def _call(
        self, fn: Callable[..., Any], *args: Any, ranks: list[int] | None = None, is_users: bool = False
    ) -> list[Any]:
        with self._life.turn():
            self.start()
            link = self._team.link
            return self._life.staying(lambda: self._team.surely(lambda: link.call(fn, *args, ranks=ranks), is_users))


def _engine_of(engine: str | Engine | None, num_workers: int, dataset: Supply | None) -> Engine:
    """By default, one whose workers can read the data."""
    needed = None if dataset is None else dataset.engine
    made = resolve_engine(engine or needed, max_workers=num_workers)
    if needed is not None and made.name not in (needed, "inline"):
        raise ArgumentError(
            f"The dataset can be read on engine={needed!r} only, and the workers would live on {made.name!r}."
        )
    return made
