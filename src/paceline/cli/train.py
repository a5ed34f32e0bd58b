"""`paceline train`: typed experiments, from a new folder to a run."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli import train_launch

if TYPE_CHECKING:
    from paceline.experiment.plan import Plan
    from paceline.runs import Run

_RUN_HELP = """Train the experiment of this folder, as its conf.yaml says.

\b
  paceline train run                                  src/conf.yaml, or conf.yaml
  paceline train run optimizers.adam.lr=1e-3 cfg.num_epochs=3
  paceline train run cfg.start_workers=4 --engine ray
  paceline train run -m lr=1e-2,1e-3 batch_size=range(16,65,16)    a run for each combination

A path is a section and what follows, or the end of exactly one path. +path=value adds, ~path goes back to the code.
A configuration that has been run before with the same code is not run again, unless --force says so; --resume goes on
with a run of it that has not succeeded.
"""

_BIND_HELP = """Write conf.yaml from the code of the experiment, or bring it up to date: edits and comments stay.

\b
  paceline train bind            write it
  paceline train bind --check    exit code 1 if it is not up to date: for CI
  paceline train bind --diff     show what would change
  paceline train bind --reset    as the code has it, without edits
"""

OK, FAILED, REFUSED, INTERRUPTED = 0, 1, 2, 130

app = typer.Typer(help="Typed experiments: make, bind, run, launch.", no_args_is_help=True)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")]


@app.command(help="Make a folder with an experiment that trains as it is:  paceline train new digits && cd digits")
def new(name: Annotated[str, typer.Argument(help="The folder, and the name of its runs.")]) -> None:
    from paceline.errors import ConfigError
    from paceline.experiment.new_project import make_project

    try:
        path = make_project(Path(name))
    except ConfigError as error:
        raise typer.Exit(_refuse(str(error))) from None
    typer.echo(path)
    _say(f"Train it:  cd {name} && paceline train run")


@app.command(help=_BIND_HELP)
def bind(
    check: Annotated[bool, typer.Option("--check", help="Only say whether it is up to date.")] = False,
    diff: Annotated[bool, typer.Option("--diff", help="Only show what would change.")] = False,
    reset: Annotated[bool, typer.Option("--reset", help="Forget edits.")] = False,
    as_json: Json = False,
) -> None:
    from paceline.errors import ConfigError, MissingDependencyError

    if check + diff + reset > 1:
        raise typer.Exit(_refuse("--check, --diff and --reset do not go together: choose one."))
    try:
        raise typer.Exit(_bind(check, diff, reset, as_json))
    except (ConfigError, MissingDependencyError) as error:
        raise typer.Exit(_refuse(str(error))) from None


def _bind(check: bool, diff: bool, reset: bool, as_json: bool) -> int:
    from paceline.experiment import binding, check_installed
    from paceline.experiment.project import conf_to_write, load_experiment, read_conf, write_conf
    from paceline.experiment.schema import schema_of

    check_installed()
    project = Path.cwd()
    schema = schema_of(load_experiment(project))
    path = conf_to_write(project)
    text = read_conf(path) if path.exists() else None
    if diff:
        typer.echo(binding.diff(schema, text, path.name), nl=False)
        return OK
    if check:
        problems = binding.check(schema, text)
        for problem in problems:
            _say(problem)
        if as_json:
            typer.echo(json.dumps({"path": str(path), "is_current": not problems, "problems": problems}))
        return FAILED if problems else OK
    bound = binding.bind(schema, None if reset else text)
    if bound.text != text:
        write_conf(path, bound.text)
    for what, paths in (("added", bound.added), ("gone", bound.removed), ("edited", bound.edited)):
        for one in paths if text is not None and not reset else ():
            _say(f"{what}: {one}")
    for one in bound.unknown:
        _say(f"{one} could not be recovered from the code: write its value into {path.name}")
    if as_json:
        told = {"added": bound.added, "removed": bound.removed, "edited": bound.edited, "unknown": bound.unknown}
        typer.echo(json.dumps({"path": str(path), "has_changed": bound.text != text, **told}))
    else:
        typer.echo(path)
    return OK


@app.command(help=_RUN_HELP)
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
    prepare_batches: Annotated[
        bool, typer.Option("--prepare-batches", help="Map datasets by ray_map_batches first, into a cache.")
    ] = False,
    parent: Annotated[str | None, typer.Option(hidden=True, help="JSON: what the run is a part of.")] = None,
    as_json: Json = False,
) -> None:
    from paceline.errors import ConfigError, MissingDependencyError

    try:
        plans = plans_of(conf, overrides or [], sweep)
    except (ConfigError, MissingDependencyError) as error:
        raise typer.Exit(_refuse(str(error))) from None
    worst = OK
    if sweep and plans:
        told = f"config.sweep={plans[0][2]['sweep']}"
        _say(f"A sweep of {len(plans)} runs: `paceline xp ls --filter {told}` lists them.")
    for words, plan, sweep_of in plans:
        belongs_to = sweep_of if parent is None else json.loads(parent)
        options = {"engine": engine, "parent": belongs_to, "prepare_batches": prepare_batches, "say": _say}
        worst = max(worst, _run_one(plan, words, options, force, resume, as_json))
        if worst == INTERRUPTED:
            break
    raise typer.Exit(worst)


def plans_of(conf: str | None, overrides: list[str], is_sweep: bool) -> list[tuple[list[str], "Plan", Any]]:
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


class _HasBeenRun(Exception):
    def __init__(self, former: "Run"):
        super().__init__(former)
        self.former = former


def _run_one(plan: "Plan", words: list[str], options: dict[str, Any], force: bool, resume: bool, as_json: bool) -> int:
    from paceline.cli.announcing import Announcement
    from paceline.errors import PacelineError
    from paceline.experiment.running import resume_plan, run_plan

    def refuse_again() -> None:
        former = None if force else _former(plan)
        if former is not None:
            raise _HasBeenRun(former)

    try:
        former = None if force else _former(plan)
        if former is not None and (former.status.state == "SUCCEEDED" or not resume):
            return _tell_former(former, plan, as_json)
        if former is not None:
            resume_plan(plan, former)
            path = former.path
        else:  # asked again when all is ready: another process may have begun the same in the meantime
            options = {**options, "callbacks": [Announcement()], "before_begin": refuse_again}
            path = run_plan(plan, overrides=words, **options).path
    except _HasBeenRun as again:
        return _tell_former(again.former, plan, as_json)
    except KeyboardInterrupt as interrupt:
        _say(f"Interrupted: {interrupt}" if interrupt.args else "Interrupted.")
        return INTERRUPTED
    except Exception as error:
        if isinstance(error, PacelineError) and not getattr(error, "__notes__", None):
            return _refuse(str(error))  # no run has come to it
        _explain(error)
        return FAILED
    _tell(path, plan, as_json)
    return OK


def _former(plan: "Plan") -> "Run | None":
    """A run of the same configuration and code: one that has succeeded, else the newest."""
    from paceline.experiment.running import logdir_of, same_runs

    before = same_runs(plan.config_hash, logdir_of(plan), plan.code_hash)
    return next((one for one in before if one.status.state == "SUCCEEDED"), next(iter(before), None))


def _tell_former(former: "Run", plan: "Plan", as_json: bool) -> int:
    state = former.status.state
    _say(f"This configuration ({plan.config_hash}) has been run with this code: {former.name}, {state}.")
    _say("--force runs it anew.")
    if state == "SUCCEEDED":
        _tell(former.path, plan, as_json)
        return OK
    if not former.is_alive:
        _say("--resume goes on with that run.")
    return REFUSED


def _tell(path: Path, plan: "Plan", as_json: bool) -> None:
    name = f"{path.parent.name}/{path.name}"
    typer.echo(json.dumps({"run": name, "path": str(path), "config_hash": plan.config_hash}) if as_json else path)


def _explain(error: Exception) -> None:
    """What a worker has said is in the notes: which rank, and its traceback. Of what a constructor has raised here, all
    is told; what we say ourselves needs no traceback."""
    from paceline.errors import PacelineError
    from paceline.workers.outcome import text_of

    notes = [str(note) for note in getattr(error, "__notes__", None) or ()]
    if any(note.startswith("Raised in the training function") for note in notes):
        _say("\n".join(notes))
    elif isinstance(error, PacelineError):
        _say("\n".join([str(error), *notes]))
    else:
        _say(text_of(error).rstrip())


def _refuse(text: str) -> int:
    _say(text)
    return REFUSED


def _say(text: str) -> None:
    print(f"paceline: {text}", file=sys.stderr, flush=True)


def add_to(main: typer.Typer) -> None:
    train_launch.add_to(app)
    main.add_typer(app, name="train")
    main.command("new", hidden=True, help="The same as `train new`.")(new)
