"""`xp tag`, `rm`, `restore`, `gc` and `export`: what becomes of runs."""

import errno
import math
import re
import shlex
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.cli.asking import Json, Store, Words, Yes, add_verb, complete_runs, confirm, give, give_json, say

_TAG = """Give a run tags, take some away, or list them.

\b
  paceline xp tag digits/3 paper best
  paceline xp tag digits/3 --remove best
  paceline xp tag digits/3                 which it has
  paceline xp show @paper                  the newest run with it
"""
_RM = """Remove runs, for now.

\b
  paceline xp rm digits 3
  paceline xp rm 'sweep/*'

They go to the folder .trash among the results, until `xp gc`; `xp restore` brings them back.
A run that goes on is not removed: stop it first. Checkpoints that are kept at another place stay there.
"""
_RESTORE = """Bring removed runs back, or list them.

\b
  paceline xp restore                 what is in the trash
  paceline xp restore digits/run_003
  paceline xp restore digits 3        the same, as for `rm`
  paceline xp restore 'sweep/*'
  paceline xp restore --all
"""
_GC = """Delete what was removed, for good.

\b
  paceline xp gc                      all of the trash, after a question
  paceline xp gc --older-than 7d --yes
"""
_EXPORT = """Write a run, or its metrics, to a file.

\b
  paceline xp export digits 3 -o digits.tar.gz
  paceline xp export digits -o metrics.csv
  paceline xp export digits -o - --format csv      to stdout

The whole folder is .tar or .tar.gz, metrics are .csv, .json or .jsonl.
"""
Run = Annotated[str, typer.Argument(metavar="RUN", show_default=False, autocompletion=complete_runs, help="NAME/RUN …")]


def tag(
    run: Run,
    tags: Annotated[list[str] | None, typer.Argument(metavar="[TAG]...", show_default=False)] = None,
    remove: Annotated[list[str] | None, typer.Option("--remove", "-r", metavar="TAG", help="Repeatable.")] = None,
    json: Json = False,
) -> None:
    from paceline.errors import ArgumentError, RunNotFoundError
    from paceline.runs.tags import change_tags, read_tags

    store = Store()
    found = store.pick_all([run])
    names = {}
    for one in found:
        try:
            changed = change_tags(one.run.path, tags or (), remove or ()) if tags or remove else read_tags(one.path)
        except OSError as error:
            if not one.run.path.is_dir():
                raise RunNotFoundError(f"{one.name} is no longer there.") from None
            raise ArgumentError(f"The tags of {one.name} cannot be written: {error}.") from error
        names[one.name] = sorted(changed)
    if json:
        give_json(names)
        return
    from paceline.cli.drawing import clean

    give([f"{clean(name)}: {' '.join(those) or 'no tags'}" for name, those in names.items()])


def rm(words: Words = None, yes: Yes = False, json: Json = False) -> None:
    from paceline.errors import ArgumentError, RunNotFoundError, TrainerStateError
    from paceline.runs.trash import remove

    if not words:
        raise ArgumentError("Which run? `paceline xp rm NAME RUN`; the newest is `latest`.")
    store = Store()
    found = store.pick_all(words)
    for run in found:
        if not Path(run.path).is_dir():
            raise RunNotFoundError(f"{run.name} is no longer there.")
        if str(store.root / run.name) != run.path:
            raise ArgumentError(f"{run.path} is not below the results folder {store.root}: remove it yourself.")
    alive = [run.name for run in found if run.run.is_alive]
    if alive:
        raise TrainerStateError(f"{', '.join(alive[:5])} goes on: `paceline xp stop {alive[0]}` first.")
    if len(found) > 1 and not confirm(f"Remove {len(found)} runs?", yes):
        raise typer.Exit(2)
    for run in found:
        try:
            removed = remove(store.root, run.name)
        except RunNotFoundError:
            raise
        except OSError as error:
            raise ArgumentError(f"{run.name} cannot be removed: {error}.{_without_room(run.path, error)}") from error
        say(f"{run.name} is removed. `paceline xp restore {run.name}` brings it back, until `paceline xp gc`.")
        _tell_elsewhere(run.name, removed.run_dir)
    if json:
        give_json([run.name for run in found])


def _without_room(path: str, error: OSError) -> str:
    """Nothing is deleted for good unasked, also not where the trash has no room to note what is in it."""
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return ""
    deletes = f"`rm -r {shlex.quote(path)}` deletes this run for good"
    return f" The trash needs a little room: `paceline xp gc` empties it. If that is not enough, {deletes}."


def _tell_elsewhere(name: str, run_dir: Path) -> None:
    """Checkpoints that are kept at another place: what a folder names is not touched."""
    from paceline.errors import PacelineError
    from paceline.runs.load import Run

    try:
        place = Run(run_dir).checkpoint_root
    except PacelineError:
        return
    if place != str(run_dir / "checkpoints"):
        say(f"The checkpoints of {name} are at {place}, and stay there.")


