"""The command line as its user waits for it: `paceline xp ls` over 10,000 run folders, the first time and again, beside
`list_runs` with states; and how soon it answers where there is little to do, beside Python itself."""

import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.figures import SECONDS, Figure, Row, judged
from benchmarks.processes import run_process
from benchmarks.rounds import Effort

NUM_RUNS = 10_000
FIRST_S, AGAIN_S, START_S = 2.0, 0.4, 0.2
NUM_FEW = 20
PACELINE = [sys.executable, "-m", "paceline"]
LIST = [*PACELINE, "xp", "ls"]
STARTS = {"`paceline --help`": ["--help"], "`xp --help`": ["xp", "--help"], "`train --help`": ["train", "--help"]}
PYTHON = [sys.executable, "-c", "pass"]
PLAIN = [sys.executable, "-c", "import paceline; print(len([run.status for run in paceline.list_runs()]))"]


def measure(effort: Effort, say: Callable[[str], None]) -> list[Row]:
    folder = Path(tempfile.mkdtemp(prefix="bench_runs_"))
    try:
        say(f"making {NUM_RUNS} run folders")
        _make(folder / "results", NUM_RUNS)
        _make(folder / "few", NUM_FEW)
        time.sleep(3)  # what is younger than two seconds is not kept in the index
        first, again, plain = _measured(folder, effort.num_rounds, say)
        starts = _measured_starts(folder, effort.num_rounds, say)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    what = f"`xp ls`, {NUM_RUNS:,} run folders, whole program"
    return [
        _row(f"{what}: the first time", first, FIRST_S, plain),
        _row(f"{what}: again", again, AGAIN_S, plain),
        *starts,
    ]


def _measured(folder: Path, num_rounds: int, say: Callable[[str], None]) -> tuple[Figure, Figure, Figure]:
    first, again, plain = [], [], []
    environ = _environ(folder, "results")
    for number in range(num_rounds):
        say(f"round {number + 1} of {num_rounds}")
        shutil.rmtree(folder / "cache", ignore_errors=True)
        first.append(run_process(LIST, environ).wall_s)
        again.append(run_process(LIST, environ).wall_s)
        plain.append(run_process(PLAIN, environ).wall_s)
    return Figure("paceline", tuple(first)), Figure("paceline", tuple(again)), Figure("list_runs", tuple(plain))


def _measured_starts(folder: Path, num_rounds: int, say: Callable[[str], None]) -> list[Row]:
    say("starts")
    environ = _environ(folder, "few")
    commands = {name: [*PACELINE, *words] for name, words in STARTS.items()} | {f"`xp ls`, {NUM_FEW} runs": LIST}
    samples: dict[str, list[float]] = {name: [] for name in ("python", *commands)}
    for _ in range(num_rounds):
        for name, command in {"python": PYTHON, **commands}.items():
            samples[name].append(run_process(command, environ).wall_s)
    python = Figure("python -c pass", tuple(samples.pop("python")))
    return [
        _row(f"{name}, whole program", Figure("paceline", tuple(s)), START_S, python) for name, s in samples.items()
    ]


def _environ(folder: Path, results: str) -> dict[str, str]:
    """With modules that are compiled once, as where it is installed, whatever this program's environment says."""
    environ = {
        "PACELINE_RESULTS": str(folder / results),
        "XDG_CACHE_HOME": str(folder / "cache"),
        "PYTHONDONTWRITEBYTECODE": "",
        "PYTHONPYCACHEPREFIX": str(folder / "compiled"),
    }
    for command in (PLAIN, LIST):
        run_process(command, environ)
    return environ


def _row(what: str, ours: Figure, limit_s: float, plain: Figure) -> Row:
    is_met = judged(ours, lambda value: value <= limit_s)
    return Row(what, SECONDS, ours, (plain,), target=f"≤ {limit_s} s", is_met=is_met)


def _make(results: Path, num_runs: int) -> None:
    """Copies of one run, each in a Trainer's folder of its own."""
    from paceline.runs import RunFolder

    with RunFolder.create(results / "first") as folder:
        folder.write_request({"config": {"lr": 0.1}, "num_workers": 2})
        folder.set_state("RUNNING", worker_pids=[1, 2])
        for step in range(1, 21):
            folder.record_step(step, 0, [{"loss": 1 / step}, {"loss": 1.1 / step}])
        folder.set_state("SUCCEEDED")
    files = {path.name: path.read_bytes() for path in folder.path.iterdir() if path.is_file()}
    status = json.loads(files["status.json"])
    for number in range(num_runs - 1):
        files["status.json"] = json.dumps({**status, "created": status["created"] - number}).encode()
        run_dir = results / f"sgd_{number:05d}" / "run_001"
        (run_dir / "logs").mkdir(parents=True)
        for name, content in files.items():
            (run_dir / name).write_bytes(content)
