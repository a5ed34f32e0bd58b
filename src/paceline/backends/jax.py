"""jax.distributed: one group of processes for the life of the workers, with gloo between CPUs and NCCL between GPUs.

We do by hand what `jax.distributed.initialize` does, since it cannot begin the service before anybody looks for it (who
comes too early waits for a second), bind gloo to the worker's own address, or leave SIGTERM to us.

A process is for one group only: an array that is still alive keeps the old group, and when that group's service goes
away, jax ends the process.
"""

import math
import os
import re
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import wraps
from typing import Any, ClassVar

from paceline.backends.base import BackendConfig, Caller
from paceline.backends.jax_links import Address, hang_up, listening
from paceline.backends.listening import cannot_listen
from paceline.errors import ArgumentError
from paceline.registry import JAX_WORKER_MODULES
from paceline.workers.base import Place, Preload, Raised, Wire
from paceline.workers.devices import own_gpus

_BROKEN = re.compile(  # what XLA says begins with one of its codes, by which a user's own words are told from it
    r"(?:UNKNOWN|UNAVAILABLE|INTERNAL|ABORTED|CANCELLED|DEADLINE_EXCEEDED|FAILED_PRECONDITION): .*"
    r"(?i:gloo|nccl|connection (?:closed|reset|refused)|broken pipe|socket closed|coordination|heartbeat|timed out"
    r"|deadline exceeded)",
    re.DOTALL,
)
_SHUTDOWN_S = 10
"""How long a script that calls `jax.distributed.shutdown()` waits for the other ranks to do so too."""


@dataclass(frozen=True, kw_only=True)
class JaxConfig(BackendConfig):
    """`timeout_s` bounds how long workers wait for each other when they join. A process that gives no sign of life for
    `heartbeat_timeout_s`, because its machine has stopped, is given up by jax together with its group.
    `num_cpu_devices` is how many devices jax makes of the CPU in each worker: one, unless you say."""

    name: ClassVar[str] = "jax"
    package: ClassVar[str | None] = "jax"
    preload: ClassVar[Preload] = Preload(to_join=("jax", __name__), to_train=JAX_WORKER_MODULES)

    timeout_s: float = 300
    heartbeat_timeout_s: float = 100
    num_cpu_devices: int | None = None

    def __post_init__(self) -> None:
        for name in ("timeout_s", "heartbeat_timeout_s"):
            value = getattr(self, name)
            if not (value >= 1 and math.isfinite(value)):
                raise ArgumentError(f"JaxConfig({name}={value!r}): expected seconds, at least 1.")
        if self.num_cpu_devices is not None and self.num_cpu_devices < 1:
            raise ArgumentError(f"JaxConfig(num_cpu_devices={self.num_cpu_devices!r}): expected at least 1, or None.")

    def join(self, call: Caller, *, use_gpu: bool) -> None:
        coordinator = call.one(0, _open_service, self)
        links = call.all(_join_group, self, coordinator, use_gpu, _this_process())
        call.all(_learn_links, [link for link in links if link is not None])

    def intact(self) -> bool:
        import jax
        from jax._src import xla_bridge

        has_devices: bool = xla_bridge.backends_are_initialized()  # asking jax itself would make new ones
        return has_devices and bool(jax.process_count() == 1 or jax.distributed.is_initialized())

    def is_broken_collective(self, error: Raised) -> bool:
        """The type depends on who waits for the result: it is a ValueError where an array becomes a number."""
        is_jax = error.type_name in ("JaxRuntimeError", "XlaRuntimeError", "RuntimeError", "ValueError")
        return (is_jax and _BROKEN.match(error.message) is not None) or super().is_broken_collective(error)


def _open_service(wire: Wire, config: JaxConfig) -> str | None:
    """On rank 0: where the ranks register and exchange addresses, for those only who reach this worker. A single
    process needs none."""
    from jax._src.lib import _jax  # type: ignore[attr-defined]

    if wire.place.world_size == 1:
        return None
    with _held_port(wire.address) as port:
        address = f"[{wire.address}]:{port}" if ":" in wire.address else f"{wire.address}:{port}"
        wire.shared["jax_service"] = _jax.get_distributed_runtime_service(
            address,
            wire.place.world_size,
            heartbeat_timeout=int(config.heartbeat_timeout_s),
            cluster_register_timeout=int(config.timeout_s),
            shutdown_timeout=_SHUTDOWN_S,
        )
    return address


