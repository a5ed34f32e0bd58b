"""The name of a value that lives on the workers, one on each rank. Nothing is brought here before it is asked for."""

import math
import operator
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from paceline.driven.store import Kept
from paceline.driven.worker import as_text, call_method, number_of

if TYPE_CHECKING:
    from paceline.driven.group import WorkerGroup


class Value(Kept):
    """What a command gives on each rank: a batch, an output, a loss.

    `item()`, `float(value)`, a format (`f"{loss:.3f}"`) and comparisons ask for it as a number, the mean over all
    ranks; `print(value)` shows it; `get()` brings what each rank has. All of these wait until the workers are so far.
    Arithmetic and indexing make new values there, and wait for nothing. Used in a function for `apply`, or as an
    argument, it is the rank's own. The workers forget it when the driver has no name for it any more.
    """

    def __init__(self, group: "WorkerGroup", number: int):
        super().__init__(group.id, number)
        self.worker_group = group
        weakref.finalize(self, group.pipeline.forgotten.append, number).atexit = False

    def item(self) -> float:
        """As a number: the mean over all ranks."""
        return mean_of(self.worker_group.ask(number_of, self))

    def get(self) -> list[Any]:
        """What each rank has, brought to this process."""
        from paceline.driven.torch_parts import detached

        return self.worker_group.ask(detached, self)

    def backward(self, *args: Any, **kwargs: Any) -> None:
        """Of a loss: gradients of every rank's own; those of a distributed model become the mean over all ranks."""
        self.worker_group.send(call_method, self, "backward", *args, **kwargs)

    def __float__(self) -> float:
        return self.item()

    def __int__(self) -> int:
        return int(self.item())

    def __round__(self, ndigits: int | None = None) -> float:
        return round(self.item(), ndigits)

    def __bool__(self) -> bool:
        return bool(self.item())

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if spec else str(self)

    def __str__(self) -> str:
        texts = self.worker_group.ask(as_text, self)
        if all(isinstance(text, float) for text in texts):
            return str(mean_of(texts))
        return "\n".join(f"rank {rank}: {text}" for rank, text in enumerate(texts))

    def __repr__(self) -> str:
        """Asks for nothing: debuggers show it at any moment."""
        return f"<{type(self).__name__} {self._number} on the workers>"

    def __len__(self) -> int:
        return int(self.worker_group.ask(len, self)[0])

    def __iter__(self) -> Iterator["Value"]:
        """Its parts, as many as rank 0 has: `hidden, cell = value`."""
        return iter([self[index] for index in range(len(self))])

    def __getitem__(self, key: Any) -> "Value":
        return self.worker_group.keep(operator.getitem, self, key)

    def __add__(self, other: Any) -> "Value":
        return self.worker_group.keep(operator.add, self, other)

    def __radd__(self, other: Any) -> "Value":
        return self.worker_group.keep(operator.add, other, self)

    def __sub__(self, other: Any) -> "Value":
        return self.worker_group.keep(operator.sub, self, other)

    def __rsub__(self, other: Any) -> "Value":
        return self.worker_group.keep(operator.sub, other, self)

    def __mul__(self, other: Any) -> "Value":
        return self.worker_group.keep(operator.mul, self, other)

    def __rmul__(self, other: Any) -> "Value":
        return self.worker_group.keep(operator.mul, other, self)

    def __truediv__(self, other: Any) -> "Value":
        return self.worker_group.keep(operator.truediv, self, other)

    def __neg__(self) -> "Value":
        return self.worker_group.keep(operator.neg, self)

    def __eq__(self, other: object) -> bool:
        """Only a number asks for it: what is looked for in a list, say, is the name."""
        return self.item() == other if isinstance(other, int | float) else NotImplemented

    __hash__ = Kept.__hash__

    def __lt__(self, other: float) -> bool:
        return self.item() < other

    def __le__(self, other: float) -> bool:
        return self.item() <= other

    def __gt__(self, other: float) -> bool:
        return self.item() > other

    def __ge__(self, other: float) -> bool:
        return self.item() >= other

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"A value on the workers has no attribute {name!r} here. There it may have: "
            f"worker_group.apply(lambda value: value.{name}, value), or value.{name}() if it is a method."
        )


def mean_of(numbers: list[float]) -> float:
    """As exact as it can be. Where the sum is none, as of infinities of both signs, it is what arithmetic says."""
    try:
        return math.fsum(numbers) / len(numbers)
    except (OverflowError, ValueError):
        return sum(number / len(numbers) for number in numbers)
