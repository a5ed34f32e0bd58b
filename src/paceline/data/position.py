"""Where ranks are in the data, as a checkpoint has it."""

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.data.dealing import Deal, Mark, Standing
from paceline.errors import DataError

MOST_APART = 10_000
"""Epochs between ranks of one checkpoint: more than that is damage."""


def standing_as_state(standing: Standing) -> dict[str, Any]:
    """For a checkpoint."""
    return {
        "epoch": standing.epoch,
        "stop": standing.stop,
        "size": standing.size,
        "rank": standing.rank,
        "world_size": standing.world_size,
        "sizes": [list(change) for change in standing.sizes],
        "begun": [
            [epoch, mark.done, [[list(deal) for deal in deals] for deals in mark.ahead]]
            for epoch, mark in standing.begun.items()
        ],
    }


def standing_of(state: Mapping[str, Any]) -> Standing:
    """DataError for what no rank has saved: a checkpoint may have been damaged, or made by somebody else."""
    try:
        begun = {_number(epoch): _mark(done, ahead) for epoch, done, ahead in state["begun"]}
        rank, world_size = _number(state["rank"]), _number(state["world_size"])
        stop, size = (None if state[name] is None else _number(state[name]) for name in ("stop", "size"))
        sizes = tuple((_number(first), _number(one)) for first, one in state.get("sizes", ()))
        if rank >= world_size or 0 in (size, *(one for _, one in sizes)):
            raise ValueError("there is no such rank or batch")
        epoch = _number(state["epoch"])
        if any(abs(other - epoch) > MOST_APART for other in begun):
            raise ValueError("these epochs are too far apart")
        return Standing(epoch, stop, size, rank, world_size, begun, sizes)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"A checkpoint's position in the data cannot be read: {str(state)[:500]}.") from error


def _mark(done: Any, ahead: Any) -> Mark:
    return Mark(_number(done), tuple(tuple(_deal(*deal) for deal in deals) for deals in ahead))


def _deal(start: Any, stop: Any, size: Any, rank: Any, world_size: Any) -> Deal:
    deal = Deal(_number(start), None if stop is None else _number(stop), *map(_number, (size, rank, world_size)))
    if deal.size < 1 or deal.rank >= deal.world_size:
        raise ValueError("there is no such rank or batch")
    return deal


def _number(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**62:
        raise ValueError(f"{value!r} is not a number of rows, ranks or epochs")
    return value


def position_in_batches(states: Sequence[Mapping[str, Any]], rank: int, world_size: int) -> tuple[int, int]:
    """Epoch, and rows that this rank has had of it, in a stream that only this number of ranks finds again. With
    another number, or if the ranks were in different epochs, the earliest epoch begins anew."""
    try:
        epochs = {int(state["epoch"]) for state in states}
        own = [int(state["rows"]) for state in states if (state["rank"], state["world_size"]) == (rank, world_size)]
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"A checkpoint's position in the data cannot be read: {str(states)[:500]}.") from error
    return min(epochs, default=0), own[0] if own and len(epochs) == 1 else 0
