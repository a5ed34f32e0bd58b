"""TensorBoard over runs: a process of its own, on a free port of the loopback, which ends with this one."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from paceline.errors import ArgumentError
from paceline.runs.load import Run
from paceline.runs.summary import read_series

_LOOK_S = 2.0
_START_S = 120.0
_URL = re.compile(r"(http://\S+)")


class Page:
    """`url` is there when it is entered; leaving ends the process and removes what was written for it."""

    def __init__(self, runs: Mapping[str, Run], port: int = 0):
        self._runs = runs
        self._port = port
        self._stack = ExitStack()
        self.url = ""

    def __enter__(self) -> "Page":
        with self._stack as undo:
            folder = Path(undo.enter_context(tempfile.TemporaryDirectory(prefix="paceline_board_")))
            self._mirrors = [_show(folder, name, run) for name, run in self._runs.items()]
            self._mirror()
            undo.callback(self._close_mirrors)
            former = signal.signal(signal.SIGTERM, _interrupt)
            undo.callback(signal.signal, signal.SIGTERM, former)
            self._process = _start(folder, self._port)
            undo.callback(_end, self._process)
            self.url = _await_url(self._process)
            self._stack = undo.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def serve(self) -> None:
        """Until it is interrupted, or TensorBoard ends; what live runs report is shown as it comes."""
        while True:
            try:
                self._process.wait(_LOOK_S)
                return
            except subprocess.TimeoutExpired:
                self._mirror()

    def _mirror(self) -> None:
        for mirror in self._mirrors:
            if mirror is not None:
                mirror.update()

    def _close_mirrors(self) -> None:
        for mirror in self._mirrors:
            if mirror is not None:
                mirror.close()


def _show(folder: Path, name: str, run: Run) -> "_Mirror | None":
    """The files that the run has written for TensorBoard, if it has; else what it reports, as such files."""
    place = folder / re.sub(r"[^\w./-]", "_", name).replace("..", "_").strip("/")
    place.parent.mkdir(parents=True, exist_ok=True)
    folders = _event_folders(run.path)
    if not folders:
        return _Mirror(place, run)
    for inside in folders:
        link = place / os.path.relpath(inside, run.path) if inside != str(run.path) else place / "events"
        link.mkdir(parents=True, exist_ok=True)
        for file in os.scandir(inside):
            if "tfevents" in file.name and file.is_file(follow_symlinks=False):
                (link / file.name).symlink_to(file.path)
    return None


def _event_folders(path: Path) -> list[str]:
    """Those with plain files for TensorBoard in them; behind no link."""
    found = []
    for folder, _, names in os.walk(path):
        wanted = [os.path.join(folder, name) for name in names if "tfevents" in name]
        if any(os.path.isfile(one) and not os.path.islink(one) for one in wanted):
            found.append(folder)
    return found


class _Mirror:
    """The metrics of a run as TensorBoard reads them."""

    def __init__(self, place: Path, run: Run):
        from tensorboardX import SummaryWriter

        self._writer: Any = SummaryWriter(str(place))
        self._run = run
        self._told: dict[str, int] = {}

    def update(self) -> None:
        for name, (steps, values) in read_series(self._run.path).items():
            for step, value in zip(steps, values, strict=True):
                if step > self._told.get(name, -1):
                    self._writer.add_scalar(name, value, step)
                    self._told[name] = step
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def _start(folder: Path, port: int) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(folder), "--host", "127.0.0.1"]
    command += ["--port", str(port), "--reload_interval", "2", "--load_fast", "false"]
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )


def _await_url(process: "subprocess.Popen[str]") -> str:
    """From what it says; it says it when it listens."""
    alarm = threading.Timer(_START_S, process.kill)
    alarm.start()
    said = []
    try:
        assert process.stderr is not None
        for line in process.stderr:
            said.append(line)
            match = _URL.search(line)
            if match and " at " in line:
                threading.Thread(target=_drain, args=(process.stderr,), daemon=True, name="paceline-board").start()
                return match[1]
    finally:
        alarm.cancel()
    raise ArgumentError(f"TensorBoard did not start: {''.join(said[-5:]).strip() or 'it said nothing'}")


def _drain(pipe: Any) -> None:
    for _ in pipe:
        pass


def _end(process: "subprocess.Popen[str]") -> None:
    process.terminate()
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
