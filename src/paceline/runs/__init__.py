"""A run at rest: the folder its driver writes, and the same folder as everybody else reads it."""

from paceline.runs.folder import RunFolder
from paceline.runs.function_source import describe_function
from paceline.runs.kept_call import KeptCall, load_call
from paceline.runs.load import Run, list_runs, load_run
from paceline.runs.logdir import resolve_logdir, results_dir
from paceline.runs.status import RunState, RunStatus

__all__ = [
    "KeptCall",
    "Run",
    "RunFolder",
    "RunState",
    "RunStatus",
    "describe_function",
    "list_runs",
    "load_call",
    "load_run",
    "resolve_logdir",
    "results_dir",
]
