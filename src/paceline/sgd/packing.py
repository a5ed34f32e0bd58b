"""Gradients as one piece of memory: where each of them lies, and which pieces travel or are summed together. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Gradients = Sequence[Array | None]
"""In the order of the slots; None where a replica has none, as of a weight that the loss does not depend on."""

_ALIGN_BYTES = 64


@dataclass(frozen=True)
class Slot:
    """One weight that is trained. `dtype` is that in which its gradient travels: what has two bytes goes as float32,
    since sums of those would lose what the mean is for."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"

    @property
    def num_elements(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))


@dataclass(frozen=True)
class Segment:
    """Neighbours of one dtype: what can be summed in one go."""

    dtype: str
    start: int
    num_elements: int

    @property
    def stop(self) -> int:
        return self.start + self.num_elements * np.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class Layout:
    """Where the gradient of each slot is in a buffer of `num_bytes`: by dtype, and in their order within that."""

    slots: tuple[Slot, ...]

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        found, start = [], 0
        for dtype in dict.fromkeys(slot.dtype for slot in self.slots):
            num_elements = sum(slot.num_elements for slot in self.slots if slot.dtype == dtype)
            segment = Segment(dtype, start, num_elements)
            found.append(segment)
            start = -(-segment.stop // _ALIGN_BYTES) * _ALIGN_BYTES
        return tuple(found)

    @cached_property
    def num_bytes(self) -> int:
        return self.segments[-1].stop if self.segments else 0

    @cached_property
    def _offsets(self) -> tuple[int, ...]:
        places = {segment.dtype: segment.start for segment in self.segments}
        offsets = []
        for slot in self.slots:
            offsets.append(places[slot.dtype])
            places[slot.dtype] += slot.num_elements * np.dtype(slot.dtype).itemsize
        return tuple(offsets)

    def views(self, buffer: Array) -> list[Array]:
        """The gradients in a buffer of bytes, by slot; nothing is copied."""
        return [
            buffer[offset : offset + slot.num_elements * np.dtype(slot.dtype).itemsize]
            .view(slot.dtype)
            .reshape(slot.shape)
            for slot, offset in zip(self.slots, self._offsets, strict=True)
        ]

    def pieces(self, buffer: Array) -> list[Array]:
        """The same memory as one flat array for each dtype."""
        return [buffer[segment.start : segment.stop].view(segment.dtype) for segment in self.segments]

    def shards(self, num_shards: int) -> list[list[Segment]]:
        """The buffer cut for so many servers, by elements: as even as it can be, some of them empty if there are few.
        Elements, not weights: one large weight would leave all others idle."""
        shards: list[list[Segment]] = [[] for _ in range(num_shards)]
        for segment in self.segments:
            size = np.dtype(segment.dtype).itemsize
            for index, shard in enumerate(shards):
                first, last = (segment.num_elements * one // num_shards for one in (index, index + 1))
                if last > first:
                    shard.append(Segment(segment.dtype, segment.start + first * size, last - first))
        return shards

    def buckets(self, limit_bytes: int) -> list[Segment]:
        """What is sent at once, from the last weight to the first: the backward pass has the last ones first. A bucket
        ends before the weight with which it would be larger than the limit, unless that is its only one."""
        buckets: list[Segment] = []
        for index in reversed(range(len(self.slots))):
            slot, start = self.slots[index], self._offsets[index]
            size, last = np.dtype(slot.dtype).itemsize, buckets[-1] if buckets else None
            is_neighbour = (
                last is not None and last.dtype == slot.dtype and start + slot.num_elements * size == last.start
            )
            if last is not None and is_neighbour and last.stop - start <= limit_bytes:
                buckets[-1] = Segment(slot.dtype, start, last.num_elements + slot.num_elements)
            elif slot.num_elements:
                buckets.append(Segment(slot.dtype, start, slot.num_elements))
        return buckets

    def difference(self, other: "Layout") -> str | None:
        """What is not the same in another replica, in words; None if all is."""
        if len(self.slots) != len(other.slots):
            return f"{len(self.slots)} weights and {len(other.slots)}"
        for number, (one, two) in enumerate(zip(self.slots, other.slots, strict=True)):
            if one != two:
                return f"weight {number} is {_described(one)} and {_described(two)}"
        return None


def _described(slot: Slot) -> str:
    return f"{slot.name} {list(slot.shape)} {slot.dtype}"
