"""What this machine has, and who gets which part of it. Counting never initialises CUDA."""

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import ResourcesError
from paceline.workers.place import Place


@dataclass(frozen=True)
class GpuShare:
    """The GPUs of one worker. All workers see `visible`; its own are `ids`, and `index` is the first of them there."""

    ids: tuple[str, ...]
    visible: tuple[str, ...]
    index: int


def num_cpus() -> int:
    """The cores this process may run on, which a container or taskset may have cut."""
    return len(os.sched_getaffinity(0))


def gpu_ids(environ: Mapping[str, str] = os.environ, proc: Path = Path("/proc/driver/nvidia/gpus")) -> list[str]:
    """The GPUs this process may use: CUDA_VISIBLE_DEVICES if it is set, else all that the driver lists."""
    if "CUDA_VISIBLE_DEVICES" in environ:
        return [gpu for gpu in environ["CUDA_VISIBLE_DEVICES"].split(",") if gpu.strip() not in ("", "-1")]
    if proc.is_dir():
        return [str(index) for index in range(len(list(proc.iterdir())))]
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=10).stdout
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [str(index) for index, line in enumerate(listed.splitlines()) if line.startswith("GPU")]


def share_gpus(num_workers: int, gpus_per_worker: float, available: list[str]) -> list[GpuShare | None]:
    """Give each rank its GPUs. Below one GPU each, neighbouring ranks share one; all see the union of what is used."""
    if gpus_per_worker <= 0:
        return [None] * num_workers
    if gpus_per_worker >= 1:
        count = int(gpus_per_worker)
        if count != gpus_per_worker:
            raise ResourcesError(
                f"gpus_per_worker={gpus_per_worker}: above one GPU, only whole numbers can be shared out."
            )
        own = [range(rank * count, (rank + 1) * count) for rank in range(num_workers)]
    else:
        per_gpu = int(1 / gpus_per_worker + 1e-9)
        own = [range(rank // per_gpu, rank // per_gpu + 1) for rank in range(num_workers)]
    needed = own[-1].stop
    if needed > len(available):
        raise ResourcesError(
            f"{num_workers} workers with {gpus_per_worker:g} GPU each need {needed} GPUs; this machine offers "
            f"{len(available)} ({', '.join(available) or 'none'}). Ask for fewer workers or a smaller "
            "gpus_per_worker, or leave out use_gpu to train on the CPU."
        )
    visible = tuple(available[:needed])
    return [GpuShare(tuple(available[i] for i in mine), visible, mine.start) for mine in own]


def gpu_variables(visible: Sequence[str], *, sees_all: bool = False) -> dict[str, str]:
    """The environment in which a worker sees these GPUs and no others, whatever framework it uses; without any of its
    own none, unless it is to see all of the machine."""
    return {} if sees_all and not visible else {"CUDA_VISIBLE_DEVICES": ",".join(visible)}


def own_gpus(place: Place, num_visible: int) -> range:
    """Of the GPUs that all workers of a machine see, the numbers of those that are this one's: an equal share, from its
    first on. Below one GPU for each, it is one that others have too."""
    if place.device_index is None:
        return range(0)
    return range(place.device_index, place.device_index + max(1, num_visible // place.local_world_size))


def num_threads(num_workers: int, cpus_per_worker: float | None) -> int:
    """Threads for one worker's tensor operations: what the user asked for, else an even share of the cores."""
    if cpus_per_worker is not None:
        return max(1, int(cpus_per_worker))
    return max(1, num_cpus() // max(1, num_workers))
