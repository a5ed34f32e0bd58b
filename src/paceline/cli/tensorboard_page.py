"""TensorBoard over runs: a process of its own, on a free port of the loopback, which ends with this one."""

import os
import re
import signal
import stat
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
from paceline.regular_files import walk
from paceline.runs.json_lines import JsonLinesReader
from paceline.runs.load import Run
from paceline.runs.summary import collect

_LOOK_S = 2.0
_START_S = 120.0
_URL = re.compile(r"(http://\S+)")
_TENSORBOARD = """
import sys, types
sys.modules["tensorboard.compat.notf"] = types.ModuleType("notf")
from tensorboard.main import run_main
run_main()
"""
"""Where TensorFlow is installed, `python -m tensorboard.main` imports it, for many seconds, to read files that
TensorBoard can read as well. A module of that name tells it to do without: see tensorboard/compat."""


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
            self._shown = [_Shown(_place(folder, name), run) for name, run in self._runs.items()]
            undo.callback(self._close)
            self._update()
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
                self._update()

    def _update(self) -> None:
        for shown in self._shown:
            shown.update()

    def _close(self) -> None:
        for shown in self._shown:
            shown.close()


def _place(folder: Path, name: str) -> Path:
    """Its name in TensorBoard; two runs never have the same."""
    place = folder / (re.sub(r"[^\w./-]", "_", name).replace("..", "_").strip("/") or "run")
    while place.exists():
        place = place.with_name(f"{place.name}_")
    place.mkdir(parents=True)
    return place


class _Shown:
    """A run in TensorBoard's folder: links to the files that it has written for TensorBoard, if it has; else what it
    reports, as such files."""

    def __init__(self, place: Path, run: Run):
        self._links = _Links(place, run)
        self._place, self._run = place, run
        self._mirror: _Mirror | None = None

    def update(self) -> None:
        if self._links.update():
            return
        self._mirror = self._mirror or _Mirror(self._place, self._run)
        self._mirror.update()

    def close(self) -> None:
        if self._mirror is not None:
            self._mirror.close()


class _Links:
    def __init__(self, place: Path, run: Run):
        self._place, self._path = place, run.path
        self._linked: set[str] = set()

    def update(self) -> bool:
        """Whether there is a file; also those that have come since. Plain files alone, and behind no link."""
        for folder, _, names in walk(self._path):
            for name in names:
                file = os.path.join(folder, name)
                if "tfevents" in name and file not in self._linked and stat.S_ISREG(os.lstat(file).st_mode):
                    inside = os.path.relpath(folder, self._path)
                    link = self._place / ("events" if inside == "." else inside) / name
                    link.parent.mkdir(parents=True, exist_ok=True)
                    link.symlink_to(file)
                    self._linked.add(file)
        return bool(self._linked)


class _Mirror:
    """The metrics of a run as TensorBoard reads them."""

    def __init__(self, place: Path, run: Run):
        from tensorboardX import SummaryWriter

        self._writer: Any = SummaryWriter(str(place))
        self._lines = JsonLinesReader(str(run.path / "metrics.jsonl"))
        self._told: dict[str, int] = {}

    def update(self) -> None:
        """Adds what has come since. A step that is made again after a restart is not told twice."""
        for name, (steps, values) in collect(self._lines.read()).items():
            for step, value in zip(steps, values, strict=True):
                if step > self._told.get(name, -1):
                    self._writer.add_scalar(name, value, step)
                    self._told[name] = step
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def _start(folder: Path, port: int) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", _TENSORBOARD, "--logdir", str(folder), "--host", "127.0.0.1"]
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
