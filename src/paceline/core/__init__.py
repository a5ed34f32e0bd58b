"""The pieces of a run that a script uses by itself, without a Trainer: `core.init` and what it gives."""

from paceline.core.checkpoint import CheckpointContext
from paceline.core.context import Context, init
from paceline.core.distributed import DistributedContext
from paceline.core.preempt import PreemptContext, PreemptMode
from paceline.core.train import EarlyExitReason, TrainContext

__all__ = [
    "CheckpointContext",
    "Context",
    "DistributedContext",
    "EarlyExitReason",
    "PreemptContext",
    "PreemptMode",
    "TrainContext",
    "init",
]
