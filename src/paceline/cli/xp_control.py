"""`xp stop`, `xp resume` and `xp retry`."""

import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.asking import (
    FAILED,
    INTERRUPTED,
    TIMED_OUT,
    Address,
    Json,
    Store,
    Words,
    add_verb,
    give_json,
    pick_anywhere,
    say,
)

if TYPE_CHECKING:
    from paceline.runs import RunRequest
    from paceline.runs.load import Run
    from paceline.trainer import Trainer

_STOP = """Stop a run: ask it to save and return.

\b
  paceline xp stop digits
  paceline xp stop digits 3 --kill               firmly, if it has not ended after 40 s
  paceline xp stop digits --kill --timeout 0     at once
  paceline xp stop 'sweep/*'                     all that match
  paceline xp stop digits 3 --address http://head:8265

A run that has ended already stays as it is. Exit code: 124 if it has not ended in time.
"""
_RESUME = """Go on with a run from its last checkpoint.

\b
  paceline xp resume digits
  paceline xp resume digits 3 --trusted     a folder of another account: this runs code that is in it

The run was stopped, failed or lost. It goes on in the same folder, in the foreground. Exit code: 1 if the run fails.
"""
_RETRY = """Start a new run of the same function and config.

\b
  paceline xp retry digits 3

It becomes the next run of that name, and stays in the foreground. Exit code: 1 if it fails.
"""
Trusted = Annotated[bool, typer.Option("--trusted", help="Open a folder that another account has written.")]


def stop(
    words: Words = None,
    kill: Annotated[bool, typer.Option("--kill", help="SIGKILL if it has not ended in time.")] = False,
    timeout: Annotated[str, typer.Option(metavar="40s", help="How long it may take to end.")] = "40s",
    no_wait: Annotated[bool, typer.Option("--no-wait", help="Ask, and do not wait.")] = False,
    json: Json = False,
    address: Address = None,
) -> None:
    from paceline.runs.conditions import seconds

    timeout_s = seconds(timeout, unit="s")
    results = [
        _stopped(found, kill, timeout_s, no_wait, address) for found in pick_anywhere(words, address, several=True)
    ]
    if json:
        give_json(results)
    for one in results:
        say(f"{one['name']}: {one['told']}")
    if not no_wait and any(one["state"] in ("RUNNING", "PENDING") for one in results):
        raise typer.Exit(TIMED_OUT)


def _stopped(found: Any, kill: bool, timeout_s: float, no_wait: bool, address: str | None) -> dict[str, Any]:
    from paceline.cli.stopping import DriverProcess
    from paceline.cli.xp_logs import await_end
    from paceline.errors import TrainerStateError

    if hasattr(found, "cluster"):
        return _stopped_job(found, kill, timeout_s, no_wait)
    run = found.run
    try:
        driver = DriverProcess.find(run)
    except TrainerStateError:
        launched = _job_of(found, address)
        if launched is None:
            raise
        return _stopped_job(launched, kill, timeout_s, no_wait)
    if driver is None:
        return _told(found, run, f"has ended already ({run.status.state.value})")
    try:
        if not (kill and timeout_s == 0):
            driver.send(signal.SIGTERM)
        if no_wait:
            return _told(found, run, "was asked to stop")
        if timeout_s > 0:
            say(f"{found.name} is asked to save and return; this waits up to {timeout_s:g} s for its end.")
        status = await_end(run, time.monotonic() + timeout_s)
        if not status.state.is_final and kill:
            driver.send(signal.SIGKILL)
            status = await_end(run, time.monotonic() + 10)
            return _told(found, run, f"was killed ({status.state.value})")
    finally:
        driver.close()
    if status.state.is_final:
        return _told(found, run, f"has stopped ({status.state.value})")
    return _told(found, run, f"was asked to stop and has not ended after {timeout_s:g} s; --kill would end it")


def _stopped_job(run: Any, kill: bool, timeout_s: float, no_wait: bool) -> dict[str, Any]:
    from paceline.cli.cluster_runs import stop_on_cluster

    return stop_on_cluster(run, kill, timeout_s, no_wait)


def _job_of(found: Any, address: str | None) -> Any:
    """Of a run that another machine drives, the job that it is on a cluster that the user has named; else None."""
    if address is None and not os.environ.get("RAY_ADDRESS"):
        return None
    from paceline.cli.cluster_runs import job_of_folder

    return job_of_folder(found, address)


