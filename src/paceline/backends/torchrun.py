"""The environment that torchrun gives to a script, which then forms the process group itself.

Rank 0's worker serves the store, at a port that the system has given it, and TORCHELASTIC_USE_AGENT_STORE makes every
rank a client of it, rank 0 as well: nobody can take the port between the choice of it and its use, and since a restart
has new workers, it has a new and empty store. torchrun serves it in the launcher, which has to import torch for that.
"""

import os
from dataclasses import dataclass
from functools import wraps
from typing import Any, ClassVar

from paceline.backends.base import Caller
from paceline.backends.torch import TorchConfig, open_store, use_own_threads
from paceline.workers.base import Place, Preload, Raised, Wire


@dataclass(frozen=True, kw_only=True)
class TorchrunConfig(TorchConfig):
    """Workers that are no group yet. What the script makes is its own business: `backend` and `timeout_s` of its
    `init_process_group` count, and `num_collectives` and `is_broken_collective` see its group."""

    preload: ClassVar[Preload] = Preload(to_join=("torch", "torch.distributed", __name__))
    sees_all_gpus: ClassVar[bool] = True

    max_restarts: int = 3

    def join(self, call: Caller, *, use_gpu: bool) -> None:
        offers = call.all(_offer_store, self.timeout_s)
        address, port = next(store for _, store in offers if store is not None)
        num_nodes = 1 + max(node_rank for node_rank, _ in offers)
        call.all(_announce, address, port, num_nodes, self.max_restarts)

    def is_broken_collective(self, error: Raised) -> bool:
        """An exit code does not tell why: a command fails, and a script may leave in good order, because another rank
        is gone."""
        return error.type_name == "ScriptExitError" or super().is_broken_collective(error)

    def intact(self) -> bool:
        return False  # a script has had the process for itself


def _offer_store(wire: Wire, timeout_s: float) -> tuple[int, tuple[str, int] | None]:
    """The number of this worker's machine, and on rank 0 where the store is."""
    place = wire.place
    return place.node_rank, open_store(wire, timeout_s) if place.world_rank == 0 else None


def _announce(wire: Wire, address: str, port: int, num_nodes: int, max_restarts: int) -> None:
    wire.is_spent = True  # a script has had this process for itself
    os.environ.update(torchrun_environ(wire.place, address, port, num_nodes, max_restarts))
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    _outlive_models(wire.shared)
    use_own_threads(wire)


def _outlive_models(shared: dict[str, Any]) -> None:
    """Let a script destroy its group before its DDP model. When the model is then freed and has the last reference to
    the group, torch waits for the group's threads and keeps the interpreter's lock that they wait for, forever: about
    one script in ten hung so, just when it had done all its work."""
    import torch.distributed as dist

    original = dist.destroy_process_group

    @wraps(original)
    def destroy_process_group(group: Any = None) -> None:
        shared["torch_group"] = group or dist.group.WORLD  # a reference of Python's, which frees it without the lock
        original(group)

    dist.destroy_process_group = dist.distributed_c10d.destroy_process_group = destroy_process_group


def torchrun_environ(place: Place, address: str, port: int, num_nodes: int, max_restarts: int) -> dict[str, str]:
    """What it sets beside what every worker has (see `rank_environ`). All ranks have one role, and the name that it has
    by default."""
    return {
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "GROUP_WORLD_SIZE": str(num_nodes),
        "ROLE_NAME": "default",
        "ROLE_RANK": str(place.world_rank),
        "ROLE_WORLD_SIZE": str(place.world_size),
        "TORCHELASTIC_MAX_RESTARTS": str(max_restarts),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
