"""Torch helpers for a training function: device, model, loader, optimizer, precision, reproducibility.

Every name is resolved on first use, so that importing this package does not load torch. Outside a worker each
helper goes by the launcher's ranks, or does the single-process thing: the same function also runs by hand.
"""

from typing import TYPE_CHECKING, Any

from paceline import torch_names

if TYPE_CHECKING:
    from paceline.prepare.device import get_device
    from paceline.prepare.loader import PreparedDataLoader, prepare_data_loader
    from paceline.prepare.metrics import gather_for_metrics, mean_over_rows
    from paceline.prepare.model import prepare_model, unwrap_model
    from paceline.prepare.optimizer import backward, prepare_optimizer
    from paceline.prepare.precision import accelerate
    from paceline.prepare.reproducibility import enable_reproducibility, rng_state, set_rng_state

__all__ = [
    "PreparedDataLoader",
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
]

_HOMES = {
    "PreparedDataLoader": "loader",
    "accelerate": "precision",
    "backward": "optimizer",
    "enable_reproducibility": "reproducibility",
    "gather_for_metrics": "metrics",
    "get_device": "device",
    "mean_over_rows": "metrics",
    "prepare_data_loader": "loader",
    "prepare_model": "model",
    "prepare_optimizer": "optimizer",
    "rng_state": "reproducibility",
    "set_rng_state": "reproducibility",
    "unwrap_model": "model",
}


def __getattr__(name: str) -> Any:
    return torch_names.find(__name__, _HOMES, name)


def __dir__() -> list[str]:
    return __all__
