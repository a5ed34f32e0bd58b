"""Results as lines on stdout."""

from collections.abc import Sequence
from typing import Any

from paceline.callbacks.base import Callback
from paceline.callbacks.flatten import as_number, flatten, step_of
from paceline.callbacks.selection import WorkerSelection


class PrintCallback(Callback):
    """Prints each step, a line per worker: `step 3  rank 0  loss=0.25  accuracy=0.91`.

    `workers_to_log`: a rank, a list of ranks, or None for all. Keys that begin with `_` are left out.
    """

    def __init__(self, workers_to_log: int | Sequence[int] | None = None):
        self._selection = WorkerSelection(workers_to_log)

    def start_training(self, logdir: str, config: dict[str, Any], **info: Any) -> None:
        self._selection.check(info.get("num_workers"))

    def handle_result(self, results: list[dict[str, Any]], **info: Any) -> None:
        lines = [_line(rank, result) for rank, result in self._selection.pick_ranked(results)]
        if lines:
            print("\n".join(lines), flush=True)


def _line(rank: int, result: dict[str, Any]) -> str:
    shown = flatten({key: value for key, value in result.items() if not str(key).startswith("_")})
    values = [f"{key}={_readable(value)}" for key, value in shown.items()]
    return "  ".join([f"step {step_of(result)}", f"rank {rank}", *values])


def _readable(value: Any) -> str:
    number = as_number(value)
    if isinstance(number, float):
        return f"{number:.6g}"
    return str(value if number is None else number)
