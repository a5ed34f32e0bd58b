"""torch.distributed: one process group for the life of the workers, as torchrun would have made it."""

import gc
import os
import re
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import wraps
from typing import Any, ClassVar

from paceline.backends.base import BackendConfig, Caller
from paceline.backends.listening import listen_at
from paceline.errors import ArgumentError
from paceline.registry import TORCH_WORKER_MODULES
from paceline.workers.base import Preload, Raised, Wire

_BROKEN = re.compile(
    r"connection (closed|reset|refused)|broken pipe|socket (closed|timeout)|gloo|nccl|remote (process )?exited"
    r"|store.*(closed|failed)|failed to recv|tcpstore|timed out|process group",
    re.IGNORECASE,
)


@dataclass(frozen=True, kw_only=True)
class TorchConfig(BackendConfig):
    """`backend` None picks nccl with GPUs and gloo without. `init_method` is 'env' or 'tcp': both end in the same
    group, and MASTER_ADDR and MASTER_PORT are set in either case. `timeout_s` bounds every collective."""

    name: ClassVar[str] = "torch"
    package: ClassVar[str | None] = "torch"
    transports: ClassVar[tuple[str, ...]] = ("gloo", "mpi", "nccl", "ucc", "xccl")
    preload: ClassVar[Preload] = Preload(
        to_join=("torch", "torch.distributed", __name__),
        to_train=(
            "torch._dynamo",  # by the first DDP model, for more than a second
            "torch.nn.parallel",
            *TORCH_WORKER_MODULES,
        ),
    )

    backend: str | None = None
    init_method: str = "env"
    timeout_s: float = 1800

    def __post_init__(self) -> None:
        if self.init_method not in ("env", "tcp"):
            raise ArgumentError(f"TorchConfig(init_method={self.init_method!r}): expected 'env' or 'tcp'.")
        if not self.timeout_s > 0:
            raise ArgumentError(f"TorchConfig(timeout_s={self.timeout_s!r}): expected a positive number of seconds.")

    def join(self, call: Caller, *, use_gpu: bool) -> None:
        backend = self.backend or ("nccl" if use_gpu else "gloo")
        address, port = call.one(0, open_store, self.timeout_s)
        call.all(_join_group, backend, address, port, self.timeout_s)

    def intact(self) -> bool:
        import torch.distributed as dist

        return dist.is_initialized()

    def num_collectives(self) -> int | None:
        import torch.distributed as dist

        try:
            group: Any = dist.group.WORLD
            return None if group is None else int(group._get_sequence_number_for_group())
        except RuntimeError:  # of a kind of group that does not count
            return None

    def is_broken_collective(self, error: Raised) -> bool:
        echoes = ("DistBackendError", "DistNetworkError", "DistStoreError", "DistError", "WorkersLostError")
        if error.type_name in echoes:
            return True
        return error.type_name == "RuntimeError" and _BROKEN.search(error.message) is not None


def open_store(wire: Wire, timeout_s: float) -> tuple[str, int]:
    """On rank 0: a store on a port that the system picks, so that no two groups can collide, for those only who reach
    this worker. By itself a store would listen on all interfaces, as IPv6: open to other machines, and asking a name
    server for each of its IPv4 clients, one after the other."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    listener = listen_at(wire.address)
    port = listener.getsockname()[1]
    wire.shared["torch_store"] = TCPStore(
        wire.address,
        port,
        wire.place.world_size,
        is_master=True,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    return wire.address, port


def _join_group(wire: Wire, backend: str, host: str, port: int, timeout_s: float) -> None:
    import torch
    import torch.distributed as dist
    import torch.distributed.nn.functional  # imported after joining, its default arguments would keep the group
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    if dist.is_initialized():  # inline: this process is part of a group, ours or one that the user made
        wire.shared.pop("torch_store", None)
        return
    wire.leaving.callback(_leave_group, wire.shared)  # first, so that it also undoes a join that fails half-way
    wire.leaving.callback(_restore, dict(os.environ), sys.excepthook)
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = host, str(port)
    use_own_threads(wire)
    if wire.place.device_index is not None:
        torch.cuda.set_device(wire.place.device_index)
    place, timeout = wire.place, timedelta(seconds=timeout_s)
    store = wire.shared.pop("torch_store", None)
    if store is None:
        with _short_lookups():
            store = TCPStore(host, port, place.world_size, is_master=False, timeout=timeout)
    options: dict[str, Any] = {"rank": place.world_rank, "world_size": place.world_size, "timeout": timeout}
    try:
        dist.init_process_group(backend, store=store, **options)
    except BaseException as error:
        store = None
        traceback.clear_frames(error.__traceback__)  # they hold the store, and that its port
        raise
    # The second reference keeps the group's threads alive when a script destroys it before its DDP model: freeing both
    # at once can hang. While it is there, nobody who waits for this rank in a collective learns that it has left.
    wire.shared["torch_group"] = dist.group.WORLD
    _tolerate_second_init()


@contextmanager
def _short_lookups() -> Iterator[None]:
    """A store looks up the name of the address that it connects to, as ::ffff:127.0.0.1, which no hosts file has. When
    many workers ask a name server at once and an answer is lost, let them ask again after 1 s instead of 5."""
    if "RES_OPTIONS" in os.environ:
        yield
        return
    os.environ["RES_OPTIONS"] = "timeout:1 attempts:4"
    try:
        yield
    finally:
        del os.environ["RES_OPTIONS"]


def _leave_group(shared: dict[str, Any]) -> None:
    import torch.distributed as dist

    gc.collect()  # a DDP model that is still alive would abort the interpreter later on
    if dist.is_initialized():
        dist.destroy_process_group()
    shared.pop("torch_group", None)
    shared.pop("torch_store", None)
    _set_init_process_group(getattr(dist.init_process_group, "paceline_original", dist.init_process_group))


def _restore(environ: Mapping[str, str], excepthook: Any) -> None:
    """What the process had before it joined. Inline, that process is the user's own."""
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
        if name in environ:
            os.environ[name] = environ[name]
    if getattr(sys.excepthook, "__module__", "").startswith("torch.distributed"):  # it has put one around the former
        sys.excepthook = excepthook


def use_own_threads(wire: Wire) -> None:
    """In a worker, as many as its share of the cores, which was not known when the nursery imported torch. Who leaves
    has as many as before."""
    import torch

    wire.leaving.callback(torch.set_num_threads, torch.get_num_threads())
    with suppress(KeyError, ValueError, RuntimeError):  # a list, say, or 0: torch has made of it what it does
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


def _tolerate_second_init() -> None:
    """Let a script that calls init_process_group itself, as it does under torchrun, run unchanged in a worker."""
    import torch.distributed as dist

    original = dist.init_process_group
    if hasattr(original, "paceline_original"):
        return

    @wraps(original)
    def init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
        if not dist.is_initialized():
            original(backend, *args, **kwargs)
            return
        wanted = {part.split(":")[-1] for part in (backend or "").split(",") if part}
        if wanted and dist.get_backend() not in wanted:
            raise ArgumentError(
                f"init_process_group({backend!r}): this worker already belongs to a {dist.get_backend()} group. "
                f"Ask for it when you make the Trainer: Trainer(backend=TorchConfig(backend={backend!r}), ...)."
            )

    init_process_group.paceline_original = original  # type: ignore[attr-defined]
    _set_init_process_group(init_process_group)


def _set_init_process_group(fn: Any) -> None:
    """In both places where scripts find it."""
    import torch.distributed as dist

    dist.init_process_group = dist.distributed_c10d.init_process_group = fn
