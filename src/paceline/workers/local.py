"""The local engine: workers are processes on this machine, forked from a nursery.

Linux only: a worker's end is noticed through its pidfd, at once and whatever its children still hold open, and the
kernel ends workers whose nursery is gone.
"""

import contextlib
import fcntl
import os
import pickle
import select
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from paceline import frameworks
from paceline.errors import ArgumentError, ResourcesError, StackDumpError, WorkerStartError
from paceline.registry import WORKER_MODULES
from paceline.workers import outcome, surroundings
from paceline.workers.base import (
    DIRECT,
    Asked,
    Call,
    Died,
    Event,
    Place,
    Preempted,
    Preload,
    Printed,
    Resources,
    Sent,
    Size,
    WorkerInfo,
    rank_environ,
)
from paceline.workers.devices import GpuShare, gpu_ids, gpu_variables, num_cpus, num_threads, share_gpus
from paceline.workers.framing import FrameReader, send_patiently
from paceline.workers.nursery import Nursery, shared_nursery
from paceline.workers.output import LogTail
from paceline.workers.reports import Report, unpack
from paceline.workers.stacks import collect_stacks

BATCH_S = 0.05
"""How long reports may gather before the driver takes them."""

_PIPE_BYTES = 1 << 20

_END_S = 5.0
"""How long a worker may take to end that was killed."""

_TELL_S = 30.0
"""How long a worker may take to make room for something it is told: its reader is a thread that does nothing else."""


class LocalEngine:
    """Processes on this machine. `preload` names modules that the nursery imports besides the framework: whatever
    your function needs and takes long to import, as long as importing it starts no thread. `slots` is how many workers
    an elastic Trainer may have here: by default one for each core, or as many as the GPUs serve. It may be changed
    while a run goes on, to lend cores to somebody else and take them back."""

    name = "local"

    def __init__(self, preload: Sequence[str] = (), slots: int | None = None):
        if slots is not None and slots < 1:
            raise ArgumentError(f"slots={slots}: expected at least 1, or None for what the machine has.")
        self.preload = tuple(preload)
        self.slots = slots

    def num_slots(self, resources: Resources) -> int:
        """How many workers there is room for now."""
        if self.slots is not None:
            return self.slots
        if resources.gpus:
            return int(len(gpu_ids()) / resources.gpus)
        return int(num_cpus() / (resources.cpus or 1))

    def warm(self, preload: Preload) -> None:
        shared_nursery(self._all_of(preload))

    def group(self, size: Size, resources: Resources, preload: Preload) -> "LocalGroup":
        return LocalGroup(size, resources, self._all_of(preload), partial(self.num_slots, resources))

    def _all_of(self, preload: Preload) -> tuple[str, ...]:
        modules = (*preload.to_join, *preload.to_train, *WORKER_MODULES, *self.preload)
        return tuple(filter(frameworks.may_be_forked, modules))

    def describe(self) -> str:
        gpus = gpu_ids()
        return f"{num_cpus()} cores, {len(gpus)} GPUs"


