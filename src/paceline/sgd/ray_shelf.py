"""Ray's object store as a shelf: arrays go from node to node without the driver."""

from typing import Any

import ray

from paceline.sgd.packing import Array


class RayShelf:
    """See `Shelf`. What nobody has a token of any more, Ray removes: it counts those that it carries."""

    needs_engine = False

    def put(self, arrays: list[Array]) -> Any:
        self.needs_engine = True
        return ray.put(arrays)

    def get(self, token: Any) -> list[Array]:
        arrays: list[Array] = ray.get(token)
        return arrays
