"""Which workers' results a logger takes."""

from collections.abc import Sequence
from typing import Any

from paceline.errors import ArgumentError, ArgumentTypeError


class WorkerSelection:
    """Some ranks, or all of them (`ranks` is None), checked at construction and once more when a run starts.

    In an elastic run a rank may exist in some steps only: where it does not, it is left out.
    `parameter` is the name under which the user gave `workers`; messages use it.
    """

    def __init__(self, workers: int | Sequence[int] | None, parameter: str = "workers_to_log"):
        self.parameter = parameter
        self.ranks = None if workers is None else _checked_ranks(workers, parameter)

    def check(self, num_workers: float | None) -> None:
        """Raises if a rank can never exist in a run of at most so many workers: math.inf, or None for unknown, allows
        all of them."""
        if self.ranks is None or num_workers is None:
            return
        for rank in self.ranks:
            if rank >= num_workers:
                raise ArgumentError(
                    f"{self.parameter} asks for rank {rank}, but this run has {num_workers} "
                    f"worker{'s' * (num_workers != 1)}: ranks 0 to {num_workers - 1}."
                )

    def pick(self, results: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [result for _, result in self.pick_ranked(results)]

    def pick_ranked(self, results: list[dict[str, Any]]) -> list[tuple[int, dict[str, Any]]]:
        ranks = range(len(results)) if self.ranks is None else self.ranks
        return [(rank, results[rank]) for rank in ranks if rank < len(results)]


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