class LocalGroup:
    """See `WorkerGroup` for the contract."""

    def __init__(self, size: Size, resources: Resources, preload: Sequence[str], num_slots: Callable[[], int]):
        self._size, self._num_slots = size, num_slots
        self._num_workers = size.min
        self._resources = resources
        self._preload = preload
        self._workers: list[_Worker] = []
        self._poller: select.epoll | None = None
        self._look_at = 0.0
        """When reports and output are due, whoever has something else to say."""
        self._scratch: Path | None = None
        self._remove_scratch: Callable[[], Any] = lambda: None
        self.infos: Sequence[WorkerInfo] = ()

    def start(self) -> None:
        """All workers are new: a fork costs less than waiting for survivors to unwind, and nothing stale lives on."""
        self.close()
        self._num_workers = self._wanted()
        try:
            specs, shares = self._specs()
            nursery = shared_nursery(self._preload)
            for spec in specs:
                worker = _Worker(spec, nursery)
                self._workers.append(worker)  # before it is started: `close` then finds what is left halfway
                worker.start(spec)
            self.infos = [
                WorkerInfo(worker.place, worker.pid, socket.gethostname(), share.ids if share else ())
                for worker, share in zip(self._workers, shares, strict=True)
            ]
            self._poller = select.epoll()
            for worker in self._workers:
                self._poller.register(worker.line.fd, select.EPOLLIN)
                self._poller.register(worker.pidfd, select.EPOLLIN)
        except BaseException:
            self.close()
            raise

    def submit(self, calls: Mapping[int, Call], logs: Mapping[int, Path] | None = None) -> None:
        packed = {rank: call.packed for rank, call in calls.items()}  # fails, if it must, before any rank begins
        for rank, payload in packed.items():
            self._workers[rank].begin(payload, logs[rank] if logs else None)

    def poll(self, timeout_s: float, deliver: Callable[[Event], None]) -> None:
        """Reports wait in their pipes until the next poll: waking up for each would cost the trainers their cores. And
        who has sent no message is looked at no more often than that: with quick questions and answers, it would take
        as long as these."""
        assert self._poller is not None, "poll before start"
        ready = {fd for fd, _ in self._poller.poll(min(timeout_s, BATCH_S))}
        is_due = not ready or time.monotonic() >= self._look_at
        for worker in self._workers:
            if is_due or worker.pidfd in ready or worker.line.fd in ready:
                for event in worker.events(is_gone := worker.pidfd in ready, is_due):
                    deliver(event)
                if is_gone:
                    self._poller.unregister(worker.pidfd)
                if worker.line.messages.closed and worker.line.fd in ready:
                    self._poller.unregister(worker.line.fd)
                if is_due or worker.has_answered:  # who has its answer does not look for more output
                    for text in worker.printed():
                        deliver(Printed(worker.rank, text))
        if is_due:
            self._look_at = time.monotonic() + BATCH_S

    def answer(self, question: Asked, value: Any) -> None:
        if question.rank < len(self._workers):  # else the group has been ended since
            self._workers[question.rank].answer(question.number, value)

    def can_grow(self) -> bool:
        return bool(self._workers) and self._wanted() > len(self._workers)

    def _wanted(self) -> int:
        return self._size.min if self._size.min == self._size.max else self._size.clamp(self._num_slots())

    def request_stop(self) -> None:
        for worker in list(self._workers):
            worker.request_stop()

    def stacks(self, timeout_s: float = 2.0) -> dict[int, str]:
        if not self._workers:
            raise StackDumpError("There are no workers: stacks can be had between start() and shutdown().")
        living = {worker.rank: (worker.pid, worker.stacks_path) for worker in self._workers if worker.alive}
        ended = {worker.rank: f"(pid {worker.pid} has ended)\n" for worker in self._workers}
        return ended | collect_stacks(living, timeout_s)

    def abort(self, deliver: Callable[[Event], None]) -> None:
        """What is in the pipes and sockets outlives the workers."""
        try:
            for worker in self._workers:
                worker.kill()
            for worker in self._workers:
                if worker.alive:
                    worker.wait(_END_S)
                    for event in worker.events(is_gone=True):
                        deliver(event)
                    for text in worker.printed():
                        deliver(Printed(worker.rank, text))
        finally:
            self.close()

    def healthy(self) -> bool:
        return bool(self._workers) and all(worker.is_idle() for worker in self._workers)

    def close(self, grace_s: float = 0.0) -> None:
        for worker in self._workers:
            if grace_s > 0 and worker.is_idle():
                worker.dismiss()
        deadline = time.monotonic() + grace_s
        workers, self._workers, self.infos = self._workers, [], ()
        with contextlib.ExitStack() as stack:  # an interrupt in one of these does not spare the others
            if self._scratch is not None:
                stack.callback(self._remove_scratch)
                self._scratch = None
            if self._poller is not None:
                stack.callback(self._poller.close)
                self._poller = None
            for worker in reversed(workers):
                stack.callback(worker.end, deadline)

    def _specs(self) -> tuple[list[dict[str, Any]], list[GpuShare | None]]:
        """What each worker is forked with. Raises ResourcesError before anything is started."""
        if self._resources.custom:
            raise ResourcesError(
                f"resources_per_worker names {', '.join(sorted(self._resources.custom))}; the local engine counts CPU "
                "and GPU only. Leave them out here."
            )
        shares = share_gpus(self._num_workers, self._resources.gpus, gpu_ids() if self._resources.gpus else [])
        scratch = self._scratch = Path(tempfile.mkdtemp(prefix="paceline_"))
        # Also of a group that is dropped without being closed: its workers leave when their connections are gone. At
        # exit the nursery does it, after the last worker.
        self._remove_scratch = finalizer = weakref.finalize(self, _remove, scratch, os.getpid())
        finalizer.atexit = False
        specs = [self._spec(rank, share, scratch) for rank, share in enumerate(shares)]
        return specs, shares

    def _spec(self, rank: int, share: GpuShare | None, scratch: Path) -> dict[str, Any]:
        size = self._num_workers
        place = Place(rank, rank, 0, size, size, share.index if share else None)
        return {
            "place": place,
            "environ": worker_environ(
                place, share, num_threads(size, self._resources.cpus), self._resources.sees_all_gpus
            ),
            "sys_path": list(sys.path),
            "argv": list(getattr(sys, "argv", [""])),
            "cwd": surroundings.cwd() or os.curdir,
            "log_path": str(scratch / f"rank_{rank}.log"),
            "stacks_path": str(scratch / f"rank_{rank}.stacks"),
            "scratch_dir": str(scratch),
        }


