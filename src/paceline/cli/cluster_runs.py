"""Runs that were launched to a cluster, by its jobs: for those whose folder cannot be seen from here.

A cluster is asked only if the user has named one, by --address or RAY_ADDRESS. With --address, names mean runs of that
cluster; with RAY_ADDRESS alone, folders come first.
"""

import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from paceline.cli.announcing import find_announced
from paceline.cli.asking import Store, say
from paceline.cli.listing import Row
from paceline.cli.ray_cluster import STOP_S, Cluster, Job
from paceline.errors import ArgumentError, PacelineError, ResourcesError, RunNotFoundError
from paceline.runs.environment import job_of
from paceline.runs.index import Found
from paceline.runs.load import load_run
from paceline.runs.selection import select
from paceline.runs.status import RunState
from paceline.runs.summary import Summary

_MOST = 100
"""So many jobs are looked at, the newest ones: a cluster keeps thousands."""

_NAME_S = 3.0


@dataclass(frozen=True)
class ClusterRun:
    cluster: Cluster
    job: Job
    run: str
    """run_001; the job's id, as long as the run has not begun."""
    path: str | None
    """Of its folder, as the job sees it."""

    @property
    def name(self) -> str:
        return f"{self.job.about.get('name', '')}/{self.run}"

    @property
    def is_here(self) -> bool:
        """Whether that very folder is seen from here, not one that has the same path on another machine."""
        return self.path is not None and job_of(self.path) == self.job.id

    @property
    def state(self) -> RunState:
        """How it has ended, if its folder is seen from here and says so: the job ends a moment later."""
        with suppress(PacelineError):
            if self.path is not None and self.is_here:
                state = load_run(self.path).status.state
                if state.is_final and state != RunState.LOST:
                    return state
        return RunState(self.job.state)

    @property
    def reason(self) -> str:
        """What the job says of its end, if that is the run's."""
        return self.job.said if self.state == self.job.state else ""

    def as_of(self, job: Job) -> "ClusterRun":
        """The same with its job as it is now: if the run has begun meanwhile, it has a number, and a folder."""
        if self.path is not None or job.state == "PENDING":
            return replace(self, job=job)
        return next(iter(named(self.cluster, [job])), replace(self, job=job))

    def as_row(self) -> Row:
        job = self.job
        found = Found(self.name, self.path or "", RunState(job.state), job.created, job.created, job.ended)
        return Row(found, Summary(), frozenset(), time.time(), job=job.id)


def job_of_folder(found: Found, address: str | None) -> ClusterRun | None:
    """The one that may drive it. None if the run was not launched, or to another cluster, or is gone on with elsewhere
    since that job has ended."""
    id = job_of(found.path)
    if id is None:
        return None
    cluster = Cluster(address)
    job = next((job for job in cluster.jobs() if job.id == id), None)
    if job is None or job.is_final:
        return None
    return ClusterRun(cluster, job, found.path.rpartition("/")[2], found.path)


def named(cluster: Cluster, jobs: Sequence[Job]) -> list[ClusterRun]:
    """Those of the jobs that we have launched, with what their output says of their runs. Of several jobs that went on
    with one run, the newest."""
    ours = [job for job in jobs if "name" in job.about and job.state in set(RunState)][:_MOST]
    begun = [job.id for job in ours if job.state != "PENDING"]
    texts = cluster.beginnings(begun, lambda text: find_announced(text) is not None, _NAME_S) if begun else {}
    found: dict[str, ClusterRun] = {}
    for job in ours:
        announced = find_announced(texts.get(job.id, ""))
        run, path = (job.id, None) if announced is None else (announced.run, announced.path)
        found.setdefault(path or job.id, ClusterRun(cluster, job, run, path))
    return list(found.values())


def rows_elsewhere(address: str | None, store: Store) -> list[Row]:
    """Of runs whose folders are not in the store. A cluster of RAY_ADDRESS that does not answer is told, no more."""
    try:
        cluster = Cluster(address)
        runs = named(cluster, cluster.jobs())
    except ResourcesError as error:
        if address is not None:
            raise
        say(str(error))
        return []
    here = {run.path for run in store.runs}
    return [run.as_row() for run in runs if not (run.path in here and run.is_here)]


