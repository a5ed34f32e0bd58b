"""`paceline data new`, `run` and `launch`: jobs that prepare data in the storage."""

import contextlib
import json as json_text
import sys
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.asking import Address, Json, Root, add_command, say

_NEW = """Make a folder with a data job that runs as it is.

\b
  paceline data new images
  cd images && paceline data run

It writes a small dataset into the storage: change its main.py to what you need.
"""
_RUN = """Run the data job of this folder, here.

\b
  paceline data run
  paceline data run --root /mnt/shared --rows 2000      what follows our own options is for the job's script
  paceline data run --json -- --help

The storage is what --root or PACELINE_STORAGE names; the script finds it as PACELINE_STORAGE. The job is a run like any
other: NAME/run_001 in the results folder, for `paceline xp`. Its storage stays that of the run: `xp resume` and
`xp retry` find it again, in any folder.
"""
_LAUNCH = """Run the data job of this folder on a Ray cluster, as a job with its code.

\b
  paceline data launch --address http://head:8265
  paceline data launch --follow --root /mnt/shared --rows 2000

The storage is that of the cluster's machines: --root or PACELINE_STORAGE, as they see it. This prints NAME/RUN as soon
as the run has begun, at most two minutes later; --follow shows what the job prints, and ends with its exit code.
"""
_OURS = {"ignore_unknown_options": True, "allow_interspersed_args": False}

Args = Annotated[
    list[str] | None, typer.Argument(metavar="[ARGS]...", show_default=False, help="For the script of the job.")
]


def new(
    name: Annotated[str, typer.Argument(metavar="NAME", show_default=False, help="The folder, and its runs' name.")],
    json: Json = False,
) -> None:
    from paceline.experiment.new_project import make_project

    path = make_project(Path(name), "data_template")
    print(json_text.dumps({"path": str(path)}) if json else path)
    say(f"Run it:  cd {name} && paceline data run --root DIR")


def run(args: Args = None, root: Root = None, json: Json = False) -> None:
    from paceline.cli.announcing import Announcement
    from paceline.cli.storage_tree import storage_root
    from paceline.launch.data_job import find_job, run_job

    job = find_job(Path.cwd())
    storage = storage_root(root)
    announcement = Announcement()
    # With --json, what the job prints must not come before the answer.
    with contextlib.redirect_stdout(sys.stderr) if json else contextlib.nullcontext():
        code = run_job(job, args or [], storage, [announcement])
    if announcement.path is not None:
        name = f"{announcement.path.parent.name}/{announcement.path.name}"
        print(json_text.dumps({"run": name, "path": str(announcement.path)}) if json else announcement.path)
        sys.stdout.flush()
    raise typer.Exit(code)


def launch(
    args: Args = None,
    root: Root = None,
    address: Address = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Stay, and show what it prints.")] = False,
    json: Json = False,
) -> None:
    from paceline.cli import launching
    from paceline.cli.ray_cluster import Cluster
    from paceline.cli.storage_tree import storage_root
    from paceline.launch.data_job import find_job

    project = Path.cwd()
    job = find_job(project)
    storage = str(storage_root(root, is_here=False))
    cluster = Cluster(address)
    one = launching.Launch(job.name, ["data", "run", "--", *(args or [])], {"kind": "data"})
    variables = {**launching.variables_for_job(project), "PACELINE_STORAGE": storage}
    [id] = launching.submit(cluster, [one], project, variables)
    if follow:
        raise typer.Exit(launching.follow(cluster, id, one, address, json))
    raise typer.Exit(launching.await_and_tell(cluster, [id], [one], address, json))


def add_to(group: typer.Typer) -> None:
    add_command(group, "new", _NEW, new)
    add_command(group, "run", _RUN, run, context_settings=_OURS)
    add_command(group, "launch", _LAUNCH, launch, context_settings=_OURS)