def _remove(scratch: Path, owner_pid: int) -> None:
    if os.getpid() == owner_pid:  # in a fork of the driver, the group is only a copy
        shutil.rmtree(scratch, ignore_errors=True)


def worker_environ(place: Place, share: GpuShare | None, threads: int, sees_all_gpus: bool = False) -> dict[str, str]:
    """The driver's environment, and what a script finds under torchrun."""
    # All ranks are here: a name lookup or a VPN must not matter. What the user has set does.
    environ = {**frameworks.thread_variables(threads), **frameworks.interface_variables("lo"), **os.environ}
    visible = share.visible if share is not None else ()
    return {**environ, **rank_environ(place), **gpu_variables(visible, sees_all=sees_all_gpus)}


class _Line:
    """The connection to one worker: sockets for commands, direct answers and its messages, and a pipe for its reports.
    Each has one direction: with a socket for both, who waits for the next message would wake up whenever the other end
    has taken one out."""

    def __init__(self) -> None:
        pairs = [socket.socketpair() for _ in range(3)]
        self._ours, self._theirs = zip(*pairs, strict=True)
        self.commands, self.answers, inbox = self._ours
        self.report_fd, self._worker_report_fd = os.pipe2(os.O_CLOEXEC)
        with contextlib.suppress(OSError):  # a smaller pipe only makes a fast loop wait sooner
            fcntl.fcntl(self.report_fd, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        for sock in self._ours:
            sock.setblocking(False)
        os.set_blocking(self.report_fd, False)
        self.fd = inbox.fileno()
        self.messages = FrameReader(self.fd)
        self._reports = FrameReader(self.report_fd)

    def reports(self) -> list[Report]:
        """What is in the pipe now."""
        return [unpack(body) for body in self._reports.bodies()]

    @property
    def worker_fds(self) -> tuple[int, ...]:
        return (*(sock.fileno() for sock in self._theirs), self._worker_report_fd)

    def close_worker_end(self) -> None:
        for sock in self._theirs:
            sock.close()
        os.close(self._worker_report_fd)

    def close(self) -> None:
        for sock in self._ours:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)  # a child of this process may have inherited it
            sock.close()
        os.close(self.report_fd)


