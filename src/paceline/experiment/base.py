"""BaseModule: what an experiment derives from."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

from torch.optim import LBFGS, Optimizer

import paceline
from paceline import session
from paceline.errors import ArgumentError, CheckpointError
from paceline.experiment import keeping
from paceline.experiment.agreement import Agreement, let_agree
from paceline.experiment.building import freeze_unmapped, mapping_of, models_in
from paceline.experiment.config import TrainConfig
from paceline.experiment.measures import (
    computed,
    measures_in,
    measures_of_tools,
    metrics_among,
    restore_states,
    share_states,
    states_of,
)
from paceline.experiment.shards import Loader, datasets_in
from paceline.experiment.stages import Stages, epoch_line
from paceline.experiment.tool_memory import ToolMemory, tools_in
from paceline.prepare import get_device, rng_state, set_rng_state, unwrap_model

logger = logging.getLogger(__name__)


class LoopStopped(BaseException):
    """Leaves a `worker_loop` that was asked to stop, and has saved. Not an Exception: loops may catch these."""


class BaseModule(ABC):
    """An experiment: its parts as attributes, and a `worker_loop` that every worker runs.

    Its `__init__` takes sections that are annotated with classes of your own; `conf.yaml` is made of these. By the time
    that `worker_loop` is called, optimizers have the parameters of their models, models without an optimizer are
    frozen, and the state of a former attempt, or of the checkpoint that was given, is restored.
    """

    formats: ClassVar[Mapping[str, str]] = {}
    """How values look in the line of an epoch, by globs of their names: {"acc*": ".1%", "mbd": ""}. "" leaves out."""

    def __init__(
        self,
        cfg: TrainConfig,
        models: Any = None,
        datasets: Any = None,
        optimizers: Any = None,
        losses: Any = None,
        metrics: Any = None,
        tools: Any = None,
    ):
        self.cfg = cfg
        self.models, self.datasets, self.optimizers = models, datasets, optimizers
        self.losses, self.metrics, self.tools = losses, metrics, tools
        self.first_batch = 0
        """Where `numbered` begins: after a checkpoint in the middle of an epoch, the batch that comes next."""
        both = measures_in(losses).keys() & measures_in(metrics).keys()
        if both:
            raise ArgumentError(f"{', '.join(sorted(both))}: a loss and a metric have this name; give one another.")
        self._stages = Stages()
        self._registered: list[str] = []
        self._memory: ToolMemory | None = None
        self._not_updated: set[str] = set()
        self._is_inside_epoch = False
        self._agreement: Agreement | None = None
        self._frozen = self._freeze()

    @abstractmethod
    def worker_loop(self, dataset_shards: Any) -> Any:
        """The training, on every worker. `dataset_shards` has an attribute for each dataset: this rank's part of it.
        What it returns is in the run's values, by rank."""

    @classmethod
    def init_module(cls, conf: Any = None, overrides: Sequence[str] = ()) -> Any:
        """An experiment as a configuration says, in this process. Without a path: that of its project."""
        from paceline.experiment.building import build_experiment
        from paceline.experiment.project import load_plan

        return build_experiment(load_plan(cls, conf, overrides))

    # --- data ---------------------------------------------------------------------------------------------------------

    def generate_loaders(self, dataset_shards: Any) -> list[Loader]:
        """A loader of each dataset, in the order of the attributes of Datasets: batches of `dataset.batch_size` rows,
        collated by its `ray_map_batches`. Every row comes once, so that ranks may have unequal last batches; a dataset
        with `drop_last = True` leaves these out."""
        return [
            getattr(dataset_shards, name).iter_torch_batches(
                batch_size=getattr(dataset, "batch_size", None),
                prefetch_batches=self.cfg.prefetch_batches,
                collate_fn=getattr(dataset, "ray_map_batches", None),
                rest="drop" if getattr(dataset, "drop_last", False) else "uneven",
            )
            for name, dataset in datasets_in(self.datasets).items()
        ]

    def numbered(self, loader: Iterable[Any]) -> Iterator[tuple[int, Any]]:
        """`enumerate` that goes on with the number of the batch, where training goes on in the middle of an epoch."""
        first, self.first_batch = self.first_batch, 0
        return iter(enumerate(loader, first))

    # --- losses and metrics -------------------------------------------------------------------------------------------

    def reset_all_metrics_and_losses(self) -> None:
        """At the beginning of an epoch. Where training goes on in the middle of one, what was counted stays."""
        if self._is_inside_epoch:
            self._is_inside_epoch = False
            return
        for measure in self._measures().values():
            measure.reset()

    def save_metrics(
        self, epoch: int, batch_idx: int | None = None, report: bool = True, prefix: str = ""
    ) -> dict[str, Any]:
        """The metrics over all ranks, reported. See `save_metrics_and_losses`."""
        return self._save(measures_in(self.metrics), epoch, batch_idx, report, prefix)

    def save_losses(
        self, epoch: int, batch_idx: int | None = None, report: bool = True, prefix: str = ""
    ) -> dict[str, Any]:
        """The losses over all ranks, reported."""
        return self._save(measures_in(self.losses), epoch, batch_idx, report, prefix)

    def save_metrics_and_losses(
        self, epoch: int, batch_idx: int | None = None, report: bool = True, prefix: str = ""
    ) -> dict[str, Any]:
        """All values since the last reset, over all ranks, with `epoch` and `batch`, in one report. Collective.

        Of the batches of an epoch each `cfg.log_every`-th is computed and reported; for others nothing is, nobody
        waits, and the result has no values. Without `batch_idx` it is always done; `report=False` gives values only.
        With `prefix="val_"` their names begin so: a metric of training and of validation are then two curves.
        """
        return self._save(self._measures(), epoch, batch_idx, report, prefix)

    def _save(
        self, measures: Mapping[str, Any], epoch: int, batch_idx: int | None, report: bool, prefix: str
    ) -> dict[str, Any]:
        place = {"epoch": epoch, **({} if batch_idx is None else {"batch": batch_idx})}
        if batch_idx is not None and batch_idx % self.cfg.log_every:
            return place
        found = computed(measures, self._not_updated)
        values = {**place, **{f"{prefix}{name}": value for name, value in found.items()}}
        if report:
            paceline.report(**values)
        return values

    def _measures(self) -> dict[str, Any]:
        return {**measures_in(self.losses), **measures_in(self.metrics)}

    def _counting(self) -> dict[str, Any]:
        """All that counts over the ranks, in tools too: by name, for checkpoints."""
        registered = metrics_among({path: keeping.reach(self, path) for path in self._registered})
        return {**self._measures(), **measures_of_tools(tools_in(self.tools)), **registered}

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def save_checkpoint(
        self, epoch: int, metrics: Mapping[str, Any] | None = None, batch_idx: int | None = None
    ) -> None:
        """Save models, optimizers, tools, metrics, registered state, random generators and the position in the data, on
        all ranks; at the end of an epoch, or after a batch if `batch_idx` is given. `metrics` are stored with it, and
        rank it if `cfg.best_metric` is among them. At the end of an epoch, rank 0 prints its line.

        A run that was asked to stop (Ctrl-C, `xp stop`, a machine that is taken away) ends here, on all ranks."""
        values = {name: value for name, value in (metrics or {}).items() if keeping.is_holdable(value)}
        scored = keeping.scored(self.cfg.best_metric, values, is_inside=batch_idx is not None)
        own = {"rng": rng_state(), "measures": states_of(self._counting()), "kept": self._kept()}
        state: dict[str, Any] = {
            "epoch": epoch,
            "batch_idx": batch_idx,
            "metrics": values,
            "models": {name: unwrap_model(one).state_dict() for name, one in models_in(self.models).items()},
            "optimizers": {name: one.state_dict() for name, one in self._optimizers().items()},
            "kept": own["kept"],
        }
        paceline.save_checkpoint(per_rank=own, **{**scored, **state})
        if batch_idx is None:
            self.log_epoch(epoch, values)
        if paceline.should_stop():
            raise LoopStopped

    def restore_checkpoint(self) -> bool:
        """Go on from the checkpoint of the last attempt, or from `cfg.restore_checkpoint_path`; False if there is none.
        It is done before `worker_loop`, so that loops from `cfg.start_epoch` on begin where they should."""
        checkpoint = paceline.load_checkpoint()
        if checkpoint is None:
            return False
        keeping.check_names(checkpoint, {"models": models_in(self.models), "optimizers": self._optimizers()})
        for name, state in checkpoint["models"].items():
            unwrap_model(getattr(self.models, name)).load_state_dict(state)
        for name, state in checkpoint["optimizers"].items():
            getattr(self.optimizers, name).load_state_dict(state)
        own = checkpoint.per_rank
        self._put_back(checkpoint["kept"] if own is None else own["kept"])
        is_inside = checkpoint["batch_idx"] is not None
        if own is not None:
            restore_states(self._counting(), own["measures"])
            set_rng_state(own["rng"])
        else:
            self._share([part["measures"] for part in checkpoint.all_ranks if part is not None], is_inside)
        self.cfg.start_epoch = checkpoint["epoch"] + (not is_inside)
        self.first_batch = checkpoint["batch_idx"] + 1 if is_inside else 0
        self._is_inside_epoch = is_inside
        return True

    def _share(self, everybody: list[Mapping[str, Any]], is_inside: bool) -> None:
        rank, world_size = paceline.world_rank(), paceline.world_size()
        lost = ", ".join(share_states(self._counting(), everybody, rank, world_size))
        if lost and is_inside:
            raise CheckpointError(
                f"{lost}: {len(everybody)} ranks have counted, and {world_size} go on in the middle of an epoch. "
                "States without a reduction (dist_reduce_fx) cannot be put together: go on with as many ranks, or from "
                "a checkpoint at the end of an epoch."
            )
        if lost and rank == 0:
            logger.warning("%s begins anew: it has states without a reduction, and there are fewer ranks now.", lost)

    def register_stateful(self, *paths: str) -> None:
        """Keep more in every checkpoint: `register_stateful("history", "models.ema")`. What has `state_dict` is kept by
        it; other values as they are. Call it in `__init__`."""
        for path in paths:
            keeping.read_path(self, path)
            if path not in self._registered:
                self._registered.append(path)

    def _kept(self) -> dict[str, Any]:
        registered = {path: keeping.read_path(self, path) for path in self._registered}
        return {"tools": self._remembered().state(self._kept_elsewhere()), "registered": registered}

    def _put_back(self, kept: Mapping[str, Any]) -> None:
        self._remembered().restore(kept["tools"], self._kept_elsewhere())
        for path in self._registered:
            if path in kept["registered"]:
                keeping.write_path(self, path, kept["registered"][path])

    def _remembered(self) -> ToolMemory:
        self._memory = self._memory or ToolMemory(self.tools, self._kept_elsewhere())
        return self._memory

    def _kept_elsewhere(self) -> set[int]:
        """Ids of what tools may hold and other parts of the checkpoint have."""
        models = [one for model in models_in(self.models).values() for one in (model, unwrap_model(model))]
        others = (*self._optimizers().values(), *self._counting().values(), *tools_in(self.tools).values())
        return {id(one) for one in (*models, *others)}

    # --- conveniences -------------------------------------------------------------------------------------------------

    def agree(self, flag: bool) -> bool:
        """True on all ranks if it is true on one of them. Collective: for decisions that end a loop."""
        self._agreement = self._agreement or Agreement()
        return self._agreement.decide("agree()", bool(flag))

    def stage(self, name: str) -> AbstractContextManager[None]:
        """`with self.stage("train"):` times a part of the epoch, for its line."""
        return self._stages.stage(name)

    def run_stage(self, name: str, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The same for a call."""
        with self.stage(name):
            return fn(*args, **kwargs)

    def log_epoch(self, epoch: int, values: Mapping[str, Any]) -> None:
        """Print the epoch's line, on rank 0: stages and values. `save_checkpoint` does it."""
        line = epoch_line(epoch, self.cfg.num_epochs, values, self._stages.taken(), self.formats)
        if paceline.world_rank() == 0:
            print(line, flush=True)

    # --- for those who run it -----------------------------------------------------------------------------------------

    def enter_worker(self) -> None:
        """In a worker, before anything else: metrics go to the device, and what tools begin with is noted."""
        if self._frozen and paceline.world_rank() == 0:
            names = ", ".join(f"models.{name}" for name in self._frozen)
            logger.warning("%s: no optimizer is mapped to it, so it is frozen, in eval mode.", names)
        for measure in self._measures().values():
            measure.to(get_device())
        self._remembered()
        if session.world_size() > 1:
            self._warn_of_own_ways()
            self._agreement = Agreement()
            for name, tool in tools_in(self.tools).items():
                let_agree(tool, f"tools.{name}", self._agreement)

    def _warn_of_own_ways(self) -> None:
        for name, one in self._optimizers().items():
            if isinstance(one, LBFGS) and paceline.world_rank() == 0:
                logger.warning(
                    "optimizers.%s is an LBFGS, which chooses its steps by the loss that its closure returns: if that "
                    "is not the mean over all ranks, their models part. Return the mean, or train with one worker.",
                    name,
                )

    def _freeze(self) -> list[str]:
        if self.models is None or self.optimizers is None:
            return []
        return freeze_unmapped(self.models, mapping_of(self.models, list(self._optimizers())))

    def _optimizers(self) -> dict[str, Optimizer]:
        held = vars(self.optimizers) if self.optimizers is not None else {}
        return {name: one for name, one in held.items() if isinstance(one, Optimizer)}
