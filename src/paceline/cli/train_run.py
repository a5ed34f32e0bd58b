"""`paceline train run`: the experiment of a folder, on workers."""

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.asking import FAILED, INTERRUPTED, OK, USAGE, give, say
from paceline.no_collection import no_collection

if TYPE_CHECKING:
    from paceline.experiment.plan import Plan
    from paceline.runs import Run

HELP = """Train the experiment of this folder, as its conf.yaml says.

\b
  paceline train run                                  src/conf.yaml, or conf.yaml
  paceline train run optimizers.adam.lr=1e-3 cfg.num_epochs=3
  paceline train run cfg.start_workers=4 --engine ray
  paceline train run -m lr=1e-2,1e-3 'train.batch_size=range(16,65,16)'    a run for each combination

A path is a section and what follows, or the end of exactly one path. +path=value adds, ~path goes back to the code.
A configuration that has been run before with the same code is not run again, unless --force says so; --resume goes on
with a run of it that has not succeeded; if there is none, it says so and begins one. Exit code: 1 if a run fails.

What workers print is on stdout, and the run folder is its last line. With --json, stdout has an object for each run
and nothing else.
"""


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
    json: Annotated[bool, typer.Option("--json", help="An object for each run, on a line of stdout.")] = False,
) -> None:
    from json import loads

    refuse_both(force, resume)
    worst, plans = OK, plans_of(conf, overrides or [], sweep)
    if sweep and plans:
        found_by = f"config.sweep={plans[0][2]['sweep']}"
        say(f"A sweep of {len(plans)} runs: `paceline xp ls --filter {found_by}` lists them.")
    for words, plan, sweep_of in plans:
        belongs_to = sweep_of if parent is None else loads(parent)
        options = {"overrides": words, "engine": engine, "parent": belongs_to, "prepare_batches": prepare_batches}
        worst = max(worst, _run_one(plan, options, force, resume, json))
        if worst == INTERRUPTED:
            break
    raise typer.Exit(worst)


def refuse_both(force: bool, resume: bool) -> None:
    from paceline.errors import ArgumentError

    if force and resume:
        raise ArgumentError("--force runs anew, and --resume goes on with a former run: choose one.")


def plans_of(conf: str | None, overrides: list[str], is_sweep: bool) -> list[tuple[list[str], "Plan", Any]]:
    """Of each run to come; all are checked before the first one begins."""
    import secrets

    from paceline.experiment import check_installed

    check_installed()
    with no_collection():
        from paceline.experiment.overrides import expand
        from paceline.experiment.project import load_experiment, load_plans

        experiment = load_experiment(Path.cwd())
    if not is_sweep:
        [plan] = load_plans(experiment, conf, [overrides])
        return [(overrides, plan, None)]
    combinations, sweep_id = expand(overrides), secrets.token_hex(4)
    plans = load_plans(experiment, conf, combinations)
    return [
        (words, plan, {"sweep": sweep_id, "number": number, "of": len(plans)})
        for number, (words, plan) in enumerate(zip(combinations, plans, strict=True), 1)
    ]


class _HasBeenRun(Exception):
    def __init__(self, former: "Run"):
        super().__init__(former)
        self.former = former


def _run_one(plan: "Plan", options: dict[str, Any], force: bool, resume: bool, json: bool) -> int:
    from paceline.cli.announcing import Announcement
    from paceline.errors import PacelineError
    from paceline.experiment.running import resume_plan, run_plan

    def refuse_again() -> None:
        if not force and (former := _former(plan)) is not None:
            raise _HasBeenRun(former)

    begun = Announcement()
    try:
        former = None if force else _former(plan, options["engine"] if resume else None)
        if former is not None and (former.status.state == "SUCCEEDED" or not resume):
            return _tell_former(former, plan, json)
        # With --json, what workers print must not come between the answers.
        with contextlib.redirect_stdout(sys.stderr) if json else contextlib.nullcontext():
            if former is not None:
                _check_engine(former, options["engine"])
                begun.path = former.path
                resume_plan(plan, former, callbacks=[begun])
            else:  # asked again when all is ready: another process may have begun the same in the meantime
                if resume:
                    say(f"No run of this configuration ({plan.config_hash}) and code is there to resume: one begins.")
                run_plan(plan, **options, say=say, callbacks=[begun], before_begin=refuse_again)
    except _HasBeenRun as again:
        return _tell_former(again.former, plan, json)
    except KeyboardInterrupt as interrupt:
        say(f"Interrupted: {interrupt}" if interrupt.args else "Interrupted.")
        _tell(begun.path, plan, json)
        return INTERRUPTED
    except SystemExit:  # SIGTERM, which ends this program when the run has ended
        _tell(begun.path, plan, json)
        raise
    except Exception as error:
        if isinstance(error, PacelineError) and not getattr(error, "__notes__", None):
            say(str(error))  # no run has come to it
            return USAGE
        _explain(error)
        _tell(begun.path, plan, json)
        return FAILED
    _tell(begun.path, plan, json)
    return OK


def _former(plan: "Plan", engine: str | None = None) -> "Run | None":
    """A run of the same configuration and code; one with that engine, if there is any."""
    from paceline.experiment.run_folders import former_run, logdir_of, same_runs

    before = same_runs(plan.config_hash, logdir_of(plan), plan.code_hash)
    return former_run([run for run in before if run.request.get("engine") == engine]) or former_run(before)


def _check_engine(former: "Run", engine: str | None) -> None:
    from paceline.errors import ArgumentError

    had = former.request.get("engine")
    if engine is not None and had != engine:
        raise ArgumentError(
            f"{former.name} had its workers on the engine {had!r}, and goes on there: leave out --engine {engine} to "
            "go on with it, or run anew with --force."
        )


def _tell_former(former: "Run", plan: "Plan", json: bool) -> int:
    state = former.status.state
    say(f"This configuration ({plan.config_hash}) has been run with this code: {former.name}, {state}.")
    say("--force runs it anew.")
    if not former.is_alive and state != "SUCCEEDED":
        say("--resume goes on with that run.")
    _tell(former.path, plan, json)
    return OK if state == "SUCCEEDED" else USAGE


def _tell(path: Path | None, plan: "Plan", json: bool) -> None:
    from paceline.cli.drawing import clean_json
    from paceline.json_text import encode
    from paceline.runs import load_run

    if path is None:  # it ended before there was a folder
        return
    run = load_run(path)
    state = run.status.state.value
    if json:
        told = {"run": run.name, "path": str(run.path), "state": state, "config_hash": plan.config_hash}
        give([clean_json(encode(told).decode())])
    elif state == "SUCCEEDED":
        give([str(run.path)])
    else:
        next_verb = "resume" if state == "STOPPED" else "show"
        does = "goes on with it" if state == "STOPPED" else "tells more"
        say(f"{run.name}: {state}. `paceline xp {next_verb} {run.name}` {does}.")


def _explain(error: Exception) -> None:
    """What a worker has said is in the notes: which rank, and its traceback. Of what a constructor has raised here, all
    is told; what we say ourselves needs no traceback."""
    from paceline.errors import PacelineError
    from paceline.workers.outcome import text_of

    notes = [str(note) for note in getattr(error, "__notes__", None) or ()]
    if any(note.startswith("Raised in the training function") for note in notes):
        say("\n".join(notes))
    elif isinstance(error, PacelineError):
        say("\n".join([str(error), *notes]))
    else:
        say(text_of(error).rstrip())
