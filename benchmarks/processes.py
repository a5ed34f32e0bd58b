"""Start a process, wait for it, time it, read its marks, and leave nothing of it behind."""

import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.marks import MARKS_FILE, Mark, read_marks

ROOT = Path(__file__).parent.parent


class MeasurementError(Exception):
    """A figure could not be had. The message goes into the table."""


@dataclass(frozen=True)
class Finished:
    wall_s: float
    """From just before the process was started to its end."""
    marks: list[Mark]


def run_process(argv: Sequence[str], environ: Mapping[str, str] | None = None, timeout_s: float = 300) -> Finished:
    """Run it in a folder of its own, which is where its marks and runs go, and which does not outlive it.

    Raises MeasurementError when it fails or takes too long; it and all its descendants are ended then.
    """
    folder = Path(tempfile.mkdtemp(prefix="bench_"))
    try:
        wall_s = _wait_for(argv, {**_environment(folder), **(environ or {})}, folder, timeout_s)
        return Finished(wall_s, read_marks(_marks_path(folder)))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _wait_for(argv: Sequence[str], environ: Mapping[str, str], folder: Path, timeout_s: float) -> float:
    log_path = folder / "output.log"
    with log_path.open("wb") as log:
        begin = time.perf_counter()
        process = subprocess.Popen(
            argv, env=environ, cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
        )
        expired = threading.Event()
        alarm = threading.Timer(timeout_s, _expire, (expired, process.pid))
        alarm.start()
        try:
            code = process.wait()  # without a timeout, which would look at the process in steps of up to 50 ms
            wall_s = time.perf_counter() - begin
        except BaseException:
            _kill_tree(process.pid)
            process.wait()
            raise
        finally:
            alarm.cancel()
    if expired.is_set():
        raise MeasurementError(f"took longer than {timeout_s:g} s")
    if code != 0:
        raise MeasurementError(f"ended with code {code}: {_last_words(log_path.read_text(errors='replace'))}")
    return wall_s


def _environment(folder: Path) -> dict[str, str]:
    """For a measured process: one thread for each worker, nothing sent home, and this checkout importable."""
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith(("PACELINE_", "RAY_", "SGD_"))
    }
    return {
        **inherited,
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")]),
        "RAY_USAGE_STATS_ENABLED": "0",
        "HF_HUB_OFFLINE": "1",
        "TMPDIR": str(folder),  # some peers leave files there
        "PACELINE_RESULTS": str(folder / "runs"),
        MARKS_FILE: str(_marks_path(folder)),
    }


def _marks_path(folder: Path) -> Path:
    return folder / "marks.jsonl"


def _expire(expired: threading.Event, pid: int) -> None:
    expired.set()
    _kill_tree(pid)


def _kill_tree(pid: int) -> None:
    try:
        top = psutil.Process(pid)
        family = [top, *top.children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for process in family:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue


def _last_words(output: str) -> str:
    """The line that most likely says what went wrong."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line]
    return (errors or lines or ["without a word"])[-1][:200]