@contextmanager
def _held_port(address: str) -> Iterator[int]:
    """A port that the system has picked, and gives to nobody else meanwhile. The service takes no socket of ours, and
    does not tell which port it got; but it binds with SO_REUSEPORT, and so may have the one that we hold. Nobody else
    gets it: the system never picks a port that is bound."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            holder.bind((address, 0))
        except OSError as error:
            raise cannot_listen(address, error) from error
        yield holder.getsockname()[1]


def _join_group(
    wire: Wire, config: JaxConfig, coordinator: str | None, use_gpu: bool, driver: tuple[str, int]
) -> Address | None:
    """Returns where gloo of this worker listens, if it does. The devices are made here: all ranks have to come for it,
    and a function that uses jax on one rank alone would wait for the others."""
    import jax
    from jax._src import xla_bridge

    is_driver = _this_process() == driver
    if not is_driver:  # first, and so called last, when all else is undone
        wire.leaving.callback(_leave_group, wire.shared)
        wire.is_spent = True
    _tolerate_initialize(wire.leaving)
    if xla_bridge.backends_are_initialized():  # inline: this process has its devices already
        return None
    for name, value in _settings(config, wire.place, use_gpu).items():
        wire.leaving.callback(_put_back, name, getattr(jax.config, name))
        jax.config.update(name, value)  # type: ignore[no-untyped-call]
    if coordinator is None:
        jax.devices()
        return None
    _register(wire, coordinator, config)
    with _gloo_at(wire.address) as links:
        jax.devices()
    return links[0] if links else None


def _put_back(name: str, value: Any) -> None:
    """How many devices it makes of the CPU, jax does not let anybody change once there are any: they stay."""
    import jax

    with suppress(RuntimeError):
        jax.config.update(name, value)  # type: ignore[no-untyped-call]


def _settings(config: JaxConfig, place: Place, use_gpu: bool) -> dict[str, Any]:
    """Of jax, for this worker. Without GPUs it would take whatever GPUs it finds, all of them for every worker."""
    found: dict[str, Any] = {"jax_cpu_collectives_implementation": "gloo"}
    if config.num_cpu_devices is not None:
        found["jax_num_cpu_devices"] = config.num_cpu_devices
    if not use_gpu:
        found["jax_platforms"] = "cpu"
    elif place.device_index is not None:
        num_visible = len(os.environ.get("CUDA_VISIBLE_DEVICES", "").split(","))
        found["jax_cuda_visible_devices"] = ",".join(map(str, own_gpus(place, num_visible)))
    return found


def _register(wire: Wire, coordinator: str, config: JaxConfig) -> None:
    """Become one of the processes that jax knows of; waits for all of them. Who does not see them all in time is ended
    by jax."""
    from jax._src import distributed
    from jax._src.lib import _jax  # type: ignore[attr-defined]

    state, place = distributed.global_state, wire.place
    state.coordinator_address = coordinator
    state.process_id, state.num_processes = place.world_rank, place.world_size
    state.service = wire.shared.pop("jax_service", None)
    state.client = _jax.get_distributed_runtime_client(
        coordinator,
        place.world_rank,
        init_timeout=int(config.timeout_s),
        shutdown_timeout=_SHUTDOWN_S,
        heartbeat_timeout=int(config.heartbeat_timeout_s),
        shutdown_on_destruction=False,  # it would wait for ranks that are gone
        use_compression=True,
    )
    state.client.connect()


@contextmanager
def _gloo_at(address: str) -> Iterator[list[Address]]:
    """Let gloo listen at this address; where it does is then in the list. By itself it would look up the host's name,
    and listen wherever that leads."""
    from jax._src.lib import _jax  # type: ignore[attr-defined]

    original = _jax.make_gloo_tcp_collectives
    found: list[Address] = []

    @wraps(original)
    def make_gloo_tcp_collectives(distributed_client: Any) -> Any:
        before = listening()
        made = original(distributed_client, hostname=address)
        found.extend(listening() - before)
        return made

    _jax.make_gloo_tcp_collectives = make_gloo_tcp_collectives
    try:
        yield found
    finally:
        _jax.make_gloo_tcp_collectives = original


def _learn_links(wire: Wire, links: list[Address]) -> None:
    wire.shared["jax_links"] = frozenset(links)


def _leave_group(shared: dict[str, Any]) -> None:
    hang_up(shared.pop("jax_links", frozenset()))


def _tolerate_initialize(leaving: ExitStack) -> None:
    """Let a script that calls jax.distributed.initialize itself run unchanged in a worker."""
    import jax

    original: Callable[..., None] = jax.distributed.initialize
    if hasattr(original, "paceline_original"):  # inline: another Trainer has done so, and it is undone with the last
        return

    @wraps(original)
    def initialize(*args: Any, **kwargs: Any) -> None:
        """The group is there already."""

    initialize.paceline_original = original  # type: ignore[attr-defined]
    jax.distributed.initialize = initialize
    leaving.callback(setattr, jax.distributed, "initialize", original)


def _this_process() -> tuple[str, int]:
    return socket.gethostname(), os.getpid()
