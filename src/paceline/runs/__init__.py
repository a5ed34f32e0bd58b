"""A run at rest: the folder its driver writes, and the same folder as everybody else reads it.

Names are imported at their first use: who lists runs needs nothing of what writes them."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.runs.folder import RunFolder, checkpoint_root, claim_root
    from paceline.runs.kept_call import load_call
    from paceline.runs.load import Run, list_runs, load_run
    from paceline.runs.logdir import resolve_logdir, results_dir
    from paceline.runs.request import RunRequest
    from paceline.runs.status import RunState, RunStatus

_HOME_OF = {
    "Run": "load",
    "RunFolder": "folder",
    "RunRequest": "request",
    "RunState": "status",
    "RunStatus": "status",
    "checkpoint_root": "folder",
    "claim_root": "folder",
    "list_runs": "load",
    "load_call": "kept_call",
    "load_run": "load",
    "resolve_logdir": "logdir",
    "results_dir": "logdir",
}

__all__ = [
    "Run",
    "RunFolder",
    "RunRequest",
    "RunState",
    "RunStatus",
    "checkpoint_root",
    "claim_root",
    "list_runs",
    "load_call",
    "load_run",
    "resolve_logdir",
    "results_dir",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'paceline.runs' has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value
