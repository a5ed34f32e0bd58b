"""Results in MLflow."""

import logging
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlparse

from paceline.callbacks.base import Callback
from paceline.callbacks.flatten import flatten, numeric_metrics, step_of
from paceline.callbacks.log_dir import check_log_dir, make_log_dir
from paceline.callbacks.optional_package import environment_defaults, require
from paceline.callbacks.selection import single_worker
from paceline.callbacks.tracked_run import TrackedRun
from paceline.errors import ArgumentError

if TYPE_CHECKING:
    from paceline.checkpoints import CheckpointInfo

logger = logging.getLogger(__name__)

_STATUS = {"SUCCEEDED": "FINISHED", "FAILED": "FAILED", "STOPPED": "KILLED"}
_SEND_INTERVAL_S = 1.0
_MAX_METRICS_PER_CALL = 1_000
_MAX_PARAMS_PER_CALL = 100
_MAX_PARAM_CHARS = 6_000


class MLflowLoggerCallback(Callback):
    """Makes an MLflow run: `config` as params, one worker's numbers as metrics at step `_training_iteration`.

    Without `tracking_uri` (or MLFLOW_TRACKING_URI) it goes to `<logdir>/mlruns`, a local folder; the
    experiment is named like the folder of the runs. Quick reports are sent together, about once a second. The
    MLflow run ends as FINISHED, FAILED or KILLED, as the training did; with `save_artifact` it then also gets
    the checkpoints.

    A resumed run goes on with the same MLflow run, which keeps both values of a step that is made again. Steps
    without that worker are left out.

    With a local folder nothing leaves the machine: MLflow's usage telemetry is not started, unless your
    program has imported mlflow before.
    """

    def __init__(
        self,
        tracking_uri: str | None = None,
        registry_uri: str | None = None,
        experiment_id: str | None = None,
        experiment_name: str | None = None,
        tags: dict[str, Any] | None = None,
        save_artifact: bool = False,
        logdir: str | os.PathLike[str] | None = None,
        worker_to_log: int | Sequence[int] = 0,
    ):
        require("mlflow", "mlflow", "MLflowLoggerCallback")
        if experiment_id is not None and experiment_name is not None:
            raise ArgumentError(
                f"experiment_id ({experiment_id!r}) and experiment_name ({experiment_name!r}) both say which "
                "experiment to use. Give one of them."
            )
        self._tracking_uri = tracking_uri
        self._registry_uri = registry_uri
        self._experiment_id = experiment_id
        self._experiment_name = experiment_name
        self._tags = {key: str(value) for key, value in (tags or {}).items()}
        self._save_artifact = save_artifact
        self._explicit_dir = check_log_dir(logdir)
        self._selection = single_worker(worker_to_log)
        self._client: Any = None  # mlflow is not imported before a run starts
        self._mlflow_run_id = ""
        self._run_dir = Path()
        self._waiting: list[Any] = []
        self._last_sent_s = 0.0

    @property
    def mlflow_run_id(self) -> str:
        """The id of the latest run in MLflow; empty before the first."""
        return self._mlflow_run_id

    def start_training(self, logdir: str, config: dict[str, Any], **info: Any) -> None:
        self._selection.check(info.get("num_workers"))
        self._run_dir = Path(logdir)
        home = make_log_dir(self._explicit_dir, logdir)
        given_uri = self._tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or ""
        self._client = _connect(given_uri or str(home / "mlruns"), self._registry_uri)
        place = (_without_secrets(given_uri), self._experiment_id or self._experiment_name)
        kept = TrackedRun(logdir, "mlflow", self._selection, *place)
        run = self._find_run(kept.id()) if info.get("is_resumed") else None
        if run is None:
            run_id = str(info.get("run_id", self._run_dir.name))
            run = self._client.create_run(self._find_experiment(), tags=self._tags, run_name=run_id)
        self._mlflow_run_id = run.info.run_id
        self._waiting, self._last_sent_s = [], 0.0
        try:
            kept.keep(self._mlflow_run_id)
            self._send_params(config, run.data.params)
        except BaseException:
            self._client.set_terminated(self._mlflow_run_id, "FAILED")
            raise

    def handle_result(self, results: list[dict[str, Any]], **info: Any) -> None:
        if self._client is None:
            return
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        for result in self._selection.pick(results):
            step = step_of(result)
            for name, value in numeric_metrics(result).items():
                self._waiting.append(Metric(_valid_name(name), float(value), now_ms, step))
        if time.monotonic() - self._last_sent_s >= _SEND_INTERVAL_S:
            self._send_metrics()

    def handle_checkpoint(self, checkpoint: "CheckpointInfo", **info: Any) -> None:
        if self._client is not None:
            self._send_metrics()  # steps before a checkpoint are not made again, even if this process is killed now

    def finish_training(self, error: bool = False, **info: Any) -> None:
        if self._client is None:
            return
        status = str(info.get("status", "FAILED" if error else "SUCCEEDED"))
        try:
            self._send_metrics()
            if self._save_artifact:
                self._send_checkpoints()
        finally:
            client, self._client = self._client, None  # first: a store that is gone must not be asked again
            client.set_terminated(self._mlflow_run_id, _STATUS.get(status, "FAILED"))

    def _find_run(self, mlflow_run_id: str | None) -> Any:
        """The run of an earlier driver, running again; None if there is none any more."""
        if mlflow_run_id is None:
            return None
        from mlflow.exceptions import MlflowException

        try:
            self._client.update_run(mlflow_run_id, status="RUNNING")
            return self._client.get_run(mlflow_run_id)
        except MlflowException as error:
            if error.error_code not in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
                raise  # a server that does not answer may have the run all the same
            logger.warning("MLflow's run %s cannot be continued: %s. A new one begins.", mlflow_run_id, error)
            return None

    def _find_experiment(self) -> str:
        if self._experiment_id is not None:
            from mlflow.exceptions import MlflowException

            try:
                return str(self._client.get_experiment(self._experiment_id).experiment_id)
            except MlflowException as error:
                raise ArgumentError(f"MLflow has no experiment with the id {self._experiment_id!r}: {error}") from error
        name = self._experiment_name or self._run_dir.resolve().parent.name or "paceline"
        known = self._client.get_experiment_by_name(name)
        return str(self._client.create_experiment(name) if known is None else known.experiment_id)

    def _send_params(self, config: dict[str, Any], known: dict[str, str]) -> None:
        """Without those that the run has already: MLflow refuses to change one, and the text of an object may differ
        from process to process."""
        from mlflow.entities import Param

        texts = {_valid_name(key): str(value)[:_MAX_PARAM_CHARS] for key, value in flatten(config).items()}
        params = [Param(name, text) for name, text in texts.items() if name not in known]
        for start in range(0, len(params), _MAX_PARAMS_PER_CALL):
            self._client.log_batch(self._mlflow_run_id, params=params[start : start + _MAX_PARAMS_PER_CALL])

    def _send_metrics(self) -> None:
        waiting, self._waiting = self._waiting, []
        for start in range(0, len(waiting), _MAX_METRICS_PER_CALL):
            self._client.log_batch(self._mlflow_run_id, metrics=waiting[start : start + _MAX_METRICS_PER_CALL])
        self._last_sent_s = time.monotonic()

    def _send_checkpoints(self) -> None:
        checkpoint_dir = self._run_dir / "checkpoints"
        if checkpoint_dir.is_dir():
            self._client.log_artifacts(self._mlflow_run_id, str(checkpoint_dir), "checkpoints")
        else:
            logger.warning("save_artifact: there is no folder %s to give to MLflow", checkpoint_dir)


def _connect(tracking_uri: str, registry_uri: str | None) -> Any:
    if urlparse(tracking_uri).scheme not in ("", "file"):
        from mlflow.tracking import MlflowClient

        return MlflowClient(tracking_uri=tracking_uri, registry_uri=registry_uri)
    # MLflow 3 still has folders as a store, in maintenance, and wants to be told that one is meant. The light
    # package has no other local store.
    with environment_defaults(MLFLOW_ALLOW_FILE_STORE="true", MLFLOW_DISABLE_TELEMETRY="true"):
        from mlflow.tracking import MlflowClient

        return MlflowClient(tracking_uri=tracking_uri, registry_uri=registry_uri or tracking_uri)


def _without_secrets(uri: str) -> str:
    parts = urlparse(uri)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="").geturl()


def _valid_name(name: str) -> str:
    """MLflow takes letters, digits and `_-. /:` in names."""
    return re.sub(r"[^\w\-. /:]", "_", name)
