"""TensorFlow: `TF_CONFIG` for every worker, by which a `MultiWorkerMirroredStrategy` of the script makes the group.

The script makes it, and not `join`: as soon as TensorFlow is initialised, nobody may set devices or threads any more,
and scripts do. A process can be in one group only: the eager context keeps its server and its peers until the process
ends. So workers that leave are replaced, from a nursery that has TensorFlow imported. That is safe as long as nothing
is initialised there: importing it starts no threads but those of OpenBLAS, which survive a fork.
"""

import json
import math
import os
import re
import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from paceline.backends.base import BackendConfig, Caller
from paceline.errors import ArgumentError
from paceline.registry import TENSORFLOW_IMPORT
from paceline.workers.base import Place, Preload, Raised, Wire
from paceline.workers.devices import own_gpus

_ECHOES = ("UnavailableError", "AbortedError", "CancelledError", "DeadlineExceededError", "InternalError")
_BROKEN = re.compile(
    r"collective|heartbeat|unhealthy|coordination (service|agent)|barrier|connect(ion)? (to|reset|refused|closed)"
    r"|failed to connect|socket closed|broken pipe|GRPC|has left|task:\d+",
    re.IGNORECASE,
)


@dataclass(frozen=True, kw_only=True)
class TensorflowConfig(BackendConfig):
    """`timeout_s`: how long a rank that makes its strategy waits for the others to do so too. `heartbeat_timeout_s`:
    after how much silence of a process TensorFlow gives up what waits for it; the driver knows of its end earlier.
    `memory_growth`: take the memory of a GPU as it is needed, not all of it at once."""

    name: ClassVar[str] = "tensorflow"
    package: ClassVar[str | None] = "tensorflow"
    preload: ClassVar[Preload] = Preload(to_join=(TENSORFLOW_IMPORT, __name__))

    timeout_s: float = 1800
    heartbeat_timeout_s: float = 30
    memory_growth: bool = True

    def __post_init__(self) -> None:
        for name in ("timeout_s", "heartbeat_timeout_s"):
            value = getattr(self, name)
            if not (value > 0 and math.isfinite(value)):
                raise ArgumentError(f"TensorflowConfig({name}={value!r}): expected a positive number of seconds.")

    def join(self, call: Caller, *, use_gpu: bool) -> None:
        processes = call.all(_name_of_process)
        if processes == [_name_of_process()]:
            return  # inline. Without TF_CONFIG a strategy is for this process alone, which stays as it is.
        call.all(_announce, call.all(_hold_port), self)

    def intact(self) -> bool:
        """Whether a strategy of the next run would be in a group of its own. The second strategy of a process sets the
        group up anew, and takes away what a quicker rank has sent by then: so whoever has made one is replaced, and
        whoever has used TensorFlow without one, which could not join any more."""
        if "TF_CONFIG" not in os.environ and os.environ.get("WORLD_SIZE") == "1":  # inline
            return True
        from tensorflow.python.eager import context

        made: Any = context._context
        return _is_told() and (made is None or made._context_handle is None)

    def is_broken_collective(self, error: Raised) -> bool:
        if error.type_name in _ECHOES:
            return _BROKEN.search(error.message) is not None
        return super().is_broken_collective(error)


def tf_config(addresses: Sequence[str], rank: int) -> str:
    """As TensorFlow reads it. Rank 0 is the chief by being the first worker."""
    return json.dumps({"cluster": {"worker": list(addresses)}, "task": {"type": "worker", "index": rank}})


def _name_of_process(wire: Wire | None = None) -> str:
    return f"{os.getpid()} on {socket.gethostname()}"


def _hold_port(wire: Wire) -> str:
    """A port for this rank's server, which nobody else can get until the process ends: TensorFlow binds it some time
    later, beside a socket of ours that does not listen. Without it, a port that was free a moment ago could be gone."""
    holder = wire.shared["tensorflow_port"] = socket.socket(socket.AF_INET6 if ":" in wire.address else socket.AF_INET)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    holder.bind(("", 0))
    host = f"[{wire.address}]" if ":" in wire.address else wire.address
    return f"{host}:{holder.getsockname()[1]}"


def _announce(wire: Wire, addresses: Sequence[str], config: TensorflowConfig) -> None:
    wire.leaving.callback(_leave, wire)
    wire.is_spent = True
    os.environ["TF_CONFIG"] = tf_config(addresses, wire.place.world_rank)
    os.environ["TF_GRPC_REUSE_PORT"] = "1"
    for name in ("TF_USE_LEGACY_KERAS", "TF_CPP_MIN_LOG_LEVEL"):
        os.environ.setdefault(name, "1")  # as when TensorFlow was imported
    _configure(len(addresses), config)
    if wire.place.device_index is not None:
        _choose_gpus(wire.place, config.memory_growth)


def _configure(num_workers: int, config: TensorflowConfig) -> None:
    """How long TensorFlow waits, an hour if nobody says so. A strategy leaves alone what is configured before it."""
    from tensorflow.python.eager import context

    job = context.coordination_config_pb2.CoordinatedJob(name="worker", num_tasks=num_workers)
    context.context().configure_coordination_service(
        service_type="standalone",
        service_leader="/job:worker/replica:0/task:0",
        cluster_register_timeout_in_ms=int(config.timeout_s * 1000),
        heartbeat_timeout_in_ms=int(config.heartbeat_timeout_s * 1000),
        coordinated_jobs=[job],
    )


def _choose_gpus(place: Place, memory_growth: bool) -> None:
    """All workers of a machine see the GPUs of all of them. TensorFlow would use whatever it finds, and take all memory
    of it, in every worker."""
    import tensorflow as tf

    visible = tf.config.list_physical_devices("GPU")
    own = [visible[index] for index in own_gpus(place, len(visible))]
    tf.config.set_visible_devices(own, "GPU")
    for gpu in own:
        tf.config.experimental.set_memory_growth(gpu, memory_growth)


def _is_told() -> bool:
    try:
        told = json.loads(os.environ["TF_CONFIG"])
        place = (str(told["task"]["index"]), str(len(told["cluster"]["worker"])))
    except (KeyError, TypeError, ValueError):
        return False
    return place == (os.environ.get("RANK"), os.environ.get("WORLD_SIZE"))


def _leave(wire: Wire) -> None:
    threading.Thread(target=_say_goodbye, args=(wire.place.world_rank,), name="paceline-leave", daemon=True).start()


def _say_goodbye(rank: int) -> None:
    """Free those who wait for this rank in a collective. One who is not in the group yet goes in for that: the others
    may be waiting for it to come."""
    import tensorflow as tf
    from tensorflow.python.eager import context

    if context.context()._collective_ops_server_def is None:
        tf.distribute.MultiWorkerMirroredStrategy()
    context.context().report_error_to_cluster(tf.errors.UNAVAILABLE, f"rank {rank} has left the group")
