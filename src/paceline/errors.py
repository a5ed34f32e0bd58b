"""Every error that Paceline raises on its own account.

A user's exception keeps its own type: it is raised on the driver as it was raised in the worker, with a note that
names the rank and carries the worker's traceback. The tree below is for everything else.

    PacelineError
    ├── ArgumentError (ValueError)             an argument has a value that cannot be used
    ├── ArgumentTypeError (TypeError)          an argument has a type that cannot be used
    ├── ConfigError (ValueError)               a configuration, or the experiment that it is of, cannot be used
    ├── MissingDependencyError (ImportError)   an optional package is needed and not installed
    ├── ResourcesError (RuntimeError)          this machine does not have what was asked for
    ├── TrainerStateError (RuntimeError)       the call does not fit what the Trainer is doing now
    ├── WorkerError (RuntimeError)             something went wrong around a worker
    │   ├── WorkersLostError                   workers died more often than max_retries allows
    │   ├── WorkerStartError                   workers could not be started or joined into a group
    │   ├── ReportMismatchError                ranks ended with different numbers of reports
    │   ├── SaveMismatchError                  ranks ended with different numbers of checkpoints
    │   ├── ScriptExitError                    a launched script cannot be run, or its exit code is not 0
    │   └── TrainFunctionError                 the user's exception could not be sent to the driver
    ├── CheckpointError
    │   ├── CheckpointNotFoundError (ValueError, FileNotFoundError)
    │   ├── CheckpointValueError (TypeError)   a value that a checkpoint cannot hold safely
    │   ├── CheckpointDamagedError             a committed checkpoint does not read back
    │   └── CheckpointWriteError (OSError)     storage refused the checkpoint
    ├── DataError (ValueError)                 rows that cannot be read, or are not what was expected
    ├── StackDumpError (RuntimeError)          stacks were asked for where there are no workers
    ├── RunNotFoundError (FileNotFoundError)   a path that is not a run folder
    ├── RunDamagedError                        a file of a run folder cannot be read
    └── RunNotResumableError (RuntimeError)    a run that has ended, or whose call cannot be opened

All of them pickle, so they travel from a worker to the driver unchanged.
"""


class PacelineError(Exception):
    """The root: `except PacelineError` catches what the library itself has to say."""


class ArgumentError(PacelineError, ValueError):
    pass


class ArgumentTypeError(PacelineError, TypeError):
    pass


class ConfigError(PacelineError, ValueError):
    """Tells all that is wrong, a line each: `problems` has them one by one."""

    problems: tuple[str, ...] = ()


class MissingDependencyError(PacelineError, ImportError):
    """Names the package and the line that installs it."""

    def __init__(self, package: str, extra: str, needed_for: str = "this"):
        super().__init__(package, extra, needed_for)
        self.package, self.extra, self.needed_for = package, extra, needed_for

    def __str__(self) -> str:
        return (
            f"{self.needed_for} needs the package '{self.package}', which is not installed. "
            f"Install it with: pip install 'paceline[{self.extra}]'"
        )


class ResourcesError(PacelineError, RuntimeError):
    pass


class TrainerStateError(PacelineError, RuntimeError):
    pass


class WorkerError(PacelineError, RuntimeError):
    pass


class WorkersLostError(WorkerError):
    pass


class WorkerStartError(WorkerError):
    pass


class ReportMismatchError(WorkerError):
    pass


class SaveMismatchError(WorkerError):
    pass


class ScriptExitError(WorkerError):
    pass


class TrainFunctionError(WorkerError):
    pass


class CheckpointError(PacelineError):
    pass


class CheckpointNotFoundError(CheckpointError, ValueError, FileNotFoundError):
    pass


class CheckpointValueError(CheckpointError, TypeError):
    pass


class CheckpointDamagedError(CheckpointError):
    pass


class CheckpointWriteError(CheckpointError, OSError):
    pass


class DataError(PacelineError, ValueError):
    pass


class StackDumpError(PacelineError, RuntimeError):
    pass


class RunNotFoundError(PacelineError, FileNotFoundError):
    pass


class RunDamagedError(PacelineError):
    pass


class RunNotResumableError(PacelineError, RuntimeError):
    pass
