"""The rows of one run as its folder tells them: those that count, by dataset, epoch and step."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from paceline.data.row_codec import DATA, ENDED, Item, Message, Spans, decoded, left_out_of, spans_of
from paceline.errors import ArgumentError, RunDamagedError
from paceline.json_text import decode
from paceline.recording.counted_rows import Began, Sent, began_of, counted, lineage, num_missing
from paceline.recording.row_spans import Cover, cover
from paceline.runs import Run, load_run
from paceline.runs.durable import read_json_lines
from paceline.runs.rows_file import ROWS_FILE, Content, read_rows_file

_ID_BITS = 56


@dataclass(frozen=True)
class About:
    """What the run has told of a dataset that it read."""

    name: str | None
    column: str | None = None
    num_rows: int | None = None
    sources: tuple[tuple[int | None, int], ...] = ()
    """Of each, how many rows it has, if they are numbered from 0 on, and how often each comes in an epoch."""
    is_cut: bool = False
    """Whether an epoch has only some of the rows, and others the next time."""

    @property
    def label(self) -> str:
        return self.name or "dataset"

    def times(self, ids: Any) -> Any:
        """How often these rows are to come in an epoch."""
        times = np.array([times for _, times in self.sources] or [1])
        if self.column is not None or len({*times.tolist()}) == 1:
            return np.full(len(ids), times.max())
        return times[np.clip(ids >> _ID_BITS, 0, len(times) - 1)]


@dataclass
class Epoch:
    """What counts of one epoch of one dataset; those of the same have the same key."""

    key: str
    about: About
    number: int
    parts: list[tuple[int, int, Spans]] = field(default_factory=list)
    """Of each message: the step, the rank, and its rows."""
    ended: dict[int, set[int]] = field(default_factory=dict)
    """By attempt, the ranks that have read their part to its end."""
    num_left_out: int = 0
    is_finished: bool = False
    began_elsewhere: bool = False

    @cached_property
    def cover(self) -> Cover:
        empty = np.empty(0, np.int64)
        return cover(
            np.concatenate([empty, *(spans.firsts for _, _, spans in self.parts)]),
            np.concatenate([empty, *(spans.lasts for _, _, spans in self.parts)]),
        )

    @property
    def steps(self) -> tuple[int, int] | None:
        steps = [step for step, _, _ in self.parts]
        return (min(steps), max(steps)) if steps else None

    def sightings(self, row: int) -> tuple[tuple[int, int], ...]:
        """The steps that had it, and the ranks."""
        return tuple(
            (step, rank) for step, rank, (firsts, lasts) in self.parts if ((firsts <= row) & (row <= lasts)).any()
        )


@dataclass(frozen=True)
class History:
    run: Run
    epochs: list[Epoch]
    num_damaged: int
    """Records that cannot be read, or are not there."""


def read_history(run_dir: str | os.PathLike[str]) -> History:
    """ArgumentError if the run was not asked to record its rows, RunDamagedError if what it has cannot be used."""
    run = load_run(run_dir)
    content = read_rows_file(run.path / ROWS_FILE)
    if content is None:
        raise ArgumentError(
            f"{run.path} does not tell which rows went into which step: it has no {ROWS_FILE}. Ask for it when the run "
            "begins: trainer.run(train_func, dataset=..., record_ids=True)."
        )
    try:
        return _history(run, content)
    except ValueError as error:
        raise RunDamagedError(f"{run.path / ROWS_FILE} cannot be used: {error}.") from error


def _history(run: Run, content: Content) -> History:
    events = run.events
    known = [began_of(fields, _numbers(events, "checkpoint", "id")) for fields in content.begins.values()]
    begun = {began.number: began for began in known if began is not None}
    sent = [Sent(attempt, rank, decoded(message)) for attempt, rank, message in content.messages]
    num_damaged = content.num_damaged + known.count(None) + max(_numbers(events, "lines_lost", "num_rows"), default=0)
    ours = [one for one in sent if one.attempt in begun]
    num_damaged += len(sent) - len(ours)
    reported = [line.get("attempt") for line in read_json_lines(run.path / "metrics.jsonl")]
    heard = {one.attempt for one in ours} | {number for number in reported if _is_int(number)}
    active = [number for number in begun if number in heard]  # one that did nothing has taken nothing back
    if not active:
        return History(run, [], num_damaged)
    shares = lineage(begun, max(active))
    epochs = _epochs(ours, list(counted(ours, shares)), shares[-1].began)
    needed = {share.began.number: share.ranks for share in shares}
    for epoch in epochs:
        epoch.is_finished = any(needed[attempt] <= ranks for attempt, ranks in epoch.ended.items())
    return History(run, epochs, num_damaged + num_missing(ours, shares))


def _numbers(events: list[dict[str, Any]], kind: str, name: str) -> set[int]:
    found = [event.get(name) for event in events if event.get("kind") == kind]
    return {number for number in found if isinstance(number, int) and not isinstance(number, bool)}


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _epochs(sent: list[Sent], counting: list[Sent], first: Began) -> list[Epoch]:
    """In order. The first epoch of each dataset may have begun in another run, if the first attempt began with that's
    checkpoint."""
    names = _names(sent)
    found: dict[tuple[str, int], Epoch] = {}
    for attempt, rank, message in counting:
        for item in message.items:
            if item.kind == DATA:
                continue
            if (attempt, rank, item.data) not in names:
                raise ValueError("there are rows of which nobody says what data they are of")
            key, about = names[attempt, rank, item.data]
            epoch = found.setdefault((key, item.epoch), Epoch(key, about, item.epoch))
            _put(epoch, attempt, rank, message, item)
    if first.is_given:
        for key in {key for key, _ in found}:
            found[key, min(number for one, number in found if one == key)].began_elsewhere = True
    places = {key: place for place, key in enumerate(dict.fromkeys(key for key, _ in found))}
    return [found[key] for key in sorted(found, key=lambda one: (places[one[0]], one[1]))]


def _put(epoch: Epoch, attempt: int, rank: int, message: Message, item: Item) -> None:
    if item.kind == ENDED:
        epoch.ended.setdefault(attempt, set()).add(rank)
        epoch.num_left_out = max(epoch.num_left_out, left_out_of(item))
    else:
        epoch.parts.append((message.step, rank, spans_of(item)))


def _names(sent: list[Sent]) -> dict[tuple[int, int, int], tuple[str, About]]:
    """What each rank of each attempt has called its datasets: a key, by which they are the same, and what they are."""
    told = ((one, item) for one in sent for item in one.message.items if item.kind == DATA)
    return {(one.attempt, one.rank, item.data): _about(item.content) for one, item in told}


def _about(content: bytes) -> tuple[str, About]:
    fields = decode(content)
    if not isinstance(fields, dict):
        raise ValueError("what is said of a dataset is no JSON object")
    name, column, num_rows = fields.get("name"), fields.get("column"), fields.get("num_rows")
    about = About(
        name if isinstance(name, str) else None,
        column if isinstance(column, str) else None,
        num_rows if _is_size(num_rows) else None,
        tuple(_sources(fields.get("sources"))),
        fields.get("is_cut") is True,
    )
    return str(fields.get("key")), about


def _sources(told: Any) -> Iterator[tuple[int | None, int]]:
    for one in told if isinstance(told, list) else ():
        if not isinstance(one, list) or len(one) != 2 or not _is_size(one[1]):
            raise ValueError("what is said of the sources of a dataset makes no sense")
        yield (one[0] if _is_size(one[0]) and one[0] < 1 << _ID_BITS else None), one[1]


def _is_size(value: Any) -> bool:
    return _is_int(value) and 0 <= value < 2**62
