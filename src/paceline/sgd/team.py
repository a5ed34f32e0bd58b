"""The workers with their replicas, from the first to the last step: made equal, kept so, and renewed when some are
lost."""

import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from paceline import registry
from paceline.backends.base import BackendConfig
from paceline.backends.torch import TorchConfig
from paceline.callbacks.dispatch import CallbackList
from paceline.control.crew import Crew
from paceline.errors import ArgumentError, MissingDependencyError
from paceline.rank_session import Task
from paceline.runs import RunRequest
from paceline.sgd import model_calls
from paceline.sgd.inline_link import InlineLink
from paceline.sgd.link import Link, LostError
from paceline.sgd.memory import SharedBuffers
from paceline.sgd.no_group import NoGroup
from paceline.sgd.options import Options
from paceline.sgd.packing import Layout
from paceline.sgd.record import RunRecord
from paceline.sgd.recovery import Recovery, check_budget, choose, may_replace, nobody_left
from paceline.sgd.side import Contribution, Spec
from paceline.sgd.strategies import Made, Strategy, made_without
from paceline.workers.base import Engine, Preload, Resources, Size, WorkerInfo
from paceline.workers.proc_files import address_of
from paceline.workers.stacks import rank_names, without_stacks

logger = logging.getLogger(__name__)

R = TypeVar("R")


