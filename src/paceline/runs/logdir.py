"""Where runs go: the results folder, the folder of one Trainer below it, and its numbered run folders."""

import errno
import functools
import itertools
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from paceline.errors import ArgumentError, ArgumentTypeError

_GIVE_ANOTHER = "Give a logdir in a folder that this user may write to"
RUN_DIR_NAME = re.compile(r"run_(\d{3,})")


def results_dir() -> Path:
    """`PACELINE_RESULTS`, or `~/paceline_results`. Read at each call and not created."""
    chosen = os.environ.get("PACELINE_RESULTS") or "~/paceline_results"
    return Path(os.path.abspath(_expand_home(chosen)))


def resolve_logdir(
    logdir: str | os.PathLike[str] | None, prefix: str = "sgd", *, clock: Callable[[], float] = time.time
) -> Path:
    """The absolute path of a Trainer's folder, which exists afterwards.

    None makes a new folder, named after the present second, that no other call gets. A path that is absolute
    or starts with ~ is used as it is, any other lies below the results folder; both may exist already.
    """
    if logdir is None:
        return _make_dated(results_dir(), prefix, clock())
    path = _locate(logdir)
    try:
        path.mkdir(parents=True, exist_ok=True)
        # Refused now, because a run would hear of it only after the workers started.
        if not os.access(path, os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids):
            raise PermissionError(13, os.strerror(13), str(path))
    except OSError as error:
        raise unusable(path, error) from error
    return path


def make_run_dir(logdir: Path) -> Path:
    """The next `run_001`, `run_002` … in `logdir`; processes that do this at once get different ones."""
    try:
        logdir.mkdir(parents=True, exist_ok=True)
        return _make_first_free(logdir / f"run_{n:03d}" for n in itertools.count(_last_number(logdir) + 1))
    except OSError as error:
        raise unusable(logdir, error) from error


@functools.lru_cache(maxsize=1024)  # thousands of folders have a run_001
def run_number(name: str) -> int | None:
    match = RUN_DIR_NAME.fullmatch(name)
    return int(match[1]) if match else None


def _last_number(logdir: Path) -> int:
    return max((run_number(name) or 0 for name in os.listdir(logdir)), default=0)


def _make_dated(results: Path, prefix: str, now: float) -> Path:
    name = f"{prefix}_{time.strftime('%Y-%m-%d_%H-%M-%S', time.localtime(now))}"
    suffixes = itertools.chain([""], (f"_{n}" for n in itertools.count(2)))
    try:
        results.mkdir(parents=True, exist_ok=True)
        return _make_first_free(results / (name + suffix) for suffix in suffixes)
    except OSError as error:
        raise unusable(results, error) from error


def _make_first_free(candidates: Iterator[Path]) -> Path:
    for path in candidates:  # mkdir is the test and the claim in one, so two processes never share a folder
        try:
            path.mkdir()
        except FileExistsError:
            continue
        return path
    raise AssertionError("the candidates are endless")


def _locate(logdir: str | os.PathLike[str]) -> Path:
    if not isinstance(logdir, str | os.PathLike):
        raise ArgumentTypeError(
            f"logdir must be a path (str or pathlib.Path) or None, not {type(logdir).__name__}: {logdir!r}"
        )
    text = os.fspath(logdir)
    if not text.strip():
        raise ArgumentError("logdir is empty. Give the path of a folder, or None for a new one named by the time.")
    if "://" in text:
        raise ArgumentError(
            f"logdir must be a local folder, got the URL {text!r}. A run writes its logs locally; to keep "
            "checkpoints at a URL use CheckpointStrategy(storage_path=...)."
        )
    root = results_dir()
    path = Path(os.path.abspath(root / _expand_home(text)))
    if not os.path.isabs(_expand_home(text)) and not path.is_relative_to(root):
        raise ArgumentError(
            f"logdir {text!r} is relative, so it is taken below the results folder {root}, "
            "and leads out of it. Give an absolute path instead."
        )
    if run_number(path.name) is not None and not path.exists():
        raise ArgumentError(
            f"logdir {text!r} is called as runs themselves are, so that listings would take it for one, and not find "
            "those in it. Give it another name."
        )
    return path


def _expand_home(text: str) -> str:
    expanded = os.path.expanduser(text)
    if expanded.startswith("~"):
        raise ArgumentError(f"{text!r} names the home folder of a user that this machine does not have.")
    return expanded


def unusable(path: Path, error: OSError) -> ArgumentError:
    """What to tell who wants to write runs there, where storage has refused it with this error."""
    culprit = next((p for p in (path, *path.parents) if p.exists() and not p.is_dir()), None)
    if culprit is not None:
        why = f"{culprit} is a file" if culprit.is_file() else f"{culprit} is not a folder"
    else:
        why = error.strerror or str(error)
    is_full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    what = "Make room there, or give a logdir on another disk" if is_full else _GIVE_ANOTHER
    return ArgumentError(f"runs cannot be written to {path}: {why}. {what}, or set PACELINE_RESULTS to one.")
