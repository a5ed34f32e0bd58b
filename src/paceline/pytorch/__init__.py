"""Trials: write what one batch is, and the loop, its periods, checkpoints and metrics are done for you.

    with pytorch.init(hparams={"global_batch_size": 32}) as context:
        trial = MyTrial(context)
        result = pytorch.Trainer(trial, context).fit(max_length=pytorch.Epoch(10))

Every name is resolved on first use, so that importing this package does not load torch.
"""

from typing import TYPE_CHECKING, Any

from paceline import torch_names

if TYPE_CHECKING:
    from paceline.pytorch.batch_process import TorchBatchProcessor, TorchBatchProcessorContext, torch_batch_process
    from paceline.pytorch.callbacks import PyTorchCallback
    from paceline.pytorch.context import PyTorchTrialContext
    from paceline.pytorch.entry import init
    from paceline.pytorch.loader import DataLoader
    from paceline.pytorch.loading import load_trial_from_checkpoint_path
    from paceline.pytorch.optimization import LRScheduler
    from paceline.pytorch.reducers import MetricReducer
    from paceline.pytorch.result import TrainResult
    from paceline.pytorch.trainer import Trainer
    from paceline.pytorch.trial import PyTorchTrial, Reducer, TorchData
    from paceline.pytorch.units import Batch, Epoch, Record, TrainUnit

_HOMES = {
    "Batch": "units",
    "DataLoader": "loader",
    "Epoch": "units",
    "LRScheduler": "optimization",
    "MetricReducer": "reducers",
    "PyTorchCallback": "callbacks",
    "PyTorchTrial": "trial",
    "PyTorchTrialContext": "context",
    "Record": "units",
    "Reducer": "trial",
    "TorchBatchProcessor": "batch_process",
    "TorchBatchProcessorContext": "batch_process",
    "TorchData": "trial",
    "TrainResult": "result",
    "TrainUnit": "units",
    "Trainer": "trainer",
    "init": "entry",
    "load_trial_from_checkpoint_path": "loading",
    "torch_batch_process": "batch_process",
}

__all__ = [
    "Batch",
    "DataLoader",
    "Epoch",
    "LRScheduler",
    "MetricReducer",
    "PyTorchCallback",
    "PyTorchTrial",
    "PyTorchTrialContext",
    "Record",
    "Reducer",
    "TorchBatchProcessor",
    "TorchBatchProcessorContext",
    "TorchData",
    "TrainResult",
    "TrainUnit",
    "Trainer",
    "init",
    "load_trial_from_checkpoint_path",
    "torch_batch_process",
]


def __getattr__(name: str) -> Any:
    return torch_names.find(__name__, _HOMES, name)


def __dir__() -> list[str]:
    return __all__
