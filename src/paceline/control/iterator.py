"""What `Trainer.run_iterator` hands out."""

import logging
import os
from collections.abc import Iterator
from types import TracebackType
from typing import Any

from paceline.control.controller import Controller
from paceline.errors import TrainerStateError
from paceline.recording.gather import Report
from paceline.recording.recorder import Recorder

logger = logging.getLogger(__name__)


class RunIterator:
    """Iterates over the steps of a run: each is the list of all ranks' reports. Iterating drives the run.

    Leaving the loop early is fine: closing the iterator, or starting another run, stops this one. In a fork of the
    process that has begun the run, neither does: the run is that one's.
    """

    def __init__(self, controller: Controller):
        self._controller = controller
        self._steps = controller.steps()
        self._finished = False
        self._owner_pid = os.getpid()
        next(self._steps)  # the workers begin now, not when somebody asks for the first step

    def __iter__(self) -> Iterator[list[Report]]:
        return self

    def __next__(self) -> list[Report]:
        if self._finished:
            raise StopIteration
        if self._owner_pid != os.getpid():
            raise TrainerStateError(
                f"This run is driven by another process, {self._owner_pid}; this one, {os.getpid()}, is a fork of it, "
                "and cannot go on with it. Here, trainer.run() begins a run with workers of its own."
            )
        try:
            return next(self._steps)
        except BaseException:
            self._finished = not self.is_running()  # another thread's next() fails without ending the run
            raise

    @property
    def recorder(self) -> Recorder:
        """What the run leaves: its folder and its checkpoints."""
        return self._controller.recorder

    def finish_saving(self) -> None:
        """Between two steps: wait until a checkpoint that is being written is committed, or has failed."""
        self._controller.finish_saving()

    def is_finished(self) -> bool:
        return self._finished

    def is_running(self) -> bool:
        """Whether somebody is inside `next` right now: another thread, or a callback of this very run."""
        return bool(self._steps.gi_running)  # type: ignore[attr-defined]

    def get_final_results(self, force: bool = False) -> list[Any] | None:
        """What the function returned, by rank, once the run has succeeded. `force` runs the rest of it first."""
        if force:
            for _ in self:
                pass
        if not self._finished:
            logger.info("The run is not finished: iterate to its end first, or call get_final_results(force=True).")
        return self._controller.values

    def close(self) -> None:
        """Stop the run unless it has ended. Idempotent."""
        self._finished = True
        self._steps.close()  # type: ignore[attr-defined]

    def __enter__(self) -> "RunIterator":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


SGDIterator = RunIterator
"""The name that it has in RaySGD."""
