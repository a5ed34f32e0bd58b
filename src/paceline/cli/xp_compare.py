"""`xp compare`: runs side by side, in a table."""

from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from paceline.cli.asking import Json, Store, add_verb, complete_runs, give, give_json, say

_COMPARE = """Compare runs in a table: configs and metrics.

\b
  paceline xp compare digits/1 digits/2 digits/3
  paceline xp compare 'sweep/*' -m loss -m accuracy --sort metrics.loss
  paceline xp compare @paper --all
"""
_PROVENANCE = ("experiment", "config_hash", "code_hash", "overrides", "sweep")
"""What an experiment notes beside its configuration, and what differs wherever that does."""

Runs = Annotated[
    list[str],
    typer.Argument(metavar="RUN...", show_default=False, autocompletion=complete_runs, help="NAME/RUN, @tag, glob …"),
]


def compare(
    runs: Runs,
    metric: Annotated[list[str] | None, typer.Option("-m", "--metric", metavar="NAME", help="Repeatable.")] = None,
    everything: Annotated[bool, typer.Option("--all", "-a", help="Also what is the same in all.")] = False,
    sort: Annotated[str | None, typer.Option(metavar="FIELD", help="As of xp ls.", show_default=False)] = None,
    json: Json = False,
) -> None:
    from paceline.cli import drawing
    from paceline.cli.listing import find_key, rows_of, sorted_rows
    from paceline.cli.xp_show import flat
    from paceline.runs.summary import is_counter

    store = Store()
    rows = rows_of(store.pick_each(runs), store)
    rows = sorted_rows(rows, sort) if sort else rows
    if json:
        give_json([row.as_json() for row in rows])
        return
    keys = [key for key in dict.fromkeys(key for row in rows for key, _ in flat(dict(row.summary.config))) if key]
    keys = [key for key in keys if everything or key not in _PROVENANCE]
    apart = {key: num_apart([find_key(row.summary.config, key) for row in rows]) for key in keys}
    shown = [key for key in keys if everything or apart[key]]
    names = dict.fromkeys(name for row in rows for name in row.summary.metrics if not name.startswith("_"))
    metrics = [name for name in names if not metric or name in metric]
    # Where there is no room for all: what somebody looks for first, how well it went and by what most of them differ.
    wanted: set[str | None] = {*metric} if metric else {row.summary.key_metric for row in rows}
    told = [name for name in metrics if name in wanted]
    rest = sorted(metrics, key=is_counter)
    differing = sorted(shown, key=lambda key: -apart[key])
    order = [*dict.fromkeys([*told, *(f"config.{key}" for key in differing), *rest])]
    titles = dict(zip(shown, short_endings(shown) if drawing.width() is not None else shown, strict=True))
    columns = [drawing.Column("run"), drawing.Column("state"), drawing.Column("steps", is_right=True)]
    columns += [drawing.Column(drawing.clean(titles[k]), rank=1 + order.index(f"config.{k}")) for k in shown]
    columns += [drawing.Column(drawing.clean(k), rank=1 + order.index(k), is_right=True) for k in metrics]
    cells = [
        [
            drawing.clean(row.found.name),
            row.found.state.value,
            str(row.summary.num_steps),
            *(drawing.plain(find_key(row.summary.config, key)) for key in shown),
            *(drawing.number(one.last) if (one := row.summary.metrics.get(name)) else "" for name in metrics),
        ]
        for row in rows
    ]
    give(drawing.table(columns, cells, drawing.width(), {1: drawing.STATE_COLOURS}, drawing.is_coloured()))
    if missing := drawing.left_out(columns, cells, drawing.width()):
        say(f"No room for {', '.join(missing)}: a wider terminal, | cat and --json have all.")


def num_apart(values: Sequence[Any]) -> int:
    """How many of them are not what most are."""
    return len(values) - max(Counter(map(repr, values)).values(), default=0)


def short_endings(keys: Sequence[str]) -> list[str]:
    """Of dotted keys, as little of the end as tells them apart: `optimizers.adam.lr` is `lr`."""
    parts = [key.split(".") for key in keys]
    endings = [{".".join(one[-length:]) for length in range(1, len(one) + 1)} for one in parts]
    return [
        next(
            (
                ending
                for length in range(1, len(one) + 1)
                if sum((ending := ".".join(one[-length:])) in some for some in endings) == 1
            ),
            ".".join(one),
        )
        for one in parts
    ]


def add_to(group: typer.Typer) -> None:
    add_verb(group, "compare", _COMPARE, compare)
