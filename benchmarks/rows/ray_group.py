"""Paceline on a Ray that is up: a trivial run with its workers' start and end, and one on workers that are there."""

from collections.abc import Callable

from benchmarks import systems
from benchmarks.figures import MILLISECONDS, SECONDS, Row, judged, ratio_at_least
from benchmarks.marks import launches
from benchmarks.rounds import Effort, in_turns
from benchmarks.rows.second_run import duration_s
from benchmarks.systems import PACELINE_ON_RAY, System

PEERS = (systems.RAY, systems.RAY_TUNED)
LEAST_RATIO = 4.0
LIMIT_S = 0.05


def measure(effort: Effort, say: Callable[[str], None]) -> list[Row]:
    whole, *peers = in_turns((PACELINE_ON_RAY, *PEERS), _launch_s, effort, say)
    (warm,) = in_turns((PACELINE_ON_RAY,), _warm_run_s, effort, say)
    ratios = [ratio_at_least(SECONDS, whole, peer, LEAST_RATIO) for peer in peers]
    return [
        Row(
            "on a Ray that is up: start 2 torch workers, a trivial `run`, shut down; the peers' `fit`",
            SECONDS,
            whole,
            tuple(peers),
            target="≤ 1/4 of Ray Train's, tuned or not",
            is_met=None if None in ratios else all(ratios),
        ),
        Row(
            "on Ray: a trivial `run` on a warm group; the peers' `fit`",
            MILLISECONDS,
            warm,
            tuple(peers),
            target=f"≤ {LIMIT_S * 1e3:.0f} ms",
            is_met=judged(warm, lambda value: value <= LIMIT_S),
        ),
    ]


def _launch_s(system: System, num_launches: int = 3, keep_group: bool = False) -> list[float]:
    """The first launch does not count: Ray may still be starting processes of its own then."""
    run = systems.run_job(system, "meet", num_launches, keep_group=keep_group)
    _, *later = launches(run.marks)
    return [duration_s(marks) for marks in later]


def _warm_run_s(system: System) -> list[float]:
    return _launch_s(system, num_launches=11, keep_group=True)
