"""A script under `paceline run` and under torchrun: the command to its end, and a SIGKILL to the next step."""

from collections.abc import Callable

from benchmarks import systems
from benchmarks.figures import SECONDS, Row, ratio_at_least
from benchmarks.marks import the
from benchmarks.rounds import Effort, in_turns
from benchmarks.systems import System

MOST_OF_START, MOST_OF_RESTART = 0.7, 1 / 3


def measure(effort: Effort, say: Callable[[str], None]) -> list[Row]:
    start = in_turns((systems.JOIN_PACELINE_RUN, systems.JOIN_TORCHRUN), _wall_s, effort, say)
    restart = in_turns((systems.PACELINE_RUN, systems.TORCHRUN_RESTARTING), _restart_s, effort, say)
    return [
        Row(
            "a script that joins gloo and leaves: the command to its end",
            SECONDS,
            start[0],
            (start[1],),
            target=f"≤ {MOST_OF_START} of torchrun's",
            is_met=ratio_at_least(SECONDS, *start, 1 / MOST_OF_START),
        ),
        Row(
            "a launched script: SIGKILL of a rank to the next finished step",
            SECONDS,
            restart[0],
            (restart[1],),
            target="≤ 1/3 of torchrun's",
            is_met=ratio_at_least(SECONDS, *restart, 1 / MOST_OF_RESTART),
        ),
    ]


def _wall_s(system: System) -> list[float]:
    return [systems.run_job(system, "meet").wall_s]


def _restart_s(system: System) -> list[float]:
    marks = systems.run_job(system, "train_through_a_kill", timeout_s=180, num_steps=20).marks
    (kill,) = the("kill", marks, 1)
    return [max(one["at"] for one in the("recovered", marks, 2)) - kill["at"]]
