"""How a run looks while it runs and when it has ended: values in, rich renderables out."""

import os
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from paceline.callbacks.flatten import numeric_metrics, step_of

_BAR_WIDTH = 30
_MAX_METRICS = 8
_MAX_SIZES = 5
_MAX_UNFINISHED = 8
_RATE_WINDOW = 50  # samples; at 10 frames a second, the last 5 seconds
_MARKS = {"SUCCEEDED": ("✓", "green"), "FAILED": ("✗", "red"), "STOPPED": ("■", "yellow")}


@dataclass
class Progress:
    """What the display knows. The callback stores here; nothing is computed before a frame is drawn."""

    run_dir: str
    num_workers: int
    started_s: float = field(default_factory=time.monotonic)
    num_steps: int = 0
    latest: dict[str, Any] = field(default_factory=dict)
    num_checkpoints: int = 0
    last_checkpoint_step: int = 0
    num_restarts: int = 0
    former_sizes: list[int] = field(default_factory=list)
    """How many workers there were before each change."""
    unfinished: dict[int, str] = field(default_factory=dict)
    """What each rank has printed of its present line."""
    first_done: tuple[float, float] | None = None
    done: tuple[float, float] | None = None
    """When `report_progress` was first, and last, called, and with what."""
    status: str = "RUNNING"
    ended_s: float | None = None
    problem: str = ""
    samples: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=_RATE_WINDOW))

    def tell_done(self, done: float) -> None:
        self.done = (time.monotonic(), done)
        self.first_done = self.first_done or self.done


class ProgressView:
    """Draws a Progress, as it is at the moment of drawing, every time rich asks for a frame."""

    def __init__(self, progress: Progress):
        self._progress = progress
        self._spinner = Spinner("dots", style="cyan")

    def __rich__(self) -> RenderableType:
        progress = self._progress
        if progress.ended_s is not None:
            return ending(progress)
        now = time.monotonic()
        progress.samples.append((now, progress.num_steps))
        return Group(self._headline(now), *_details(progress, now), *_unfinished(progress.unfinished))

    def _headline(self, now: float) -> RenderableType:
        progress = self._progress
        line = Table.grid(padding=(0, 1))
        line.add_row(self._spinner, _joined(_title(progress), _elapsed(now - progress.started_s)))
        return line


def ending(progress: Progress) -> RenderableType:
    """What stays on the screen: how the run ended, and the last metrics."""
    metrics = _metrics(progress.latest)
    return Group(summary(progress), *([Padding(metrics, (0, 0, 0, 2))] if metrics else []))


def summary(progress: Progress) -> Text:
    """One line: how the run ended, what it did, where it is."""
    mark, colour = _MARKS.get(progress.status, ("•", "white"))
    duration_s = (progress.ended_s or time.monotonic()) - progress.started_s
    parts = [
        Text(f"{mark} {progress.status}", style=f"bold {colour}"),
        Text(f"{_counted(progress.num_steps, 'step')} in {_elapsed(duration_s)}"),
        *_events(progress),
    ]
    if progress.problem:
        parts.append(Text(progress.problem, style=colour))
    line = _joined(*parts)
    return line.append(" → ", style="dim").append(_short_path(progress.run_dir), style="cyan")


def _details(progress: Progress, now: float) -> list[RenderableType]:
    bar = [] if progress.done is None else [_joined(_bar(progress.done[1]), _time_left(progress, now))]
    if not progress.num_steps:
        return [Padding(line, (0, 0, 0, 2)) for line in bar or [Text("waiting for the first report", style="dim")]]
    steps = Text(f"step {step_of(progress.latest) or progress.num_steps:,}", style="bold")
    lines = [*bar, _joined(steps, _rate(progress, now), *_events(progress))]
    metrics = _metrics(progress.latest)
    if metrics:
        lines.append(metrics)
    return [Padding(line, (0, 0, 0, 2)) for line in lines]


def _bar(done: float) -> Text:
    full = int(done * _BAR_WIDTH)
    bar = Text("━" * full, style="cyan").append("━" * (_BAR_WIDTH - full), style="grey35")
    return bar.append(f" {int(done * 100)} %", style="bold")


