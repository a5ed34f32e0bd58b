"""In a worker: run what the driver has sent, and what the commands of a loop are."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from paceline.data.dataset import Dataset
from paceline.data.shard import Shard
from paceline.driven.commands import Command, Forget, Order
from paceline.driven.store import Store, unpacking_from
from paceline.errors import ArgumentTypeError, TrainFunctionError
from paceline.session import call_in_worker, place
from paceline.workers import main_module, outcome, parcel
from paceline.workers.base import Wire

FAILED = "driven command failed"
"""The kind of message that says which one, before the call raises."""


def run(wire: Wire, group_id: str, orders: Sequence[Order], is_apart: bool) -> dict[int, bytes]:
    """What commands tell, packed, by their numbers. `is_apart`: this is another process than the driver."""
    stores = wire.shared.setdefault("driven", {})
    store = stores.setdefault(group_id, Store(group_id))
    told: dict[int, bytes] = {}
    call_in_worker(wire, partial(_run, wire, store, orders, is_apart, told), (), {})
    return told


def _run(wire: Wire, store: Store, orders: Sequence[Order], is_apart: bool, told: dict[int, bytes]) -> None:
    with unpacking_from(store):
        for order in orders:
            if isinstance(order, Forget):
                store.forget(order.numbers)
                continue
            try:
                value = _value_of(order, is_apart)
                if order.tells:
                    told[order.number] = outcome.pack_value(value)
                else:
                    store.put(order.number, value)
                del value  # it would live on while the next command runs
            except BaseException as error:
                wire.send(FAILED, order.number)
                if isinstance(error, SystemExit):
                    raise TrainFunctionError(outcome.message_of(error)) from error
                raise


def _value_of(command: Command, is_apart: bool) -> Any:
    fn, args, kwargs, brought = parcel.loads(command.packed)
    if is_apart:
        main_module.publish(brought)
    return fn(*args, **kwargs)


# --- commands ---------------------------------------------------------------------------------------------------------


def call_value(fn: Any, *args: Any, **kwargs: Any) -> Any:
    """Call what lives here."""
    return fn(*args, **kwargs)


def call_method(value: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    return getattr(value, name)(*args, **kwargs)


def on_rank_0(fn: Callable[..., Any], *args: Any) -> Any:
    """What is the same everywhere, told once."""
    return fn(*args) if place().world_rank == 0 else None


def number_of(value: Any) -> float:
    if isinstance(value, str | bytes):  # float() would read it
        raise _no_number(value)
    try:
        return float(value.item() if hasattr(value, "item") else value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise _no_number(value) from error


def _no_number(value: Any) -> ArgumentTypeError:
    shape = getattr(value, "shape", None)
    what = f"a {type(value).__name__}" + (f" of shape {tuple(shape)}" if shape is not None else "")
    return ArgumentTypeError(f"This value is no number but {what}: get() brings it to the driver as it is.")


def as_text(value: Any) -> float | str:
    """A number, or how it prints."""
    try:
        return number_of(value)
    except ArgumentTypeError:
        return str(value)


class _End:
    """What comes after the last batch."""


_END = _End()


class Reader:
    """This rank's part of a dataset; a loop on the driver begins an epoch, and takes batch after batch."""

    def __init__(self, dataset: Dataset, seed: int, move: Callable[[Any], Any], options: dict[str, Any]):
        here = place()
        self._shard = Shard(dataset.tree, here.world_rank, here.world_size, lambda: seed)
        self._move, self._options = move, options
        self._batches: Iterator[Any] = iter(())

    def begin(self) -> None:
        self._shard.close()
        self._batches = iter(self._shard.to_torch(**self._options))

    def num_batches(self) -> int | None:
        """None if nobody knows: an error here would end the lines that are under way."""
        try:
            return len(self._shard.to_torch(**self._options))
        except TypeError:
            return None

    def take(self) -> Any:
        batch = next(self._batches, _END)
        return batch if batch is _END else self._move(batch)


def num_parts(batch: Any) -> int | None:
    """None at the end; 0 of a batch that is no tuple or list."""
    if batch is _END:
        return None
    return len(batch) if isinstance(batch, tuple | list) else 0
