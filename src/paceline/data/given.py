"""What a run was given to read, and what of it goes to the workers."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paceline.errors import ArgumentError, ArgumentTypeError, DataError
from paceline.workers.base import WorkerInfo

if TYPE_CHECKING:
    from paceline.data.dataset import Dataset
    from paceline.data.ray_supply import RayData


@dataclass(frozen=True)
class Handout:
    """What a rank gets: datasets by name, under None if there is one; or pairs of them, by the number of the fold."""

    items: Mapping[str | None, Any]
    folds: Sequence[tuple[Any, Any]] = ()


class Supply:
    """Datasets of a run. Those of our own are cut in the workers; a Ray dataset is a stream that begins here."""

    def __init__(
        self,
        datasets: Mapping[str | None, Dataset],
        folds: Sequence[tuple[Dataset, Dataset]] = (),
        ray_data: RayData | None = None,
    ):
        self._datasets, self._folds, self._ray_data = dict(datasets), tuple(folds), ray_data

    @property
    def datasets(self) -> Mapping[str | None, Dataset]:
        """Those of our own, by name; those of folds by the names under which a run reads them."""
        return {
            **self._datasets,
            **{
                fold_name(number, part): one for number, pair in enumerate(self._folds) for part, one in enumerate(pair)
            },
        }

    @property
    def engine(self) -> str | None:
        """The engine whose workers can read it; None: any."""
        return None if self._ray_data is None else "ray"

    def cut(self, workers: Sequence[WorkerInfo]) -> Sequence[Handout]:
        """What each worker gets, by rank. Ends the streams that were cut before."""
        for dataset in self.datasets.values():
            _check_rows(dataset, len(workers))
        streams = [{}] * len(workers) if self._ray_data is None else self._ray_data.cut(workers)
        return [Handout({**self._datasets, **stream}, self._folds) for stream in streams]

    def close(self) -> None:
        """End the streams: who is reading one gets an error. Idempotent."""
        if self._ray_data is not None:
            self._ray_data.close()

    def describe(self) -> Any:
        """For the run folder."""
        told: dict[Any, Any] = {name: dataset.describe() for name, dataset in self._datasets.items()}
        if self._ray_data is not None:
            told |= self._ray_data.describe()
        if self._folds:
            return {"folds": [[train.describe(), val.describe()] for train, val in self._folds]}
        return told.get(None, told)

    @property
    def is_portable(self) -> bool:
        """Whether it can be kept with a run: it only says where files are."""
        from paceline.data.base import Blocks
        from paceline.data.tree import leaves

        return self._ray_data is None and all(
            isinstance(leaf.source, Blocks) for dataset in self.datasets.values() for leaf in leaves(dataset.tree)
        )


def fold_name(number: int, part: int) -> str:
    """Of a pair's place 0 or 1."""
    return f"fold {number}/{('train', 'val')[part]}"


def resolve_dataset(dataset: Any) -> Supply | None:
    """Turn what the user gave, a dataset, a dict of them or a list of folds, into what a run needs."""
    if dataset is None:
        return None
    from paceline.data.making import as_dataset

    if isinstance(dataset, list | tuple):
        return Supply({}, [_fold(number, pair) for number, pair in enumerate(_not_empty(dataset))])
    given = dataset if isinstance(dataset, dict) else {None: dataset}
    for name in given:
        if isinstance(dataset, dict) and not isinstance(name, str):
            raise ArgumentTypeError(f"dataset: its names must be text, and {name!r} is a {type(name).__name__}.")
    if isinstance(dataset, dict) and not dataset:
        raise ArgumentError("dataset={}: there is none in it.")
    streams = {name: one for name, one in given.items() if is_rays(one)}
    ours = {
        name: as_dataset(one, "dataset" if name is None else f"dataset[{name!r}]")
        for name, one in given.items()
        if name not in streams
    }
    return Supply(ours, (), _ray_data(streams) if streams else None)


def made_anew(train_func: Any) -> Supply | None:
    """The dataset of a run whose folder does not have it, if its function has a method `make_dataset`, as that of an
    experiment has, for Ray Data."""
    make = getattr(train_func, "make_dataset", None)
    return None if make is None else resolve_dataset(make())


def _not_empty(folds: Any) -> Any:
    if not folds:
        raise ArgumentError("dataset: this list of folds is empty.")
    return folds


def _fold(number: int, pair: Any) -> tuple[Dataset, Dataset]:
    from paceline.data.making import as_dataset

    if not isinstance(pair, list | tuple) or len(pair) != 2:
        raise ArgumentTypeError(
            f"dataset[{number}] is a {type(pair).__name__}; in a list or tuple, expected pairs (train, val), one for "
            "each fold. paceline.data.to_cv() makes them; a dict gives several datasets names."
        )
    if any(is_rays(one) for one in pair):
        raise ArgumentTypeError("dataset: folds of a Ray dataset are not known; cut the data that it is read from.")
    train, val = (as_dataset(one, f"dataset[{number}][{place}]") for place, one in enumerate(pair))
    return train, val


def is_rays(value: Any) -> bool:
    module = sys.modules.get("ray.data")  # whoever has one of its datasets has imported it
    return module is not None and isinstance(value, module.Dataset)


def _ray_data(datasets: Mapping[str | None, Any]) -> RayData:
    from paceline.data.ray_supply import RayData

    return RayData(datasets)


def _check_rows(dataset: Dataset, num_ranks: int) -> None:
    total = dataset.num_rows()
    if total is not None and total < num_ranks:
        raise DataError(
            f"{dataset!r} has {total} rows, which are not enough for {num_ranks} workers. Use fewer workers, or "
            ".repeat()."
        )
