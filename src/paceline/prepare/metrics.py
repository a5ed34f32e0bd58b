"""What all ranks have computed, together: for metrics over a whole dataset."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
import torch.distributed as dist

from paceline import session
from paceline.errors import ArgumentError, ArgumentTypeError, TrainerStateError
from paceline.prepare.device import get_device
from paceline.prepare.group import check_group
from paceline.prepare.nesting import is_container, map_tensors
from paceline.prepare.order import Progress
from paceline.prepare.scope import current_place, current_scope


def gather_for_metrics(value: Any) -> Any:
    """The rows of all ranks, on every rank, each sample once: `labels, scores = gather_for_metrics((labels, scores))`.

    For the loop over a prepared loader, or after it: the latest such loop counts. `value` is a tensor, or a dict, list,
    tuple or dataclass of them, in any depth; None stays None. In the loop, a tensor has one row for each sample of the
    latest batch; in it and after it, of all batches since it began. The rows come in the order of the data, without
    those by which the last batches were filled up to be equally large. A tensor without dimensions gives one row for
    each rank, and none is left out.

    With a batch sampler of your own, the rows of whole batches come rank by rank: gather them in the loop. Data that
    Paceline did not share out comes rank by rank as it is: iterable datasets, samplers that are distributed already,
    `add_dist_sampler=False`.

    Collective: every rank must call it. Without other ranks the rows are those of this process. No gradients pass.
    """
    tensors: list[torch.Tensor] = []

    def take(part: Any) -> Any:
        tensors.append(_checked(part))
        return part

    map_tensors(take, value, is_leaf=_is_leaf)
    progress = current_scope().progress
    starts = [_start_of(tensor, progress) for tensor in tensors]
    if current_place().world_size == 1:
        gathered = iter([tensor.reshape(1) if tensor.dim() == 0 else tensor for tensor in tensors])
    else:
        check_group("gather_for_metrics would gather the values")
        parts = _all_gather(tensors)
        gathered = iter([_joined(ones, start, progress) for ones, start in zip(parts, starts, strict=True)])
    return map_tensors(lambda part: next(gathered), value, is_leaf=_is_leaf)


def mean_over_rows(losses: torch.Tensor) -> torch.Tensor:
    """The loss for `backward()` of this rank's rows, given the loss of each: with it, the gradient that
    DistributedDataParallel makes, the mean over ranks, is that of the mean over all rows of the batch.

    For loops over a shard whose last batch is `rest="uneven"` or `"pad"`: ranks that have fewer rows than others, or
    none, weigh no more than these, and rows that only fill up a batch count nothing. No rank waits for another.
    Elsewhere it is the mean.
    """
    if losses.dim() == 0:
        raise ArgumentError(
            "mean_over_rows was given one number; expected the loss of each row: reduction='none' in torch's losses."
        )
    by_row = losses.flatten(1).mean(1) if losses.dim() > 1 else losses
    running = session.current()
    latest = None if running is None else running.latest_batch()
    if latest is None:
        return by_row.mean()
    if len(by_row) < latest.num_own:
        raise ArgumentError(
            f"mean_over_rows was given {len(by_row)} losses; this rank has {latest.num_own} rows in the latest batch "
            "of its shard."
        )
    weight: float = latest.world_size / latest.num_rows
    return by_row[: latest.num_own].sum() * weight


def _is_leaf(part: Any) -> bool:
    return part is not None and not is_container(part)


def _checked(part: Any) -> torch.Tensor:
    if not isinstance(part, torch.Tensor):
        raise ArgumentTypeError(
            f"gather_for_metrics was given {part!r} of type {type(part).__name__}; expected tensors, or containers of "
            "tensors. Write torch.tensor(...) for numbers and arrays."
        )
    return part.detach()


def _start_of(tensor: torch.Tensor, progress: Progress | None) -> int | None:
    """From which item of the order on this tensor has rows: from the latest batch's first, or from the loop's."""
    if tensor.dim() == 0 or progress is None:
        return None
    if not progress.is_of_samples:
        if progress.is_over:
            raise TrainerStateError(
                "gather_for_metrics was called after a loop over the batches of a batch sampler: which of their rows "
                "were dealt out twice is known in the loop only. Gather each batch there."
            )
        return None
    starts = [progress.start] if progress.is_over else [progress.before, progress.start]
    numbers = [progress.num_given(start) for start in starts]
    for start, number in zip(starts, numbers, strict=True):
        if len(tensor) == number:
            return start
    expected = " in the latest batch, or ".join(map(str, numbers))
    raise ArgumentError(
        f"gather_for_metrics was given a tensor of shape {tuple(tensor.shape)}; expected a row for each sample that "
        f"this rank got from the latest loop over a prepared loader: {expected} since it began. Prepare the loader "
        "of this loop too; gather first, then select or flatten. One value of each rank is a tensor without dimensions."
    )


def _joined(parts: list[torch.Tensor], start: int | None, progress: Progress | None) -> torch.Tensor:
    """One tensor of what the ranks gave: by the order of the samples if it is known, else by rank."""
    if progress is not None and start is not None:
        return torch.stack(parts, 1).flatten(0, 1)[: progress.num_items(start)]
    if progress is not None and not progress.is_of_samples and parts[0].dim() > 0:
        return torch.cat(parts[: progress.num_items(progress.before)])
    return torch.stack(parts) if parts[0].dim() == 0 else torch.cat(parts)


def _all_gather(tensors: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    """For each tensor, those of all ranks. They may differ in the number of rows."""
    kinds: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(kinds, [(tuple(tensor.shape), str(tensor.dtype)) for tensor in tensors])
    if any(_without_rows(kind) != _without_rows(kinds[0]) for kind in kinds):
        ranks = "; ".join(f"rank {rank}: {kind}" for rank, kind in enumerate(kinds))
        raise ArgumentError(
            "gather_for_metrics was given tensors that differ from rank to rank in more than the number of rows "
            f"({ranks}). Give the same structure on every rank, and pad to one length."
        )
    shapes = [[kind[number][0] for kind in kinds] for number in range(len(tensors))]
    return [_gather_one(tensor, ones) for tensor, ones in zip(tensors, shapes, strict=True)]


def _without_rows(kind: list[tuple[tuple[int, ...], str]]) -> list[Any]:
    return [(len(shape), shape[1:], dtype) for shape, dtype in kind]


def _gather_one(tensor: torch.Tensor, shapes: list[tuple[int, ...]]) -> list[torch.Tensor]:
    """As bytes, since not every kind of group takes every type of number; of equal length, as all of them ask for."""
    device = get_device() if dist.get_backend() == "nccl" else torch.device("cpu")
    own = tensor.to(device).contiguous().flatten().view(torch.uint8)
    sizes = [prod(shape) * tensor.element_size() for shape in shapes]
    padded = own.new_zeros(max(sizes))
    padded[: len(own)] = own
    others = [torch.empty_like(padded) for _ in shapes]
    dist.all_gather(others, padded)
    return [
        part[:size].view(tensor.dtype).reshape(shape).to(tensor.device)
        for part, size, shape in zip(others, sizes, shapes, strict=True)
    ]
