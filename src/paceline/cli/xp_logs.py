"""`xp logs` and `xp wait`: a run while it goes on."""

import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.asking import (
    FAILED,
    INTERRUPTED,
    OK,
    TIMED_OUT,
    Address,
    Json,
    Words,
    add_verb,
    give,
    give_json,
    pick_anywhere,
    say,
)

if TYPE_CHECKING:
    from paceline.runs.load import Run

_LOGS = """Print what a run prints, and follow it.

\b
  paceline xp logs                          the newest run
  paceline xp logs digits 3 --rank 0
  paceline xp logs digits --tail 50 --no-follow
  paceline xp logs digits --grep 'loss|error'
  paceline xp logs digits 3 --address http://head:8265    a run on a Ray cluster, whose folder is not here

Ctrl-C leaves the run alone. Lines are cleaned of what a terminal would act on; --raw gives them as they are.
"""
_WAIT = """Wait until a run has ended.

\b
  paceline xp wait digits && paceline xp show digits
  paceline xp wait digits 3 --timeout 1h

Exit code: 0 if it succeeded, 1 if not, 124 if it had not ended in time.
"""
_LOOK_S = 0.2
_BLOCK_BYTES = 1 << 20
_LONGEST_LINE_BYTES = 4 << 20


def logs(
    words: Words = None,
    follow: Annotated[
        bool | None, typer.Option("--follow/--no-follow", "-f", help="Default: while it runs.", show_default=False)
    ] = None,
    tail: Annotated[
        int | None, typer.Option("--tail", "-n", metavar="N", min=0, help="The last lines of each rank.")
    ] = None,
    rank: Annotated[list[int] | None, typer.Option(metavar="RANK", help="Repeatable. Default: all.")] = None,
    grep: Annotated[
        str | None, typer.Option(metavar="PATTERN", help="Lines that contain this regular expression.")
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Bytes as they were printed.")] = False,
    json: Json = False,
    address: Address = None,
) -> None:
    [found] = pick_anywhere(words, address)
    is_wanted = _matching(grep)
    if hasattr(found, "cluster"):
        _logs_of_job(found, rank, follow, tail, is_wanted, raw, json)
        return
    run = found.run
    is_followed = run.is_alive if follow is None else follow
    tails: dict[int, _Tail] = {}
    try:
        while True:
            is_over = not run.is_alive  # asked first: what is read afterwards is then all there will be
            for number in _ranks(run, rank):
                tails.setdefault(number, _Tail(run, number, tail))
            for number, one in sorted(tails.items()):
                lines = filter(is_wanted, one.lines(is_last=is_over or not is_followed, raw=raw))
                _print(number, lines, len(tails) > 1 or len(run.status.worker_pids) > 1, json)
            if is_over or not is_followed:
                break
            time.sleep(_LOOK_S)
    except KeyboardInterrupt:
        if run.is_alive:
            say(f"\n{found.name} goes on. `paceline xp stop {found.name}` would stop it.")
        raise typer.Exit(INTERRUPTED) from None
    if not tails:
        say(f"{found.name} has no logs{f' of rank {rank}' if rank else ''}.")
    if is_followed:
        say(f"{found.name}: {run.status.state.value}{f' ({run.status.reason})' if run.status.reason else ''}")


def _logs_of_job(found: Any, rank: list[int] | None, *options: Any) -> None:
    from paceline.cli.cluster_runs import print_logs
    from paceline.errors import ArgumentError

    if rank:
        raise ArgumentError(f"--rank: the folder of {found.name} is not here, and its job has one log for all ranks.")
    try:
        print_logs(found, *options)
    except KeyboardInterrupt:
        say(f"\n{found.name} goes on. `paceline xp stop {found.name}` would stop it.")
        raise typer.Exit(INTERRUPTED) from None


def _matching(pattern: str | None) -> Callable[[str], bool]:
    import re

    from paceline.errors import ArgumentError

    if pattern is None:
        return lambda line: True
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ArgumentError(f"--grep {pattern!r} is no regular expression: {error}.") from None
    return lambda line: compiled.search(line) is not None


def _ranks(run: "Run", wanted: list[int] | None) -> list[int]:
    from paceline.regular_files import is_inside

    logs_dir = run.path / "logs"
    try:
        names = os.listdir(logs_dir) if is_inside(logs_dir, run.path) else []
    except OSError:
        return []
    numbers = [name[5:-4] for name in names if name.startswith("rank_") and name.endswith(".log")]
    found = sorted(int(number) for number in numbers if number.isascii() and number.isdecimal() and len(number) < 7)
    return [number for number in found if not wanted or number in wanted]


def _print(rank: int, lines: Iterable[str], is_named: bool, json: bool) -> None:
    from paceline.cli.drawing import clean_json
    from paceline.json_text import encode

    if json:
        give(clean_json(encode({"rank": rank, "line": line}).decode()) for line in lines)
    else:
        give(f"[rank {rank}] {line}" if is_named else line for line in lines)


class _Tail:
    """The lines of one rank's log, from where the last call has left off. Of a log that was replaced or cut short
    meanwhile, all that is there now."""

    def __init__(self, run: "Run", rank: int, num_last: int | None):
        self._path, self._root = run.path / "logs" / f"rank_{rank}.log", run.path
        self._place = 0
        self._file: tuple[int, int] | None = None
        self._rest = b""
        self._num_last = num_last

    def lines(self, is_last: bool, raw: bool) -> Iterator[str]:
        from paceline.cli.drawing import clean_lines

        if self._num_last is not None:
            self._skip(self._num_last)
            self._num_last = None
        while True:
            block = self._read()
            data = self._rest + block
            whole, newline, self._rest = data.rpartition(b"\n") if b"\n" in data else (b"", b"", data)
            if newline:
                text = whole.decode(errors="replace")
                yield from text.split("\n") if raw else clean_lines(text)
            if len(self._rest) > _LONGEST_LINE_BYTES:
                text, self._rest = self._rest.decode(errors="replace"), b""
                yield from [text] if raw else clean_lines(text)
            if not block:
                break
        if is_last and self._rest:
            text, self._rest = self._rest.decode(errors="replace"), b""
            yield from [text] if raw else clean_lines(text)

    def _read(self, most: int = _BLOCK_BYTES) -> bytes:
        with _opened(self._path, self._root) as fd:
            if fd is None:
                return b""
            found = os.fstat(fd)
            is_another = self._file not in (None, (found.st_dev, found.st_ino))
            if is_another or found.st_size < self._place:
                self._place = 0
            self._file = found.st_dev, found.st_ino
            data = os.pread(fd, most, self._place)
        self._place += len(data)
        return data

    def _skip(self, num_last: int) -> None:
        """To the beginning of the last lines, looked for from the end."""
        with _opened(self._path, self._root) as fd:
            if fd is None:
                return
            end = place = os.fstat(fd).st_size
            num_found, data = 0, b""
            while place > 0 and num_found <= num_last:
                size = min(65_536, place)
                place -= size
                block = os.pread(fd, size, place)
                num_found += block.count(b"\n")
                data = block + data
                if len(data) > _LONGEST_LINE_BYTES:
                    break
        is_ended = data.endswith(b"\n")
        lines = data.removesuffix(b"\n").split(b"\n")[-num_last:] if num_last and data else []
        self._place = end - len(b"\n".join(lines)) - (is_ended and bool(lines))


@contextmanager
def _opened(path: Path, root: Path) -> Iterator[int | None]:
    """None if there is none (yet)."""
    from paceline.errors import RunDamagedError
    from paceline.regular_files import open_regular

    try:
        fd = open_regular(path, root)
    except FileNotFoundError:
        yield None
        return
    except OSError as error:
        raise RunDamagedError(f"{path} cannot be read: {error.strerror}.") from None
    try:
        yield fd
    finally:
        os.close(fd)


def wait(
    words: Words = None,
    timeout: Annotated[
        str | None, typer.Option(metavar="1h", help="Default: as long as it takes.", show_default=False)
    ] = None,
    json: Json = False,
    address: Address = None,
) -> None:
    from paceline.runs.conditions import seconds

    [found] = pick_anywhere(words, address)
    deadline = None if timeout is None else time.monotonic() + seconds(timeout, unit="s")
    if hasattr(found, "cluster"):
        found = found.as_of(found.cluster.await_end(found.job.id, deadline))
        state, reason, is_final = found.state.value, found.reason or None, found.state.is_final
    else:
        status = await_end(found.run, deadline)
        state, reason, is_final = status.state.value, status.reason, status.state.is_final
    if json:
        give_json({"name": found.name, "state": state, "reason": reason})
    else:
        say(f"{found.name}: {state}{f' ({reason})' if reason else ''}")
    if not is_final:
        raise typer.Exit(TIMED_OUT)
    raise typer.Exit(OK if state == "SUCCEEDED" else FAILED)


def await_end(run: "Run", deadline: float | None) -> Any:
    """Its last status: not a final one, if the time was over."""
    while True:
        status = run.status
        left_s = _LOOK_S if deadline is None else deadline - time.monotonic()
        if status.state.is_final or left_s <= 0:
            return status
        time.sleep(min(_LOOK_S, left_s))


def add_to(group: typer.Typer) -> None:
    add_verb(group, "logs", _LOGS, logs)
    add_verb(group, "wait", _WAIT, wait)
