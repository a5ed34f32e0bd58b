"""What every experiment is told about its training, whatever it trains."""

from dataclasses import dataclass
from typing import Literal

import torch

DUMMY_PARAMS = [torch.nn.Parameter(torch.zeros(()))]
"""For an optimizer that is a default argument: `adam: Adam = Adam(DUMMY_PARAMS)`. When the experiment is built, the
parameters of the models that are mapped to the optimizer take their place."""


@dataclass
class TrainConfig:
    """`self.cfg` of an experiment. For fields of your own, derive a dataclass from it; none of these can be removed."""

    name: str = "experiment"
    """Runs are NAME/run_001, NAME/run_002 … in the results folder."""
    restore_checkpoint_path: str | None = None
    """A checkpoint, or a run folder for its last one, from which a new run goes on."""
    start_epoch: int = 0
    """Where loops begin; after a restart, the epoch that comes next."""
    num_epochs: int = 10
    start_workers: int = 1
    """How many workers; 0 trains in this process."""
    prefetch_batches: int = 2
    """How many batches `generate_loaders` has ready in advance."""
    log_every: int = 1
    """Of the batches of an epoch, one in so many is reported, and synchronised for that."""
    seed: int | None = None
    """For random numbers, deterministic algorithms and the order of shuffled data. None: another one in every run."""
    engine: Literal["local", "ray"] | None = None
    """Where workers live. None: on Ray if this program is connected to it, else on this machine."""
    use_gpu: bool = False
    max_workers: int | None = None
    """If given, the group grows to so many where there is room, and shrinks to `start_workers` where there is not."""
    max_retries: int = 3
    """How often the run may be restarted after workers have died; negative means always."""
    keep_checkpoints: int | None = None
    """How many to keep besides the last: the best ones by `best_metric`, else the newest. None: all."""
    best_metric: str | None = None
    """A name among the metrics that `save_checkpoint` gets."""
    best_mode: Literal["min", "max"] = "min"


# Users know it by the package, and configurations name it so.
TrainConfig.__module__ = __name__.rpartition(".")[0]
