"""Horovod on torch: the environment that horovodrun would give to a script, and a group that exists already.

The group is made when the workers are: `hvd.init()` in a script then finds it, and a second run on the same workers
too. Rank 0's worker serves the rendezvous, as long as the group lasts: a script may shut down and init again.
"""

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, ClassVar

import psutil

from paceline.backends.base import BackendConfig, Caller
from paceline.backends.horovod_rendezvous import Rendezvous
from paceline.backends.torch import use_own_threads
from paceline.errors import ArgumentError, MissingDependencyError, WorkerStartError
from paceline.registry import TORCH_WORKER_MODULES
from paceline.workers.base import Place, Preload, Raised, Wire

_MISTAKES = re.compile(r"^(Mismatched |Requested to |Process-set rank |\w+ (is not supported )?with )")
"""What Horovod says of calls that do not fit together. It raises the same for them as for a rank that is gone."""


@dataclass(frozen=True, kw_only=True)
class HorovodConfig(BackendConfig):
    """`timeout_s` bounds how long ranks wait for each other to make the group, and for what is on its way between them.
    For a rank that does not come to a collective Horovod waits without end: `hang_timeout_s` of a Trainer ends that."""

    name: ClassVar[str] = "horovod"
    package: ClassVar[str | None] = "horovod"
    preload: ClassVar[Preload] = Preload(
        to_join=("torch", "horovod.torch", __name__),
        to_train=("torch._dynamo", *TORCH_WORKER_MODULES),  # the first by any optimizer, for more than a second
    )

    timeout_s: float = 1800

    def __post_init__(self) -> None:
        if not (self.timeout_s > 0 and math.isfinite(self.timeout_s)):
            raise ArgumentError(f"HorovodConfig(timeout_s={self.timeout_s!r}): expected a positive number of seconds.")

    def check(self) -> None:
        try:
            super().check()
        except MissingDependencyError as error:
            error.add_note("It is compiled when it is installed, and a torch from 2.1 on needs help: docs/horovod.md.")
            raise

    def join(self, call: Caller, *, use_gpu: bool) -> None:
        offers = call.all(_offer_rendezvous)
        places = [place for place, _ in offers]
        address, port = next(rendezvous for _, rendezvous in offers if rendezvous is not None)
        call.all(_join_group, places, address, port, math.ceil(self.timeout_s))

    def intact(self) -> bool:
        """Not if the script has shut it down, or another rank has, nor with process sets, which the next script would
        find there."""
        import horovod.torch as hvd

        try:
            return hvd.is_initialized() and [*hvd.mpi_ops._basics._get_process_set_ids_and_ranks()] == [0]
        except (RuntimeError, ValueError):  # another rank has, or is about to: `is_initialized` does not know
            return False

    def is_broken_collective(self, error: Raised) -> bool:
        if error.type_name == "HorovodInternalError":
            return _MISTAKES.search(error.message) is None
        return super().is_broken_collective(error)


def horovod_environ(
    place: Place, places: Sequence[Place], address: str, port: int, interface: str, timeout_s: int
) -> dict[str, str]:
    """What horovodrun sets for a rank. `places` are those of all ranks: a cross rank counts the machines that have this
    local rank."""
    across = [other.node_rank for other in places if other.local_rank == place.local_rank]
    return {
        "HOROVOD_RANK": str(place.world_rank),
        "HOROVOD_SIZE": str(place.world_size),
        "HOROVOD_LOCAL_RANK": str(place.local_rank),
        "HOROVOD_LOCAL_SIZE": str(place.local_world_size),
        "HOROVOD_CROSS_RANK": str(sorted(across).index(place.node_rank)),
        "HOROVOD_CROSS_SIZE": str(len(across)),
        # It only keeps machines apart. Nodes of a cluster may share an address, and so a name.
        "HOROVOD_HOSTNAME": f"node{place.node_rank}",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": address,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        "HOROVOD_GLOO_IFACE": interface,
        "HOROVOD_GLOO_TIMEOUT_SECONDS": str(timeout_s),
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
    }


def _offer_rendezvous(wire: Wire) -> tuple[Place, tuple[str, int] | None]:
    """The place of this worker, and on rank 0 where all of them meet."""
    if wire.place.world_rank != 0:
        return wire.place, None
    rendezvous = Rendezvous(wire.address, wire.place.world_size)
    wire.leaving.callback(rendezvous.close)
    return wire.place, (wire.address, rendezvous.port)


def _join_group(wire: Wire, places: Sequence[Place], address: str, port: int, timeout_s: int) -> None:
    import torch

    hvd = _horovod_torch()
    if hvd.is_initialized():  # inline: this process is part of a group, ours or one that the user made
        return
    environ = horovod_environ(wire.place, places, address, port, _interface_of(wire.address), timeout_s)
    names = [*environ, "HOROVOD_DYNAMIC_PROCESS_SETS"]  # the last one is set by hvd.init(process_sets="dynamic")
    wire.leaving.callback(_restore, {name: os.environ.get(name) for name in names})
    wire.leaving.callback(_leave_group)  # before the other, and also after a join that fails half-way
    os.environ.update(environ)
    use_own_threads(wire)
    if wire.place.device_index is not None:
        torch.cuda.set_device(wire.place.device_index)
    hvd.init()
    _renew_for_process_sets()


def _horovod_torch() -> Any:
    """It can be imported without its compiled part, and then only prints what is missing."""
    try:
        import horovod.torch as hvd
    except ImportError as error:
        raise WorkerStartError(f"Horovod is installed, but cannot be used with this torch: {error}") from error
    if not hasattr(hvd, "init"):
        raise WorkerStartError(
            "Horovod is installed without its part for torch. Compile it where torch is installed: "
            "HOROVOD_WITH_PYTORCH=1 pip install --no-cache-dir --no-build-isolation --force-reinstall horovod"
        )
    return hvd


def _interface_of(address: str) -> str:
    """gloo asks for the interface's name."""
    interfaces: dict[str, list[Any]] = psutil.net_if_addrs()
    for name, ones in interfaces.items():
        if any(one.address == address for one in ones):
            return name
    raise WorkerStartError(f"No network interface of this worker has its address {address}.")


def _leave_group() -> None:
    """Ranks that wait for this one in a collective get an error."""
    import horovod.torch as hvd

    hvd.shutdown()
    _set_init(getattr(hvd.init, "paceline_original", hvd.init))


def _restore(environ: Mapping[str, str | None]) -> None:
    """What the process had before it joined. Inline, that process is the user's own."""
    for name, value in environ.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


def _renew_for_process_sets() -> None:
    """Let `hvd.init(process_sets=...)` of a script make a group that has them. A plain `hvd.init()` finds the one that
    is there, without our help."""
    import horovod.torch as hvd

    original = hvd.init

    @wraps(original)
    def init(comm: Any = None, process_sets: Any = None) -> None:
        if process_sets and hvd.is_initialized():
            hvd.shutdown()
        original(comm, process_sets)

    init.paceline_original = original  # type: ignore[attr-defined]
    _set_init(init)


def _set_init(fn: Any) -> None:
    """In both places where scripts find it."""
    import horovod.torch as hvd

    hvd.init = hvd.mpi_ops.init = fn
