"""`xp diff` and `xp audit`: where two runs part, and whether each row of one came once."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.asking import FAILED, Json, Store, Words, add_verb, complete_runs, give, give_json

if TYPE_CHECKING:
    from paceline.runs.load import Run

_DIFF = """Say how two runs differ, and where they part.

\b
  paceline xp diff digits/1 digits/2
  paceline xp diff -2 -1                     the newest, and the one before

Compared are config, code and environment; of metrics and of recorded rows it says the first step at which they differ.
Exit code: 0, also if they differ.
"""
_AUDIT = """Check that each row came once in every epoch.

\b
  paceline xp audit digits

The run has to have recorded it: run(record_ids=True). Exit code: 0 if it is clean, 1 if not.
"""

One = Annotated[
    str, typer.Argument(metavar="RUN", show_default=False, autocompletion=complete_runs, help="NAME/RUN, -1 …")
]


def diff(first: One, second: One, json: Json = False) -> None:
    from paceline.cli import drawing

    store = Store()
    a, b = store.pick([first]), store.pick([second])
    found: dict[str, Any] = {
        "config": _differences(_flat(a.run), _flat(b.run)),
        "code": _code(a.run, b.run),
        "environment": _differences(_surroundings(a.run), _surroundings(b.run)),
        "metrics": _parting(a.path, b.path),
        "data": _data(a.run, b.run),
    }
    if json:
        give_json({"a": a.name, "b": b.name, **found})
        return
    is_on = drawing.is_coloured()
    lines = [f"{drawing.paint('-', 'red', is_on)} {drawing.clean(a.name)}"]
    lines += [f"{drawing.paint('+', 'green', is_on)} {drawing.clean(b.name)}"]
    for title in ("config", "code", "environment"):
        lines += ["", drawing.paint(title, "bold", is_on), *_changes(found[title], is_on)]
    lines += ["", drawing.paint("metrics", "bold", is_on), *(f"  {line}" for line in _metric_lines(found["metrics"]))]
    lines += ["", drawing.paint("data", "bold", is_on), f"  {drawing.clean(found['data'])}"]
    give(lines)


def _changes(changes: dict[str, list[Any]], is_on: bool) -> list[str]:
    from paceline.cli.drawing import clean, paint

    lines = []
    for key, (one, other) in changes.items():
        if "\n" in str(one) + str(other):
            lines += [f"  {clean(key)}:", *_text_diff(str(one or ""), str(other or ""), is_on)]
            continue
        lines.append(f"  {clean(key)}: {paint(_shown(one), 'red', is_on)} → {paint(_shown(other), 'green', is_on)}")
    return lines or ["  the same"]


def _shown(value: Any) -> str:
    from paceline.cli.drawing import plain

    return "(none)" if value is None else plain(value)


def _text_diff(one: str, other: str, is_on: bool) -> list[str]:
    import difflib

    from paceline.cli.drawing import clean, paint

    found = list(difflib.unified_diff(one.splitlines()[:2000], other.splitlines()[:2000], n=1, lineterm=""))[2:200]
    colours = {"-": "red", "+": "green"}
    return [f"    {paint(clean(line), colours.get(line[:1]), is_on)}" for line in found]


def _flat(run: "Run") -> dict[str, Any]:
    from paceline.cli.xp_show import flat

    return {key: value for key, value in flat(_pruned(run.config)) if key}


def _pruned(value: Any, most: int = 2_000) -> Any:
    from paceline.json_text import pruned

    return pruned(value, most=most)


def _differences(one: dict[str, Any], other: dict[str, Any]) -> dict[str, list[Any]]:
    keys = dict.fromkeys([*one, *other])
    return {key: [one.get(key), other.get(key)] for key in keys if one.get(key) != other.get(key)}


def _code(a: "Run", b: "Run") -> dict[str, list[Any]]:
    return _differences(_code_of(a), _code_of(b))


def _code_of(run: "Run") -> dict[str, Any]:
    from paceline.regular_files import DOCUMENT_BYTES
    from paceline.runs.durable import read_file

    git, function = _pruned(run.environment.get("git")), _pruned(run.request.get("function"))
    git, function = git if isinstance(git, dict) else {}, function if isinstance(function, dict) else {}
    changes = read_file(run.path / "code.diff", DOCUMENT_BYTES) or b""
    return {
        "commit": git.get("commit"),
        "branch": git.get("branch"),
        "function": function.get("name"),
        "source": function.get("source"),
        "uncommitted changes": changes.decode(errors="replace") or None,
    }


def _surroundings(run: "Run") -> dict[str, Any]:
    found = _pruned(run.environment, most=100_000)
    plain = {key: found.get(key) for key in ("python", "platform", "host", "cpus", "usable_cpus", "gpus")}
    for group in ("packages", "variables"):
        values = found.get(group)
        plain |= values if isinstance(values, dict) else {}
    return {"num_workers": _pruned(run.request.get("num_workers")), **plain}


def _parting(a: str, b: str) -> dict[str, Any]:
    """Of each metric that both have: the first step at which it differs, and both values. None: nowhere."""
    from paceline.runs.summary import read_series

    one, other = read_series(a), read_series(b)
    found: dict[str, Any] = {}
    for name in one:
        if name in other and not name.startswith("_"):
            found[name] = first_difference(one[name], other[name])
    return {
        "parts_at": found,
        "only_a": sorted(name for name in one.keys() - other.keys() if not name.startswith("_")),
        "only_b": sorted(name for name in other.keys() - one.keys() if not name.startswith("_")),
    }


def first_difference(one: tuple[list[int], list[float]], other: tuple[list[int], list[float]]) -> dict[str, Any] | None:
    """A step that one of them alone has, differs too."""
    mine, theirs = (dict(zip(*series, strict=True)) for series in (one, other))
    for step in sorted({*mine, *theirs}):
        a, b = mine.get(step), theirs.get(step)
        if a != b and not (a != a and b != b):  # NaN is the same as NaN
            return {"step": step, "a": a, "b": b}
    return None


def _metric_lines(found: dict[str, Any]) -> list[str]:
    from paceline.cli.drawing import clean

    lines = []
    for name, parting in found["parts_at"].items():
        if parting is None:
            lines.append(f"{clean(name)}: the same at every step")
        else:
            values = _told_apart(parting["a"], parting["b"])
            lines.append(f"{clean(name)}: the same until step {parting['step']}, where they have {values}")
    for side, names in (("the first", found["only_a"]), ("the second", found["only_b"])):
        lines += [f"{clean(', '.join(names))}: only of {side}"] if names else []
    return lines or ["none in common"]


def _told_apart(*values: float | None) -> str:
    """With as many digits as it takes."""
    short = ["none" if value is None else f"{value:.6g}" for value in values]
    return " and ".join(short if len({*short}) > 1 else map(repr, values))


def _data(a: "Run", b: "Run") -> str:
    import os

    from paceline.errors import PacelineError

    missing = [run.name for run in (a, b) if not os.path.isfile(run.path / "rows.bin")]
    if missing:
        return f"not recorded by {' and '.join(missing)}: run(record_ids=True) does"
    from paceline.data import diff as data_diff

    try:
        found = data_diff(a.path, b.path)
    except PacelineError as error:
        return f"cannot be compared: {error}"
    return "the same rows at every step" if found is None else str(found)


def audit(words: Words = None, json: Json = False) -> None:
    import dataclasses

    from paceline.cli.drawing import clean
    from paceline.data import audit as data_audit

    found = data_audit(Store().pick(words).path)
    if json:
        give_json({**dataclasses.asdict(found), "is_clean": found.is_clean})
    else:
        give([clean(line) for line in str(found).split("\n")])
    if not found.is_clean:
        raise typer.Exit(FAILED)


def add_to(group: typer.Typer) -> None:
    add_verb(group, "diff", _DIFF, diff)
    add_verb(group, "audit", _AUDIT, audit)
