"""The table that `print(trainer)` and a notebook show: who the workers are, where they run and what they use."""

import psutil
from rich.console import Group
from rich.table import Table

from paceline.backends.base import BackendConfig
from paceline.html_table import html_table
from paceline.workers.base import Engine, Resources, WorkerGroup, WorkerInfo
from paceline.workers.devices import num_threads

_COLUMNS = ("rank", "host", "pid", "device", "CPUs", "CPU %", "memory")


class WorkerTable:
    """For a terminal, or for a notebook."""

    def __init__(
        self, engine: Engine, backend: BackendConfig, world_size: int, resources: Resources, group: WorkerGroup | None
    ):
        state = "running" if group is not None else "not started"
        workers = "1 worker" if world_size == 1 else f"{world_size} workers"
        self._title = f"{workers} · backend {backend.name} · engine {engine.name} ({engine.describe()}) · {state}"
        infos = group.infos if group is not None else [None] * world_size
        self._rows = [[str(rank), *_row(info, world_size, resources)] for rank, info in enumerate(infos)]

    def __rich__(self) -> Group:
        table = Table()
        for column in _COLUMNS:
            table.add_column(column, justify="left" if column in ("host", "device") else "right")
        for row in self._rows:
            table.add_row(*row)
        return Group(self._title, table)

    def html(self) -> str:
        return html_table(self._rows, _COLUMNS, self._title)


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
