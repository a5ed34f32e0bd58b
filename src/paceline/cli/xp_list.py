"""`xp ls` and `xp best`."""

import time
from typing import Annotated, Any

import typer

from paceline.cli.asking import Address, Json, Store, add_verb, complete_states, give, give_json, say

_LS = """List runs, the newest first.

\b
  paceline xp ls                                     the last 20
  paceline xp ls -a --state FAILED                   every run that failed
  paceline xp ls --name 'digits*' --since 2d
  paceline xp ls --filter "metrics.loss<0.1 and config.lr>0.01" --sort metrics.loss
  paceline xp ls -q | xargs -r -n1 paceline xp show  names alone, for other programs
  paceline xp ls --watch
  paceline xp ls --address http://head:8265          and those on a Ray cluster whose folders are not here

Fields of a filter: name, run, state, steps, workers, age, duration, tags, metrics.NAME (the last value), min.NAME,
max.NAME, config.NAME. Operators: < <= > >= = != and ~ (contains), with and, or, not and brackets.
"""
_BEST = """The runs with the best value of a metric.

\b
  paceline xp best --metric val_accuracy
  paceline xp best --metric loss --name 'digits*' -n 3
  paceline xp show $(paceline xp best --metric loss -q)

Of each run the best value of all its steps counts. The least is the best for names with loss, error, perplexity, mae,
mse and the like, else the greatest; --min and --max say it.
"""
_LESS_IS_BETTER = ("loss", "err", "perplex", "ppl", "mae", "mse", "rmse", "nll", "bpc", "wer", "cer", "time", "latency")
_WATCH_S = 2.0

Name = Annotated[str | None, typer.Option("--name", metavar="GLOB", help="Names that match.", show_default=False)]
State = Annotated[
    list[str] | None,
    typer.Option("--state", metavar="STATE", help="Repeatable.", show_default=False, autocompletion=complete_states),
]
Tag = Annotated[list[str] | None, typer.Option("--tag", metavar="TAG", help="With all these tags.", show_default=False)]
Since = Annotated[
    str | None,
    typer.Option("--since", metavar="2d", help="Not older than that, in s, m, h, d or w.", show_default=False),
]
Filter = Annotated[str | None, typer.Option("--filter", metavar="CONDITION", show_default=False, help="See above.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Names alone.")]


def ls(
    everything: Annotated[bool, typer.Option("--all", "-a", help="All of them, not the last 20.")] = False,
    num: Annotated[int, typer.Option("-n", metavar="N", help="How many.", min=1)] = 20,
    state: State = None,
    tag: Tag = None,
    name: Name = None,
    since: Since = None,
    condition: Filter = None,
    sort: Annotated[
        str | None,
        typer.Option(metavar="FIELD", help="created, name, steps, duration, metrics.NAME …; -FIELD: the other way."),
    ] = None,
    metric: Annotated[
        str | None, typer.Option(metavar="NAME", help="Which metric to show.", show_default=False)
    ] = None,
    quiet: Quiet = False,
    json: Json = False,
    address: Address = None,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Again every 2 s, until Ctrl-C.")] = False,
) -> None:
    asked: dict[str, Any] = {"state": state, "tag": tag, "name": name, "since": since, "condition": condition}
    most = None if everything else num
    if not watch:
        _list(asked, most, sort, metric, quiet, json, address)
        return
    from paceline.cli.drawing import width

    while True:
        if width() is not None and not json:  # a terminal, which is cleared; elsewhere lists follow each other
            print("\x1b[H\x1b[2J", end="")
        _list(asked, most, sort, metric, quiet, json, address)
        time.sleep(_WATCH_S)


def _list(
    asked: dict[str, Any],
    most: int | None,
    sort: str | None,
    metric: str | None,
    quiet: bool,
    json: bool,
    address: str | None,
) -> None:
    from paceline.cli import drawing
    from paceline.cli.listing import draw_rows, rows_of, sorted_rows

    store = Store()
    runs, num_all = _narrowed(store, **asked, most=None if sort else most)
    elsewhere = _on_cluster(store, address, asked)
    if quiet and not sort and not elsewhere:
        give([drawing.clean(run.name) for run in runs])
        return
    rows = rows_of(runs, store, is_rough=not json and not (sort or "").lstrip("-").startswith(("min.", "max.")))
    if elsewhere:
        rows = sorted([*rows, *elsewhere], key=lambda row: row.found.created or 0.0, reverse=True)
        rows, num_all = rows if sort else rows[:most], num_all + len(elsewhere)
    if sort:
        rows = sorted_rows(rows, sort)[:most]
    if quiet:
        give([drawing.clean(row.found.name) for row in rows])
    elif json:
        give_json([row.as_json() for row in rows])
    elif not rows:
        say(
            f"There are no such runs in {store.root}."
            if store.runs or elsewhere
            else f"There are no runs in {store.root} yet."
        )
    else:
        give(draw_rows(rows, drawing.width(), drawing.is_coloured(), metric))
        if num_all > len(rows):
            say(f"{len(rows)} of {num_all} runs; -a shows all.")


