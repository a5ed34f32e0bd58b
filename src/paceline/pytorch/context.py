"""What a trial is given: hyperparameters, the wrapping of what is trained, and where training is."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch

from paceline import core
from paceline.errors import ArgumentError, ArgumentTypeError, TrainerStateError
from paceline.prepare.device import get_device, move_batch
from paceline.pytorch.optimization import LRScheduler, Optimization
from paceline.pytorch.reducers import MetricReducer, Reducers
from paceline.pytorch.schedulers import StepMode

logger = logging.getLogger(__name__)


class PyTorchTrialContext:
    """Made by `pytorch.init()`."""

    def __init__(
        self,
        core_context: Any,
        hparams: dict[str, Any] | None,
        exp_conf: dict[str, Any] | None,
        aggregation_frequency: int,
        seed: int,
    ):
        if isinstance(aggregation_frequency, bool) or not isinstance(aggregation_frequency, int):
            raise ArgumentTypeError(f"aggregation_frequency={aggregation_frequency!r}; expected a whole number.")
        if aggregation_frequency < 1:
            raise ArgumentError(f"aggregation_frequency={aggregation_frequency}: expected at least 1.")
        self.core = core_context
        self.distributed: core.DistributedContext = core_context.distributed
        self.device = get_device()
        self.experimental = Experimental(self)
        self.seed = seed
        self.leaving = ExitStack()
        """What is undone when the context is left."""
        self._hparams, self._exp_conf = hparams, exp_conf
        self.optimization = Optimization(aggregation_frequency)
        self.reducers = Reducers()
        self.moves_batches, self.shares_out = True, True
        self._moment: tuple[int, int, bool, bool] | None = None
        self._stop_requested = False
        self._initial_batch = 0
        self._writer: Any = None
        self.global_batch_size, self.per_slot_batch_size = self._batch_sizes()

    # --- what was asked -----------------------------------------------------------------------------------------------

    def _batch_sizes(self) -> tuple[int | None, int | None]:
        size = self.distributed.size
        if self._hparams is None or "global_batch_size" not in self._hparams:
            return None, None
        asked = self._hparams["global_batch_size"]
        if isinstance(asked, bool) or not isinstance(asked, int):
            raise ArgumentTypeError(
                f"hparams['global_batch_size'] is {asked!r}, a {type(asked).__name__}; expected a whole number."
            )
        if asked < size:
            raise ArgumentError(
                f"hparams['global_batch_size'] is {asked}, less than a row for each of {size} ranks: make it {size} or "
                "more, or use fewer ranks."
            )
        per_slot = asked // size
        if per_slot * size != asked and self.distributed.is_chief:
            logger.warning(
                "The global batch size %d cannot be divided among %d ranks: it is %d, %d for each.",
                asked, size, per_slot * size, per_slot,
            )  # fmt: skip
        return per_slot * size, per_slot

    def get_global_batch_size(self) -> int:
        """Rows of all ranks in one batch."""
        return self._known(self.global_batch_size)

    def get_per_slot_batch_size(self) -> int:
        """Rows of one rank in one batch: what a loader is given."""
        return self._known(self.per_slot_batch_size)

    def _known(self, size: int | None) -> int:
        if size is None:
            raise ArgumentError(
                "No batch size is known: pytorch.init(hparams={'global_batch_size': 32}), the rows of all ranks in one "
                "batch."
            )
        return size

    def get_hparams(self) -> dict[str, Any]:
        if self._hparams is None:
            raise ArgumentError("There are no hyperparameters: give them, pytorch.init(hparams={...}).")
        return self._hparams

    def known_hparams(self) -> dict[str, Any] | None:
        return self._hparams

    def get_hparam(self, name: str) -> Any:
        known = self.get_hparams()
        if name not in known:
            raise ArgumentError(
                f"There is no hyperparameter {name!r}; there are {', '.join(map(repr, known)) or 'none'}."
            )
        if name == "global_batch_size":
            logger.warning(
                "Use context.get_global_batch_size(), which is what is really used, or get_per_slot_batch_size()."
            )
        return known[name]

    def get_experiment_config(self) -> dict[str, Any]:
        if self._exp_conf is None:
            raise ArgumentError("There is no experiment configuration: give one, pytorch.init(exp_conf={...}).")
        return self._exp_conf

    def get_data_config(self) -> dict[str, Any]:
        return dict(self.get_experiment_config().get("data", {}))

    def get_experiment_id(self) -> str:
        """The name of the folder in which the run's is."""
        return self._run_dir().parent.name

    def get_trial_id(self) -> str:
        """The name of the run's folder."""
        return self._run_dir().name

    def _run_dir(self) -> Path:
        if self.core.run_dir is None:
            raise TrainerStateError("The trial belongs to no run here, so that it has no id.")
        return Path(self.core.run_dir)

    def get_trial_seed(self) -> int:
        """By which the data is ordered. The same on all ranks."""
        return self.seed

    # --- wrapping -----------------------------------------------------------------------------------------------------

    def wrap_model(
        self,
        model: torch.nn.Module,
        *,
        compile: bool | dict[str, Any] = False,
        ddp_kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """On its device, and with several ranks in step with theirs. `compile=True`, or a dict of arguments for it, is
        `torch.compile`."""
        return self.optimization.wrap_model(model, compile, ddp_kwargs)

    def wrap_optimizer(
        self,
        optimizer: torch.optim.Optimizer,
        backward_passes_per_step: int = 1,
        fp16_compression: bool | None = None,
        average_aggregated_gradients: bool | None = None,
    ) -> torch.optim.Optimizer:
        """The optimizer itself. `average_aggregated_gradients` overrules what `fit` is told. `fp16_compression` was
        Horovod's, and is ignored."""
        return self.optimization.wrap_optimizer(optimizer, backward_passes_per_step, average_aggregated_gradients)

    def wrap_lr_scheduler(self, lr_scheduler: Any, step_mode: StepMode | None = None, frequency: int = 1) -> Any:
        """The scheduler itself, which now steps when `step_mode` says, every `frequency` times, and is kept with
        checkpoints."""
        return self.optimization.wrap_scheduler(lr_scheduler, step_mode, frequency)

    def wrap_reducer(
        self,
        reducer: Callable[[list[Any]], Any] | MetricReducer,
        name: str | None = None,
        for_training: bool = True,
        for_validation: bool = True,
    ) -> Any:
        """A metric that only you know how to put together: a `MetricReducer`, or a function of the list of everything
        that the returned object's `update()` was given, on all ranks."""
        return self.reducers.wrap(reducer, name, for_training, for_validation)

    def wrap_scaler(self, scaler: Any) -> Any:
        """A GradScaler that you use by yourself, kept with checkpoints. Before the first `wrap_model`."""
        return self.optimization.wrap_scaler(scaler)

    # --- in train_batch -----------------------------------------------------------------------------------------------

    def backward(
        self,
        loss: torch.Tensor,
        gradient: torch.Tensor | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
    ) -> None:
        """`loss.backward()`, in mixed precision of the scaled loss. With gradients aggregated over several batches,
        ranks exchange them in the last of these only."""
        self.optimization.backward(loss, gradient, retain_graph, create_graph)

    def step_optimizer(
        self,
        optimizer: torch.optim.Optimizer,
        clip_grads: Callable[[Iterable[torch.nn.Parameter]], Any] | None = None,
        auto_zero_grads: bool = True,
        scaler: Any = None,
    ) -> None:
        """Step, and clear the gradients. With gradients aggregated over several batches, it does so in the last of
        these, and nothing before. `clip_grads` is called with the parameters when all ranks' gradients are there, the
        scale taken out of them."""
        self.optimization.step(optimizer, clip_grads, auto_zero_grads, scaler)

    def to_device(self, data: Any) -> Any:
        """Every tensor of a nested value, arrays of numbers as tensors; anything else as it is."""
        return _moved(data, self.device)

    # --- where training is --------------------------------------------------------------------------------------------

    def set_moment(self, batch: int, epoch: int, is_start: bool, is_end: bool) -> None:
        self._moment = batch, epoch, is_start, is_end

    def _at(self, place: int) -> Any:
        if self._moment is None:
            raise TrainerStateError("There is no batch yet: training has not begun.")
        return self._moment[place]

    def current_train_batch(self) -> int:
        """The number of the batch that is trained on, from 0 on."""
        return int(self._at(0))

    def current_train_epoch(self) -> int:
        return int(self._at(1))

    def is_epoch_start(self) -> bool:
        """Whether the batch is the first of an epoch."""
        return bool(self._at(2))

    def is_epoch_end(self) -> bool:
        return bool(self._at(3))

    def get_initial_batch(self) -> int:
        """How many batches were trained on when this process began."""
        return self._initial_batch

    def set_initial_batch(self, number: int) -> None:
        self._initial_batch = number

    def set_stop_requested(self, stop_requested: bool) -> None:
        """End the training, with a checkpoint, when the next period is due. One rank is enough: all stop."""
        if not isinstance(stop_requested, bool):
            raise ArgumentTypeError(f"set_stop_requested({stop_requested!r}): expected True or False.")
        self._stop_requested = stop_requested

    def get_stop_requested(self) -> bool:
        return self._stop_requested

    # --- TensorBoard --------------------------------------------------------------------------------------------------

    def get_tensorboard_path(self) -> Path:
        """A folder of the run's, whose files TensorBoard shows."""
        run_dir: Path | None = self.core.run_dir
        path = (run_dir if run_dir is not None else Path.cwd()) / "tensorboard"
        path.mkdir(parents=True, exist_ok=True)
        return path

    def get_tensorboard_writer(self) -> Any:
        """One for all, closed at the end."""
        if self._writer is None:
            from paceline.pytorch.tensorboard_writer import open_writer

            self._writer = open_writer(self.get_tensorboard_path(), self.distributed.rank)
            self.leaving.callback(self._writer.close)
        return self._writer


class Experimental:
    """Ways out of what is done for you."""

    def __init__(self, context: PyTorchTrialContext):
        self._context = context

    def use_amp(self) -> None:
        """Mixed precision without a word in the trial: forward in float16 on a GPU, with the loss scaled, and in
        bfloat16 on the CPU. Before the first `wrap_model`."""
        optimization = self._context.optimization
        device = self._context.device.type
        optimization.wrap_scaler(torch.amp.GradScaler(device, enabled=device == "cuda"))
        optimization.is_automatic = True

    def disable_dataset_reproducibility_checks(self) -> None:
        """Loaders of any kind, which you share out among the ranks and continue after a restart by yourself."""
        self._context.shares_out = False

    def disable_auto_to_device(self) -> None:
        """Batches reach the trial as the loader gives them: move them with `context.to_device()`."""
        self._context.moves_batches = False


def _moved(data: Any, device: torch.device) -> Any:
    """Plain containers, which most batches are, by the short way: it is gone for every batch."""
    if isinstance(data, torch.Tensor):
        return data if data.device == device else data.to(device, non_blocking=True)
    if isinstance(data, np.ndarray):
        return torch.from_numpy(data).to(device) if data.dtype.kind in "biuf" else data
    kind = type(data)
    if kind is tuple or kind is list:
        return kind([_moved(part, device) for part in data])
    if kind is dict:
        return {name: _moved(part, device) for name, part in data.items()}
    return move_batch(data, device)


__all__ = ["Experimental", "LRScheduler", "PyTorchTrialContext"]
