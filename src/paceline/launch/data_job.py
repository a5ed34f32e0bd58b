"""A data job: a folder with a script that prepares data in the storage, run as a run like any other."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from paceline.backends.base import BackendConfig, Caller
from paceline.callbacks import Callback
from paceline.errors import ConfigError
from paceline.launch.launcher import Launch, program_of, run_to_exit_code
from paceline.project_file import project_name, read_project_file, table_in
from paceline.runs.logdir import results_dir
from paceline.workers.base import Wire

STORAGE_VARIABLE = "PACELINE_STORAGE"
"""By which the script finds the storage."""

_GO = (
    "Go to the folder of a data job, or make one: paceline data new NAME. Its pyproject.toml says which script it is: "
    '[tool.paceline] data_job = "main.py".'
)


@dataclass(frozen=True)
class DataJob:
    name: str
    """Its runs are NAME/run_001 … in the results folder."""
    script: str


def find_job(project: Path) -> DataJob:
    """The data job of a folder. ConfigError if it is none."""
    file = project / "pyproject.toml"
    told = read_project_file(project)
    if told is None:
        raise ConfigError(f"There is no data job in {project}: it has no pyproject.toml. {_GO}")
    script = table_in(told, project, "tool", "paceline").get("data_job")
    if not isinstance(script, str):
        raise ConfigError(f"There is no data job in {project}: its pyproject.toml names none. {_GO}")
    if not (project / script).is_file():
        raise ConfigError(f"{file} names the script {script!r}, which is not there.")
    return DataJob(project_name(project), script)


def run_job(job: DataJob, args: Sequence[str], storage: Path, callbacks: Sequence[Callback] = ()) -> int:
    """Run it here, in a worker of its own, to its end; gives the exit code. One that is killed is not begun again: who
    has half written something has to look at it first."""
    launch = Launch(num_workers=1, max_restarts=0, engine="local", logdir=str(results_dir() / job.name))
    backend = Alone(storage=str(storage))
    return run_to_exit_code(program_of([job.script, *args]), launch, backend=backend, callbacks=callbacks)


@dataclass(frozen=True, kw_only=True)
class Alone(BackendConfig):
    """A script without a framework. What there is of GPUs is there for it."""

    sees_all_gpus: ClassVar[bool] = True

    storage: str | None = None
    """Part of the run, not of the shell that began it: who resumes or retries it may have another one, or none."""

    def join(self, call: Caller, *, use_gpu: bool) -> None:
        if self.storage is not None:
            call.all(_name_storage, self.storage)


def _name_storage(wire: Wire, storage: str) -> None:
    former = os.environ.get(STORAGE_VARIABLE)
    wire.leaving.callback(_set_variable, former)
    _set_variable(storage)


def _set_variable(storage: str | None) -> None:
    if storage is None:
        os.environ.pop(STORAGE_VARIABLE, None)
    else:
        os.environ[STORAGE_VARIABLE] = storage
