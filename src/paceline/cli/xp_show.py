"""`xp show` and `xp plot`: one run, and curves."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.asking import Json, Store, Words, add_verb, complete_runs, give, give_json

if TYPE_CHECKING:
    from paceline.cli.listing import Row
    from paceline.runs.load import Run

_SHOW = """Show a run: config, metrics, curves and how it ended.

\b
  paceline xp show                   the newest run
  paceline xp show digits 3          run_003 of digits
  paceline xp show @best --json

With checkpoints, events, environment, and where the time goes if it was profiled.
"""
_PLOT = """Draw the metrics of runs in the terminal.

\b
  paceline xp plot                          all metrics of the newest run
  paceline xp plot digits/2 digits/3 -m loss
  paceline xp plot 'digits/*' -m loss --json > curves.json
"""
_NUM_CURVES, _MOST_LINES = 3, 40


def show(words: Words = None, json: Json = False) -> None:
    from paceline.cli import drawing
    from paceline.cli.listing import rows_of

    store = Store()
    found = store.pick(words)
    [row] = rows_of([found], store)
    if json:
        give_json(_as_json(found.run, row))
        return
    most, is_on = drawing.width(), drawing.is_coloured()
    lines = _lines(found.run, row, most or 100, is_on)
    give(
        [
            line if most is None or line.startswith("\x1b") or "\x1b" in line else drawing.cut(line, most)
            for line in lines
        ]
    )


def _as_json(run: "Run", row: "Row") -> dict[str, Any]:
    from paceline.cli.run_events import bottleneck, events_of

    return {
        **row.as_json(),
        "reason": run.status.reason,
        "checkpoints": _checkpoints(run),
        "events": [event for event in events_of(run) if event.get("kind") != "profile"],
        "environment": _read(run, "environment", {}),
        "bottleneck": bottleneck(run),
    }


def _read(run: "Run", name: str, instead: Any) -> Any:
    """What is damaged is left out: the rest is worth seeing."""
    from paceline.errors import PacelineError
    from paceline.json_text import pruned

    try:
        return pruned(getattr(run, name), most=1_000_000) if name != "checkpoints" else run.checkpoints
    except PacelineError:
        return instead


def _lines(run: "Run", row: "Row", most: int, is_on: bool) -> list[str]:
    from paceline.cli.drawing import STATE_COLOURS, clean, number, paint, span
    from paceline.cli.run_events import bottleneck, event_lines

    status, summary = run.status, row.summary
    state = status.state.value
    head = [paint(clean(row.found.name), "bold", is_on), paint(state, STATE_COLOURS.get(state), is_on)]
    lines = ["  ".join(head)]
    facts = [("path", str(run.path))]
    if status.reason:
        facts += [("reason" if not number_ else "", part) for number_, part in enumerate(status.reason.splitlines())]
    facts += [
        ("function", summary.function or ""),
        ("workers", "" if summary.num_workers is None else str(summary.num_workers)),
        ("steps", str(summary.num_steps)),
        ("progress", "" if row.progress is None else f"{row.progress:.0%}"),
        ("began", f"{span(row.age_s)} ago" if row.age_s is not None else ""),
        ("took" if status.state.is_final else "running for", span(row.duration_s)),
        ("tags", " ".join(sorted(row.tags))),
        ("driver", f"process {status.pid} on {status.host}" if not status.state.is_final and status.pid else ""),
    ]
    lines += _pairs([(name, value) for name, value in facts if value or name == ""])
    if summary.config:
        # Which class stands where says little beside its arguments, and of typed experiments there are many.
        pairs = [(key, value) for key, value in flat(summary.config) if not key.endswith("_target_")]
        lines += _titled("config", _some(_pairs(pairs)), is_on)
    if summary.metrics:
        pairs = [
            (name, f"{number(one.last):<12} least {number(one.least):<12} most {number(one.most)}")
            for name, one in summary.metrics.items()
            if not name.startswith("_")
        ]
        lines += _titled("metrics", _some(_pairs(pairs)), is_on)
        lines += _curves(run, row, most, is_on)
    lines += _titled("checkpoints", _checkpoint_lines(run), is_on)
    said = bottleneck(run)
    lines += _titled("where the time goes", [clean(line) for line in said.splitlines()] if said else [], is_on)
    lines += _titled("events", event_lines(run, most), is_on)
    return lines + _titled("environment", _pairs(_environment(run)), is_on)


def _some(lines: list[str]) -> list[str]:
    num_more = len(lines) - _MOST_LINES
    return lines if num_more <= 0 else [*lines[:_MOST_LINES], f"… {num_more} more: --json has all of them"]


def _titled(title: str, lines: list[str], is_on: bool) -> list[str]:
    from paceline.cli.drawing import paint

    return ["", paint(title, "bold", is_on), *(f"  {line}" for line in lines)] if lines else []


def _pairs(pairs: list[tuple[str, Any]]) -> list[str]:
    from paceline.cli.drawing import cells, clean

    names = [clean(name) for name, _ in pairs]
    size = max(map(cells, names), default=0)
    return [
        f"{name}{' ' * (size - cells(name))}  {clean(str(value))}"
        for name, (_, value) in zip(names, pairs, strict=True)
    ]


def flat(config: Any, prefix: str = "", depth: int = 10) -> list[tuple[str, Any]]:
    """Nested keys with dots."""
    if not isinstance(config, dict) or not config or depth == 0:
        return [(prefix, config)]
    return [
        pair
        for key, value in config.items()
        for pair in flat(value, f"{prefix}.{key}" if prefix else str(key), depth - 1)
    ]


def _curves(run: "Run", row: "Row", most: int, is_on: bool) -> list[str]:
    from paceline.cli.curves import draw
    from paceline.cli.drawing import clean
    from paceline.errors import RunDamagedError
    from paceline.runs.summary import read_series

    try:
        series = read_series(run.path)
    except RunDamagedError:
        return []
    key = row.summary.key_metric
    names = [name for name in ([key] if key else []) + list(series) if not name.startswith(("_", "epoch", "batch"))]
    lines: list[str] = []
    for name in list(dict.fromkeys(names))[:_NUM_CURVES]:
        points = list(zip(*series[name], strict=True))
        if len(points) > 1:
            lines += ["", *draw({clean(name): points}, (min(most, 100), 6), is_on)]
    return lines


def _checkpoints(run: "Run") -> list[dict[str, Any]]:
    found = _read(run, "checkpoints", [])
    return [{"id": one.id, "path": one.path, "time": one.time, "score": one.score} for one in found]


def _checkpoint_lines(run: "Run") -> list[str]:
    import os

    from paceline.cli.drawing import clean

    infos = _checkpoints(run)
    some = [
        clean(os.path.basename(one["path"])) + (f"  score {one['score']}" if one["score"] is not None else "")
        for one in infos
    ]
    return some if len(some) <= 5 else [*some[:2], f"… {len(some) - 4} more", *some[-2:]]


def _environment(run: "Run") -> list[tuple[str, Any]]:
    found = _read(run, "environment", {})
    git = found.get("git")
    git = git if isinstance(git, dict) else {}
    commit = str(git.get("commit") or "")[:12]
    changed = git.get("dirty")
    pairs = [(key, found.get(key)) for key in ("paceline", "python", "host", "platform", "cwd")]
    command = found.get("command")
    pairs.append(("command", " ".join(map(str, command)) if isinstance(command, list) else command))
    pairs.append(("commit", f"{commit}{' with changes (code.diff)' if changed else ''}" if commit else None))
    return [(name, value) for name, value in pairs if isinstance(value, str | int | float) and value != ""]


def plot(
    runs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN]...", show_default=False, autocompletion=complete_runs, help="Default: the newest."
        ),
    ] = None,
    metric: Annotated[list[str] | None, typer.Option("-m", "--metric", metavar="NAME", help="Repeatable.")] = None,
    rank: Annotated[int | None, typer.Option(help="As this rank reported it.", show_default=False)] = None,
    height: Annotated[int, typer.Option(min=2, max=100, help="Lines of a plot.")] = 10,
    json: Json = False,
) -> None:
    from paceline.cli import drawing
    from paceline.cli.curves import draw
    from paceline.errors import RunNotFoundError
    from paceline.runs.summary import Series, read_series

    store = Store()
    chosen = store.pick_each(runs) if runs else [store.pick([])]
    series = {run.name: read_series(run.path, rank) for run in chosen}
    names = list(dict.fromkeys(name for one in series.values() for name in one if not name.startswith("_")))
    wanted = [name for name in names if not metric or name in metric]
    if not wanted:
        raise RunNotFoundError(f"There is nothing to draw. Metrics: {', '.join(names) or 'none'}.")
    by_metric: dict[str, dict[str, Series]] = {
        name: {run: one[name] for run, one in series.items() if name in one} for name in wanted
    }
    if json:
        give_json(
            {n: {run: {"steps": s, "values": v} for run, (s, v) in runs_.items()} for n, runs_ in by_metric.items()}
        )
        return
    size = min(drawing.width() or 100, 120), height
    for name, curves in by_metric.items():
        points = {
            drawing.clean(name if len(series) == 1 else f"{name}  {run}"): list(zip(*one, strict=True))
            for run, one in curves.items()
        }
        give([*draw(points, size, drawing.is_coloured()), ""])


def add_to(group: typer.Typer) -> None:
    add_verb(group, "show", _SHOW, show)
    add_verb(group, "plot", _PLOT, plot)
