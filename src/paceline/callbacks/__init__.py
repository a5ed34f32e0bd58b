"""Listeners on the driver: what a run reports, and where it goes. Every name is imported at its first use."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.callbacks.base import Callback, SGDCallback
    from paceline.callbacks.csv_logger import CSVLoggerCallback
    from paceline.callbacks.dispatch import CallbackList
    from paceline.callbacks.json_logger import JsonLoggerCallback
    from paceline.callbacks.mlflow_logger import MLflowLoggerCallback
    from paceline.callbacks.printing import PrintCallback
    from paceline.callbacks.progress import ProgressCallback, default_progress
    from paceline.callbacks.tensorboard_logger import TBXLoggerCallback
    from paceline.callbacks.wandb_logger import WandbLoggerCallback

__all__ = [
    "CSVLoggerCallback",
    "Callback",
    "CallbackList",
    "JsonLoggerCallback",
    "MLflowLoggerCallback",
    "PrintCallback",
    "ProgressCallback",
    "SGDCallback",
    "TBXLoggerCallback",
    "WandbLoggerCallback",
    "default_progress",
]

_MODULE_OF = {
    "CSVLoggerCallback": "csv_logger",
    "Callback": "base",
    "CallbackList": "dispatch",
    "JsonLoggerCallback": "json_logger",
    "MLflowLoggerCallback": "mlflow_logger",
    "PrintCallback": "printing",
    "ProgressCallback": "progress",
    "SGDCallback": "base",
    "TBXLoggerCallback": "tensorboard_logger",
    "WandbLoggerCallback": "wandb_logger",
    "default_progress": "progress",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
