"""What a driven loop is made of besides values: a model, its optimizer, and batches."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from paceline.driven.value import Value
from paceline.driven.worker import call_method, call_value, num_parts, on_rank_0
from paceline.errors import TrainerStateError

if TYPE_CHECKING:
    from paceline.driven.group import WorkerGroup


class Model(Value):
    """A model with one replica on each rank. `WorkerGroup.distribute` makes it."""

    def __call__(self, *args: Any, **kwargs: Any) -> Value:
        """Every rank's replica, called with the rank's own of these values."""
        return self.worker_group.keep(call_value, self, *args, **kwargs)

    def train(self, mode: bool = True) -> "Model":
        self.worker_group.send(call_method, self, "train", mode)
        return self

    def eval(self) -> "Model":
        return self.train(False)

    def state_dict(self) -> dict[str, Any]:
        """Rank 0's, brought to this process: that of the model as it was given."""
        state: dict[str, Any] = self.worker_group.ask(on_rank_0, call_method, self, "state_dict")[0]
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """On every rank."""
        self.worker_group.send(call_method, self, "load_state_dict", state)


class Optimizer(Value):
    """An optimizer on each rank, for its replica of the model.

    Args:
        kind: a class of torch's optimizers, which gets the model's parameters; or a function that gets the model and
            returns an optimizer. Default: `torch.optim.SGD`.
        options: for the class or the function: `lr=0.1`.
    """

    def __init__(self, model: Model, worker_group: "WorkerGroup", kind: Any = None, **options: Any):
        from paceline.driven.torch_parts import make_optimizer

        super().__init__(worker_group, worker_group.command(make_optimizer, kind, model, options))

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.worker_group.send(call_method, self, "zero_grad", set_to_none)

    def step(self) -> None:
        self.worker_group.send(call_method, self, "step")

    def state_dict(self) -> dict[str, Any]:
        """Rank 0's, brought to this process."""
        state: dict[str, Any] = self.worker_group.ask(on_rank_0, call_method, self, "state_dict")[0]
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """On every rank."""
        self.worker_group.send(call_method, self, "load_state_dict", state)


class Batches:
    """Loop over it: each loop is one epoch. Every rank reads its own part, one batch ahead of the loop."""

    def __init__(self, reader: Value):
        self._reader, self._group = reader, reader.worker_group
        self._num_loops = 0

    def __len__(self) -> int:
        """Batches in an epoch; TypeError if that cannot be known without reading them."""
        found: int | None = self._group.ask(call_method, self._reader, "num_batches")[0]
        if found is None:
            raise TypeError("how many rows there are is not known before they are read")
        return found

    def __iter__(self) -> Iterator[Any]:
        """Of each batch, as many values as it has parts; one value if it is no tuple or list."""
        self._num_loops = number = self._num_loops + 1
        self._group.send(call_method, self._reader, "begin")
        batch, asked = self._take()
        try:
            while True:
                self._check_is_last(number)
                following, asked_next = self._take()  # read while the loop computes, and known before it is needed
                size = self._group.told(asked)[0]
                asked = asked_next
                if size is None:
                    return
                yield tuple(batch[index] for index in range(size)) if size else batch
                batch = following
        finally:
            self._group.pipeline.ignore(asked)

    def _check_is_last(self, number: int) -> None:
        if number != self._num_loops:
            raise TrainerStateError(
                "This loop cannot go on, since another loop over these batches has begun: there is one at a time. Make "
                "batches() of the dataset for each."
            )

    def _take(self) -> tuple[Value, int]:
        batch = self._group.keep(call_method, self._reader, "take")
        return batch, self._group.command(num_parts, batch, tells=True)
