"""Lightning Fabric in a run: a logger that reports, and Fabric's own checkpoints as checkpoints of the run."""

from argparse import Namespace
from collections.abc import Collection, Mapping
from typing import Any

from paceline import session
from paceline.integrations.joining import begun_from, folder_for_files, join, missing
from paceline.prepare.reproducibility import rng_state, set_rng_state

try:
    from lightning.fabric import Fabric
    from lightning.fabric.loggers.logger import Logger
    from lightning.fabric.wrappers import _FabricDataLoader
except ModuleNotFoundError as error:
    raise missing(error, __name__) from error

_FILE = "fabric.ckpt"
"""In a checkpoint's directory. Of a sharded strategy it is a folder."""
_RNG, _EPOCHS = "rng", "epochs"


class PacelineLogger(Logger):  # type: ignore[misc]
    """For `Fabric(loggers=PacelineLogger())`: what is given to `fabric.log` and `log_dict` is reported. Each call is a
    report, so log all that belongs to a step at once, on every rank or on rank 0 alone. Outside of a run it does
    nothing."""

    @property
    def name(self) -> str:
        return "paceline"

    @property
    def version(self) -> str | None:
        """The name of the run folder."""
        run_dir = None if (running := session.current()) is None else running.run_dir
        return None if run_dir is None else run_dir.name

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        running = session.current()
        if running is not None:
            running.report(dict(metrics) if step is None else {**metrics, "global_step": step})

    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Nothing: the config of the run is in its folder."""


def save_checkpoint(fabric: Fabric, state: dict[str, Any]) -> None:
    """As `fabric.save(path, state)`, into a checkpoint of the run, with the random generators of each rank. On all
    ranks, after an epoch. Of a loader, the number of epochs is kept: by it Fabric shuffles. Numbers and texts in the
    state are those of the checkpoint too: one can be the score of a CheckpointStrategy. Outside of a run it does
    nothing, which is said once."""
    running = session.current()
    if running is None:
        session.save_checkpoint()  # says it
        return
    plain = {name: value for name, value in state.items() if isinstance(value, bool | int | float | str)}
    epochs = {name: loader._num_iter_calls for name, loader in _loaders(state).items()}
    with folder_for_files(running) as folder:
        fabric.save(folder / _FILE, _without(epochs, state))  # rank 0's path counts, and all wait for it
        directory = folder if running.place.world_rank == 0 else None
        running.save_checkpoint(plain, directory, {_RNG: rng_state(), _EPOCHS: epochs})


def load_checkpoint(fabric: Fabric, state: dict[str, Any]) -> bool:
    """As `fabric.load(path, state)`, from the checkpoint that the run goes on from; False, and all is as it was, in one
    that begins. On all ranks, when all that the state has is set up, and before the first batch."""
    running = session.current()
    if running is None:
        return False
    join(running, fabric, fabric.world_size, "pass Fabric(strategy='ddp', devices=paceline.local_world_size())")
    checkpoint = begun_from(running, _FILE)
    if checkpoint is None or checkpoint.directory is None:
        return False
    loaders = _loaders(state)
    loaded = _without(loaders, state)
    fabric.load(checkpoint.directory / _FILE, loaded)
    state |= loaded
    own = checkpoint.per_rank or next(iter(checkpoint.all_ranks), None) or {}
    for name, num_epochs in own.get(_EPOCHS, {}).items():
        loaders[name]._num_iter_calls = num_epochs
        if num_epochs > 0 and getattr(loaders[name], "persistent_workers", False):
            iter(loaders[name]._dataloader)  # they draw a seed when they begin, which was before these epochs
    if checkpoint.per_rank is not None:
        set_rng_state(checkpoint.per_rank[_RNG])
    return True


def _loaders(state: Mapping[str, Any]) -> dict[str, _FabricDataLoader]:
    return {name: value for name, value in state.items() if isinstance(value, _FabricDataLoader)}


def _without(names: Collection[str], state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in state.items() if name not in names}
