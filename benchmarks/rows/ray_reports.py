"""A loop of 100 reports on Ray, of empty steps and of DDP steps, against Ray Train and our local engine."""

from collections.abc import Callable

from benchmarks.figures import MILLISECONDS, Figure, Row, ratio_at_least
from benchmarks.rounds import Effort, in_turns
from benchmarks.rows.loop_speed import loop_s
from benchmarks.systems import PACELINE, PACELINE_ON_RAY, RAY_TUNED, System

SYSTEMS = (PACELINE_ON_RAY, PACELINE, RAY_TUNED)
LEAST_RATIO_TO_RAY = 50.0
LEAST_RATIO_TO_LOCAL = 1 / 1.1


def measure(effort: Effort, say: Callable[[str], None]) -> list[Row]:
    empty, *peers_empty = in_turns(SYSTEMS, lambda system: _loop_s(system, is_empty=True), effort, say)
    trained, *peers_trained = in_turns(SYSTEMS, lambda system: _loop_s(system, is_empty=False), effort, say)
    to_local = "≤ 1.1 of the local engine's"
    return [
        Row(
            "on Ray: a loop of 100 reports and nothing else, on the worker",
            MILLISECONDS,
            empty,
            tuple(peers_empty),
            target=f"≤ 1/50 of Ray Train's, tuned; {to_local}",
            is_met=_is_met(empty, peers_empty[0], LEAST_RATIO_TO_LOCAL)
            and _is_met(empty, peers_empty[1], LEAST_RATIO_TO_RAY),
        ),
        Row(
            "on Ray: 100 DDP steps with a report at each",
            MILLISECONDS,
            trained,
            tuple(peers_trained),
            target=to_local,
            is_met=_is_met(trained, peers_trained[0], LEAST_RATIO_TO_LOCAL),
        ),
    ]


def _is_met(ours: Figure, peer: Figure, least_ratio: float) -> bool | None:
    return ratio_at_least(MILLISECONDS, ours, peer, least_ratio)


def _loop_s(system: System, is_empty: bool) -> list[float]:
    return loop_s(system, num_rounds=3 if system.is_slow else 12, is_empty=is_empty)
