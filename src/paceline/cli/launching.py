"""A run that goes to a cluster as a job: what is submitted, how its number becomes known, and how it is followed.

    here                                        in the job
    pack the project, submit ────────────────►  paceline train run …, or paceline data run …
    read its output ◄────────────────────────── "This is digits/run_003, in …"

A run folder is numbered by who makes it, which is the job: only there the folders before it are sure to be seen. So
`launch` waits for that line, for START_S at the most.
"""

import json as json_text
import os
import secrets
import shlex
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from paceline.cli.announcing import Announced, find_announced
from paceline.cli.asking import FAILED, INTERRUPTED, OK, say
from paceline.cli.ray_cluster import STOP_S, Cluster, Job, Submission
from paceline.errors import ResourcesError
from paceline.runs.environment import JOB_VARIABLE

START_S = 120.0

_SYSTEM = ("/bin", "/usr/bin", "/usr/local/bin")
_NUM_LAST_LINES = 20


@dataclass(frozen=True)
class Launch:
    """A run to come."""

    name: str
    """Its run will be NAME/run_001, or whatever number is next there."""
    words: Sequence[str]
    """Of its command, after `paceline`."""
    about: Mapping[str, str]


def submit(cluster: Cluster, launches: Sequence[Launch], project: Path, variables: Mapping[str, str]) -> list[str]:
    """The ids of their jobs. All have the same code."""
    ids: list[str] = []
    with packed(project, variables) as archive:
        for launch in launches:
            id = f"paceline_{secrets.token_hex(4)}"
            # Without a shell in between, which a signal would reach instead of the run.
            command = f"exec python -m paceline {shlex.join(launch.words)}"
            about = {**launch.about, "name": launch.name}
            try:
                cluster.submit(Submission(id, command, archive, about, {**variables, JOB_VARIABLE: id}))
            except ResourcesError:
                if ids:
                    say(f"Launched before that, and going on: {', '.join(ids)}.")
                raise
            ids.append(id)
    return ids


@contextmanager
def packed(project: Path, variables: Mapping[str, str]) -> Iterator[str]:
    """The project as a file. Where results and data go is no code, even if that is in the project's folder."""
    from paceline.cli.parcel import pack
    from paceline.runs.logdir import results_dir

    outside = [results_dir(), *(Path(variables[one]) for one in ("PACELINE_STORAGE",) if one in variables)]
    with tempfile.TemporaryDirectory(prefix="paceline_launch_") as folder:
        target = Path(folder) / "project.zip"
        pack(project, target, outside)
        yield str(target)


def variables_for_job(
    project: Path, environ: Mapping[str, str] | None = None, python: str = sys.executable
) -> dict[str, str]:
    """What a job is told by its environment. Folders go as whole paths: a job begins elsewhere."""
    from paceline.runs.repository import describe_repository

    environ = os.environ if environ is None else environ
    told = {"RAY_JOB_STOP_WAIT_TIME_S": str(STOP_S)}
    for name in ("PACELINE_RESULTS", "PACELINE_STORAGE"):
        if environ.get(name):
            told[name] = os.path.abspath(os.path.expanduser(environ[name]))
    repository = describe_repository(project)
    if repository is not None and repository.commit is not None:  # .git stays here
        told["PACELINE_COMMIT"] = repository.commit + (" with changes" if repository.is_dirty else "")
    folder = os.path.dirname(os.path.abspath(python))
    if folder not in _SYSTEM:  # an environment that the cluster may have too, at the same place
        told["PATH"] = f"{folder}:${{PATH}}"
    return told


def await_start(cluster: Cluster, ids: Sequence[str], within_s: float = START_S) -> dict[str, Announced | None]:
    """Which run each job has become; None for one that has ended before, or has not begun by then."""
    texts = cluster.beginnings(ids, lambda text: find_announced(text) is not None, within_s)
    return {id: find_announced(text) for id, text in texts.items()}