def restore(
    names: Annotated[list[str] | None, typer.Argument(metavar="[NAME/RUN]...", show_default=False)] = None,
    everything: Annotated[bool, typer.Option("--all", "-a", help="All that is in the trash.")] = False,
    json: Json = False,
) -> None:
    from paceline.runs.logdir import results_dir
    from paceline.runs.trash import removed_runs
    from paceline.runs.trash import restore as bring_back

    root = results_dir()
    trash = removed_runs(root)
    if not names and not everything:
        _list_removed(trash, json)
        return
    chosen = list(trash) if everything else _meant(names or [], trash)
    done = [(one.name, bring_back(root, one)) for one in chosen]
    for former, present in done:
        say(f"{former} is back" + (f", as {present}: a newer run has its number." if present != former else "."))
    if json:
        give_json([present for _, present in done])


def _meant(words: list[str], trash: list[Any]) -> list[Any]:
    """NAME RUN, as for `rm`, or words that each mean a run or several. Of a name that was removed twice, the last."""
    from paceline.errors import RunNotFoundError
    from paceline.runs.selection import select

    is_one = len(words) == 2 and re.fullmatch(r"(run_)?\d+|-\d+|latest", words[1])
    found: dict[str, Any] = {}
    for asked in [words] if is_one else [[word] for word in words]:
        try:
            names = select(asked, [one.name for one in trash], lambda name: frozenset())
        except RunNotFoundError:
            told = " ".join(asked)
            raise RunNotFoundError(f"{told} is not in the trash. `paceline xp restore` lists what is.") from None
        found |= {name: next(one for one in trash if one.name == name) for name in names}
    return list(found.values())


def _list_removed(trash: list[Any], json: bool) -> None:
    from paceline.cli.drawing import Column, clean, span, table, width

    if json:
        give_json([{"name": one.name, "time": one.time} for one in trash])
    elif not trash:
        say("The trash is empty.")
    else:
        now = time.time()
        rows = [(clean(one.name), f"{span(max(0.0, now - one.time))} ago") for one in trash]
        give(table([Column("run"), Column("removed")], rows, width()))


def gc(
    older_than: Annotated[str, typer.Option(metavar="7d", help="Only what was removed that long ago.")] = "0s",
    yes: Yes = False,
    json: Json = False,
) -> None:
    from paceline.errors import ArgumentError
    from paceline.runs.conditions import seconds
    from paceline.runs.logdir import results_dir
    from paceline.runs.trash import empty, removed_runs, sweep

    root, age_s = results_dir(), seconds(older_than)
    last = time.time() - age_s if age_s else math.inf  # all, also what a clock that was set back has not reached yet
    chosen = [one for one in removed_runs(root) if one.time <= last]
    if chosen and not confirm(f"Delete {_counted(chosen)} for good?", yes):
        raise typer.Exit(2)
    deleted = []
    for one in chosen:
        _tell_elsewhere(one.name, one.run_dir)
        try:
            deleted += [one.name] if empty(one) else []
        except OSError as error:
            raise ArgumentError(f"{one.place} cannot be deleted: {error}.") from error
    sweep(root)
    say(f"{len(deleted)} runs are deleted." if len(deleted) != 1 else f"{deleted[0]} is deleted.")
    if json:
        give_json(deleted)


def _counted(removed: list[Any]) -> str:
    return f"{len(removed)} removed runs" if len(removed) > 1 else removed[0].name


def export(
    words: Words = None,
    out: Annotated[
        str | None, typer.Option("-o", "--out", metavar="FILE", help="- is stdout.", show_default=False)
    ] = None,
    kind: Annotated[
        str | None, typer.Option("--format", metavar="tar|tar.gz|csv|json|jsonl", help="Default: by the file's name.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Over a file that is there.")] = False,
    json: Json = False,
) -> None:
    from paceline.cli.exporting import KINDS, write
    from paceline.errors import ArgumentError

    found = Store().pick(words)
    name = found.name.replace("/", "_")
    out = out or f"{name}.{kind or 'tar.gz'}"
    kind = kind or next((one for one in KINDS if out.endswith(f".{one}")), None)
    if kind not in KINDS:
        given = f"-o {out}" if kind is None else f"--format {kind}"
        raise ArgumentError(f"{given}: expected a name that ends in, or a --format of, {', '.join(KINDS)}.")
    num_left_out = write(found.run, kind, out, force)
    if num_left_out:
        say(f"{num_left_out} links and other things that are no files were left out.")
    if out != "-":
        say(f"{found.name} is in {out}.")
        if json:
            give_json({"name": found.name, "file": str(Path(out).absolute()), "format": kind})


def add_to(group: typer.Typer) -> None:
    add_verb(group, "tag", _TAG, tag)
    add_verb(group, "rm", _RM, rm)
    add_verb(group, "restore", _RESTORE, restore)
    add_verb(group, "gc", _GC, gc)
    add_verb(group, "export", _EXPORT, export)
