"""`paceline train`: typed experiments, from a new folder to a run."""

from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.cli import train_launch, train_run
from paceline.cli.asking import FAILED, Json, add_command, give, give_json, new_group, say
from paceline.no_collection import no_collection

_HELP = """Typed experiments: make one, bind its configuration, run it, launch it.

\b
  paceline train new digits      a folder with an experiment that trains as it is
  cd digits
  paceline train bind            conf.yaml, from the code
  paceline train run             here, on as many workers as conf.yaml says
  paceline train launch          on a Ray cluster

Where the runs are then, `paceline xp ls` tells.
"""

_NEW_HELP = """Make a folder with an experiment that trains as it is.

\b
  paceline train new digits
  cd digits && paceline train run

Its name is that of the runs. The folder is new, or empty.
"""

_BIND_HELP = """Write conf.yaml from the code of the experiment, or bring it up to date: edits and comments stay.

\b
  paceline train bind            write it
  paceline train bind --check    exit code 1 if it is not up to date: for CI
  paceline train bind --diff     show what would change
  paceline train bind --reset    as the code has it, without edits; but for the name of the runs
"""


def new(
    name: Annotated[
        str, typer.Argument(metavar="NAME", show_default=False, help="The folder, and the name of its runs.")
    ],
    json: Json = False,
) -> None:
    from paceline.experiment.new_project import make_project

    path = make_project(Path(name))
    if json:
        give_json({"name": path.name, "path": str(path)})
    else:
        give([str(path)])
    say(f"Train it:  cd {name} && paceline train run")


def bind(
    check: Annotated[bool, typer.Option("--check", help="Only say whether it is up to date.")] = False,
    diff: Annotated[bool, typer.Option("--diff", help="Only show what would change.")] = False,
    reset: Annotated[bool, typer.Option("--reset", help="Forget edits.")] = False,
    json: Json = False,
) -> None:
    from paceline.errors import ArgumentError
    from paceline.experiment import check_installed

    if check + diff + reset > 1:
        raise ArgumentError("--check, --diff and --reset do not go together: choose one.")
    check_installed()
    project = Path.cwd()
    with no_collection():
        from paceline.experiment.project import conf_to_write, load_experiment, read_conf
        from paceline.experiment.schema import schema_of

        schema = schema_of(load_experiment(project))
    path = conf_to_write(project)
    text = read_conf(path) if path.exists() else None
    if check:
        _check(schema, path, text, json)
    elif diff:
        _diff(schema, path, text, json)
    else:
        _bind(schema, path, text, _name_of(project) if reset else None, json)


def _name_of(project: Path) -> str:
    """Empty if no runs can be called so: most files need no other name, and are not refused for that."""
    from paceline.errors import ConfigError
    from paceline.project_file import project_name

    try:
        return project_name(project)
    except ConfigError:
        return ""


def _check(schema: Any, path: Path, text: str | None, json: bool) -> None:
    from paceline.experiment import binding

    problems = binding.check(schema, text)
    for problem in problems:
        say(problem)
    if json:
        give_json({"path": str(path), "is_current": not problems, "problems": problems})
    if problems:
        raise typer.Exit(FAILED)


def _diff(schema: Any, path: Path, text: str | None, json: bool) -> None:
    from paceline.experiment import binding

    changes = binding.diff(schema, text, path.name)
    if json:
        give_json({"path": str(path), "has_changed": bool(changes), "diff": changes})
    else:
        give(changes.splitlines())


def _bind(schema: Any, path: Path, text: str | None, reset_as: str | None, json: bool) -> None:
    """`reset_as` is the project's name, if edits are to be forgotten."""
    from paceline.errors import ConfigError
    from paceline.experiment import binding
    from paceline.experiment.project import read_conf, write_conf

    bound = binding.bind(schema, text) if reset_as is None else binding.reset(schema, text, reset_as)
    if bound.text != text:
        if (read_conf(path) if path.exists() else None) != text:
            raise ConfigError(f"{path} was changed while it was bound, and is left as it is now: bind it again.")
        write_conf(path, bound.text)
    for what, paths in (("added", bound.added), ("gone", bound.removed), ("edited", bound.edited)):
        for one in paths if text is not None and reset_as is None else ():
            say(f"{what}: {one}")
    if bound.renamed is not None:
        say(
            f"The name that the runs had could not be read in {path.name}: they are called {bound.renamed!r} from now "
            "on. If they had another name, write it into cfg.name."
        )
    for one in bound.unknown:
        say(f"{one} could not be recovered from the code: write its value into {path.name}")
    if json:
        told = {"added": bound.added, "removed": bound.removed, "edited": bound.edited, "unknown": bound.unknown}
        give_json({"path": str(path), "has_changed": bound.text != text, **told})
    else:
        give([str(path)])


def add_to(app: typer.Typer) -> None:
    group = new_group("train", _HELP)
    add_command(group, "new", _NEW_HELP, new)
    add_command(group, "bind", _BIND_HELP, bind)
    add_command(group, "run", train_run.HELP, train_run.run)
    train_launch.add_to(group)
    app.add_typer(group)
    add_command(app, "new", _NEW_HELP, new, hidden=True)
