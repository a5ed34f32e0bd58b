"""From an epoch's plan to batches: what one rank reads, in this process or in one of a loader's."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from paceline.data.dealing import Batch, Mark, Rest, batches
from paceline.data.forms import Form, emptied
from paceline.data.plan import Knowledge, Plan, plan
from paceline.data.readers import Readers
from paceline.data.rows import Columns, Rows
from paceline.data.tree import Tree

_NUM_READERS = 2
"""While one decodes, the other may wait for a disk."""


class Fed(NamedTuple):
    """A batch of one rank. `stop` is how much of the epoch all ranks have had with it, `num_rows` how many rows all of
    them have in it, `ids` the numbers of this rank's, without those that only fill it up."""

    stop: int
    num_rows: int
    ids: Any
    data: Any


@dataclass(frozen=True)
class Feed:
    """All that it takes to read a rank's batches, wherever that is done."""

    tree: Tree
    seed: int
    rank: int
    world_size: int
    size: int
    """Rows of a batch, of all ranks together."""
    rest: Rest
    form: Form

    def epoch(
        self,
        number: int,
        mark: Mark,
        knowledge: Knowledge,
        executor: Executor | None = None,
        part: int = 0,
        num_parts: int = 1,
    ) -> Iterator[Fed]:
        """The batches that are left of an epoch; of them, every `num_parts`-th."""
        made = plan(self.tree, self.seed, number, knowledge, self.form.finish, self.form.columns)
        made.begin(mark.done, self.rank, self.world_size, executor)
        for batch in islice(batches(made.node, mark, self.size, self.rest), part, None, num_parts):
            yield self._fed(made, batch)

    def _fed(self, made: Plan, batch: Batch) -> Fed:
        own = batch.share(self.rank, self.world_size)
        found = made.read([*own, *batch.filling(self.rank, self.world_size)])
        if found is None:  # there are fewer rows than ranks: others have them
            one = made.read([batch.ranges[0]._replace(stop=batch.ranges[0].start + 1)])
            assert one is not None
            data, ids = self._empty(one[0]), one[1][:0]
        else:
            rows, ids = found
            if self.rest == "pad" and batch.start < self.size:  # they come again, whatever the user makes of them now
                rows = rows.take(np.arange(len(rows)))
            data = self.form.batch(rows)
        made.forget(batch.ranges)
        num_own = sum(part.stop - part.start for part in own)
        return Fed(batch.stop, batch.num_rows, ids[:num_own], data)

    def _empty(self, row: Rows) -> Any:
        """A batch without rows, made of one that has a row."""
        return self.form.batch(row.slice(0, 0)) if isinstance(row, Columns) else emptied(self.form.batch(row))


def ahead(items: Callable[[Executor], Iterator[Fed]], num_ahead: int) -> Generator[Fed, None, None]:
    """Read in threads: blocks always, and whole batches too if some shall be ready ahead."""
    with Readers(_NUM_READERS, "paceline-read") as readers:
        if num_ahead > 0:
            yield from _in_a_thread(items(readers), num_ahead)
        else:
            yield from items(readers)


def _in_a_thread(items: Iterator[Fed], num_ahead: int) -> Iterator[Fed]:
    ready: queue.SimpleQueue[Any] = queue.SimpleQueue()
    room = threading.Semaphore(num_ahead)
    filler = Readers(1, "paceline-batches", wake=room.release)

    def fill(is_over: threading.Event = filler.is_over) -> None:
        try:
            for item in items:
                ready.put(item)
                room.acquire()
                if is_over.is_set():
                    return
            ready.put(None)
        except BaseException as error:
            ready.put(error)

    with filler:
        filler.submit(fill)
        while (item := ready.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            room.release()
            yield item
