"""Data-parallel training driven step by step: see `DistributedSGD`.

Names are imported at their first use: workers need nothing of the driver's side, and each new one would wait for it."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.sgd.distributed import DistributedSGD
    from paceline.sgd.models import JaxModel, NumpyModel, TFModel, TorchModel
    from paceline.sgd.result import StepResult

_HOME_OF = {
    "DistributedSGD": "distributed",
    "JaxModel": "models",
    "NumpyModel": "models",
    "StepResult": "result",
    "TFModel": "models",
    "TorchModel": "models",
}

__all__ = ["DistributedSGD", "JaxModel", "NumpyModel", "StepResult", "TFModel", "TorchModel"]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'paceline.sgd' has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value
