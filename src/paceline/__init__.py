"""Paceline: distributed training that feels like calling a function.

Every name below is imported at its first use: `import paceline` loads neither torch nor any other framework.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.backends.base import BackendConfig
    from paceline.backends.horovod import HorovodConfig
    from paceline.backends.jax import JaxConfig
    from paceline.backends.tensorflow import TensorflowConfig
    from paceline.backends.torch import TorchConfig
    from paceline.callbacks import (
        Callback,
        CSVLoggerCallback,
        JsonLoggerCallback,
        MLflowLoggerCallback,
        PrintCallback,
        ProgressCallback,
        SGDCallback,
        TBXLoggerCallback,
        WandbLoggerCallback,
    )
    from paceline.checkpoints import Checkpoint, CheckpointInfo, CheckpointStrategy
    from paceline.checkpoints import load as read_checkpoint
    from paceline.control.iterator import RunIterator, SGDIterator
    from paceline.core.cluster import get_cluster_info
    from paceline.core.record import record_run
    from paceline.errors import PacelineError
    from paceline.prepare import (
        accelerate,
        backward,
        enable_reproducibility,
        gather_for_metrics,
        get_device,
        mean_over_rows,
        prepare_data_loader,
        prepare_model,
        prepare_optimizer,
        rng_state,
        set_rng_state,
        unwrap_model,
    )
    from paceline.profiling import Profiler, profile
    from paceline.runs import Run, list_runs, load_run
    from paceline.session import (
        get_data_shard,
        get_dataset,
        get_datasets,
        in_worker,
        load_checkpoint,
        local_rank,
        local_world_size,
        node_rank,
        report,
        report_progress,
        save_checkpoint,
        should_stop,
        world_rank,
        world_size,
    )
    from paceline.trainer import Trainer
    from paceline.workers.local import LocalEngine
    from paceline.workers.ray import RayEngine

__version__ = "0.1.0"

LOG_FORMAT = "%(levelname)s: [%(process)d] %(name)s: %(message)s"
"""For `logging.basicConfig(format=...)`, where several processes log to one terminal."""

_HOMES = {
    "paceline.backends.base": ["BackendConfig"],
    "paceline.backends.tensorflow": ["TensorflowConfig"],
    "paceline.backends.horovod": ["HorovodConfig"],
    "paceline.backends.jax": ["JaxConfig"],
    "paceline.backends.torch": ["TorchConfig"],
    "paceline.callbacks": [
        "Callback",
        "CSVLoggerCallback",
        "JsonLoggerCallback",
        "MLflowLoggerCallback",
        "PrintCallback",
        "ProgressCallback",
        "SGDCallback",
        "TBXLoggerCallback",
        "WandbLoggerCallback",
    ],
    "paceline.checkpoints": ["Checkpoint", "CheckpointInfo", "CheckpointStrategy", "read_checkpoint"],
    "paceline.control.iterator": ["RunIterator", "SGDIterator"],
    "paceline.core.cluster": ["get_cluster_info"],
    "paceline.core.record": ["record_run"],
    "paceline.errors": ["PacelineError"],
    "paceline.prepare": [
        "accelerate",
        "backward",
        "enable_reproducibility",
        "gather_for_metrics",
        "get_device",
        "mean_over_rows",
        "prepare_data_loader",
        "prepare_model",
        "prepare_optimizer",
        "rng_state",
        "set_rng_state",
        "unwrap_model",
    ],
    "paceline.profiling": ["Profiler", "profile"],
    "paceline.runs": ["Run", "list_runs", "load_run"],
    "paceline.session": [
        "get_data_shard",
        "get_dataset",
        "get_datasets",
        "in_worker",
        "load_checkpoint",
        "local_rank",
        "local_world_size",
        "node_rank",
        "report",
        "report_progress",
        "save_checkpoint",
        "should_stop",
        "world_rank",
        "world_size",
    ],
    "paceline.trainer": ["Trainer"],
    "paceline.workers.local": ["LocalEngine"],
    "paceline.workers.ray": ["RayEngine"],
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}
_RENAMED = {"read_checkpoint": "load"}

__all__ = [
    "LOG_FORMAT",
    "BackendConfig",
    "CSVLoggerCallback",
    "Callback",
    "Checkpoint",
    "CheckpointInfo",
    "CheckpointStrategy",
    "HorovodConfig",
    "JaxConfig",
    "JsonLoggerCallback",
    "LocalEngine",
    "MLflowLoggerCallback",
    "PacelineError",
    "PrintCallback",
    "Profiler",
    "ProgressCallback",
    "RayEngine",
    "Run",
    "RunIterator",
    "SGDCallback",
    "SGDIterator",
    "TBXLoggerCallback",
    "TensorflowConfig",
    "TorchConfig",
    "Trainer",
    "WandbLoggerCallback",
    "__version__",
    "accelerate",
    "backward",
    "enable_reproducibility",
    "gather_for_metrics",
    "get_cluster_info",
    "get_data_shard",
    "get_dataset",
    "get_datasets",
    "get_device",
    "in_worker",
    "list_runs",
    "load_checkpoint",
    "load_run",
    "local_rank",
    "local_world_size",
    "mean_over_rows",
    "node_rank",
    "prepare_data_loader",
    "prepare_model",
    "prepare_optimizer",
    "profile",
    "read_checkpoint",
    "record_run",
    "report",
    "report_progress",
    "rng_state",
    "save_checkpoint",
    "set_rng_state",
    "should_stop",
    "unwrap_model",
    "world_rank",
    "world_size",
]


def __getattr__(name: str) -> Any:
    if name in (
        "core",
        "data",
        "experiment",
        "keras",
        "pytorch",
        "sgd",
    ):  # packages of their own, for `paceline.data.read_parquet` after `import paceline`
        return import_module(f"paceline.{name}")
    if name not in _HOME_OF:
        raise AttributeError(f"module 'paceline' has no attribute {name!r}")
    value = getattr(import_module(_HOME_OF[name]), _RENAMED.get(name, name))
    globals()[name] = value  # the next time, it is simply there
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
