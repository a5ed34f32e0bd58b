"""In a worker: what a program is told when it begins, and what its exit code means."""

import os

from paceline.errors import ScriptExitError
from paceline.session import current, world_rank


def tell_restart_count() -> None:
    session = current()
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(session.attempt if session is not None else 0)


def is_stop_wanted() -> bool:
    session = current()
    return session is not None and session.is_stop_wanted


def check_exit_code(code: int, what: str) -> None:
    """ScriptExitError for one that is not 0, unless the run was asked to end: then any code is a way to leave."""
    if code and not is_stop_wanted():
        raise ScriptExitError(f"Rank {world_rank()}: {what} ended with exit code {code}.") from None