def await_and_tell(
    cluster: Cluster, ids: Sequence[str], launches: Sequence[Launch], address: str | None, as_json: bool
) -> int:
    """For those who do not follow: which runs the jobs have become. Gives the exit code."""
    try:
        started = await_start(cluster, ids) if ids else {}
        told = [
            tell_started(cluster, id, one, started[id], address, as_json) for id, one in zip(ids, launches, strict=True)
        ]
    except KeyboardInterrupt:
        say(f"\nWhat was launched goes on: {', '.join(ids)}. `paceline xp ray{_where(address)}` shows it.")
        return INTERRUPTED
    except ResourcesError as error:
        raise ResourcesError(f"{error} What was launched before may well go on: {', '.join(ids)}.") from error
    return max(told, default=OK)


def tell_started(
    cluster: Cluster, id: str, launch: Launch, announced: Announced | None, address: str | None, as_json: bool
) -> int:
    """Name and run to stdout; what to do next, or why it has ended, to stderr. Gives the exit code."""
    job = cluster.job(id)
    run = f"{launch.name}/{id if announced is None else announced.run}"
    if as_json:
        path = None if announced is None else announced.path
        print(json_text.dumps({"run": run, "job": id, "state": job.state, "path": path, "dashboard": cluster.url}))
    else:
        print(run)
    sys.stdout.flush()
    if announced is None and job.is_final and job.state != "SUCCEEDED":
        tell_end(cluster, job, run)
        return FAILED
    words = shlex.join(run.rsplit("/", 1)) + _where(address)
    if announced is None:
        why = "is PENDING still" if job.state == "PENDING" else "has not begun its run yet; maybe it waits for room"
        say(f"The job {id} {why}. It goes on, and its run gets a number when it begins.\n  paceline xp logs {words}")
    else:
        say(f"{run} is job {id} on {cluster.url}.")
        say(f"  paceline xp logs {words}\n  paceline xp board {shlex.join(run.rsplit('/', 1))}")
    say(f"  paceline xp ray{_where(address)}")
    return OK


def _where(address: str | None) -> str:
    """How the cluster is named in a command to come, if it has to be."""
    if address is None and os.environ.get("RAY_ADDRESS"):
        return ""
    return f" --address {shlex.quote(address or 'auto')}"


def follow(cluster: Cluster, id: str, launch: Launch, address: str | None, as_json: bool) -> int:
    """Print what the job prints until it ends, and give the exit code of its run. Ctrl-C leaves it alone."""
    from paceline.cli.cluster_runs import ClusterRun
    from paceline.cli.line_stream import LineStream

    stream = LineStream(sys.stderr if as_json else sys.stdout)
    run = f"{launch.name}/{id}"
    say(f"{run} is a job on {cluster.url}. Ctrl-C leaves it, and it goes on.")
    try:
        cluster.follow(id, stream.feed)
        stream.close()
        job = cluster.job(id)
        if not job.is_final:
            raise ResourcesError(f"{cluster.url} has ended the connection, and the job is {job.state}.")
    except KeyboardInterrupt:
        run = _named(launch, id, stream.beginning)
        say(f"\n{run} goes on. {_commands(run, address)}")
        return INTERRUPTED
    except ResourcesError as error:
        run = _named(launch, id, stream.beginning)
        raise ResourcesError(f"{error} What was followed, {run}, may well go on. {_commands(run, address)}") from error
    run = _named(launch, id, stream.beginning)
    announced = find_announced(stream.beginning)
    path = None if announced is None else announced.path
    state = ClusterRun(cluster, job, run.rpartition("/")[2], path).state
    if as_json:
        print(json_text.dumps({"run": run, "job": id, "state": state, "path": path, "dashboard": cluster.url}))
    say(f"{run}: {state}")
    return OK if state == "SUCCEEDED" else FAILED


def _named(launch: Launch, id: str, text: str) -> str:
    announced = find_announced(text)
    return f"{launch.name}/{id if announced is None else announced.run}"


def _commands(run: str, address: str | None) -> str:
    words = shlex.join(run.rsplit("/", 1)) + _where(address)
    return f"`paceline xp logs {words}` follows it again, `paceline xp stop {words}` stops it."


def tell_end(cluster: Cluster, job: Job, run: str) -> None:
    lines = cluster.output(job.id).splitlines()[-_NUM_LAST_LINES:]
    said = "" if not job.said or any(job.said in line for line in lines) else f"\n{job.said}"
    say(f"{run} has ended before its run began: {job.state}.{said}")
    for line in lines:
        say(f"  {line}")
