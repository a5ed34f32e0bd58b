"""Where ranks are in the data, as a checkpoint has it."""

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.data.dealing import Deal, Mark, Standing
from paceline.errors import DataError


def standing_as_state(standing: Standing) -> dict[str, Any]:
    """For a checkpoint."""
    return {
        "epoch": standing.epoch,
        "stop": standing.stop,
        "size": standing.size,
        "rank": standing.rank,
        "world_size": standing.world_size,
        "begun": [
            [epoch, mark.done, [[list(deal) for deal in deals] for deals in mark.ahead]]
            for epoch, mark in standing.begun.items()
        ],
    }


def standing_of(state: Mapping[str, Any]) -> Standing:
    try:
        begun = {
            int(epoch): Mark(int(done), tuple(tuple(Deal(*deal) for deal in deals) for deals in ahead))
            for epoch, done, ahead in state["begun"]
        }
        return Standing(state["epoch"], state["stop"], state["size"], state["rank"], state["world_size"], begun)
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"A checkpoint's position in the data cannot be read: {state!r}.") from error


def position_in_batches(states: Sequence[Mapping[str, Any]], rank: int, world_size: int) -> tuple[int, int]:
    """Epoch, and rows that this rank has had of it, in a stream that only this number of ranks finds again. With
    another number, or if the ranks were in different epochs, the earliest epoch begins anew."""
    try:
        epochs = {int(state["epoch"]) for state in states}
        own = [int(state["rows"]) for state in states if (state["rank"], state["world_size"]) == (rank, world_size)]
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"A checkpoint's position in the data cannot be read: {states!r}.") from error
    return min(epochs, default=0), own[0] if own and len(epochs) == 1 else 0
