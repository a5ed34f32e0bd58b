"""What is left of a run folder when processes are killed, and when several use one logdir."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import paceline.runs
from paceline.runs import load_run
from paceline.runs.durable import read_json_lines

SOURCES = str(Path(paceline.runs.__file__).parents[2])

WRITE_FOREVER = """
import sys
from paceline.runs import RunFolder

folder = RunFolder.create(sys.argv[1])
folder.write_request({"config": {"seed": 1}})
folder.set_state("RUNNING")
folder.start_heartbeat(0.001)
pad = "x" * int(sys.argv[2])
step = 0
while True:
    step += 1
    folder.record_step(step, 1, [{"step_of_rank": step, "pad": pad}] * 2)
    folder.flush()
    print(step, flush=True)
"""

MAKE_RUNS = """
import sys
from paceline.runs import RunFolder, resolve_logdir

print("ready", flush=True)
sys.stdin.readline()
for _ in range(25):
    RunFolder.create(sys.argv[1]).close()
print(resolve_logdir(None, clock=lambda: 1_700_000_000.0), flush=True)
"""


@contextmanager
def python(program: str, *args: str, results: Path) -> Iterator[subprocess.Popen[str]]:
    path = os.pathsep.join(filter(None, [SOURCES, os.environ.get("PYTHONPATH")]))
    process = subprocess.Popen(
        [sys.executable, "-c", program, *args],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path, "PACELINE_RESULTS": str(results)},
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("line_bytes", [10, 3_000_000])
def test_driver_is_killed_while_appending(tmp_path: Path, line_bytes: int) -> None:
    for _ in range(3):
        with python(WRITE_FOREVER, str(tmp_path), str(line_bytes), results=tmp_path) as driver:
            assert driver.stdout is not None
            said = [int(driver.stdout.readline()) for _ in range(5)]
            assert load_run(tmp_path).status.state == "RUNNING"
            driver.send_signal(signal.SIGKILL)
            said += [int(line) for line in driver.stdout if line.endswith("\n")]
            driver.wait()
        run = load_run(tmp_path)
        steps = [line["step"] for line in read_json_lines(run.path / "metrics.jsonl")]
        assert steps == list(range(1, len(steps) + 1))
        assert len(steps) >= said[-1]  # what the driver was told is flushed is there
        assert run.status.state == "LOST"
        assert run.status.reason is not None
        assert f"process {driver.pid} ended" in run.status.reason
        assert run.config == {"seed": 1}


def test_two_drivers_share_a_logdir(tmp_path: Path) -> None:
    logdir, results = tmp_path / "exp", tmp_path / "results"
    with (
        python(MAKE_RUNS, str(logdir), results=results) as first,
        python(MAKE_RUNS, str(logdir), results=results) as second,
    ):
        for driver in (first, second):
            assert driver.stdout is not None
            assert driver.stdout.readline() == "ready\n"
        for driver in (first, second):
            assert driver.stdin is not None
            driver.stdin.write("go\n")
            driver.stdin.flush()
        outputs = [driver.communicate()[0] for driver in (first, second)]
    assert sorted(path.name for path in logdir.iterdir()) == [f"run_{n:03d}" for n in range(1, 51)]
    # and each has a folder of its own, although both asked in the same second
    assert sorted(outputs) == sorted(f"{path}\n" for path in results.iterdir())
    assert len(set(outputs)) == 2
