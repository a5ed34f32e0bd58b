"""The interface of everything that listens to a run."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.checkpoints import CheckpointInfo


class Callback:
    """Listens to a run, on the driver, one call at a time. Override what you need; the rest does nothing.

    The timeline of a run, for the callbacks in the order of the list:

        start_training(logdir, config, run_id=, num_workers=, world_size=, is_resumed=)
        │                                                       once per driver, before any worker trains
        ├─ handle_result([rank 0's dict, rank 1's dict, …])     once per step: when every rank has reported it
        ├─ handle_checkpoint(checkpoint)                        when a checkpoint is complete on storage
        ├─ handle_restart(attempt, reason, cause=)              the function starts again: workers died, were taken
        │                                                       away, or there is room for more of them; results
        │                                                       after this may repeat earlier steps
        ├─ handle_resize(world_size, former=, reason=)          from now on there are more, or fewer, workers
        │
        finish_training(error, exception=, status=)             once, however the run ended

    What a callback raises:
        in start_training    the run does not begin; those that had started get finish_training(error=True)
        in handle_*          the run ends FAILED with this exception
        in finish_training   the other callbacks are still finished; then it is raised, unless training
                             itself failed: then it is logged, and noted on the error of the training

    A slow callback delays the delivery of results. The training loop goes on, while its queue has room.
    Always accept `**info`: later versions may tell more.
    """

    def start_training(self, logdir: str, config: dict[str, Any], **info: Any) -> None:
        """`logdir` is the folder of this run. `info`: run_id ("run_001"), world_size, num_workers (the most that
        there may be, if the run is elastic), and is_resumed: whether an earlier driver has written to that folder."""

    def handle_result(self, results: list[dict[str, Any]], **info: Any) -> None:
        """`results` holds one dict per rank, in rank order. This callback may change and keep them."""

    def handle_checkpoint(self, checkpoint: "CheckpointInfo", **info: Any) -> None:
        """`checkpoint` can be loaded from now on, also after a crash."""

    def handle_restart(self, attempt: int, reason: str, **info: Any) -> None:
        """`attempt` counts the restarts of this run from 1; `reason` says which workers died and how. `info`: cause
        ("loss", "preemption" or "growth")."""

    def handle_resize(self, world_size: int, **info: Any) -> None:
        """`info`: former, the number of workers until now, and reason. Told before the function starts again."""

    def finish_training(self, error: bool = False, **info: Any) -> None:
        """`error` is True exactly when the run failed.

        `info`: status ("SUCCEEDED", "FAILED" or "STOPPED") and exception (what ended the run, or None).
        """


SGDCallback = Callback
"""The name that it has in RaySGD."""
