"""What one report costs the training loop, and how many reports reach a callback on the driver in a second."""

import statistics
from collections.abc import Callable

from benchmarks import systems
from benchmarks.figures import MICROSECONDS, PER_SECOND, Row, judged
from benchmarks.marks import the
from benchmarks.rounds import Effort, in_turns
from benchmarks.systems import System

SYSTEMS = (systems.PACELINE, systems.RAY, systems.RAY_TUNED)
LIMIT_S = 15e-6
LEAST_PER_S = 20_000


def measure(effort: Effort, say: Callable[[str], None]) -> list[Row]:
    cost, *cost_of_peers = in_turns(SYSTEMS, lambda system: _cost_s(system, between_steps=True), effort, say)
    (warm_cost,) = in_turns(SYSTEMS[:1], lambda system: _cost_s(system, between_steps=False), effort, say)
    rate, *rate_of_peers = in_turns(SYSTEMS, lambda system: _delivered_per_s(system, effort), effort, say)
    steps = f"{rate.value / 2:,.0f} steps/s of 2 ranks" if rate.value else ""
    return [
        Row(
            "one `report` between the steps of a DDP loop, by the worker's clock",
            MICROSECONDS,
            cost,
            tuple(cost_of_peers),
            target=f"≤ {LIMIT_S * 1e6:.0f} µs",
            is_met=judged(cost, lambda value: value <= LIMIT_S),
        ),
        Row("the same, one report right after the other", MICROSECONDS, warm_cost),
        Row(
            "reports per second delivered to a callback, sent by 2 workers as fast as they can",
            PER_SECOND,
            rate,
            tuple(rate_of_peers),
            target=f"≥ {LEAST_PER_S:,}/s",
            is_met=judged(rate, lambda value: value >= LEAST_PER_S),
            note=steps,
        ),
    ]


def _cost_s(system: System, between_steps: bool) -> list[float]:
    """The median over the reports of a rank, which leaves out those during which another process had the core."""
    num_reports = 20 if system.is_slow else 300
    run = systems.run_job(system, "time_reports", num_reports=num_reports, between_steps=between_steps)
    return [statistics.median(one["seconds"]) for one in the("reports", run.marks, 2)]


def _delivered_per_s(system: System, effort: Effort) -> list[float]:
    """From the first report of all to the callback that gets the last one. Every rank's report counts."""
    num_reports = 20 if system.is_slow else 5_000 if effort.is_quick else 20_000
    run = systems.run_job(system, "flood", num_reports=num_reports, count=True)
    begin = min(one["at"] for one in the("flood", run.marks, 2))
    last = max((one for one in run.marks if one["name"] == "delivered"), key=lambda one: one["count"])
    if last["count"] != 2 * num_reports:
        raise ValueError(f"{last['count']} of {2 * num_reports} reports were delivered")
    return [last["count"] / (last["last"] - begin)]
