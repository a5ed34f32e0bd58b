"""The systems that are compared, and how a job is run with each of them."""

import importlib.util
import json
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.processes import Finished, MeasurementError, run_process

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
        where = self.arguments or ("--master-port", str(_free_port()))
        return [*launcher, *where, str(SCRIPTS / self.script), spec]


@dataclass(frozen=True)
class PacelineRun(System):
    """The scripts are those of torchrun, as they are."""

    def command(self, spec: str) -> list[str]:
        return [sys.executable, "-m", "paceline", "run", "-n", "2", str(SCRIPTS / self.script), spec]


_RESTARTING = ("--standalone", "--max-restarts", "1")  # without --standalone, restarts failed or hung
_OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # else restarted ranks may find addresses of dead ones
_TUNED = {"RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.05"}

PACELINE = System("Paceline", "paceline", "with_paceline.py")
PACELINE_ON_RAY = System("Paceline on Ray", "ray", "with_paceline_on_ray.py")
TORCHRUN = Torchrun("torchrun", "torch", "with_torchrun.py")
TORCHRUN_RESTARTING = Torchrun("torchrun", "torch", "with_torchrun.py", _RESTARTING, _OWN_STORE)
PACELINE_RUN = PacelineRun("paceline run", "paceline", "with_torchrun.py")
JOIN_PACELINE_RUN = PacelineRun("paceline run", "paceline", "join_and_leave.py")
JOIN_TORCHRUN = Torchrun("torchrun", "torch", "join_and_leave.py")
ACCELERATE_DEBUG = System("Accelerate debug_launcher", "accelerate", "with_accelerate.py", ("debug_launcher",))
ACCELERATE_NOTEBOOK = System("Accelerate notebook_launcher", "accelerate", "with_accelerate.py", ("notebook_launcher",))
FABRIC_SPAWN = System("Fabric ddp_spawn", "lightning", "with_fabric.py", ("ddp_spawn",), is_slow=True)
FABRIC_FORK = System("Fabric ddp_fork", "lightning", "with_fabric.py", ("ddp_fork",))
RAY = System("Ray Train", "ray", "with_ray.py", is_slow=True)
RAY_TUNED = System("Ray Train, tuned", "ray", "with_ray.py", environ=_TUNED, is_slow=True)
PACELINE_IN_TUNE = System("Paceline in Ray Tune", "ray", "tune_trials.py", ("paceline",))
RAY_IN_TUNE = System("Ray Train in Ray Tune", "ray", "tune_trials.py", ("ray_train",), is_slow=True)
RAY_TUNED_IN_TUNE = System(
    "Ray Train, tuned, in Ray Tune", "ray", "tune_trials.py", ("ray_train",), _TUNED, is_slow=True
)

READ_PACELINE = System("Paceline", "pyarrow", "read_with_paceline.py")
READ_PYARROW = System("plain pyarrow", "pyarrow", "read_in_processes.py", ("pyarrow",))
READ_DATALOADER = System(
    "DataLoader over an Arrow table", "torch", "read_in_processes.py", ("dataloader",), is_slow=True
)
READ_RAY = System("Ray Data", "ray", "read_with_ray.py", is_slow=True)
READ_HF = System("Hugging Face, as Arrow", "datasets", "read_in_processes.py", ("huggingface",))
READ_HF_TORCH = System(
    "Hugging Face, as torch", "datasets", "read_in_processes.py", ("huggingface_torch",), is_slow=True
)
READ_LITDATA = System("LitData", "litdata", "read_in_processes.py", ("litdata",), is_slow=True)


def run_job(system: System, job: str, num_launches: int = 1, timeout_s: float = 300, **sizes: Any) -> Finished:
    """Run a job of `jobs` with the system, in a new process, so many times one after the other."""
    if importlib.util.find_spec(system.package) is None:
        raise MeasurementError(f"{system.package} is not installed")
    spec = json.dumps({"job": job, "num_launches": num_launches, **sizes})
    return run_process(system.command(spec), system.environ, timeout_s)


def run_reader(system: System, timeout_s: float = 300, **spec: Any) -> Finished:
    """Let the system read data; `benchmarks.reading` says what a spec has."""
    if importlib.util.find_spec(system.package) is None:
        raise MeasurementError(f"{system.package} is not installed")
    return run_process(system.command(json.dumps(spec)), system.environ, timeout_s)


def run_script(script: str, timeout_s: float = 300, **sizes: Any) -> Finished:
    """Run a script that measures Paceline alone."""
    return run_process([sys.executable, str(SCRIPTS / script), json.dumps(sizes)], timeout_s=timeout_s)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