def _on_cluster(store: Store, address: str | None, asked: dict[str, Any]) -> list[Any]:
    """Rows of runs that only a cluster tells of, which is asked if the user has named one."""
    import os
    from fnmatch import fnmatchcase

    if address is None and not os.environ.get("RAY_ADDRESS"):
        return []
    from paceline.cli.cluster_runs import rows_elsewhere
    from paceline.runs.conditions import parse, seconds

    rows = rows_elsewhere(address, store)
    if asked["state"]:
        wanted = _states(asked["state"])
        rows = [row for row in rows if row.found.state in wanted]
    if asked["name"]:
        rows = [row for row in rows if any(fnmatchcase(one, asked["name"]) for one in (row.logdir, row.found.name))]
    if asked["since"]:
        first = time.time() - seconds(asked["since"])
        rows = [row for row in rows if (row.found.created or 0) >= first]
    if asked["condition"] is not None:
        fits = parse(asked["condition"])
        rows = [row for row in rows if fits(row.lookup)]
    return [] if asked["tag"] else rows  # tags are in the folder


def _narrowed(
    store: Store,
    state: list[str] | None,
    tag: list[str] | None,
    name: str | None,
    since: str | None,
    condition: str | None,
    most: int | None,
) -> tuple[list[Any], int]:
    """The runs that were asked for, and how many there are of them. What is cheap to know narrows first."""
    from fnmatch import fnmatchcase

    from paceline.cli.listing import rows_of
    from paceline.runs.conditions import parse, seconds

    fits = parse(condition) if condition is not None else None
    runs = store.runs
    if state:
        wanted = _states(state)
        runs = [run for run in runs if run.state in wanted]
    if name:
        runs = [run for run in runs if fnmatchcase(run.name.rpartition("/")[0], name) or fnmatchcase(run.name, name)]
    if since:
        first = time.time() - seconds(since)
        runs = [run for run in runs if (run.created or 0) >= first]
    if tag:
        runs = [run for run in runs if store.tags_of(run.name) >= {*tag}]
    if fits is not None:
        runs = [row.found for row in rows_of(runs, store) if fits(row.lookup)]
    return runs[:most], len(runs)


def _states(words: list[str]) -> set[str]:
    from paceline.errors import ArgumentError
    from paceline.runs.status import RunState

    states = {part.strip().upper() for word in words for part in word.split(",")}
    unknown = states - set(RunState)
    if unknown:
        raise ArgumentError(f"--state {', '.join(sorted(unknown))}: expected one of {', '.join(RunState)}.")
    return states


def best(
    metric: Annotated[str, typer.Option("--metric", "-m", metavar="NAME", help="By which.")],
    least: Annotated[bool, typer.Option("--min", help="The least is the best.")] = False,
    most: Annotated[bool, typer.Option("--max", help="The greatest is the best.")] = False,
    num: Annotated[int, typer.Option("-n", metavar="N", help="How many.", min=1)] = 1,
    state: State = None,
    tag: Tag = None,
    name: Name = None,
    since: Since = None,
    condition: Filter = None,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    from paceline.cli import drawing
    from paceline.cli.listing import draw_rows, rows_of, sorted_rows
    from paceline.errors import ArgumentError, RunNotFoundError

    if least and most:
        raise ArgumentError("--min and --max: expected one of them.")
    store = Store()
    runs, _ = _narrowed(store, state, tag, name, since, condition, None)
    rows = [row for row in rows_of(runs, store) if metric in row.summary.metrics]
    if not rows:
        known = sorted({name for row in rows_of(runs[:100], store) for name in row.summary.metrics})
        raise RunNotFoundError(f"No such run has reported {metric!r}. There are: {', '.join(known) or 'no metrics'}.")
    is_least = least or (not most and any(part in metric.lower() for part in _LESS_IS_BETTER))
    rows = sorted_rows(rows, f"min.{metric}" if is_least else f"-max.{metric}")[:num]
    if quiet:
        give([drawing.clean(row.found.name) for row in rows])
    elif json:
        give_json([{**row.as_json(), "best": row.lookup(f"{'min' if is_least else 'max'}.{metric}")} for row in rows])
    else:
        say(f"The {'least' if is_least else 'greatest'} {metric}, over all steps of a run:")
        for row in rows:
            value = row.lookup(f"{'min' if is_least else 'max'}.{metric}")
            say(f"  {row.found.name}: {drawing.number(value)}")
        give(draw_rows(rows, drawing.width(), drawing.is_coloured(), metric))


def add_to(group: typer.Typer) -> None:
    add_verb(group, "ls", _LS, ls)
    add_verb(group, "best", _BEST, best)
