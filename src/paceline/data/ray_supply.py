"""Ray Data: one stream over the cluster, split among the ranks while it is read."""

import contextlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import ray
import ray.util.client
from ray.data import Dataset
from ray.data.dataset import MaterializedDataset

from paceline.errors import ArgumentError
from paceline.workers.base import WorkerInfo
from paceline.workers.ray_slots import free_resources

logger = logging.getLogger(__name__)


class RayData:
    """One dataset under the name None, or several by name. They are cut anew for every attempt: an elastic group may
    have another size each time."""

    def __init__(self, datasets: Mapping[str | None, Dataset]):
        if ray.util.client.ray.is_connected():  # type: ignore[no-untyped-call]
            raise ArgumentError(
                "dataset: this program is connected through the Ray client (ray://), from which the parts of a dataset "
                "cannot be sent to workers. Run it on the cluster, for instance with `ray job submit`, or open the "
                "data in the training function."
            )
        self._datasets = dict(datasets)
        self._coordinators: list[Any] = []

    def cut(self, workers: Sequence[WorkerInfo]) -> list[dict[str | None, Any]]:
        """By rank, its streams by name. Every rank gets equally many rows, since ranks that train together step
        together; the few rows that are left over are not used."""
        self.close()
        self._warn_when_nobody_can_read()
        splits = {}
        for name, dataset in self._datasets.items():
            # Without hints of where ranks are, which would let chance decide who gets which rows: a rank that starts
            # again has to find those that it had.
            dataset.context.execution_options.preserve_order = True
            splits[name] = dataset.streaming_split(len(workers), equal=True)
            # There is no public call that ends a stream before its time.
            self._coordinators.append(getattr(splits[name][0], "_coord_actor", None))
        return [{name: split[rank] for name, split in splits.items()} for rank in range(len(workers))]

    def close(self) -> None:
        coordinators, self._coordinators = self._coordinators, []
        for coordinator in filter(None, coordinators):
            with contextlib.suppress(Exception):
                ray.kill(coordinator)

    def describe(self) -> dict[str | None, str]:
        return {name: repr(dataset) for name, dataset in self._datasets.items()}

    def _warn_when_nobody_can_read(self) -> None:
        free = free_resources().get("CPU", 0)
        is_to_be_read = not all(isinstance(dataset, MaterializedDataset) for dataset in self._datasets.values())
        if is_to_be_read and free < 1:
            logger.warning(
                "The workers hold all but %g of the cluster's CPUs, and reading the dataset takes at least "
                "one: it will wait for that. Ask for fewer workers, or for less with cpus_per_worker.",
                free,
            )