def _time_left(progress: Progress, now: float) -> str:
    """At the speed since `report_progress` was first called: before that, the run may have started, or have gone on
    from a checkpoint. With one call only, at the speed since the run began."""
    if progress.done is None or progress.first_done is None:
        return ""
    (at_s, done), (first_s, first) = progress.done, progress.first_done
    if done <= first:
        first_s, first = progress.started_s, 0.0
    if done <= first or at_s <= first_s:
        return ""
    left_s = (1 - done) * (at_s - first_s) / (done - first) - (now - at_s)
    return f"{_elapsed(max(0.0, left_s))} left"


def _unfinished(lines: dict[int, str]) -> list[RenderableType]:
    """One line for each rank; of many, the first ones."""
    shown = [f"[rank {rank}] {line}" for rank, line in lines.items()][:_MAX_UNFINISHED]
    more = [f"+{len(lines) - len(shown)} more ranks"] if len(lines) > len(shown) else []
    texts = [Text.from_ansi(line, overflow="ellipsis", no_wrap=True) for line in [*shown, *more]]
    return [Padding(text, (0, 0, 0, 2)) for text in texts]


def _metrics(result: dict[str, Any]) -> Text | None:
    own = {key: value for key, value in result.items() if not str(key).startswith("_")}
    numbers = list(numeric_metrics(own).items())
    if not numbers:
        return None
    line = Text(overflow="ellipsis", no_wrap=True)
    for name, value in numbers[:_MAX_METRICS]:
        line.append(f"{name} ", style="dim").append(_compact(value), style="bold cyan").append("  ")
    if len(numbers) > _MAX_METRICS:
        line.append(f"+{len(numbers) - _MAX_METRICS} more", style="dim")
    return line


def _title(progress: Progress) -> Text:
    title = Text(_run_name(progress), style="bold")
    title.append(f"  {_counted(progress.num_workers, 'worker')}", style="not bold dim")
    if progress.former_sizes:
        title.append(f" (before: {progress.former_sizes[-1]:,})", style="not bold cyan")
    return title


def _events(progress: Progress) -> list[Text]:
    parts = []
    if progress.num_checkpoints:
        text = Text(_counted(progress.num_checkpoints, "checkpoint"), style="green")
        if progress.ended_s is None:
            text.append(f" (last at step {progress.last_checkpoint_step:,})", style="dim")
        parts.append(text)
    if progress.former_sizes and progress.ended_s is not None:
        parts.append(_sizes([*progress.former_sizes, progress.num_workers]))
    if progress.num_restarts:
        parts.append(Text(_counted(progress.num_restarts, "restart"), style="yellow"))
    return parts


def _sizes(sizes: list[int]) -> Text:
    """`2 → 4 → 3 workers`; of many changes, the last ones."""
    shown = ["…"] * (len(sizes) > _MAX_SIZES) + [f"{size:,}" for size in sizes[-_MAX_SIZES:]]
    return Text(f"{' → '.join(shown)} workers", style="cyan")


def _rate(progress: Progress, now: float) -> Text:
    """Over the last seconds; over the whole run when steps are so slow that these seconds say nothing."""
    then, steps_then = progress.samples[0] if progress.samples else (now, progress.num_steps)
    if progress.num_steps - steps_then < 2:
        then, steps_then = progress.started_s, 0
    if now <= then:
        return Text("")
    rate = (progress.num_steps - steps_then) / (now - then)
    return Text(f"{_compact(rate)} steps/s" if rate >= 1 else f"{_compact(1 / rate)} s/step", style="magenta")


def _joined(*parts: Text | str) -> Text:
    line = Text()
    for part in parts:
        if not part:
            continue
        if line:
            line.append(" · ", style="dim")
        line.append(part)
    return line


def _compact(value: int | float) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.1f}" if 1_000 <= abs(value) < 1e9 else f"{value:.4g}"


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _elapsed(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _run_name(progress: Progress) -> str:
    path = Path(progress.run_dir)
    return f"{path.parent.name}/{path.name}"


def _short_path(path: str) -> str:
    home = os.path.expanduser("~")  # of a user without a home, that
    return f"~{path[len(home) :]}" if path.startswith(home + "/") else path
