"""The events of a run, as `xp show` tells them; among them, what a profiler has measured."""

import time
from typing import Any

from paceline.cli.drawing import clean, cut
from paceline.errors import RunDamagedError
from paceline.json_text import pruned
from paceline.runs.json_lines import read_last_lines
from paceline.runs.load import Run

_NUM_EVENTS = 8
_MOST_BYTES = 16 << 20
_DULL_EVENTS = ("profile", "checkpoint", "attempt")


def events_of(run: Run) -> list[dict[str, Any]]:
    """The last ones: those of a long run may be more than there is memory."""
    try:
        found = pruned(read_last_lines(str(run.path / "events.jsonl"), _MOST_BYTES), most=1_000_000)
    except RunDamagedError:
        return []
    return [event for event in found if isinstance(event, dict)]


def event_lines(run: Run, most: int) -> list[str]:
    events = [event for event in events_of(run) if event.get("kind") not in _DULL_EVENTS]
    lines = []
    for event in events[-_NUM_EVENTS:]:
        when, kind = event.get("time"), event.get("kind")
        rest = " ".join(
            f"{key}={value}" for key, value in event.items() if key not in ("time", "kind") and value is not None
        )
        try:
            clock = time.strftime("%H:%M:%S", time.localtime(float(when)))  # type: ignore[arg-type]
        except (TypeError, ValueError, OverflowError, OSError):
            clock = "        "
        lines.append(cut(clean(f"{clock}  {kind}  {rest}"), max(20, most - 2)))
    return lines


def bottleneck(run: Run) -> str | None:
    """What a profiler has measured, and what that means. None if there was none, or nothing of it makes sense."""
    from paceline.profiling.verdict import judge

    events = [event for event in events_of(run) if event.get("kind") == "profile" and event.get("rank") in (0, None)]
    sums: dict[str, float] = {}
    num_steps, times = 0, []
    for event in events:
        parts, steps, when = event.get("parts_s"), event.get("steps"), event.get("time")
        for name, value in parts.items() if isinstance(parts, dict) else ():
            if isinstance(value, int | float):
                sums[name] = sums.get(name, 0.0) + value
        num_steps += steps if type(steps) is int else 0
        times += [when] if isinstance(when, int | float) else []
    if not sums:
        return None
    elapsed_s = max(times, default=0.0) - min(times, default=0.0) if len(times) > 1 else sum(sums.values())
    samples = [event for event in events if isinstance(event.get("cpu_percent"), int | float)]
    return str(judge(sums, num_steps, max(elapsed_s, sum(sums.values())), samples))
