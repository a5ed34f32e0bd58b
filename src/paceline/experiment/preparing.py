"""Batches made ahead of time: each dataset through its `ray_map_batches` once, row by row into the cache.

Only the driver prepares, before workers start. Workers then read rows that are mapped already, in the order, and with
the positions, of the dataset itself. A dataset for which that could make a difference is left alone, and so is one
that cannot be kept: then batches are made on the fly, as without all this.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from paceline.data.base import Indexed, Stream
from paceline.data.draws import drawing_for
from paceline.data.forms import CollatedRows
from paceline.data.identity import identity_of
from paceline.data.making import as_dataset
from paceline.data.prepared_cache import ROWS, VERSION, Draft, Hold, hold, is_there, is_whole, prepared_dir, remove
from paceline.data.prepared_cleaning import clean
from paceline.data.row_numbers import chunks_of, rows_of, samples_of_numbers
from paceline.data.rows import Rows
from paceline.data.torch_equal import RowsHash, is_same
from paceline.data.torch_prepared import PreparedRows, Writer
from paceline.data.tree import Leaf
from paceline.errors import DataError, PacelineError
from paceline.experiment.own_code import code_hash_of
from paceline.experiment.plan import Build, Plan, resolved
from paceline.experiment.shards import collating, datasets_in
from paceline.prepare.rng import RandomStream

logger = logging.getLogger(__name__)

_CHUNK = 256
"""Rows that are mapped at once."""
_NUM_TRIALS = 6
"""Batches of rows in other company that are mapped again, to see whether the map works row by row."""
_SAY_EVERY_S = 10.0
Say = Callable[[str], None]
_Source = Indexed | Stream


@dataclass(frozen=True)
class Prepared:
    """What is in the cache for an experiment. It is not removed from there before `release`."""

    paths: Mapping[str, str]
    """By the name of the dataset."""
    holds: tuple[Hold, ...] = ()

    def release(self) -> None:
        for one in self.holds:
            one.release()


def prepare_datasets(experiment: Any, plan: Plan, say: Say = logger.info, root: Path | None = None) -> Prepared:
    """Bring the datasets of a built experiment into the cache, those that are not there yet. `say` is told what is
    done, and why something is not. Afterwards the cache is cleaned by its default policy."""
    place = prepared_dir() if root is None else root
    builds = plan.sections["datasets"].kwargs if "datasets" in plan.sections else {}
    holds = {}
    for name, dataset in datasets_in(experiment.datasets).items():
        build = builds.get(name)
        job = _Job(f"datasets.{name}", dataset, build if isinstance(build, Build) else None, place, say)
        try:
            held = job.prepared()
        except _NotPreparableError as reason:
            say(f"{job.name} is not prepared: {reason}. Its batches are made on the fly.")
            continue
        except OSError as error:
            say(
                f"{job.name} is not prepared: {place} cannot take it: {error.strerror or error}. Its batches are made "
                "on the fly. `paceline data gc` makes room, PACELINE_STORAGE names another place."
            )
            continue
        holds[name] = held
    for one, why in clean(place):
        say(f"Removed {one.source} of {one.num_bytes:,} bytes from the cache of prepared batches ({why}).")
    return Prepared({name: str(one.path) for name, one in holds.items()}, tuple(holds.values()))


class _NotPreparableError(Exception):
    """Why."""


@dataclass(frozen=True)
class _Job:
    """One dataset."""

    name: str
    dataset: Any
    build: Build | None
    place: Path
    say: Say

    def prepared(self) -> Hold:
        source, map_fn = self._source(), self._map()
        base = self._base_key(map_fn)
        fingerprint = self._own_fingerprint()
        if fingerprint is None and is_there(self.place, base):
            # Somebody has prepared such a dataset: whether its rows were these, only they themselves can say.
            fingerprint = self._hash_of_rows(source)
        if fingerprint is not None and (found := self._find(_key(base, fingerprint))) is not None:
            return found
        return self._make(source, map_fn, base, fingerprint)

    def _find(self, key: str) -> Hold | None:
        held = hold(self.place / key)
        if held is None:
            return None
        if is_whole(held.path):
            self.say(f"{self.name} is prepared already: {held.path}")
            return held
        held.release()
        self.say(f"{self.name}: {held.path} is damaged, and made anew.")
        remove(self.place, key)
        return None

    # --- what it is ---------------------------------------------------------------------------------------------------

    def _map(self) -> Callable[[Any], Any]:
        map_fn = getattr(self.dataset, "ray_map_batches", None)
        if not callable(map_fn):
            raise _NotPreparableError("it has no ray_map_batches")
        found: Callable[[Any], Any] = map_fn
        return found

    def _source(self) -> _Source:
        try:
            tree = as_dataset(self.dataset, self.name).tree
        except PacelineError as error:
            raise _NotPreparableError(str(error)) from error
        if not isinstance(tree, Leaf) or tree.ops or not isinstance(tree.source, Indexed | Stream):
            raise _NotPreparableError("only map-style and iterable datasets without further steps can be")
        if isinstance(tree.source, Stream) and hasattr(self.dataset, "set_epoch"):
            raise _NotPreparableError("it has a set_epoch, so that its rows may be others in every epoch")
        return tree.source

    def _base_key(self, map_fn: Callable[[Any], Any]) -> str:
        """Of all but the rows."""
        if self._has_fingerprint:  # what the object holds besides is covered by its own word
            map_fn = getattr(map_fn, "__func__", map_fn)
        parts = {
            "version": VERSION,
            "class": _name_of(type(self.dataset)),
            "arguments": None if self.build is None else resolved(self.build),
            "code": code_hash_of({type(self.dataset), *type(self.dataset).__mro__}),
            "map": identity_of(map_fn),
            "torch": torch.__version__,
        }
        return _hash(json.dumps(parts, sort_keys=True, default=repr))

    @property
    def _has_fingerprint(self) -> bool:
        return callable(getattr(self.dataset, "fingerprint", None))

    def _own_fingerprint(self) -> str | None:
        return f"own {self.dataset.fingerprint()!r}" if self._has_fingerprint else None

    # --- its rows -----------------------------------------------------------------------------------------------------

    def _chunks(self, source: _Source, doing: str) -> Iterator[Rows]:
        total = f" of {len(source):,}" if isinstance(source, Indexed) else ""
        told, num_rows, chunks = time.monotonic(), 0, chunks_of(source, _CHUNK)
        while True:
            with _user_code():
                rows = next(chunks, None)
            if rows is None:
                return
            yield rows
            num_rows += len(rows)
            if time.monotonic() - told > _SAY_EVERY_S:
                told = time.monotonic()
                self.say(f"{self.name}: {num_rows:,}{total} rows {doing}")

    def _hash_of_rows(self, source: _Source) -> str:
        content = RowsHash()
        with RandomStream(0).lent():
            for rows in self._chunks(source, "compared with those in the cache"):
                content.add(rows)
        return content.hexdigest()

    def _make(self, source: _Source, map_fn: Callable[[Any], Any], base: str, fingerprint: str | None) -> Hold:
        begin, form = time.monotonic(), CollatedRows(collating(map_fn))
        draft = Draft(self.place)
        try:
            writer, rows_hash = self._write(source, form, draft.path / ROWS)
            self._compare(source, form, PreparedRows(draft.path / ROWS))
            held = draft.commit(_key(base, fingerprint or rows_hash), self._manifest(base, writer))
        except BaseException:
            draft.discard()
            raise
        if held is None:
            raise _NotPreparableError("somebody has removed it at once")
        took = f"{writer.num_rows:,} rows, {writer.num_bytes / 1e6:,.1f} MB, in {time.monotonic() - begin:.1f} s"
        self.say(f"{self.name} is prepared ({took}): {held.path}")
        return held

    def _write(self, source: _Source, form: CollatedRows, path: Path) -> tuple[Writer, str]:
        content, writer = RowsHash(), Writer(path)
        try:
            with RandomStream(0).lent():
                for rows in self._chunks(source, "prepared"):
                    content.add(rows)
                    with _user_code():
                        batch = form.batch(rows)
                    writer.add(batch, len(rows))
        except DataError as error:
            raise _NotPreparableError(f"ray_map_batches: {error}") from error
        finally:
            writer.close()
        if not writer.num_rows:
            raise _NotPreparableError("it has no rows")
        return writer, content.hexdigest()

    def _manifest(self, base: str, writer: Writer) -> dict[str, Any]:
        assert writer.layout is not None
        return {
            "base": base,
            "source": _name_of(type(self.dataset)),
            "arguments": None if self.build is None else resolved(self.build),
            "num_rows": writer.num_rows,
            "num_bytes": writer.num_bytes,
            "crc32": writer.crc32,
            "schema": json.loads(writer.layout.as_json()),
        }

    def _compare(self, source: _Source, form: CollatedRows, prepared: PreparedRows) -> None:
        """Whether batches are what the map gives on the fly: of other rows together than those that were mapped, and
        with other random numbers."""
        size = getattr(self.dataset, "batch_size", None)
        size = size if isinstance(size, int) and size > 0 else 32
        # Of a stream the first rows only: for others one would have to wait.
        reach = len(prepared) if isinstance(source, Indexed) else min(len(prepared), 4 * _CHUNK)
        for numbers in [[0], [reach - 1], *samples_of_numbers(reach, size, _NUM_TRIALS)]:
            with _user_code(), RandomStream(len(numbers) + 1).lent(), drawing_for(1, 1, None):
                made = form.batch(rows_of(source, numbers))
            if not is_same(made, prepared.gather(numbers)):
                raise _NotPreparableError(
                    "a row comes out of it, or of ray_map_batches, otherwise the second time, or together with other "
                    "rows. Are random numbers drawn, or is a batch padded to its longest row?"
                )


@contextmanager
def _user_code() -> Iterator[None]:
    """What the dataset or its map raises says why it cannot be prepared; training will raise it in its own place."""
    try:
        yield
    except Exception as error:
        raise _NotPreparableError(f"{type(error).__name__}: {error}") from error


def _name_of(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _key(base: str, fingerprint: str) -> str:
    return _hash(f"{base} {fingerprint}")


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
