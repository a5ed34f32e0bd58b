"""One module for each benchmark: `measure(effort, say)` returns its rows of the table."""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from benchmarks.figures import Row
from benchmarks.rounds import Effort

Say = Callable[[str], None]
"""Tells whoever waits what is being done."""

MODULES = {
    "cold": "cold_script",
    "group": "new_group",
    "run": "second_run",
    "report": "reports",
    "loop": "loop_speed",
    "recovery": "recovery",
    "launch": "launcher",
    "checkpoint": "checkpoint_stall",
    "import": "import_time",
    "controller": "controller",
    "ray-group": "ray_group",
    "ray-report": "ray_reports",
    "ray-controller": "ray_controller",
    "tune": "tuning",
    "trial": "trial_loop",
    "sgd": "sgd",
    "sgd-overhead": "sgd_overhead",
    "runs": "list_runs",
    "data-numbers": "data_numbers",
    "data-images": "data_images",
    "data-resume": "data_resume",
    "data-memory": "data_memory",
}


class Benchmark:
    def __init__(self, name: str):
        self.name = name
        self._module = import_module(f"benchmarks.rows.{MODULES[name]}")

    @property
    def summary(self) -> str:
        return (self._module.__doc__ or "").strip().splitlines()[0]

    def measure(self, effort: Effort, say: Say) -> list[Row]:
        rows: list[Row] = self._module.measure(effort, say)
        return rows

    def draw(self, rows: list[Row], path: Path) -> bool:
        """Draw the rows if they are better seen than read; says whether it was done."""
        if not hasattr(self._module, "draw") or any(row.ours.value is None for row in rows):
            return False
        self._module.draw(rows, path)
        return True
