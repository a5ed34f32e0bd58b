"""Where one process stands among all of a run, and the variables by which launchers tell it."""

from collections.abc import Mapping
from dataclasses import dataclass

from paceline.errors import ArgumentError


@dataclass(frozen=True)
class Place:
    """Where one worker stands among all of them. `device_index` counts the GPUs visible to this worker."""

    world_rank: int = 0
    local_rank: int = 0
    node_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    device_index: int | None = None


_TORCHRUN = {
    "world_rank": "RANK",
    "local_rank": "LOCAL_RANK",
    "node_rank": "GROUP_RANK",
    "world_size": "WORLD_SIZE",
    "local_world_size": "LOCAL_WORLD_SIZE",
}
# Those that srun sets for a step; a batch script, which is one process, has some of Slurm's other variables.
_SRUN = {
    "world_rank": "SLURM_PROCID",
    "local_rank": "SLURM_LOCALID",
    "node_rank": "SLURM_NODEID",
    "world_size": "SLURM_STEP_NUM_TASKS",
    "local_world_size": "SLURM_NTASKS_PER_NODE",
}


def rank_environ(place: Place) -> dict[str, str]:
    """The variables by which a script under torchrun knows its place, and that somebody has launched it: Lightning then
    starts no processes of its own, and refuses a number of devices that there is not."""
    told = {variable: str(getattr(place, name)) for name, variable in _TORCHRUN.items()}
    return {**told, "TORCHELASTIC_RUN_ID": "paceline"}


def place_from_environ(environ: Mapping[str, str]) -> Place | None:
    """The place that a launcher has given to this process: torchrun, or whatever sets RANK and WORLD_SIZE, or srun.
    None without one. What a launcher leaves out is that of a single machine."""
    for variables in (_TORCHRUN, _SRUN):
        if all(environ.get(variables[name]) for name in ("world_rank", "world_size")):
            return _place({name: (variable, environ.get(variable)) for name, variable in variables.items()})
    return None


def _place(told: Mapping[str, tuple[str, str | None]]) -> Place:
    numbers = {}
    for name, (variable, text) in told.items():
        if text:
            if not (text.isascii() and text.isdecimal() and len(text) < 10):
                raise ArgumentError(
                    f"The environment variable {variable} is {text!r}; expected a whole number from 0 on."
                )
            numbers[name] = int(text)
    rank, size = numbers["world_rank"], numbers["world_size"]
    if rank >= size:
        raise ArgumentError(
            f"{told['world_rank'][0]}={rank} and {told['world_size'][0]}={size} contradict each other: ranks count "
            "from 0. They are set by a launcher; unset both to run a single process."
        )
    return Place(**{"local_rank": rank, "local_world_size": size, **numbers})
