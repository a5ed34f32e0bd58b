"""What a run needs to go on without the process that began it: the function, its config, the Trainer's arguments.

They are pickled, and unpickling runs code. So the file carries a seal, made with a key of this user's account: a folder
that came from somewhere else is not opened, unless somebody vouches for it with `trusted=True`.
"""

import contextlib
import functools
import hashlib
import hmac
import os
import secrets
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.errors import RunNotResumableError
from paceline.regular_files import read_regular
from paceline.runs.durable import write_atomic
from paceline.runs.request import RunRequest
from paceline.workers import contents, parcel

CALL_FILE = "call.pkl"
LARGE_BYTES = 10 << 20
"""Above this, a function says what it carries with it."""
_SEAL_BYTES = hashlib.sha256().digest_size
_MOST_BYTES = 4 * 2**30


def keep_call(run_dir: Path, request: RunRequest) -> None:
    """OSError when storage refuses. A call that cannot be pickled is not kept: the run itself will say why. Nor is its
    dataset, unless it is one of files: others may be large, and a Ray dataset points into the memory of its cluster."""
    try:
        # Each is opened by itself: first the paths, by which the modules of the others are found, and the function only
        # when no other one is given.
        is_kept = request.dataset is not None and request.dataset.is_portable
        rest = replace(request, train_func=_forgotten, dataset=request.dataset if is_kept else None)
        parts = [os.path.abspath(entry) for entry in sys.path], rest, request.train_func
        packed = [parcel.dumps(part) for part in parts]
    except Exception:
        return
    if len(packed[-1]) > LARGE_BYTES:
        _warn_of_size(request.train_func)
    payload = parcel.dumps(packed)
    write_atomic(run_dir / CALL_FILE, _seal(payload) + payload, durable=False)


def _warn_of_size(train_func: Callable[..., Any]) -> None:
    """By `warnings`, which say it once."""
    way, num_bytes = contents.largest(train_func, "train_func")
    warnings.warn(
        f"{way} takes {num_bytes / 2**20:.0f} MB. It is sent to every worker, and kept in the folder of every run: "
        "load or make it inside the function instead.",
        stacklevel=2,
    )


def _forgotten() -> None:
    """Stands for the function where that is kept apart."""


def load_call(run_dir: Path, fn: Callable[..., Any] | None = None, trusted: bool = False) -> RunRequest:
    """The call, with `fn` in place of its function if there is one. Runs code that the folder holds, so only if it was
    written by this user, or is trusted."""
    path = run_dir / CALL_FILE
    try:
        data = read_regular(path, _MOST_BYTES)
    except OSError as error:
        raise RunNotResumableError(
            f"{run_dir} does not hold the call that began the run ({error.strerror}), so it cannot be resumed as it "
            "is. Start a new run with checkpoint=load_run(run_dir).latest_checkpoint_path."
        ) from error
    seal, payload = data[:_SEAL_BYTES], data[_SEAL_BYTES:]
    if not trusted and not hmac.compare_digest(seal, _seal(payload)):
        raise RunNotResumableError(
            f"{path} was not written by this user's account, or was changed since: opening it could run foreign code. "
            "If you know where it comes from, say Trainer.resume(run_dir, trusted=True)."
        )
    try:
        sys_path, rest, function = parcel.loads(payload)
        sys.path += [entry for entry in parcel.loads(sys_path) if entry not in sys.path]
        request: RunRequest = parcel.loads(rest)
        return replace(request, train_func=fn or parcel.loads(function))
    except Exception as error:
        raise RunNotResumableError(
            f"The call in {path} cannot be opened here ({type(error).__name__}: {error}). A module that it needs may "
            "be missing or changed. Give the function again: Trainer.resume(run_dir, train_func)."
        ) from error


def is_own_call(run_dir: Path) -> bool:
    """Whether a run folder holds a call that this user's account has written. Opens nothing of it."""
    try:
        data = read_regular(run_dir / CALL_FILE, _MOST_BYTES)
    except OSError:
        return False
    return hmac.compare_digest(data[:_SEAL_BYTES], _seal(data[_SEAL_BYTES:]))


def seal_place(place: str) -> str:
    """For a path or URL that a run folder names: shows later that this user's account has written it down."""
    return _seal(b"\0place\0" + place.encode(errors="surrogatepass")).hex()  # which no pickle begins with


def is_sealed(place: str, seal: object) -> bool:
    return isinstance(seal, str) and hmac.compare_digest(seal.encode(), seal_place(place).encode())


def _seal(payload: bytes) -> bytes:
    return hmac.new(_key(), payload, hashlib.sha256).digest()


def _key() -> bytes:
    """Made at the first use. Where there is no place to keep it, each process has its own, and no other's matches."""
    state = os.environ.get("XDG_STATE_HOME") or ""
    if not os.path.isabs(state):
        state = os.path.expanduser("~/.local/state")
    if not os.path.isabs(state):  # a user without a home
        return _key_of_this_process()
    state_dir = Path(state, "paceline")
    path = state_dir / "seal.key"
    with contextlib.suppress(OSError):
        if not path.exists():
            state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
            with contextlib.suppress(FileExistsError):
                _write_once(path, secrets.token_bytes(32))
        return path.read_bytes()
    return _key_of_this_process()


@functools.cache
def _key_of_this_process() -> bytes:
    return secrets.token_bytes(32)


def _write_once(path: Path, data: bytes) -> None:
    """Whole or not at all, and never over another process's."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        os.write(fd, data)
        os.fsync(fd)
        os.link(beside, path)
    finally:
        os.close(fd)
        os.unlink(beside)