def _told(found: Any, run: "Run", told: str) -> dict[str, Any]:
    return {"name": found.name, "state": run.status.state.value, "told": told}


def resume(words: Words = None, trusted: Trusted = False, json: Json = False) -> None:
    found = Store().pick(words)
    from paceline.trainer import Trainer

    if found.run.status.state != "SUCCEEDED" and not found.run.is_alive:  # else it will be refused
        say(f"{found.name} goes on.")
    _to_end(found.path, lambda: Trainer.resume(found.path, trusted=trusted), json)


def retry(words: Words = None, trusted: Trusted = False, json: Json = False) -> None:
    from paceline.errors import RunNotResumableError
    from paceline.runs.kept_call import load_call

    found = Store().pick(words)
    request = load_call(found.run.path, None, trusted)
    from dataclasses import replace

    from paceline.data.given import made_anew
    from paceline.trainer import Trainer

    if request.dataset is None and found.run.request.get("dataset") is not None:
        request = replace(request, dataset=made_anew(request.train_func))
        if request.dataset is None:
            raise RunNotResumableError(
                f"{found.name} was given a dataset, which is not part of the folder: start the run again from your "
                "program."
            )

    is_trial = (request.parent or {}).get("kind") == "tune"  # which finds its run by the parent, and has one
    request = replace(request, checkpoint_root=None, parent=None if is_trial else request.parent)
    with Trainer(**{**request.trainer, "logdir": found.run.path.parent}) as trainer:
        _to_end(None, lambda: _run_again(trainer, request, found.run.path), json, lambda: trainer.latest_run_dir)


def _run_again(trainer: "Trainer", request: "RunRequest", former: Path) -> None:
    """All that was asked then: also the config of a function that takes none, as that of an experiment, and the
    checkpoint from which it began. `Trainer.run` would not know of a parent."""
    from paceline.callbacks import default_progress
    from paceline.callbacks.dispatch import CallbackList
    from paceline.control.termination import Signals
    from paceline.runs.durable import read_file

    progress, conf = default_progress(), read_file(former / "conf.yaml")
    with Signals().watching() as signals:
        folder = trainer.new_folder(request)
        if conf is not None:
            folder.write_document("conf.yaml", conf)
        with trainer.drive(request, folder, CallbackList([] if progress is None else [progress]), signals) as iterator:
            iterator.get_final_results(force=True)


def _to_end(path: Any, work: Any, json: bool, path_of: Any = None) -> None:
    """Runs it, and tells how it ended; what a function raises is the run's end, not this program's."""
    from paceline.errors import PacelineError, WorkerError
    from paceline.runs.load import load_run

    began, leave = time.time(), None
    try:
        work()
    except KeyboardInterrupt:
        leave = INTERRUPTED
    except SystemExit as caught:  # SIGTERM, which ends this program when the run has ended
        leave = caught.code if isinstance(caught.code, int) else FAILED
    except PacelineError as error:
        if not isinstance(error, WorkerError) and not _has_ended(path if path is not None else path_of(), began):
            raise
        say(str(error))
    except Exception as error:
        say("".join(_traceback(error)))
    place = path if path is not None else path_of()
    if place is None:  # it ended before there was a folder
        raise typer.Exit(FAILED if leave is None else leave)
    run = load_run(place)
    status = run.status
    if json:
        give_json({"name": run.name, "path": str(run.path), "state": status.state.value, "reason": status.reason})
    say(f"{run.name}: {status.state.value}")
    if leave is not None:
        raise typer.Exit(leave)
    if status.state != "SUCCEEDED":
        raise typer.Exit(FAILED)


def _has_ended(path: Any, began: float) -> bool:
    """Whether a run has ended since then: an error of ours was then raised in it, by its function perhaps, and is no
    refusal to begin."""
    from paceline.runs.load import load_run

    ended = None if path is None else load_run(path).status.ended
    return ended is not None and ended >= began


def _traceback(error: BaseException) -> list[str]:
    import traceback

    return traceback.format_exception_only(error)


def add_to(group: typer.Typer) -> None:
    add_verb(group, "stop", _STOP, stop)
    add_verb(group, "resume", _RESUME, resume)
    add_verb(group, "retry", _RETRY, retry)
