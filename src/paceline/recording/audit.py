"""Whether every row was read once: `paceline.data.audit`, of what a run folder has recorded."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.data.given import resolve_dataset
from paceline.data.row_ids import all_ids
from paceline.errors import ArgumentError
from paceline.html_table import html_table
from paceline.recording.row_history import Epoch, History, read_history
from paceline.recording.row_spans import Cover, cover, union, up_to, without

_MOST_ROWS = 10
"""Which rows came twice or never is said of so many."""
_HEADER = ("dataset", "epoch", "state", "steps", "once", "twice", "never")


@dataclass(frozen=True)
class Repeated:
    """A row that came more often than it should, and where: (step, rank)."""

    row: int
    at: tuple[tuple[int, int], ...]

    def __str__(self) -> str:
        return f"row {self.row} at " + " and at ".join(f"step {step} (rank {rank})" for step, rank in self.at)


@dataclass(frozen=True)
class EpochAudit:
    """One epoch of one dataset. Of a dataset with `.repeat(n)`, "once" means n times.

    `never` is None if it is not known which rows there are (`known_by` says how it is), or the epoch was not read to
    its end: an epoch is "finished", "unfinished", or "left early", if the next one was begun.
    """

    dataset: str
    epoch: int
    state: str
    steps: tuple[int, int] | None
    once: int
    twice: int
    never: int | None
    known_by: str
    twice_rows: tuple[Repeated, ...] = ()
    never_rows: tuple[int, ...] = ()
    num_left_out: int = 0
    """So many rows at the most were left out as it was asked, by rest="drop"."""

    @property
    def is_clean(self) -> bool:
        return self.twice == 0 and (self.never or 0) <= self.num_left_out

    def findings(self) -> Iterator[str]:
        """What is not as it should be, in words."""
        where = f"{self.dataset}, epoch {self.epoch}"
        yield from (f"{where}: {one}" for one in self.twice_rows)
        if self.twice > len(self.twice_rows):
            yield f"{where}: and {self.twice - len(self.twice_rows)} other rows that came more than once"
        if self.never and self.never <= self.num_left_out:
            yield f'{where}: rest="drop" has left out {self.never} rows'
        elif self.never:
            some = ", ".join(map(str, self.never_rows))
            more = " …" if 0 < len(self.never_rows) < self.never else ""
            yield f"{where}: {self.never} rows never came{': ' if some else ''}{some}{more} (by {self.known_by})"


@dataclass(frozen=True)
class Audit:
    """What `paceline.data.audit` has found. Print it."""

    run: str
    epochs: tuple[EpochAudit, ...]
    num_damaged: int = 0
    """Records of rows that are lost or damaged: then nothing is proven."""

    @property
    def is_clean(self) -> bool:
        """No row came twice in an epoch, and none is missing in one that is finished."""
        return self.num_damaged == 0 and all(epoch.is_clean for epoch in self.epochs)

    def __str__(self) -> str:
        rows = [_HEADER, *self._rows()]
        widths = [max(len(row[place]) for row in rows) for place in range(len(_HEADER))]
        lines = [
            "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
        ]
        return "\n".join([*lines, *self._words()])

    def _repr_html_(self) -> str:
        words = "".join(html_table([[line]]) for line in self._words())
        return html_table(self._rows(), _HEADER, self.run) + words

    def _rows(self) -> list[tuple[str, ...]]:
        return [
            (
                one.dataset,
                str(one.epoch),
                one.state,
                "–" if one.steps is None else f"{one.steps[0]}–{one.steps[1]}",
                str(one.once),
                str(one.twice),
                "–" if one.never is None else str(one.never),
            )
            for one in self.epochs
        ]

    def _words(self) -> list[str]:
        found = [line for epoch in self.epochs for line in epoch.findings()]
        if self.num_damaged:
            found.append(f"{self.num_damaged} records of rows are lost or damaged: what is above is not all there was.")
        return [*found, "clean" if self.is_clean else "not clean"]


def audit(run_dir: str | os.PathLike[str], *, dataset: Any = None) -> Audit:
    """How often each row of each epoch has come in a run that was asked to `record_ids`.

    What counts is what is in the state that the run has ended with: rows that were read after the checkpoint from which
    the run went on later do not.

    Args:
        run_dir: the run folder, or the logdir of a Trainer, for its newest run.
        dataset: as it was given to `run`, or what the function made of it: read once more, to know all rows. It is
            needed only to find rows that never came where the run cannot know it: of filtered data and text files.
    """
    history = read_history(run_dir)
    given = _given(history, dataset) if dataset is not None else {}
    labels = _labels(history.epochs)
    epochs = [_audited(one, labels[place], history.epochs, given) for place, one in enumerate(history.epochs)]
    return Audit(history.run.name, tuple(epochs), history.num_damaged)


def _labels(epochs: Sequence[Epoch]) -> list[str]:
    """Names of datasets, of which several may be made of one."""
    kinds: dict[str, list[Any]] = {}
    found = []
    for epoch in epochs:
        same = kinds.setdefault(epoch.about.label, [])
        if epoch.key not in same:
            same.append(epoch.key)
        number = same.index(epoch.key) + 1
        found.append(epoch.about.label if number == 1 else f"{epoch.about.label} ({number})")
    return found


def _given(history: History, dataset: Any) -> Mapping[str | None, Cover]:
    supply = resolve_dataset(dataset)
    names = {epoch.about.name for epoch in history.epochs}
    assert supply is not None
    every = supply.datasets
    if names - set(every):
        raise ArgumentError(
            f"dataset: the run has read {', '.join(sorted(map(repr, names)))}; expected a dict with these names, or "
            "the folds that it was given."
            if names != {None}
            else "dataset: the run has one dataset, without a name; expected that, and no dict."
        )
    columns = {epoch.about.name: epoch.about.column for epoch in history.epochs}
    return {name: _cover_of(all_ids(every[name], columns[name])) for name in names}


def _cover_of(ids: Any) -> Cover:
    return cover(ids, ids).as_set()


def _audited(epoch: Epoch, label: str, every: Sequence[Epoch], given: Mapping[str | None, Cover]) -> EpochAudit:
    seen, about = epoch.cover, epoch.about
    times = about.times(seen.starts)
    twice, once = seen.where(seen.counts > times), seen.where(seen.counts == times)
    same = [one for one in every if one.key == epoch.key]
    is_last = epoch.number == max(one.number for one in same)
    state = "finished" if epoch.is_finished else "unfinished" if is_last else "left early"
    never, rows, known_by = None, (), "nothing"  # type: tuple[int | None, tuple[int, ...], str]
    if epoch.began_elsewhere:
        state += ", begun in another run"
    elif epoch.is_finished:
        never, rows, known_by = _missing(epoch, same, given)
    repeated = tuple(Repeated(row, epoch.sightings(row)) for row in twice.some(_MOST_ROWS))
    return EpochAudit(
        label, epoch.number, state, epoch.steps, once.num_rows, twice.num_rows, never, known_by, repeated, rows,
        epoch.num_left_out,
    )  # fmt: skip


def _missing(
    epoch: Epoch, same: Sequence[Epoch], given: Mapping[str | None, Cover]
) -> tuple[int | None, tuple[int, ...], str]:
    """How many rows are missing in a whole epoch, some of them, and by what that is known."""
    about, seen = epoch.about, epoch.cover
    enough = seen.where(seen.counts >= about.times(seen.starts))
    sizes = [size for size, _ in about.sources]
    others = [one.cover for one in same if one.is_finished and one is not epoch]
    expected, known_by = None, ""
    if not about.is_cut and about.name in given:
        expected, known_by = given[about.name], "the dataset that was given"
    elif not about.is_cut and about.column is None and sizes and None not in sizes and len(sizes) < 1 << 7:
        starts = [(place << 56, size or 0) for place, size in enumerate(sizes)]
        expected, known_by = up_to(starts), "the numbers of its rows"
    elif about.num_rows is not None:
        visits = int(((seen.stops - seen.starts) * seen.counts.clip(max=about.times(seen.starts))).sum())
        return max(0, about.num_rows - visits), (), "the number of its rows"
    elif not about.is_cut and others:
        expected, known_by = union(others), "the rows of its other epochs"
    if expected is None:
        return None, (), "nothing"
    missing = without(expected, enough)
    return missing.num_rows, missing.some(_MOST_ROWS), known_by
