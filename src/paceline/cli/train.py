"""`paceline train`: typed experiments, from a new folder to a run."""

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.asking import FAILED, INTERRUPTED, OK, USAGE, Json, answering, give, give_json, say
from paceline.cli.quick import QuickCommand, QuickGroup

if TYPE_CHECKING:
    from paceline.experiment.plan import Plan
    from paceline.runs import Run

_HELP = """Typed experiments: make one, bind its configuration, run it.

\b
  paceline train new digits      a folder with an experiment that trains as it is
  cd digits
  paceline train bind            conf.yaml, from the code
  paceline train run             here, on as many workers as conf.yaml says

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
  paceline train bind --reset    as the code has it, without edits
"""

_RUN_HELP = """Train the experiment of this folder, as its conf.yaml says.

\b
  paceline train run                                  src/conf.yaml, or conf.yaml
  paceline train run optimizers.adam.lr=1e-3 cfg.num_epochs=3
  paceline train run cfg.start_workers=4 --engine ray
  paceline train run -m lr=1e-2,1e-3 'train.batch_size=range(16,65,16)'    a run for each combination

A path is a section and what follows, or the end of exactly one path. +path=value adds, ~path goes back to the code.
A configuration that has been run before with the same code is not run again, unless --force says so; --resume goes on
with a run of it that has not succeeded. Exit code: 1 if a run fails.

What workers print is on stdout, and the run folder is its last line. With --json, stdout has an object for each run
and nothing else.
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
    from paceline.experiment.project import conf_to_write, load_experiment
    from paceline.experiment.schema import schema_of

    project = Path.cwd()
    schema = schema_of(load_experiment(project))
    path = conf_to_write(project)
    text = path.read_text() if path.is_file() else None
    if check:
        _check(schema, path, text, json)
    elif diff:
        _diff(schema, path, text, json)
    else:
        _bind(schema, path, text, reset, json)


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


def _bind(schema: Any, path: Path, text: str | None, reset: bool, json: bool) -> None:
    from paceline.experiment import binding
    from paceline.runs.durable import write_atomic

    bound = binding.bind(schema, None if reset else text)
    if bound.text != text:
        write_atomic(path, bound.text.encode())
    for what, paths in (("added", bound.added), ("gone", bound.removed), ("edited", bound.edited)):
        for one in paths if text is not None and not reset else ():
            say(f"{what}: {one}")
    for one in bound.unknown:
        say(f"{one} could not be recovered from the code: write its value into {path.name}")
    if json:
        told = {"added": bound.added, "removed": bound.removed, "edited": bound.edited, "unknown": bound.unknown}
        give_json({"path": str(path), "has_changed": bound.text != text, **told})
    else:
        give([str(path)])


def run(
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[PATH=VALUE]...", show_default=False, help="Changes to conf.yaml.")
    ] = None,
    sweep: Annotated[bool, typer.Option("-m", "--multirun", help="Values with commas are several runs.")] = False,
    engine: Annotated[
        str | None, typer.Option(metavar="local|ray", show_default=False, help="Default: what cfg.engine says.")
    ] = None,
    conf: Annotated[str | None, typer.Option(metavar="FILE", show_default=False, help="Another conf.yaml.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Run a configuration anew that has been run.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the last run of this configuration.")] = False,
    json: Annotated[bool, typer.Option("--json", help="An object for each run, on a line of stdout.")] = False,
) -> None:
    worst = OK
    for words, plan, parent in _plans(conf, overrides or [], sweep):
        worst = max(worst, _run_one(plan, words, {"engine": engine, "parent": parent}, force, resume, json))
        if worst == INTERRUPTED:
            break
    raise typer.Exit(worst)


def _plans(conf: str | None, overrides: list[str], is_sweep: bool) -> list[tuple[list[str], "Plan", Any]]:
    """Of each run to come; all are checked before the first one begins."""
    import secrets

    from paceline.experiment import check_installed

    check_installed()
    from paceline.experiment.overrides import expand
    from paceline.experiment.project import load_experiment, load_plan

    experiment = load_experiment(Path.cwd())
    if not is_sweep:
        return [(overrides, load_plan(experiment, conf, overrides), None)]
    combinations, sweep_id = expand(overrides), secrets.token_hex(4)
    return [
        (words, load_plan(experiment, conf, words), {"sweep": sweep_id, "number": number, "of": len(combinations)})
        for number, words in enumerate(combinations, 1)
    ]


def _run_one(plan: "Plan", words: list[str], options: dict[str, Any], force: bool, resume: bool, json: bool) -> int:
    from paceline.errors import ArgumentError, ConfigError, MissingDependencyError, ResourcesError
    from paceline.experiment.running import run_plan
    from paceline.runs import load_run
    from paceline.trainer import Trainer

    before = _same(plan)
    former = (
        None if force else next((one for one in before if one.status.state == "SUCCEEDED"), next(iter(before), None))
    )
    if former is not None and (former.status.state == "SUCCEEDED" or not resume):
        return _tell_former(former, plan, json)
    try:
        # With --json, what workers print must not come between the answers.
        with contextlib.redirect_stdout(sys.stderr) if json else contextlib.nullcontext():
            if former is not None:
                Trainer.resume(former.path)
            else:
                former = load_run(run_plan(plan, overrides=words, **options).path)
    except (ConfigError, ArgumentError, MissingDependencyError, ResourcesError) as error:
        say(str(error))
        return USAGE
    except KeyboardInterrupt as interrupt:
        say(f"Interrupted: {interrupt}")
        return INTERRUPTED
    except Exception as error:
        _explain(error)
        known = {one.path for one in before}
        failed = former or next((one for one in _same(plan) if one.path not in known), None)
        if failed is not None:
            _tell(failed, plan, json)
        return FAILED
    _tell(former, plan, json)
    return OK


def _same(plan: "Plan") -> "list[Run]":
    """Runs of the same configuration and code, newest first."""
    from paceline.experiment.running import logdir_of, same_runs

    return same_runs(plan.config_hash, logdir_of(plan), plan.code_hash)


def _tell_former(former: "Run", plan: "Plan", json: bool) -> int:
    state = former.status.state
    say(f"This configuration ({plan.config_hash}) has been run with this code: {former.name}, {state}.")
    say("--force runs it anew.")
    if not former.is_alive and state != "SUCCEEDED":
        say("--resume goes on with that run.")
    _tell(former, plan, json)
    return OK if state == "SUCCEEDED" else USAGE


def _tell(run: "Run", plan: "Plan", json: bool) -> None:
    from paceline.cli.drawing import clean_json
    from paceline.json_text import encode

    state = run.status.state.value
    if json:
        told = {"run": run.name, "path": str(run.path), "state": state, "config_hash": plan.config_hash}
        give([clean_json(encode(told).decode())])
    elif state == "SUCCEEDED":
        give([str(run.path)])
    else:
        say(f"{run.name}: {state}. `paceline xp show {run.name}` tells more.")


def _explain(error: Exception) -> None:
    """What a worker has said is in the notes: which rank, and its traceback."""
    import traceback

    notes = [str(note) for note in getattr(error, "__notes__", ())]
    say("\n".join(notes) if notes else "".join(traceback.format_exception(error)).rstrip())


def add_to(app: typer.Typer) -> None:
    group = typer.Typer(name="train", cls=QuickGroup, help=_HELP, no_args_is_help=True, rich_markup_mode=None)
    group.command("new", cls=QuickCommand, help=_NEW_HELP)(answering(new))
    group.command("bind", cls=QuickCommand, help=_BIND_HELP)(answering(bind))
    group.command("run", cls=QuickCommand, help=_RUN_HELP)(answering(run))
    app.add_typer(group)
    app.command("new", cls=QuickCommand, hidden=True, help=_NEW_HELP)(answering(new))
