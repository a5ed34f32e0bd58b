"""What a user passes to DistributedSGD, checked and brought into one form. Nothing here starts or writes anything."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline import registry
from paceline.arguments import check_int, check_timeout
from paceline.errors import ArgumentError, ArgumentTypeError
from paceline.sgd.side import num_parameters
from paceline.workers.devices import gpu_ids

BUCKET_BYTES = 25 << 20

_ALGORITHMS = (
    "better nccl nccl/pscpu nccl/rechd nccl/xring pscpu pscpu/pscpu psgpu simple xring".split()  # noqa: SIM905
)
"""Of 2018, within a worker: now there is one way, of which `device_reduce` says what comes out."""


@dataclass(frozen=True)
class Options:
    num_workers: int
    devices_per_worker: int
    use_gpu: bool
    strategy: str
    device_reduce: str
    bucket_bytes: int
    max_retries: int
    hang_timeout_s: float | None

    @property
    def divisor(self) -> float:
        num_workers = max(1, self.num_workers)
        return num_workers * (self.devices_per_worker if self.device_reduce == "mean" else 1)


def options_of(
    model_creator: Any,
    *,
    num_workers: int,
    devices_per_worker: int,
    use_cpus: bool | None,
    gpu: bool | None,
    strategy: str,
    device_reduce: str,
    bucket_bytes: int,
    max_retries: int,
    hang_timeout_s: float | None,
    grad_shard_bytes: int | None,
    all_reduce_alg: str | None,
    use_plasma_op: bool | None,
) -> Options:
    if not callable(model_creator):
        raise ArgumentTypeError(
            f"model_creator is {model_creator!r} of type {type(model_creator).__name__}; expected a function "
            "(worker_idx, device_idx) → model, which is called in the workers."
        )
    num_parameters(model_creator)
    if check_int("num_workers", num_workers) < 0:
        raise ArgumentError(f"num_workers={num_workers}: expected 1 or more, or 0 to train in this process.")
    if check_int("devices_per_worker", devices_per_worker) < 1:
        raise ArgumentError(f"devices_per_worker={devices_per_worker}: expected 1 or more.")
    if check_int("bucket_bytes", bucket_bytes) < 1:
        raise ArgumentError(f"bucket_bytes={bucket_bytes}: expected 1 or more.")
    if device_reduce not in ("mean", "sum"):
        raise ArgumentError(f"device_reduce={device_reduce!r}: expected 'mean', or 'sum' as in 2018.")
    if use_plasma_op is not None:
        _tell_old("use_plasma_op", "strategy='ps'")
        strategy = "ps" if use_plasma_op else strategy
    if strategy not in registry.names("sgd_strategy"):
        names = ", ".join(registry.names("sgd_strategy"))
        raise ArgumentError(f"strategy={strategy!r} is not known; the strategies are {names}.")
    if grad_shard_bytes is not None:
        _tell_old("grad_shard_bytes", "bucket_bytes=...")
        bucket_bytes = check_int("grad_shard_bytes", grad_shard_bytes) or BUCKET_BYTES
    if all_reduce_alg is not None:
        _check_algorithm(all_reduce_alg)
        _tell_old("all_reduce_alg", "device_reduce='sum' for the sums of 2018, or leave it out for the mean")
    return Options(
        num_workers,
        devices_per_worker,
        _use_gpu(use_cpus, gpu),
        strategy,
        device_reduce,
        bucket_bytes,
        check_int("max_retries", max_retries),
        check_timeout("hang_timeout_s", hang_timeout_s),
    )


def _use_gpu(use_cpus: bool | None, gpu: bool | None) -> bool:
    for name, value in (("use_cpus", use_cpus), ("gpu", gpu)):
        if value is not None and not isinstance(value, bool):
            raise ArgumentTypeError(f"{name} is {value!r} of type {type(value).__name__}; expected True or False.")
    if use_cpus is not None and gpu is not None and use_cpus == gpu:
        raise ArgumentError(f"use_cpus={use_cpus} contradicts gpu={gpu}: leave one of them out.")
    if gpu is not None:
        return gpu
    return not use_cpus if use_cpus is not None else bool(gpu_ids())


def _check_algorithm(given: Any) -> None:
    """Also with a number of shards, as in "xring#2", or by size, as in "nccl:32k:xring"."""
    names = [part.partition("#")[0] for part in str(given).split(":")[::2]]
    unknown = [name for name in names if name not in _ALGORITHMS]
    if unknown:
        hint = " There is no way without a reduction any more." if "trivial" in unknown else ""
        raise ArgumentError(
            f"all_reduce_alg={given!r}: {', '.join(unknown)} is not known; the names were "
            f"{', '.join(_ALGORITHMS)}.{hint}"
        )


def check_state(state: Any) -> None:
    """ArgumentError if this is not what `state_dict` returns: what comes from a file may be anybody's."""
    problem = _problem_of(state)
    if problem is not None:
        raise ArgumentError(
            f"This is no state of a DistributedSGD, since {problem}: expected what state_dict() returned, or a "
            "checkpoint of save_checkpoint()."
        )


def _problem_of(state: Any) -> str | None:
    if not isinstance(state, Mapping):
        return f"it is a {type(state).__name__}"
    if missing := [name for name in ("replica", "step", "positions") if name not in state]:
        return f"it has no {', '.join(missing)}"
    replica, step, positions = state["replica"], state["step"], state["positions"]
    if not isinstance(replica, Mapping) or not isinstance(replica.get("weights"), Mapping):
        return "its replica has no weights"
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        return f"its step is {step!r}"
    if not isinstance(positions, list) or not all(one is None or _is_position(one) for one in positions):
        return "its positions are not those of workers"
    return None


def _is_position(value: Any) -> bool:
    """Of the replicas of a worker, and of the worker in the data of the run."""
    match value:
        case [list(), Mapping()]:
            return True
    return False


def _tell_old(name: str, instead: str) -> None:
    warnings.warn(f"{name} is a name of 2018: write {instead} instead.", DeprecationWarning, stacklevel=5)
