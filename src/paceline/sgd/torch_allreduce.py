"""The mean of gradients by collectives of torch's process group, in buckets.

    one replica, of torch    buckets are sent while the backward pass goes on: hooks copy each gradient as it comes
    anything else            the sum over this worker's replicas is made first; then all buckets go at once

A bucket goes when it is full, and never before those that came earlier: all ranks have to send them in the same order.
The last one takes along, for each weight, whether there was a gradient at all.
"""

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from paceline.errors import TrainerStateError
from paceline.sgd.packing import Array, Layout, Segment, Slot
from paceline.sgd.side import Contribution, Side
from paceline.sgd.torch_replica import TorchReplica

_FLAGS = "which weights had a gradient"


def on_device(device: int) -> AbstractContextManager[Any]:
    """On a GPU of this worker, by its number among them."""
    context: AbstractContextManager[Any] = torch.cuda.device(device)
    return context


def exchange_of(side: Side) -> "Overlapped | Afterwards":
    [first, *others] = side.replicas
    return Overlapped(side, first) if isinstance(first, TorchReplica) and not others else Afterwards(side)


def _meet() -> None:
    """Connections between ranks are made by the first collective."""
    dist.barrier()


class Afterwards:
    """For replicas of any framework, and any number of them in a worker."""

    def __init__(self, side: Side):
        self._side = side
        flags = Slot(_FLAGS, (len(side.layout.slots),))
        self._layout = Layout((flags, *side.layout.slots))
        self._buffer: Array = np.zeros(self._layout.num_bytes, np.uint8)
        self._flags, *self._views = self._layout.views(self._buffer)
        self._buckets = [_as_tensor(self._buffer, one) for one in self._layout.buckets(side.spec.bucket_bytes)]

    def warm_up(self) -> None:
        _meet()

    def step(self) -> Contribution:
        side, start = self._side, time.perf_counter()
        computed = side.compute_all()
        used = side.sum_into(computed, self._views)
        self._flags[...] = 1 if used is None else used
        middle = time.perf_counter()
        for work in [dist.all_reduce(bucket, async_op=True) for bucket in self._buckets]:
            work.wait()  # type: ignore[union-attr]
        gradients = self._mean()
        end = time.perf_counter()
        side.apply_gradients(gradients)
        return side.told(
            computed,
            middle - start,
            reduce_s=end - middle,
            apply_s=time.perf_counter() - end,
        )

    def _mean(self) -> list[Array | None]:
        is_used = self._flags > 0
        for view in self._views:
            np.divide(view, self._side.spec.divisor, out=view)
        return [view if used else None for view, used in zip(self._views, is_used, strict=True)]


class Overlapped:
    """For the only replica of a worker. Its gradients are the buckets' memory: nothing is copied back."""

    def __init__(self, side: Side, replica: TorchReplica):
        self._side, self._replica = side, replica
        self._buckets = _buckets_of(replica.params, side.spec.bucket_bytes)
        self._place = {index: (bucket, view) for bucket in self._buckets for index, view in bucket.views.items()}
        self._seen: set[int] = set()
        self._works: list[Any] = []
        self._is_on = False
        """Whether this is the backward pass of a step, and not one of the user's own, for which nobody else sends."""
        for index, weight in enumerate(replica.params):
            weight.register_post_accumulate_grad_hook(partial(self._take, index))

    def warm_up(self) -> None:
        _meet()

    def step(self) -> Contribution:
        start = time.perf_counter()
        self._seen, self._works = set(), []
        for bucket in self._buckets:
            bucket.num_missing = len(bucket.views)
        self._is_on = True
        try:
            loss, metrics = self._replica.backward()
        finally:
            self._is_on = False
        position, middle = self._side.position(), time.perf_counter()
        self._finish()
        end = time.perf_counter()
        self._replica.make_step()
        self._side.step_number += 1
        return Contribution(
            [loss],
            [metrics],
            middle - start,
            reduce_s=end - middle,
            apply_s=time.perf_counter() - end,
            position=position,
            rank=self._side.rank,
        )

    def _take(self, index: int, weight: Any) -> None:
        """In the backward pass, when a gradient is complete."""
        if not self._is_on:
            return
        bucket, view = self._place[index]
        if index in self._seen:
            raise TrainerStateError(
                f"The gradient of {self._replica.names[index]} came twice in one step, as from two calls of "
                "backward(), or checkpointing with use_reentrant=True. Let get_loss() return one loss, or use "
                "strategy='ps'."
            )
        self._seen.add(index)
        gradient = weight.grad.to_dense() if weight.grad.is_sparse else weight.grad
        torch.div(gradient.to(view.dtype), self._side.spec.divisor, out=view)  # not in half precision
        bucket.num_missing -= 1
        while len(self._works) < len(self._buckets) - 1 and not self._buckets[len(self._works)].num_missing:
            self._send(self._buckets[len(self._works)])

    def _send(self, bucket: "_Bucket") -> None:
        self._side.end_fork()  # of a hook in the backward pass, or of what has told metrics and position
        self._works.append(dist.all_reduce(bucket.memory, async_op=True))

    def _finish(self) -> None:
        """Send what is left, with zeros for what has no gradient here; and wait."""
        for bucket in self._buckets[len(self._works) :]:
            for index, view in bucket.views.items():
                if index not in self._seen:
                    view.zero_()
            if bucket is self._buckets[-1]:
                bucket.flags.copy_(torch.tensor([index in self._seen for index in range(len(self._replica.params))]))
            self._send(bucket)
        for work in self._works:
            work.wait()
        is_used = (self._buckets[-1].flags.real > 0).tolist() if self._buckets else []  # weights may be complex
        for index, weight in enumerate(self._replica.params):
            view = self._place[index][1]
            weight.grad = view.to(weight.dtype) if is_used[index] else None


class _Bucket:
    """Some weights' gradients in one piece of memory."""

    def __init__(self, weights: Sequence[tuple[int, Any]], num_flags: int = 0):
        first = weights[0][1]
        num_elements = sum(weight.numel() for _, weight in weights)
        self.memory = torch.zeros(num_elements + num_flags, dtype=_sent_as(first), device=first.device)
        self.flags = self.memory[num_elements:]
        self.views: dict[int, Any] = {}
        self.num_missing, start = 0, 0
        for index, weight in weights:
            self.views[index] = self.memory[start : start + weight.numel()].view(weight.shape)
            start += weight.numel()


def _buckets_of(weights: Sequence[Any], limit_bytes: int) -> list[_Bucket]:
    """From the last weight to the first: the backward pass has the last ones first. What is not of one kind cannot be
    in one bucket."""
    groups: list[list[tuple[int, Any]]] = []
    size, kind = 0, None
    for index, weight in reversed(list(enumerate(weights))):
        num_bytes = weight.numel() * _sent_as(weight).itemsize
        if not groups or kind != (_sent_as(weight), weight.device) or size + num_bytes > limit_bytes:
            groups.append([])
            size, kind = 0, (_sent_as(weight), weight.device)
        groups[-1].append((index, weight))
        size += num_bytes
    return [_Bucket(group, len(weights) if group is groups[-1] else 0) for group in groups]


def _sent_as(weight: Any) -> torch.dtype:
    """What has two bytes is summed in four, like everywhere else."""
    return torch.float32 if weight.dtype.itemsize <= 2 else weight.dtype


def _as_tensor(buffer: Array, segment: Segment) -> Any:
    return torch.from_numpy(buffer[segment.start : segment.stop].view(segment.dtype))
