"""The table that `print(trainer)` shows: who the workers are, where they run and what they use."""

import psutil
from rich.console import Group
from rich.table import Table

from paceline.backends.base import BackendConfig
from paceline.workers.base import Engine, Resources, WorkerGroup, WorkerInfo
from paceline.workers.devices import num_threads


def worker_table(
    engine: Engine, backend: BackendConfig, world_size: int, resources: Resources, group: WorkerGroup | None
) -> Group:
    state = "running" if group is not None else "not started"
    workers = "1 worker" if world_size == 1 else f"{world_size} workers"
    title = f"{workers} · backend {backend.name} · engine {engine.name} ({engine.describe()}) · {state}"
    table = Table()
    for column in ("rank", "host", "pid", "device", "CPUs", "CPU %", "memory"):
        table.add_column(column, justify="left" if column in ("host", "device") else "right")
    for rank in range(world_size):
        info = group.infos[rank] if group is not None else None
        table.add_row(str(rank), *_row(info, world_size, resources))
    return Group(title, table)


def _row(info: WorkerInfo | None, world_size: int, resources: Resources) -> list[str]:
    cpus = f"{resources.cpus:g}" if resources.cpus is not None else str(num_threads(world_size, None))
    device = f"{resources.gpus:g} GPU" if resources.gpus else "cpu"
    if info is None:
        return ["–", "–", device, cpus, "–", "–"]
    if info.gpu_ids:
        device = "GPU " + ", ".join(info.gpu_ids)
    try:
        process = psutil.Process(info.pid)
        usage = [f"{process.cpu_percent(0.02):.0f}", f"{process.memory_info().rss / 2**20:.0f} MiB"]
    except psutil.Error:
        usage = ["gone", "–"]
    return [info.host, str(info.pid), device, cpus, *usage]
