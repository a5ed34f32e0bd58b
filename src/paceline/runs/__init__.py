"""A run at rest: the folder its driver writes, and the same folder as everybody else reads it."""

from paceline.runs.folder import RunFolder, checkpoint_root, claim_root
from paceline.runs.kept_call import load_call
from paceline.runs.load import Run, list_runs, load_run
from paceline.runs.logdir import resolve_logdir, results_dir
from paceline.runs.request import RunRequest
from paceline.runs.status import RunState, RunStatus

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
