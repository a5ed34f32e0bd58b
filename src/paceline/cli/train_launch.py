"""`paceline train launch`: an experiment on a Ray cluster, as a job."""

import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.asking import OK, USAGE, Address, Json, add_command, say

if TYPE_CHECKING:
    from paceline.cli.launching import Launch
    from paceline.cli.ray_cluster import Cluster
    from paceline.experiment.plan import Plan

_HELP = """Train the experiment of this folder on a Ray cluster, as a job with its code.

\b
  paceline train launch                                       the cluster of RAY_ADDRESS, or of this machine
  paceline train launch cfg.start_workers=8 --address http://head:8265
  paceline train launch --follow                              with its output, until it ends
  paceline train launch -m lr=1e-2,1e-3                       a job for each combination
  paceline train launch --prepare-batches

The configuration is checked here. Then the project's files are sent, and the job runs `paceline train run --engine ray`
there, detached: this prints NAME/RUN as soon as the run has begun, at most two minutes later. --follow stays, and ends
with the exit code of the run; Ctrl-C leaves the run alone. PACELINE_RESULTS and PACELINE_STORAGE go along. What a
cluster has run, or is running, with this code is not launched again without --force. --resume goes on with a run on a
cluster that has not succeeded, from its last checkpoint; if there is none, it begins one.
"""


def launch(
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[PATH=VALUE]...", show_default=False, help="Changes to conf.yaml.")
    ] = None,
    address: Address = None,
    prepare_batches: Annotated[
        bool, typer.Option("--prepare-batches", help="Make all batches before training, once.")
    ] = False,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Stay, and show what it prints.")] = False,
    sweep: Annotated[bool, typer.Option("-m", "--multirun", help="Values with commas are several runs.")] = False,
    conf: Annotated[str | None, typer.Option(metavar="FILE", show_default=False, help="Another conf.yaml.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Launch a configuration anew that has been run.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the last run of this configuration.")] = False,
    as_json: Json = False,
) -> None:
    from paceline.cli.train_run import plans_of, refuse_both
    from paceline.errors import ArgumentError

    refuse_both(force, resume)
    if follow and sweep:
        raise ArgumentError("--follow and -m: one run can be followed. Leave out --follow; `paceline xp logs` follows.")
    project = Path.cwd()
    # Whether it is to be run was decided here: in the job, a test run with few workers would hold it up.
    words = ["--resume" if resume else "--force", *_conf_words(conf, project)]
    words += ["--prepare-batches"] if prepare_batches else []
    plans = plans_of(conf, overrides or [], sweep)
    raise typer.Exit(_launch(plans, words, project, address, follow, force, as_json))


def _launch(
    plans: list[tuple[list[str], "Plan", Any]],
    words: list[str],
    project: Path,
    address: str | None,
    follow: bool,
    force: bool,
    as_json: bool,
) -> int:
    from paceline.cli import launching
    from paceline.cli.ray_cluster import Cluster

    cluster = Cluster(address)
    launches: list[Launch] = []
    worst = OK
    for overrides, plan, parent in plans:
        former, one = None if force else _former(plan, cluster), _launch_of(plan, overrides, parent, words)
        if former is None and not force and one.about in [other.about for other in launches]:
            say(f"{shlex.join(overrides)}: another run of this sweep has the same configuration. It is launched once.")
        elif former is None:
            launches.append(one)
        else:
            worst = max(worst, _tell_former(*former, plan, as_json))
    ids = launching.submit(cluster, launches, project, launching.variables_for_job(project)) if launches else []
    if follow and ids:
        return launching.follow(cluster, ids[0], launches[0], address, as_json)
    return max(worst, launching.await_and_tell(cluster, ids, launches, address, as_json))


def _launch_of(plan: "Plan", overrides: list[str], parent: Any, words: list[str]) -> "Launch":
    from paceline.cli.launching import Launch
    from paceline.experiment.run_folders import config_of, logdir_of

    logdir_of(plan)  # whether the name can be one
    command = ["train", "run", "--engine", "ray", *words]
    command += [] if parent is None else ["--parent", json.dumps(parent)]
    about = {"kind": "train", "config": plan.config_hash, "code": plan.code_hash}
    return Launch(config_of(plan).name, [*command, "--", *overrides], about)


def _conf_words(conf: str | None, project: Path) -> list[str]:
    from paceline.errors import ArgumentError

    if conf is None:
        return []
    path = Path(conf).resolve()
    if not path.is_relative_to(project.resolve()):
        raise ArgumentError(
            f"--conf {conf} is outside of {project}, and only this folder goes to the cluster: put it there."
        )
    return ["--conf", path.relative_to(project.resolve()).as_posix()]


_MAY_BE_REPEATED = ("FAILED", "STOPPED")


def _former(plan: "Plan", cluster: "Cluster") -> tuple[str, str] | None:
    """Name and state of a run on the cluster, with this configuration and code, that has succeeded or goes on."""
    from paceline.cli.cluster_runs import named
    from paceline.experiment.run_folders import logdir_of, same_runs

    wanted = (plan.config_hash, plan.code_hash)
    for job in cluster.jobs():
        if job.state not in _MAY_BE_REPEATED and (job.about.get("config"), job.about.get("code")) == wanted:
            [one] = named(cluster, [job])
            if one.state not in _MAY_BE_REPEATED:
                return one.name, one.state
    for run in same_runs(plan.config_hash, logdir_of(plan), plan.code_hash):
        if run.request.get("engine") == "ray" and run.status.state == "SUCCEEDED":
            return run.name, run.status.state.value
    return None


def _tell_former(name: str, state: str, plan: "Plan", as_json: bool) -> int:
    from paceline.cli.drawing import clean

    say(f"This configuration ({plan.config_hash}) has been launched with this code: {name}, {state}.")
    say("--force launches it anew.")
    if state != "SUCCEEDED":
        return USAGE
    print(
        json.dumps({"run": name, "job": None, "state": state, "path": None, "dashboard": None})
        if as_json
        else clean(name)
    )
    sys.stdout.flush()
    return OK


def add_to(group: typer.Typer) -> None:
    add_command(group, "launch", _HELP, launch)
    add_command(group, "lauch", "The same as `train launch`.", launch, hidden=True)
