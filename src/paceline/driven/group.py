"""WorkerGroup: workers that a loop on the driver trains with, line by line."""

import itertools
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from paceline.arguments import check_int, check_timeout, resources_of, size_of
from paceline.backends import resolve_backend
from paceline.backends.base import BackendConfig
from paceline.control.crew import Crew
from paceline.data.given import is_rays
from paceline.driven.commands import Command, arguments_for, line_of_caller, pack
from paceline.driven.parts import Batches, Model, Optimizer
from paceline.driven.pipeline import Pipeline
from paceline.driven.value import Value
from paceline.errors import ArgumentError, ArgumentTypeError
from paceline.workers import resolve_engine
from paceline.workers.base import Engine


class WorkerGroup:
    """Workers for a loop that stays on the driver. Each of its lines is sent to all of them, and nobody waits for it
    before a number is asked for. Not for several threads.

    Args:
        num_workers: 0 does it all in this process, where a debugger works.
        backend, use_gpu, cpus_per_worker, gpus_per_worker, resources_per_worker, engine: as for `Trainer`.
        seed: of the order of datasets that are shuffled without a seed of their own.
        hang_timeout_s: give up on workers that do nothing for so long, and show their stacks. Default: wait.
    """

    def __init__(
        self,
        num_workers: int = 1,
        backend: str | BackendConfig = "torch",
        use_gpu: bool = False,
        cpus_per_worker: float | None = None,
        gpus_per_worker: float | None = None,
        resources_per_worker: Mapping[str, float] | None = None,
        engine: str | Engine | None = None,
        seed: int = 0,
        hang_timeout_s: float | None = None,
    ):
        size = size_of(check_int("num_workers", num_workers), 0.0)
        resources = resources_of(use_gpu, cpus_per_worker, gpus_per_worker, resources_per_worker)
        self.engine, self.backend = resolve_engine(engine, max_workers=size.max), resolve_backend(backend)
        if self.backend.name != "torch":
            raise ArgumentError(f"backend={backend!r}: the model of a driven loop is torch's; expected 'torch'.")
        self.num_workers = max(1, num_workers)
        self.id = uuid.uuid4().hex
        self._seed = check_int("seed", seed)
        self._numbers = itertools.count(1)
        self._has_grad = True
        crew = Crew(self.engine, self.backend, size, resources)
        is_apart = self.engine.name != "inline"
        self.pipeline = Pipeline(
            crew, self.id, is_apart, self.backend.is_broken_collective, check_timeout("hang_timeout_s", hang_timeout_s)
        )
        self.engine.warm(self.backend.preload)

    # --- for a loop ---------------------------------------------------------------------------------------------------

    def distribute(self, model: Any, **ddp_options: Any) -> Model:
        """A replica of the model on every rank, all with the same weights; gradients are the mean over all ranks.

        Args:
            model: a torch.nn.Module, which is copied; or a function or class without arguments that makes one there.
            ddp_options: of torch's DistributedDataParallel: `find_unused_parameters=True`.
        """
        from paceline.driven.torch_parts import make_model

        if not callable(model):
            raise ArgumentTypeError(
                f"distribute({model!r}): expected a torch.nn.Module, or a function that makes one, got a "
                f"{type(model).__name__}."
            )
        return Model(self, self.command(make_model, model, ddp_options))

    def optimizer(self, kind: Any, model: Model, **options: Any) -> Optimizer:
        """`worker_group.optimizer(torch.optim.SGD, model, lr=0.1)`: see `Optimizer`."""
        return Optimizer(model, self, kind, **options)

    def batches(self, dataset: Any, batch_size: int | None = None, *, rest: str = "pad", **options: Any) -> Batches:
        """Batches of a dataset, of which every rank reads its own part: `for inputs, labels in batches`.

        Args:
            dataset: as for `Trainer.run`, but for those of Ray.
            batch_size: rows of each rank in a batch. `global_batch_size` is that of all ranks together.
            rest: of the last rows, if they are less than a batch. "pad" repeats rows, so that all ranks have as many,
                and the mean over ranks is the mean over rows; "drop" leaves them out.
            options: of `Shard.to_torch`: feature_columns, label_column, collate_fn …
        """
        from paceline.data.making import as_dataset
        from paceline.driven.torch_parts import make_reader

        if is_rays(dataset):
            raise ArgumentTypeError(
                "batches() of a Ray dataset are not known: give the files that it is read from "
                "(paceline.data.read_parquet), or use Trainer.run(dataset=...)."
            )
        if rest not in ("pad", "drop"):
            raise ArgumentError(
                f"rest={rest!r}: expected 'pad' or 'drop'. All ranks need as many rows for the mean over ranks to be "
                "that over rows."
            )
        options |= {"batch_size": batch_size, "rest": rest}
        return Batches(self.keep(make_reader, as_dataset(dataset, "dataset"), self._seed, options))

    def apply(self, fn: Callable[..., Any], *values: Any, **named: Any) -> Value:
        """Call the function on every rank, with the rank's own of these values, and of those that it uses by the names
        they have here: `apply(lambda: criterion(output, labels))`. What it returns stays there."""
        return self.keep(fn, *(values if named else arguments_for(fn, values)), **named)

    @contextmanager
    def no_grad(self) -> Iterator[None]:
        """What is sent inside runs in `torch.no_grad()`: for validation."""
        former, self._has_grad = self._has_grad, False
        try:
            yield
        finally:
            self._has_grad = former

    def wait(self) -> None:
        """Until the workers have done all that was sent. Raises what it has come to."""
        self.pipeline.drain()

    def close(self) -> None:
        """End the workers, and with them all values. Idempotent."""
        self.pipeline.close()

    def __enter__(self) -> "WorkerGroup":
        self.pipeline.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.wait()
        finally:
            self.close()

    def __repr__(self) -> str:
        return f"WorkerGroup(num_workers={self.num_workers}, engine={self.engine.name!r})"

    def __reduce__(self) -> Any:
        raise ArgumentTypeError(
            "A WorkerGroup is the driver's and cannot be sent to its workers. Does a function for apply() use it? "
            "Values it may use."
        )

    # --- what values and their kin are made of ------------------------------------------------------------------------

    def command(self, fn: Callable[..., Any], *args: Any, tells: bool = False, **kwargs: Any) -> int:
        """Send `fn(*args, **kwargs)` to all ranks; the number under which its value is kept there, or told."""
        if not self._has_grad:
            from paceline.driven.torch_parts import without_grad

            fn, args = without_grad, (fn, *args)
        number = next(self._numbers)
        self.pipeline.send(Command(number, pack(fn, args, kwargs), tells, line_of_caller()))
        return number

    def keep(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Value:
        return Value(self, self.command(fn, *args, **kwargs))

    def send(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """For what it does, not for what it gives."""
        self.pipeline.forgotten.append(self.command(fn, *args, **kwargs))

    def ask(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """What it gives on each rank, brought here. Blocking."""
        return self.told(self.command(fn, *args, tells=True))

    def told(self, number: int) -> list[Any]:
        return self.pipeline.told(number)


def distributed_training(model: Any, worker_group: WorkerGroup, **ddp_options: Any) -> Model:
    """`worker_group.distribute(model)`, in the words of the review."""
    return worker_group.distribute(model, **ddp_options)
