"""What was asked of a run: one frozen record, which goes from the call of `Trainer.run` to the workers, into the run
folder, and to whoever goes on with the run."""

from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any

from paceline.checkpoints import CheckpointStrategy
from paceline.runs.function_source import describe_function

_STAYS = {"travels": False}
_STAYS_UNTOLD = {"travels": False, "told": False}
_UNTOLD = {"told": False}


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """A new option of `run` is an argument there and a field here: then it reaches the workers, `run.json` and
    `Trainer.resume` by itself, unless the field says otherwise. What has to be checked is in `arguments.request_of`."""

    train_func: Callable[..., Any] = field(metadata=_UNTOLD)
    takes_config: bool = field(default=False, metadata=_UNTOLD)
    config: Mapping[str, Any] = field(default_factory=dict)
    is_namespace: bool = field(default=False, metadata=_UNTOLD)
    """Whether the function gets the config as an argparse.Namespace, as it was given."""
    checkpoint: str | dict[str, Any] | None = field(default=None, metadata=_STAYS_UNTOLD)
    """What `load_checkpoint()` gives at first: a dict, or the path or URL of a checkpoint."""
    checkpoint_strategy: CheckpointStrategy = field(default_factory=CheckpointStrategy)
    checkpoint_root: str | None = field(default=None, metadata=_STAYS_UNTOLD)
    """Where the checkpoints of this run are, if that is outside of its folder: wherever it is resumed from."""
    dataset: Any = field(default=None, metadata=_STAYS_UNTOLD)
    """Where the shards of its dataset come from."""
    record_ids: bool | str = False
    """Whether the run folder keeps which rows went into which step; a str is the column that names a row."""
    parent: Mapping[str, Any] | None = field(default=None, metadata=_STAYS)
    """What the run is a part of, such as a trial of a search."""
    trainer: Mapping[str, Any] = field(default_factory=dict, metadata=_STAYS_UNTOLD)
    """The arguments of its Trainer, to make that anew."""
    first_iteration: int = field(default=0, metadata=_STAYS_UNTOLD)
    """How many steps were made, elsewhere or earlier, before `checkpoint` was saved."""
    first_checkpoint_id: int = field(default=1, metadata=_STAYS_UNTOLD)
    """Checkpoints in the folder with a lower id are none of this run's."""
    detailed_metrics: bool = field(default=False, metadata=_UNTOLD)
    in_step: bool = field(default=False, metadata=_UNTOLD)
    """Whether `report` waits until the next step is asked for, so that nobody trains further than was decided."""
    abandoned: str = field(default="the iterator over the results was abandoned", metadata=_STAYS_UNTOLD)
    """What the run folder gives as the reason when the caller drops the run."""

    @property
    def name(self) -> str:
        return str(getattr(self.train_func, "__name__", self.train_func))

    def call(self) -> Any:
        """In a worker: the function's value."""
        if not self.takes_config:
            return self.train_func()
        return self.train_func(Namespace(**self.config) if self.is_namespace else self.config)

    def for_workers(self) -> "RunRequest":
        """Without what is the driver's alone."""
        return replace(
            self, **{one.name: _default(one) for one in fields(self) if not one.metadata.get("travels", True)}
        )

    def for_folder(self) -> dict[str, Any]:
        """What `run.json` tells of it."""
        told = {one.name: getattr(self, one.name) for one in fields(self) if one.metadata.get("told", True)}
        return {
            "function": describe_function(self.train_func),
            "checkpoint": self.checkpoint if isinstance(self.checkpoint, str) else None,
            "dataset": self.dataset.describe() if self.dataset is not None else None,
            **told,
        }


def _default(one: Any) -> Any:
    return one.default if one.default is not MISSING else one.default_factory()
