"""A run without a Trainer: rank 0 of the processes that train records all of them."""

import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.arguments import request_of
from paceline.backends.base import BackendConfig
from paceline.backends.torch import TorchConfig
from paceline.callbacks import Callback
from paceline.callbacks.dispatch import CallbackList
from paceline.checkpoints import CheckpointStrategy
from paceline.control.termination import Signals, Terminated
from paceline.core.distributed import DistributedContext
from paceline.core.host import Host, HostWire, Nobody, described
from paceline.errors import PacelineError, TrainerStateError, WorkerError
from paceline.rank_session import Session, Task
from paceline.recording.recorder import Recorder
from paceline.runs import RunFolder, claim_root, resolve_logdir
from paceline.session import EndingForks, current, open_session
from paceline.workers.base import Raised, Wire
from paceline.workers.outcome import message_of, text_of

if TYPE_CHECKING:
    from paceline.core.link import Link

_LAUNCHERS_S = 1.0
"""A launcher passes a signal on that its processes have had from the terminal: then it comes twice."""


@contextmanager
def record_run(
    config: dict[str, Any] | None = None,
    *,
    callbacks: Sequence[Callback] | None = None,
    logdir: str | os.PathLike[str] | None = None,
    checkpoint: dict[str, Any] | str | os.PathLike[str] | None = None,
    checkpoint_strategy: CheckpointStrategy | None = None,
) -> Iterator[Path]:
    """Inside the block, `report`, `save_checkpoint`, `load_checkpoint` and `should_stop` work in this very process, and
    leave a run folder as `Trainer.run` does. Gives the folder's path.

    >>> with record_run({"lr": 0.1}) as run_dir:
    ...     train(0.1)

    Under a launcher such as torchrun, every rank enters it, and waits until all have come. Rank 0 records, with its own
    arguments, what all of them report and save. Such a run is continued by giving its checkpoint to the next one, not
    by `Trainer.resume`. `core.init` is the same with more around it.
    """
    if current() is not None:
        raise TrainerStateError("record_run() cannot begin here: this code is being recorded already.")
    with (
        DistributedContext.here() as distributed,
        recorded(
            distributed,
            config,
            callbacks=callbacks,
            logdir=logdir,
            checkpoint=checkpoint,
            strategy=checkpoint_strategy,
        ) as session,
    ):
        assert session.run_dir is not None
        yield session.run_dir


@contextmanager
def recorded(
    distributed: DistributedContext,
    config: dict[str, Any] | None = None,
    *,
    callbacks: Sequence[Callback] | None = None,
    logdir: str | os.PathLike[str] | None = None,
    checkpoint: dict[str, Any] | str | os.PathLike[str] | None = None,
    strategy: CheckpointStrategy | None = None,
) -> Iterator[Session]:
    """One run of all ranks, from its beginning to its end; in it, the current session."""
    if not distributed.is_chief:
        with _joined(distributed) as session:
            yield session
        return
    hub = distributed.channel() if distributed.size > 1 else None
    try:
        request = request_of(_this_script, config=config, checkpoint=checkpoint, checkpoint_strategy=strategy)
        listeners = CallbackList(callbacks)
        folder = RunFolder.create(resolve_logdir(logdir))
        root = claim_root(request, folder)
        function = {"name": Path(sys.argv[0]).name or "python", "file": os.path.abspath(sys.argv[0])}
        folder.write_request({"engine": "none", "checkpoint_root": root, **request.for_folder(), "function": function})
        recorder = Recorder(request, folder, listeners, root)
    except BaseException as error:
        if hub is not None:
            hub.finish(WorkerError(f"Rank 0 could not begin the run: {described(error)}"))
        raise
    with _hosted(recorder, distributed, hub) as session:
        yield session


