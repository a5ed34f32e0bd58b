"""Short tuning trials with two workers each, two at a time: how many a minute."""

from collections.abc import Callable

from benchmarks import systems
from benchmarks.figures import PER_MINUTE, Row, ratio_at_least
from benchmarks.marks import launches
from benchmarks.rounds import Effort, in_turns
from benchmarks.rows.second_run import duration_s
from benchmarks.systems import PACELINE_IN_TUNE, System

PEERS = (systems.RAY_IN_TUNE, systems.RAY_TUNED_IN_TUNE)
LEAST_RATIO = 8.0


def measure(effort: Effort, say: Callable[[str], None]) -> list[Row]:
    num_trials = 4 if effort.is_quick else 16
    seldom = Effort(effort.num_slow_rounds, 1)  # a round of a peer takes minutes, and is the mean of many trials
    ours, *peers = in_turns((PACELINE_IN_TUNE, *PEERS), lambda system: _trials_per_s(system, num_trials), seldom, say)
    ratios = [ratio_at_least(PER_MINUTE, ours, peer, LEAST_RATIO) for peer in peers]
    return [
        Row(
            f"{num_trials} short trials of Ray Tune, 2 torch workers each, two trials at a time",
            PER_MINUTE,
            ours,
            tuple(peers),
            target=f"≥ {LEAST_RATIO:.0f} × Ray Train's, tuned or not",
            is_met=None if None in ratios else all(ratios),
        )
    ]


def _trials_per_s(system: System, num_trials: int) -> list[float]:
    """Two DDP steps and two reports a trial; all that Tune does around them counts."""
    run = systems.run_job(system, "train", timeout_s=1200, num_trials=num_trials, num_steps=2, reports=True)
    return [num_trials / duration_s(marks) for marks in launches(run.marks)]