class Team:
    """From `open` to `close`."""

    def __init__(
        self, options: Options, request: RunRequest, engine: Engine, resources: Resources, callbacks: CallbackList
    ):
        self._options, self._request, self._engine, self._resources = options, request, engine, resources
        self._callbacks = callbacks
        self._strategy_class: Any = registry.find("sgd_strategy", options.strategy)
        self._backend = self._backend_of_strategy()
        size = Size(options.num_workers, options.num_workers)
        preload = self._backend.preload
        if preload.to_join:  # torch: ours use numpy, as it does. Else a worker has it only if its model does
            preload = preload.plus(*registry.SGD_WORKER_MODULES)
        new_crew = partial(Crew, engine, self._backend, size, resources, options.max_retries, preload)
        kind = InlineLink if engine.name == "inline" else Link
        self.link = kind(new_crew, self._backend, options.hang_timeout_s)
        self.link.on_hang, self.link.on_sent, self.link.on_lost = self._keep_stacks, self._hear, self._prepare
        self.record: RunRecord | None = None
        self._strategy: Strategy | None = None
        self._layout = Layout(())
        self._num_losses = 0
        self.shares_memory = self._strategy_class.in_memory and options.num_workers > 1
        """Whether workers are asked whether they can."""
        self.step_number = 0
        self._positions: list[Any] = []
        self._behind: tuple[int, ...] = ()
        """Ranks whose positions are those from before the last step, though they had read for it."""
        self.is_asking = False
        """Whether the workers are in the middle of something: nobody may ask them anything else."""
        engine.warm(preload)

    def open(self, logdir: Path) -> None:
        """A run folder, workers, and replicas that begin with the weights of the first of them."""
        self.record = RunRecord(self._request, logdir, self._callbacks, self._facts())
        with _Asking(self):
            self.record.open(self._options.num_workers)
            try:
                with self.link.within(self.link.answering_s):
                    self._begin()
            except LostError as lost:
                self._replace(lost)

    def step(self) -> Made:
        assert self._strategy is not None
        with _Asking(self):
            while True:
                try:
                    with self.link.within(self._options.hang_timeout_s):
                        made = self._strategy.step(self.link)
                except LostError as lost:
                    if not self._recover(lost).stands:
                        continue
                    return made_without(lost)
                self.step_number += 1
                self._learn_positions(made.contributions)
                return made

    def _learn_positions(self, contributions: Sequence[Contribution]) -> None:
        """After a step; that of a worker that was lost in it is the one from before: see `_catch_up`."""
        if any(part.position is not None for part in contributions):
            former = self._positions if len(self._positions) == self.link.num_workers else []
            positions = dict(enumerate(former or [None] * self.link.num_workers))
            positions |= {part.rank: part.position for part in contributions}
            self._positions = list(positions.values())

    def surely(self, act: Callable[[], R], is_users: bool = False) -> R:
        """Again if workers are lost meanwhile, on those that take their place. What is a user's may take as long as it
        likes."""
        with _Asking(self):
            while True:
                try:
                    with self.link.within(None if is_users else self.link.answering_s):
                        return act()
                except LostError as lost:
                    self._recover(lost)

    def load(self, packed_state: bytes, step: int, positions: Sequence[Any]) -> None:
        """The same state in all replicas; each worker goes on in its own data."""

        def act() -> None:
            """All of it again if workers are lost: who takes their place has the number of what was before."""
            former, now = (self.step_number, self._positions), (step, list(positions))
            self.step_number, self._positions = now
            try:
                self._load(packed_state)
            except LostError:
                raise
            except BaseException as error:
                self.step_number, self._positions = former
                if not isinstance(error, ArgumentError):  # with that, nothing has begun: it is not of these models
                    self.link.is_torn = True
                raise

        self.surely(act)

    @property
    def positions(self) -> list[Any]:
        """Where the workers are in their data, each for itself."""
        return self._positions

    def close(self, state: str, error: BaseException | None = None) -> None:
        self._end_streams()
        self._strategy = None  # with the memory that it shares: who keeps this object has no use for that
        try:
            if state == "SUCCEEDED":
                self.link.close()
            else:
                self.link.give_up()
                self.link.crew.break_up()
        finally:
            if self.record is not None:
                self.record.close(state, error)

    def _begin(self, state: bytes | None = None) -> None:
        """New workers, whose replicas all have this state; without one, that of the first replica as it was made."""
        self._layout = agreed(self.link.open(self._task, self._spec()))
        buffers = self._share_memory() if self.shares_memory else None
        self._strategy = self._strategy_class(self._spec(), self._layout, buffers)
        self._load(state if state is not None else self.link.call(model_calls.packed_state, ranks=[0])[0])
        if self._behind:
            self._catch_up()

    def _catch_up(self) -> None:
        """Read on, past what went into a step that stands: nothing is to be read twice."""
        found = self.link.ask_each(dict.fromkeys(self._behind, ("skip", ())))
        for rank, position in zip(self._behind, found, strict=True):
            self._positions[rank] = position
        self._behind = ()

    def _task(self, infos: Sequence[WorkerInfo]) -> tuple[Task, Mapping[int, Path]]:
        assert self.record is not None
        return self.record.begin(infos, self._backend)

    def _load(self, packed_state: bytes) -> None:
        self.link.ask("load", packed_state, self.step_number, self._positions)

    def _share_memory(self) -> SharedBuffers | None:
        """If all workers are on this machine."""
        buffers, fd = SharedBuffers.create(self.link.num_workers, self._layout.num_bytes)
        try:
            if all(self.link.ask("attach", address_of(fd), self._layout.num_bytes)):
                return buffers
            self.link.ask("detach")
            return None
        finally:
            os.close(fd)

    def _recover(self, lost: LostError) -> Recovery:
        """Take the state from somebody who is left, and give it to new workers. What goes wrong with that is the end,
        also if it is a user's exception, of a model that cannot be made any more: there is nobody left to ask."""
        try:
            return self._renewed(lost)
        except BaseException:
            self.link.is_torn = True
            raise

    def _renewed(self, lost: LostError) -> Recovery:
        check_budget(lost.reason, self._num_losses, self._options.max_retries)
        with self.link.within(self.link.renewing_s):
            recovery, state = self._state_of_who_is_left(lost)
        self.step_number = recovery.step
        if recovery.stands:
            self._learn_positions(lost.contributions)
            told = {part.rank for part in lost.contributions if part.position is not None}
            self._behind = tuple(rank for rank in range(self.link.num_workers) if told and rank not in told)
        self._replace(lost, state)
        return recovery

    def _replace(self, lost: LostError, state: bytes | None = None) -> None:
        """By new workers with this state, or as they are made: again if these are lost too."""
        while True:
            check_budget(lost.reason, self._num_losses, self._options.max_retries)
            self._num_losses += 1
            logger.warning("Workers were lost, and are replaced (%d): %s.", self._num_losses, lost.reason)
            self.link.give_up()
            assert self.record is not None
            self.record.restart(lost.reason, self.step_number)
            try:
                with self.link.within(self.link.renewing_s):
                    self._begin(state)
                return
            except LostError as again:
                lost = again

    def _state_of_who_is_left(self, lost: LostError) -> tuple[Recovery, bytes]:
        left = lost.idle
        while left:
            try:
                made = self.link.ask_each(dict.fromkeys(left, ("made", ())))
                recovery = choose(dict(zip(left, made, strict=True)), self.step_number)
                return recovery, self.link.call(model_calls.packed_state, ranks=[recovery.keeper])[0]
            except LostError as again:
                left = again.idle
        raise nobody_left(lost.reason)

    def _prepare(self) -> None:
        """A worker is lost. While others are at it, the next ones are started; if one is at rest, its state is taken
        first."""
        self._end_streams()
        may_have_more = may_replace(self._num_losses, self._options.max_retries)
        if self.link.all_busy and may_have_more and self._engine.has_room_beside(self._resources):
            self.link.prepare()

    def _end_streams(self) -> None:
        """Of the run's dataset: who waits for data, or for a lost worker to take its part of it, gets an error. New
        workers have new ones."""
        if self._request.dataset is not None:
            self._request.dataset.close()

    def _keep_stacks(self) -> str:
        """Of workers that do not answer."""
        if self.record is None or self.link.crew.group is None:
            return ""
        blamed = ""
        try:
            stacks = self.link.crew.group.stacks()
            blamed = _blamed(without_stacks(stacks))
            return f"{blamed} Stacks of all ranks are in {self.record.keep_stacks(stacks)}."
        except OSError as error:  # a full disk, say, is not what the user has to know first
            return f"{blamed} Stacks of all ranks could not be written ({error.strerror})."

    def _hear(self, rank: int, kind: str, value: Any) -> None:
        if self.record is not None and kind == "note":
            self.record.note(value[0], rank=rank, **value[1])

    def _facts(self) -> dict[str, Any]:
        """For run.json."""
        options = self._options
        return {
            "engine": self._engine.name,
            "backend": repr(self._backend),
            "num_workers": options.num_workers,
            "devices_per_worker": options.devices_per_worker,
            "strategy": options.strategy,
            "resources": {"cpus": self._resources.cpus, "gpus": self._resources.gpus, **self._resources.custom},
            "max_retries": options.max_retries,
        }

    def _spec(self) -> Spec:
        options, shelf = self._options, self._engine.name
        return Spec(
            self._request.train_func,
            options.devices_per_worker,
            options.strategy,
            options.divisor,
            options.bucket_bytes,
            shelf if shelf in registry.names("sgd_shelf") else "message",
            self.step_number,
            options.use_gpu,
        )

    def _backend_of_strategy(self) -> BackendConfig:
        if self._strategy_class.has_group and self._options.num_workers > 1:
            # models of other frameworks hand over arrays of the CPU, also where there are GPUs
            backend = TorchConfig(backend="cpu:gloo,cuda:nccl" if self._options.use_gpu else None)
            try:
                backend.check()
            except MissingDependencyError as error:
                error.add_note(f"strategy={self._options.strategy!r} is made of torch's collectives; 'ps' needs none.")
                raise
            return backend
        # All that torch imports later, too: the first optimizer of a worker takes more than a second for that.
        return NoGroup(preload=TorchConfig.preload if "torch" in sys.modules else Preload())


class _Asking:
    """See `Team.is_asking`. A generator would cost every step a few microseconds more."""

    __slots__ = ("_team",)

    def __init__(self, team: Team):
        self._team = team

    def __enter__(self) -> None:
        self._team.is_asking = True

    def __exit__(self, *raised: object) -> None:
        self._team.is_asking = False


def _blamed(ranks: Sequence[int]) -> str:
    """For the error: in a collective, those that wait for a stopped one do not answer either."""
    if not ranks:
        return ""
    return f" No stacks came from {rank_names(ranks)}: stopped or stuck, and others may only wait for that."


def agreed(layouts: list[list[Layout]]) -> Layout:
    """The one that all replicas have. ArgumentError if one has another."""
    first = layouts[0][0]
    for worker, devices in enumerate(layouts):
        for device, layout in enumerate(devices):
            if (difference := first.difference(layout)) is not None:
                raise ArgumentError(
                    "All replicas have to train the same weights, but those of model_creator(0, 0) and "
                    f"model_creator({worker}, {device}) differ: {difference}."
                )
    return first
