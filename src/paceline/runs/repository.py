"""The version of the user's code: commit, branch and uncommitted changes of the git repository it lies in."""

import os
import subprocess
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_EMPTY_TREE = "4b825dc642cb6eb9a060e54bf8d69288fbee4904"
_MAX_STATUS_BYTES = 1_000_000
_MAX_UNTRACKED = 1_000


@dataclass(frozen=True)
class Repository:
    """`diff` is what `git apply` needs on top of `commit`, with the names of untracked files as comments."""

    root: str
    commit: str | None
    branch: str | None
    is_dirty: bool
    diff: str
    is_diff_cut: bool

    def summary(self) -> dict[str, Any]:
        return {
            "root": self.root,
            "commit": self.commit,
            "branch": self.branch,
            "dirty": self.is_dirty,
            "diff_cut": self.is_diff_cut,
        }


def describe_repository(
    directory: Path | str, *, timeout_s: float = 5.0, max_diff_bytes: int = 1_000_000
) -> Repository | None:
    """None where there is no git, no repository, or no answer within `timeout_s` in all."""
    deadline = time.monotonic() + timeout_s
    try:
        root = _git(directory, deadline, "rev-parse", "--show-toplevel").decode().rstrip("\n")
        status = _git(root, deadline, "status", "--porcelain=v2", "--branch", "-z", "--ignore-submodules=all")
    except (OSError, subprocess.SubprocessError):
        return None
    entries = status.decode(errors="replace").split("\0")
    headers = dict(entry[2:].split(" ", 1) for entry in entries if entry.startswith("# ") and " " in entry[2:])
    commit = _unless(headers.get("branch.oid"), "(initial)")
    untracked = [entry[2:] for entry in entries if entry.startswith("? ")]
    diff, is_cut = _diff(root, deadline, commit, max_diff_bytes)
    return Repository(
        root=root,
        commit=commit,
        branch=_unless(headers.get("branch.head"), "(detached)"),
        is_dirty=any(entry and not entry.startswith("# ") for entry in entries),
        diff=_untracked_comment(untracked) + diff,
        is_diff_cut=is_cut,
    )


def _unless(value: str | None, placeholder: str) -> str | None:
    return None if value == placeholder else value


def _diff(root: str, deadline: float, commit: str | None, max_bytes: int) -> tuple[str, bool]:
    # No external diff or text conversion: those are programs that a repository can choose.
    question = ("diff", "--no-ext-diff", "--no-textconv", "--no-color", "--ignore-submodules=all")
    try:
        data = _git(root, deadline, *question, commit or _EMPTY_TREE, "--", max_bytes=max_bytes + 1)
    except (OSError, subprocess.SubprocessError) as error:
        return f"# the diff could not be read: {error}\n", True
    if len(data) <= max_bytes:
        return data.decode(errors="replace"), False
    return data[:max_bytes].decode(errors="replace") + f"\n# cut here: only {max_bytes} bytes are kept\n", True


def _untracked_comment(names: list[str]) -> str:
    if not names:
        return ""
    shown = [f"#   {name!r}" for name in names[:_MAX_UNTRACKED]]
    if len(names) > len(shown):
        shown.append(f"#   and {len(names) - len(shown)} more")
    return "\n".join(["# untracked files, not in this diff:", *shown, ""])


def _git(directory: Path | str, deadline: float, *args: str, max_bytes: int = _MAX_STATUS_BYTES) -> bytes:
    """Standard output, at most `max_bytes` of it; CalledProcessError or TimeoutExpired when git fails."""
    command = ["git", "-C", str(directory), "-c", "core.fsmonitor=false", "-c", "core.quotePath=false", *args]
    timeout_s = max(deadline - time.monotonic(), 0.01)
    # Without optional locks our questions do not disturb a git that the user runs at the same time.
    environ = {**os.environ, "GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environ
    ) as process:
        assert process.stdout is not None
        timer = threading.Timer(timeout_s, process.kill)
        timer.daemon = True
        timer.start()
        try:
            data = process.stdout.read(max_bytes)
            is_full = len(data) == max_bytes
            if is_full:
                process.kill()  # a diff may be as large as the disk; nobody waits for the rest
        finally:
            process.wait()
            timer.cancel()
            timer.join()
    if time.monotonic() >= deadline:
        raise subprocess.TimeoutExpired(command, timeout_s)
    if process.returncode != 0 and not is_full:
        raise subprocess.CalledProcessError(process.returncode, command)
    return data