class _Worker:
    """One worker process as its group knows it."""

    def __init__(self, spec: dict[str, Any], nursery: Nursery):
        self.place: Place = spec["place"]
        self.rank = self.place.world_rank
        self.line = _Line()
        self.stacks_path = Path(spec["stacks_path"])
        self.pid, self.pidfd = 0, -1
        self._is_over = self._busy = False
        self._one_writer = threading.Lock()
        self._is_stop_due = False
        self._nursery, self._number = nursery, nursery.new_number()
        self._log = LogTail(Path(spec["log_path"]))
        self._old_log: LogTail | None = None

    def start(self, spec: dict[str, Any]) -> None:
        with self._one_writer:  # it is told nothing before what it has to know
            try:
                self.pid = self._nursery.fork(self._number, self.line.worker_fds, spec["scratch_dir"])
                self.pidfd = os.pidfd_open(self.pid)
            except ProcessLookupError:
                raise WorkerStartError(f"Rank {self.rank} ended with the process it was forked from.") from None
            finally:
                self.line.close_worker_end()
            self._send(self.line.commands, spec)

    @property
    def alive(self) -> bool:
        """From `start` until the nursery was asked how it ended: from then on, its pid may be somebody else's."""
        return self.pidfd >= 0 and not self._is_over

    def begin(self, payload: bytes, log_path: Path | None) -> None:
        self._busy = True
        if log_path is not None and log_path != self._log.path:
            if self._old_log is not None:
                self._old_log.close()
            self._old_log, self._log = self._log, LogTail(log_path, at_end=True)
        self.tell("call", payload, str(log_path) if log_path else None)

    def answer(self, number: int, value: Any) -> None:
        if number == DIRECT:
            self._send(self.line.answers, value)
        else:
            self.tell("answer", number, value)

    def tell(self, *message: Any) -> None:
        with self._one_writer:
            self._send(self.line.commands, message)
        if self._is_stop_due:
            self._send_stop_if_due()

    def request_stop(self) -> None:
        """From any thread, or a signal handler in the middle of `tell`, which then says it when it is done."""
        self._is_stop_due = True
        self._send_stop_if_due()

    def _send_stop_if_due(self) -> None:
        while self._is_stop_due and self.alive and self._one_writer.acquire(blocking=False):
            try:
                self._is_stop_due = False
                self._send(self.line.commands, ("stop",))
            finally:
                self._one_writer.release()

    def _send(self, sock: socket.socket, message: Any) -> None:
        with contextlib.suppress(OSError):  # a dead worker is reported by poll
            send_patiently(sock, message, _TELL_S)

    def events(self, is_gone: bool, is_due: bool = True) -> list[Event]:
        """What has arrived. Reports come first, since they were made before the messages that are here by now, and the
        death of the process comes after everything it sent. Without messages, they are looked for when they are due."""
        sent: list[Event] = []
        has_reported = is_due or is_gone
        for body in self.line.messages.bodies():
            kind, value, is_after_reports = pickle.loads(body)
            has_reported = has_reported or is_after_reports
            sent.append(self._event(kind, value))
        if not has_reported:
            return sent
        events = [*(Sent(self.rank, "report", report) for report in self.line.reports()), *sent]
        if is_gone:
            events.append(Died(self.rank, how_it_ended(self._status())))
        return events

    def _event(self, kind: str, value: Any) -> Event:
        if kind == "returned":
            self._busy = False
            return outcome.returned(self.rank, value)
        if kind == "raised":
            self._busy = False
            return outcome.raised(self.rank, value)
        if kind == "asked":
            return Asked(self.rank, *value)
        if kind == "preempted":
            return Preempted(self.rank, value)
        return Sent(self.rank, kind, value)

    @property
    def has_answered(self) -> bool:
        return not self._busy or not self.alive

    def printed(self) -> Iterator[str]:
        if self._old_log is not None:
            yield from self._old_log.texts()
            self._old_log.close()
            self._old_log = None
        yield from self._log.texts()

    def is_idle(self) -> bool:
        return self.alive and not self._busy and not self.wait(0)

    def dismiss(self) -> None:
        self.tell("exit")

    def end(self, deadline: float) -> None:
        """Wait as long as allowed, then kill the worker and whatever it has started."""
        try:
            if self.alive:
                self.wait(max(0.0, deadline - time.monotonic()))
                self.kill()
                self.wait(_END_S)
                self._status()
        finally:
            if not self._is_over:  # the start was interrupted, or this
                self._nursery.end_unseen(self._number)
            for log in filter(None, (self._old_log, self._log)):
                log.close()
            self.line.close()
            if self.pidfd >= 0:
                os.close(self.pidfd)

    def kill(self) -> None:
        """With its process group. What it has started in other sessions is ended by the nursery."""
        if self.alive:
            self._kill()

    def _kill(self) -> None:
        for kill in (os.killpg, os.kill):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                kill(self.pid, signal.SIGKILL)

    def wait(self, timeout_s: float) -> bool:
        """Until the process has ended; says whether it has."""
        poller = select.poll()  # no select: a process may have more files than that knows
        poller.register(self.pidfd, select.POLLIN)
        return bool(poller.poll(timeout_s * 1000))

    def _status(self) -> int | None:
        self._is_over = True
        status = self._nursery.end(self._number)
        if status is None:  # the nursery has ended nobody
            self._kill()
        return status


def how_it_ended(status: int | None) -> str:
    """The wait status of a worker, in words; None if nobody knows it."""
    if status is None:
        return "ended; how is not known, since the process it was forked from has ended too or does not answer"
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        hint = "; the kernel does this when memory runs out" if number == signal.SIGKILL else ""
        return f"was killed by {_signal_name(number)}{hint}"
    code = os.WEXITSTATUS(status)
    if code == 128 + signal.SIGTERM:
        return f"ended itself with exit code {code}, as it does when it gets SIGTERM while it has nothing to do"
    return f"ended itself with exit code {code} (os._exit, or exit in C code)"


def _signal_name(number: int) -> str:
    if number > signal.SIGRTMIN:  # most of the real-time signals have no name
        return f"SIGRTMIN+{number - signal.SIGRTMIN}"
    return signal.Signals(number).name