@contextmanager
def _hosted(recorder: Recorder, distributed: DistributedContext, hub: Any) -> Iterator[Session]:
    """One attempt on rank 0."""
    state, cause, left_by = "FAILED", None, None
    host = Host(recorder, distributed.size, hub or Nobody())
    signals = Signals(settle_s=_LAUNCHERS_S if hub is not None else 0.0)
    try:
        recorder.open(num_workers=host.size, world_size=host.size)
        start, landmarks = recorder.begin([os.getpid(), *(hub.pids if hub is not None else ())])
        run_dir = str(recorder.folder.path)
        task = Task(recorder.request, start, _backend(), landmarks, is_worker=False, run_dir=run_dir)
        if hub is not None:
            hub.begin(host, Task(recorder.request.for_workers(), start, _backend(), landmarks, None, False, run_dir))
        wire = HostWire(distributed.place, host, hub.address.host if hub is not None else "127.0.0.1")
        with _in_session(wire, task, signals, host) as session:
            try:
                with EndingForks():
                    yield session
            except SystemExit as caught:
                left_by = _if_success(caught)
            if host.error is not None:
                raise host.error
            session.close()  # raises what comes of the last checkpoint
        host.end(0)
        with signals.raising():
            host.wait_for_others(distributed.timeout_s)
        state = "STOPPED" if host.facts.leaving else "SUCCEEDED"
    except BaseException as caught:
        signals.only_note()  # launchers send SIGTERM just now, to all ranks that are left
        cause = _cause(caught, host)
        state = "FAILED" if _is_failure(caught, cause, host, signals) else "STOPPED"
        raise
    finally:
        signals.only_note()
        with ExitStack() as stack:
            stack.callback(signals.release)
            if hub is not None:
                stack.callback(hub.finish, None if cause is None else _told(cause), host.wished)
            recorder.close(state, None if cause is None else described(cause), cause)
    _leave(signals, host.wished, left_by)


@contextmanager
def _joined(distributed: DistributedContext) -> Iterator[Session]:
    """One attempt on any other rank."""
    link, left_by = distributed.channel(), None
    task = link.await_begin()
    signals = Signals(settle_s=_LAUNCHERS_S)
    try:
        with _in_session(link.wire, task, signals, link) as session:
            try:
                with EndingForks():
                    yield session
            except SystemExit as caught:
                left_by = _if_success(caught)
            session.close()
        link.end(None)
        with signals.raising():
            link.await_over()
    except BaseException as caught:
        signals.only_note()
        told = (type(caught).__qualname__, message_of(caught), text_of(caught), None)
        link.end(told, is_stop=isinstance(caught, KeyboardInterrupt | Terminated))
        raise
    finally:
        signals.release()
    _leave(signals, link.wished, left_by)


@contextmanager
def _in_session(wire: Wire, task: Task, signals: Signals, ear: "Host | Link") -> Iterator[Session]:
    """A script that looks at `should_stop` is asked to leave, by the first signal. Another is ended, as it would be
    without us: nobody would tell it."""
    with open_session(wire, task) as session:

        def heed() -> None:  # in the signal handler
            if not session.has_looked:
                signals.check(1)
            ear.stopping = True
            kind = "interrupt" if signals.wish is None else signals.wish.kind
            threading.Thread(target=ear.request_stop, args=(kind,), name="paceline-signal", daemon=True).start()

        signals.on_wish = heed
        signals.watch()
        with signals.raising():
            yield session


def _cause(caught: BaseException, host: Host) -> BaseException:
    """Why the run has ended, if this rank has raised something: the end of another rank explains more than its echo."""
    suspect = Raised(0, type(caught).__qualname__, str(caught), "")
    is_echo = not isinstance(caught, Exception) or TorchConfig().is_broken_collective(suspect)
    if is_echo and isinstance(caught, Exception):
        host.wait_for_cause()
    cause = host.error
    if cause is None or cause is caught or not (is_echo or host.facts.died):
        return caught
    caught.add_note(f"Before this: {described(cause)}")
    return cause


def _is_failure(caught: BaseException, cause: BaseException, host: Host, signals: Signals) -> bool:
    """Or else somebody has ended it: a signal of this rank, unless that came when the run had failed already, as it
    does from launchers; or of another rank."""
    if cause is host.error and host.is_ended:
        return False
    if not isinstance(caught, KeyboardInterrupt | Terminated):
        return True
    return cause is not caught and (signals.wish is None or signals.wish.at > (host.failed_at or 0.0))


def _if_success(caught: SystemExit) -> SystemExit:
    """`sys.exit(0)`, by which a script says that all went well: to be raised in the end. Anything else is now."""
    if caught.code not in (None, 0):
        raise caught
    return caught


def _told(cause: BaseException) -> PacelineError:
    return (
        cause if isinstance(cause, PacelineError) else WorkerError(f"The run has ended on rank 0: {described(cause)}")
    )


def _leave(signals: Signals, wished: str | None, left_by: SystemExit | None) -> None:
    """What a signal asks for, on whichever rank it came, or the script itself, once everything of the run is done."""
    kind = wished if signals.wish is None else signals.wish.kind
    if kind is not None:
        raise Terminated if kind == "terminate" else KeyboardInterrupt("the run has ended")
    if left_by is not None:
        raise left_by


def _backend() -> BackendConfig:
    """For the number of collectives, which tells who does not save; without a process group there is none."""
    return TorchConfig() if "torch.distributed" in sys.modules else BackendConfig()


def _this_script() -> None:
    """Stands for the function of a run that is none."""
