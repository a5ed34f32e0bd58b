"""The local engine: workers are processes on this machine, forked from a nursery.

Linux only: a worker's end is noticed through its pidfd, at once and whatever its children still hold open, and the
kernel ends workers whose nursery is gone.
"""

import contextlib
import os
import select
import shutil
import socket
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from paceline import frameworks
from paceline.errors import ArgumentError, ResourcesError, StackDumpError, WorkerStartError
from paceline.registry import WORKER_MODULES
from paceline.workers import surroundings
from paceline.workers.base import (
    DIRECT,
    Asked,
    Call,
    Event,
    Place,
    Preload,
    Printed,
    Resources,
    Size,
    WorkerInfo,
    rank_environ,
)
from paceline.workers.devices import GpuShare, gpu_ids, gpu_variables, num_cpus, num_threads, share_gpus
from paceline.workers.local_worker import END_S, Worker
from paceline.workers.nursery import shared_nursery
from paceline.workers.pipes import stay_awake
from paceline.workers.stacks import collect_stacks

BATCH_S = 0.05
"""How long reports may gather before the driver takes them."""

_MOST_WORKERS = 1024
"""More than any machine trains with: whoever asks for them has mistyped, and would not get at a shell any more."""


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

    def connect(self) -> None:
        pass

    def group(self, size: Size, resources: Resources, preload: Preload) -> "LocalGroup":
        return LocalGroup(size, resources, self._all_of(preload), partial(self.num_slots, resources))

    def has_room_beside(self, resources: Resources) -> bool:
        """Workers that do nothing yet take little but a GPU."""
        return not resources.gpus

    def _all_of(self, preload: Preload) -> tuple[str, ...]:
        modules = (*preload.to_join, *preload.to_train, *WORKER_MODULES, *self.preload)
        return tuple(filter(frameworks.may_be_forked, dict.fromkeys(modules)))  # each once: the same share a nursery

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
        self._workers: list[Worker] = []
        self._poller: select.epoll | None = None
        self._look_at = 0.0
        """When reports and output are due, whoever has something else to say."""
        self._answered_at = 0.0
        """When a worker was last answered that has nothing else to do: it may have done it in no time."""
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
                worker = Worker(spec, nursery)
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
        except BaseException as error:
            self.close()
            if isinstance(error, OSError) and error.errno is not None:  # else a signal handler has raised it
                raise WorkerStartError(f"The workers could not be started: {error}.") from error
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
        if timeout_s > 0:
            stay_awake(self._poller, since=self._answered_at)
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
            if question.number == DIRECT:
                self._answered_at = time.perf_counter()

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
        """What is in the pipes outlives the workers."""
        try:
            for worker in self._workers:
                worker.kill()
            for worker in self._workers:
                if worker.alive:
                    worker.wait(END_S)
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
        if self._num_workers > _MOST_WORKERS:
            raise ResourcesError(
                f"{self._num_workers} workers on this machine: expected at most {_MOST_WORKERS}. Each is a process "
                "that has the framework, and more of them than cores only wait for each other."
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