def pick_anywhere(store: Store, words: Sequence[str] | None, address: str | None, several: bool = False) -> list[Any]:
    """Each a `Found`, or a ClusterRun if its folder is not here."""

    def here() -> list[Any]:
        return store.pick_all(words) if several else [store.pick(words)]

    if address is not None:
        return pick_on_cluster(Cluster(address), words, several)
    try:
        return here()
    except RunNotFoundError as error:
        if not os.environ.get("RAY_ADDRESS"):
            raise
        try:
            return pick_on_cluster(Cluster(None), words, several)
        except PacelineError as other:
            raise RunNotFoundError(f"{error} On the cluster of RAY_ADDRESS: {other}") from None


def pick_on_cluster(cluster: Cluster, words: Sequence[str] | None, several: bool = False) -> list[Any]:
    from paceline.cli.asking import found_at

    runs = named(cluster, cluster.jobs())
    if not runs:
        raise RunNotFoundError(f"No run has been launched to {cluster.url}.")
    by_name = {run.name: run for run in reversed(runs)}  # of one name, the newest
    by_id = {run.job.id: run for run in runs}
    last = words[-1].rpartition("/")[2] if words else ""
    if last in by_id:  # which is what `launch` prints as long as there is no run
        picked = [by_id[last]]
    else:
        names = select(list(words or []), [run.name for run in runs], lambda name: frozenset())
        if len(names) > 1 and not several:
            raise ArgumentError(f"{' '.join(words or [])!r} means {len(names)} runs: {', '.join(names[:8])}.")
        picked = [by_name[name] for name in dict.fromkeys(names)]
    return [found_at(run.path) if run.path is not None and run.is_here else run for run in picked]


def print_logs(
    run: ClusterRun, follow: bool | None, tail: int | None, is_wanted: Callable[[str], bool], raw: bool, json: bool
) -> None:
    """What its job prints: the lines of all ranks. KeyboardInterrupt leaves it alone."""
    from paceline.cli.drawing import clean_json
    from paceline.cli.line_stream import LineStream
    from paceline.json_text import encode

    def shown(line: str) -> str:
        return clean_json(encode({"rank": None, "line": line}).decode()) if json else line

    cluster, id = run.cluster, run.job.id
    is_followed = not run.job.is_final if follow is None else follow
    text = cluster.output(id) if tail is not None or not is_followed else ""
    stream = LineStream(sys.stdout, is_wanted, shown, len(text) if tail is not None and is_followed else 0, raw)
    if text:
        past = LineStream(sys.stdout, is_wanted, shown, raw=raw)
        lines = text.splitlines(keepends=True)
        past.feed("".join(lines[len(lines) - min(tail, len(lines)) :] if tail is not None else lines))
        past.close()
    if is_followed:
        cluster.follow(id, stream.feed)
        stream.close()
        ended = run.as_of(cluster.job(id))
        say(f"{ended.name}: {ended.state}{f' ({ended.reason})' if ended.reason else ''}")


def stop_on_cluster(run: ClusterRun, kill: bool, timeout_s: float, no_wait: bool) -> dict[str, Any]:
    if run.job.is_final:
        return _told(run, f"has ended already ({run.state})")
    run.cluster.stop(run.job.id)
    if no_wait:
        return _told(run, "was asked to stop")
    say(f"{run.name} is asked to save and return; Ray kills it if that takes more than {STOP_S} s.")
    wait_s = max(timeout_s, STOP_S + 10) if kill else timeout_s
    run = run.as_of(run.cluster.await_end(run.job.id, time.monotonic() + wait_s))
    if run.state.is_final:
        return _told(run, f"has stopped ({run.state})")
    return _told(run, f"was asked to stop and has not ended after {wait_s:g} s")


def _told(run: ClusterRun, told: str) -> dict[str, Any]:
    return {"name": run.name, "state": run.state, "told": told}
