"""Which workers' results a logger takes."""

from collections.abc import Sequence
from typing import Any

from paceline.errors import ArgumentError, ArgumentTypeError


class WorkerSelection:
    """Some ranks, or all of them (`ranks` is None), checked at construction and once more when a run starts.

    `parameter` is the name under which the user gave `workers`; messages use it.
    """

    def __init__(self, workers: int | Sequence[int] | None, parameter: str = "workers_to_log"):
        self.parameter = parameter
        self.ranks = None if workers is None else _checked_ranks(workers, parameter)

    def check(self, world_size: int | None) -> None:
        """Raises if a rank does not exist in a run of this size (None: the size was not told)."""
        if self.ranks is None or world_size is None:
            return
        for rank in self.ranks:
            if rank >= world_size:
                raise ArgumentError(
                    f"{self.parameter} asks for rank {rank}, but this run has {world_size} "
                    f"worker{'s' * (world_size != 1)}: ranks 0 to {world_size - 1}."
                )

    def pick(self, results: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return results if self.ranks is None else [results[rank] for rank in self.ranks]

    def pick_ranked(self, results: list[dict[str, Any]]) -> list[tuple[int, dict[str, Any]]]:
        ranks = range(len(results)) if self.ranks is None else self.ranks
        return [(rank, results[rank]) for rank in ranks]


def single_worker(worker: int | Sequence[int], parameter: str = "worker_to_log") -> WorkerSelection:
    """For loggers that follow one worker. A list with one rank is accepted, as the first RaySGD did."""
    if worker is None:
        raise ArgumentTypeError(f"{parameter} must be the rank of one worker, got None.")
    selection = WorkerSelection(worker, parameter)
    if selection.ranks is None or len(selection.ranks) != 1:
        raise ArgumentError(f"{parameter} must be the rank of one worker, got {worker!r}.")
    return selection


def _checked_ranks(workers: int | Sequence[int], parameter: str) -> tuple[int, ...]:
    if _is_int(workers):
        ranks: tuple[Any, ...] = (workers,)
    elif isinstance(workers, list | tuple | range):
        ranks = tuple(workers)
    else:
        raise ArgumentTypeError(
            f"{parameter} must be a rank, a list of ranks or None for all, got {type(workers).__qualname__}."
        )
    if not ranks:
        raise ArgumentError(f"{parameter} is an empty list; use None to log all workers.")
    for rank in ranks:
        if not _is_int(rank):
            raise ArgumentTypeError(f"{parameter} must hold ranks (int), got {rank!r} in {workers!r}.")
        if rank < 0:
            raise ArgumentError(f"{parameter} must hold ranks from 0 on, got {rank}.")
    return tuple(dict.fromkeys(ranks))


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
