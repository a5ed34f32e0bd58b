"""Run a script, or a command, on many workers: what `paceline run` does."""

import os
import shutil
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.machinery import PathFinder
from importlib.util import find_spec

from paceline.backends.base import BackendConfig
from paceline.backends.torchrun import TorchrunConfig
from paceline.callbacks import Callback
from paceline.errors import (
    ArgumentError,
    ArgumentTypeError,
    MissingDependencyError,
    PacelineError,
    ResourcesError,
    ScriptExitError,
)
from paceline.launch.imports import file_of, modules_needed
from paceline.launch.program import Command, Script
from paceline.launch.size import Size
from paceline.registry import LAUNCH_WORKER_MODULES
from paceline.runs.logdir import resolve_logdir
from paceline.workers import ray_is_in_use, resolve_engine, surroundings
from paceline.workers.base import Engine
from paceline.workers.local import LocalEngine

ENGINES = ("local", "ray")
SUCCEEDED, FAILED, REFUSED, INTERRUPTED = 0, 1, 2, 130


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What is asked for, beside the script; see `paceline run --help`."""

    num_workers: Size = 1
    max_restarts: int = 3
    engine: str | None = None
    logdir: str | None = None
    cpus_per_worker: float | None = None
    gpus_per_worker: float = 0
    grace_s: float = 30.0
    preload: tuple[str, ...] = ()


def program_of(words: Sequence[str], *, is_module: bool = False, no_python: bool = False) -> Script | Command:
    """What a command line names, looked at as far as that is possible without running it. ArgumentError if it is not
    there."""
    if not words:
        raise ArgumentError("There is no script: paceline run -n 2 train.py ARGS")
    if is_module and no_python:
        raise ArgumentError("-m and --no-python contradict each other: a module is run by Python.")
    target, *args = words
    if no_python:
        if shutil.which(target) is None:
            raise ArgumentError(f"There is no command {target!r}, or it may not be executed.")
        return Command(tuple(words), surroundings.cwd())
    if is_module and not _can_be_found(target.partition(".")[0]):
        raise ArgumentError(f"There is no module {target!r}, neither in {os.getcwd()} nor installed.")
    if not is_module and not os.path.exists(target):
        hint = f" For a module, say -m {target}." if not target.endswith(".py") and "/" not in target else ""
        raise ArgumentError(f"There is no script {target!r} in {os.getcwd()}.{hint}")
    is_path_safe = bool(sys.flags.safe_path)
    return Script(
        target, tuple(args), is_module, is_path_safe, None if is_path_safe else sys.path[0], surroundings.cwd()
    )


def _can_be_found(package: str) -> bool:
    with suppress(ImportError, ValueError):
        found = PathFinder.find_spec(package, [os.getcwd(), *sys.path])
        return found is not None or find_spec(package) is not None
    return False


def run_to_exit_code(
    program: Script | Command,
    launch: Launch,
    *,
    backend: BackendConfig | None = None,
    callbacks: Sequence[Callback] = (),
) -> int:
    """Run it to its end, say on standard error what went wrong, and give the exit code: 0; 1 for whatever happens in
    the script or to its workers; 2 for what cannot be started; 130 after Ctrl-C. SIGTERM raises SystemExit(143)."""
    try:
        engine = _engine(program, launch)
        backend = backend or TorchrunConfig(max_restarts=launch.max_restarts)
        backend.check()
        logdir = resolve_logdir(launch.logdir, prefix=program.__name__.removesuffix(".py"))
        engine.warm(backend.preload)
        from paceline.trainer import Trainer  # torch is loaded meanwhile, in another process

        trainer = Trainer(
            backend,
            num_workers=launch.num_workers,
            use_gpu=launch.gpus_per_worker > 0,
            gpus_per_worker=launch.gpus_per_worker or None,
            cpus_per_worker=launch.cpus_per_worker,
            logdir=logdir,
            max_retries=launch.max_restarts,
            engine=engine,
            preemption_grace_s=launch.grace_s,
        )
    except SyntaxError as error:
        traceback.print_exception(type(error), error, None)
        return FAILED
    except (ArgumentError, ArgumentTypeError, MissingDependencyError, ResourcesError) as error:
        return refuse(error)
    try:
        with _main_file(program):
            trainer.run(program, callbacks=list(callbacks))
    except KeyboardInterrupt as interrupt:
        _say(f"Interrupted: {interrupt}")
        return INTERRUPTED
    except ResourcesError as error:
        return refuse(error)
    except Exception as error:
        _explain(error)
        return FAILED
    finally:
        trainer.shutdown()
    return SUCCEEDED


@contextmanager
def _main_file(program: Script | Command) -> Iterator[None]:
    """Inside, the script counts as this program's: by its folder the run folder's git commit is found."""
    main = sys.modules["__main__"]
    former = getattr(main, "__file__", None)
    main.__file__ = os.path.abspath((_source(program) if isinstance(program, Script) else None) or program.__name__)
    try:
        yield
    finally:
        main.__file__ = former


def refuse(error: Exception) -> int:
    _say(str(error))
    return REFUSED


def _engine(program: Script | Command, launch: Launch) -> Engine:
    name = launch.engine or ("ray" if ray_is_in_use() else "local")
    if name not in ENGINES:
        raise ArgumentError(f"--engine {name}: expected {' or '.join(ENGINES)}.")
    if name != "local":
        return resolve_engine(name, max_workers=1)
    for module in launch.preload:
        if not _can_be_found(module.partition(".")[0]):
            raise ArgumentError(f"--preload {module}: there is no such module in {os.getcwd()}, nor installed.")
    source = _source(program) if isinstance(program, Script) else None
    needed = modules_needed(source, sys.path) if source is not None else ()
    return LocalEngine(preload=(*LAUNCH_WORKER_MODULES, *needed, *launch.preload))


def _source(script: Script) -> str | None:
    if not script.is_module:
        return None if script.is_container else script.target
    path = [os.getcwd(), *sys.path]
    return file_of(f"{script.target}.__main__", path) or file_of(script.target, path)


def _explain(error: Exception) -> None:
    """What the library itself has to say, in a line; an exception of the script's, as its rank has told it."""
    notes = [str(note) for note in getattr(error, "__notes__", ())]
    if isinstance(error, ScriptExitError):
        _say("\n".join([str(error), *notes[1:]]))  # where it called sys.exit is no news
    elif len(notes) > 1:  # first what happened on which rank, then where the run folder is
        _say("\n".join([notes[0].replace("the training function", "the script", 1), *notes[1:]]))
    else:
        said = (
            str(error).replace("max_retries", "--max-restarts")
            if isinstance(error, PacelineError)
            else _formatted(error)
        )
        _say("\n".join([said, *notes]))


def _formatted(error: Exception) -> str:
    """With our own lines: it is none of the script's."""
    return "".join(traceback.format_exception(error))


def _say(text: str) -> None:
    print(f"paceline: {text}", file=sys.stderr, flush=True)
