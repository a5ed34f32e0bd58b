"""The systems that are compared, and how a job is run with each of them."""

import importlib.util
import json
import shutil
import socket
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.marks import MARKS_FILE, Mark, read_marks
from benchmarks.processes import MeasurementError, environment, run_process

SCRIPTS = Path(__file__).parent / "scripts"


@dataclass(frozen=True)
class System:
    name: str
    package: str
    script: str
    arguments: tuple[str, ...] = ()
    environ: Mapping[str, str] = field(default_factory=dict)
    is_slow: bool = False
    """Measured less often, since it would take most of the time otherwise."""

    def command(self, spec: str) -> list[str]:
        return [sys.executable, str(SCRIPTS / self.script), spec, *self.arguments]


@dataclass(frozen=True)
class Torchrun(System):
    def command(self, spec: str) -> list[str]:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
        return [
            *launcher,
            "--master-port",
            str(_free_port()),
            *self.arguments,
            str(SCRIPTS / self.script),
            spec,
        ]


_TUNED = {"RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.05"}

PACELINE = System("Paceline", "paceline", "with_paceline.py")
TORCHRUN = Torchrun("torchrun", "torch", "with_torchrun.py")
TORCHRUN_RESTARTING = Torchrun("torchrun", "torch", "with_torchrun.py", _RESTARTING, _OWN_STORE)
ACCELERATE = System("Accelerate", "accelerate", "with_accelerate.py")
FABRIC_SPAWN = System("Fabric ddp_spawn", "lightning", "with_fabric.py", ("ddp_spawn",))
FABRIC_FORK = System("Fabric ddp_fork", "lightning", "with_fabric.py", ("ddp_fork",))
RAY = System("Ray Train", "ray", "with_ray.py", is_slow=True)
RAY_TUNED = System("Ray Train, tuned", "ray", "with_ray.py", environ=_TUNED, is_slow=True)


@dataclass(frozen=True)
class JobRun:
    wall_s: float
    """The whole process, from its start to its end."""
    marks: list[Mark]


def run_job(system: System, job: str, num_launches: int = 1, timeout_s: float = 300, **sizes: Any) -> JobRun:
    """Run a job of `jobs` with the system, in a new process, so many times one after the other."""
    if importlib.util.find_spec(system.package) is None:
        raise MeasurementError(f"{system.package} is not installed")
    folder = Path(tempfile.mkdtemp(prefix="job_"))
    marks_path = folder / "marks.jsonl"
    names = {MARKS_FILE: str(marks_path), "PACELINE_RESULTS": str(folder / "runs")}
    try:
        spec = json.dumps({"job": job, "num_launches": num_launches, **sizes})
        finished = run_process(system.command(spec), environment(**names, **system.environ), folder, timeout_s)
        return JobRun(finished.wall_s, read_marks(marks_path))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
