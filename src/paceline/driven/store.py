"""A rank's own values, by number; and the name of one, which travels in place of it."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from paceline.errors import TrainerStateError


class Kept:
    """The name of a value that every rank has of its own. Wherever it is packed for the workers, as an argument or as a
    variable that a function uses, a rank unpacks its own value."""

    def __init__(self, group_id: str, number: int):
        self._group_id, self._number = group_id, number

    def __reduce__(self) -> tuple[Any, ...]:
        if not _is_packing.get():  # else whoever saves a model to a file finds out when it is loaded, and gone
            raise TrainerStateError(
                "This is the name of a value that lives on the workers of a WorkerGroup; it means nothing elsewhere, "
                "as in a file or a copy. value.get() brings what it stands for, and of a model model.state_dict()."
            )
        return own_value, (self._group_id, self._number)


class Store:
    """In a worker, for as long as the group lives."""

    def __init__(self, group_id: str):
        self.group_id = group_id
        self._values: dict[int, Any] = {}

    def put(self, number: int, value: Any) -> None:
        self._values[number] = value

    def get(self, number: int) -> Any:
        if number not in self._values:
            raise TrainerStateError(
                "This value was never made on the workers: a command before it had failed, and those that were on "
                "their way were left out. Make it again."
            )
        return self._values[number]

    def forget(self, numbers: tuple[int, ...]) -> None:
        for number in numbers:
            self._values.pop(number, None)

    def __len__(self) -> int:
        return len(self._values)


_is_packing: ContextVar[bool] = ContextVar("is_packing", default=False)


@contextmanager
def packing() -> Iterator[None]:
    """A block in which commands are packed, for the workers of a group."""
    token = _is_packing.set(True)
    try:
        yield
    finally:
        _is_packing.reset(token)


_current: ContextVar[Store | None] = ContextVar("store", default=None)
"""While commands are run. Unpickling calls a function with what was packed, and with nothing else."""


@contextmanager
def unpacking_from(store: Store) -> Iterator[None]:
    token = _current.set(store)
    try:
        yield
    finally:
        _current.reset(token)


def own_value(group_id: str, number: int) -> Any:
    """What a `Kept` is unpacked as."""
    store = _current.get()
    if store is None or store.group_id != group_id:
        raise TrainerStateError(
            "A value of one WorkerGroup was given to another: it lives on other workers. value.get() brings it here, "
            "from where you can send it."
        )
    return store.get(number)
