"""Results in Weights & Biases."""

import os
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, Literal

from paceline.callbacks.base import Callback
from paceline.callbacks.flatten import numeric_metrics, step_of
from paceline.callbacks.log_dir import make_log_dir
from paceline.callbacks.optional_package import environment_defaults, require
from paceline.callbacks.selection import single_worker
from paceline.callbacks.tracked_run import TrackedRun

_EXIT_CODE = {"SUCCEEDED": 0, "FAILED": 1, "STOPPED": 255}  # 255 is what wandb itself uses for a Ctrl-C
_STEP = "training_iteration"


class WandbLoggerCallback(Callback):
    """Makes a W&B run: `config`, and one worker's numbers over `training_iteration`.

    `mode` is wandb's: "online", "offline" (files in the run's folder, for `wandb sync`) or "disabled"; None
    leaves it to wandb. Other keywords go to `wandb.init`. It is a run of its own, beside one that your
    program may have open.

    The metric `training_iteration` is the x-axis, rather than wandb's own step: that one may only rise, and a
    restart goes back. In offline mode wandb's error reports stay off, so nothing leaves the machine. Console
    capture is off unless you pass `settings`: the run folder has the logs.

    A resumed run goes on with the same W&B run; offline, in another folder with the same id: a further part for
    `wandb sync`. Steps without that worker are left out.
    """

    def __init__(
        self,
        project: str | None = None,
        mode: Literal["online", "offline", "disabled", "shared"] | None = None,
        worker_to_log: int | Sequence[int] = 0,
        **init_kwargs: Any,
    ):
        require("wandb", "wandb", "WandbLoggerCallback")
        self._project = project
        self._mode = mode
        self._selection = single_worker(worker_to_log)
        self._init_kwargs = init_kwargs
        self._run: Any = None  # wandb is not imported before a run starts

    @property
    def run(self) -> Any:
        """The `wandb.Run` while training runs, else None."""
        return self._run

    def start_training(self, logdir: str, config: dict[str, Any], **info: Any) -> None:
        self._selection.check(info.get("num_workers"))
        kwargs = {"name": info.get("run_id"), "reinit": "create_new", **self._init_kwargs}
        kwargs.setdefault("dir", str(make_log_dir(None, logdir)))
        kwargs["config"] = {**config, **(kwargs.get("config") or {})}
        kept = TrackedRun(logdir, "wandb", self._selection, self._project)
        if info.get("is_resumed"):
            _continue_run(kwargs, kept.id())
        is_offline = (self._mode or os.environ.get("WANDB_MODE")) == "offline"
        with environment_defaults(WANDB_ERROR_REPORTING="false") if is_offline else nullcontext():
            import wandb

            kwargs.setdefault("settings", wandb.Settings(console="off"))
            self._run = wandb.init(project=self._project, mode=self._mode, **kwargs)
        try:
            kept.keep(self._run.id)
            self._run.define_metric(_STEP, hidden=True)
            self._run.define_metric("*", step_metric=_STEP)
        except BaseException:
            self.finish_training(error=True)
            raise

    def handle_result(self, results: list[dict[str, Any]], **info: Any) -> None:
        if self._run is None:
            return
        for result in self._selection.pick(results):
            self._run.log({**numeric_metrics(result), _STEP: step_of(result)})

    def finish_training(self, error: bool = False, **info: Any) -> None:
        run, self._run = self._run, None
        if run is not None:
            status = str(info.get("status", "FAILED" if error else "SUCCEEDED"))
            run.finish(exit_code=_EXIT_CODE.get(status, 1))


def _continue_run(kwargs: dict[str, Any], kept_id: str | None) -> None:
    """Changes the arguments of `wandb.init` so that it goes on with the run of an earlier driver, if that is known."""
    run_id = kwargs.get("id") or kept_id
    if run_id is None:
        return
    kwargs["id"] = run_id
    if kwargs.get("resume") in (None, "never"):  # right for the first driver only
        kwargs["resume"] = "allow"
    for name in ("fork_from", "resume_from"):  # done by the first driver
        kwargs.pop(name, None)
