"""Which of the recorded rows count: those that are in the state that the run has ended with, or has now. Pure.

An attempt begins with a checkpoint, and what an earlier one had read after that checkpoint is read again. So the last
attempt counts as a whole; of the attempt that made the checkpoint with which it began, what is in that checkpoint; and
so on, back to the beginning. Attempts that no checkpoint leads to do not count.

A checkpoint is a cut through the ranks: of each rank whose part is in it, it has what that rank had taken before its
own save, however far the others were. A rank without a part is taken to have been as far as those with one: its rows
count up to the step that these were in.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from paceline.data.row_codec import PLAIN, RUNS, Message


@dataclass(frozen=True)
class Began:
    """How an attempt began: with a checkpoint of this run, or with none. `ranks` had a part in that."""

    number: int
    world_size: int
    first_id: int
    iteration: int = 0
    checkpoint: int | None = None
    ranks: frozenset[int] | None = None
    is_given: bool = False
    """Whether it began with a checkpoint of another run, so that some rows were had elsewhere."""


class Sent(NamedTuple):
    """What a rank of an attempt has told."""

    attempt: int
    rank: int
    message: Message


class Share(NamedTuple):
    """What counts of an attempt: all, or what is in the checkpoint `until`."""

    began: Began
    until: int | None
    ranks: frozenset[int]
    """Of whom all is known that counts: those that have a part in the checkpoint."""
    iteration: int


def began_of(fields: Mapping[str, Any], committed: Collection[int]) -> Began | None:
    """As a rows file has it. `committed` are the checkpoints of this run: another's may have been copied to it."""
    numbers = [fields.get(name) for name in ("number", "world_size", "first_id", "iteration")]
    checkpoint, ranks, is_given = fields.get("checkpoint"), fields.get("ranks"), fields.get("is_given") is True
    if not all(_is_count(number) for number in numbers) or not (checkpoint is None or _is_count(checkpoint)):
        return None
    is_own = checkpoint is not None and (not is_given or checkpoint in committed)
    parts = frozenset(filter(_is_count, ranks)) if isinstance(ranks, list) else None
    number, world_size, first_id, iteration = (int(one) for one in numbers if one is not None)
    return Began(
        number, world_size, first_id, iteration, checkpoint if is_own else None, parts, is_given and not is_own
    )


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**62


def lineage(begun: Mapping[int, Began], last: int) -> list[Share]:
    """The attempts that the last one rests on, itself first."""
    began = begun[last]
    found = [Share(began, None, _everybody(began), began.iteration)]
    while began.checkpoint is not None:
        # ids go up, and an attempt that has committed none leaves its first one to the next
        makers = [one for one in begun.values() if one.number < began.number and one.first_id <= began.checkpoint]
        if not makers:
            break
        maker = max(makers, key=lambda one: one.number)
        ranks = _everybody(maker) if began.ranks is None else began.ranks
        found.append(Share(maker, began.checkpoint, ranks, began.iteration))
        began = maker
    return found


def _everybody(began: Began) -> frozenset[int]:
    return frozenset(range(min(began.world_size, 1 << 20)))


def counted(sent: Sequence[Sent], shares: Sequence[Share]) -> Iterator[Sent]:
    """Those that count, in the order of the attempts, each once."""
    by_attempt: dict[int, list[Sent]] = {}
    for one in sent:
        by_attempt.setdefault(one.attempt, []).append(one)
    for share in reversed(shares):
        theirs = by_attempt.get(share.began.number, [])
        limit = _last_step(theirs, share)
        seen: set[tuple[int, int]] = set()
        for one in theirs:
            key = (one.rank, one.message.number)
            if key not in seen and _counts(one, share, limit):
                yield one
            seen.add(key)


def _counts(one: Sent, share: Share, limit: int) -> bool:
    if share.until is None:
        return True
    return one.message.save <= share.until if one.rank in share.ranks else one.message.step <= limit


def _last_step(sent: Sequence[Sent], share: Share) -> int:
    """In which step the ranks with a part were when they saved it: with rows that they had taken for it, if they save
    a step before they report it."""
    steps = (
        one.message.step
        for one in sent
        if one.rank in share.ranks
        and share.until is not None
        and one.message.save <= share.until
        and any(item.kind in (PLAIN, RUNS) for item in one.message.items)
    )
    return max(share.iteration, max(steps, default=0))


def num_missing(sent: Sequence[Sent], shares: Sequence[Share]) -> int:
    """How many messages are not there, of those that a rank has sent before its last one that is."""
    numbers: dict[tuple[int, int], set[int]] = {}
    wanted = {share.began.number for share in shares}
    for one in sent:
        if one.attempt in wanted:
            numbers.setdefault((one.attempt, one.rank), set()).add(one.message.number)
    return sum(max(theirs) + 1 - len(theirs) for theirs in numbers.values())
