"""A Ray cluster from outside: its dashboard, and the jobs that were submitted to it."""

import asyncio
import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from paceline.errors import ArgumentError, MissingDependencyError, ResourcesError

STOP_S = 60
"""So long a job has to save and return when it is stopped; Ray's own 3 s are too few for a checkpoint."""

_TOKEN = "It asks for a token: set RAY_AUTH_MODE=token, and put the token into RAY_AUTH_TOKEN or ~/.ray/auth_token."
_REFUSED = re.compile(r"(?<![\w.:])40[13](?![\w.])|unauthorized|authenticat|forbidden")
"""In what an error says; a port may have these digits too."""

_KEY = "paceline."
_FINAL = ("SUCCEEDED", "FAILED", "STOPPED")
_LOOK_S = 0.5
_VARIABLES = ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS")


@dataclass(frozen=True)
class Job:
    id: str
    state: str
    command: str
    duration_s: float | None
    said: str
    created: float | None = None
    ended: float | None = None
    about: Mapping[str, str] = field(default_factory=dict)
    """What we have told Ray of it, when we submitted it: its `kind`, its `name` and so on; empty for others' jobs."""

    @property
    def is_final(self) -> bool:
        return self.state in _FINAL


@dataclass(frozen=True)
class Submission:
    """A job to come."""

    id: str
    command: str
    archive: str
    """A zip file: what is in it becomes the job's working directory."""
    about: Mapping[str, str]
    variables: Mapping[str, str]


class Cluster:
    """The jobs of a cluster. ResourcesError, from any of this, says that it is not there, or refuses."""

    def __init__(self, address: str | None):
        """`address` is what the user has named, if anything; else RAY_ADDRESS counts, or a cluster of this machine."""
        try:
            from ray.job_submission import JobSubmissionClient
        except ImportError as error:
            raise MissingDependencyError("ray", "ray", "A Ray cluster") from error
        if address is not None and "://" in address and not address.startswith(("http://", "https://", "ray://")):
            raise ArgumentError(f"--address {address}: expected http://HOST:8265, HOST:6379, or auto.")
        for part in ("dashboard_sdk", "job.sdk"):  # they tell of every upload and of every connection that ends
            logging.getLogger(f"ray.dashboard.modules.{part}").setLevel(logging.WARNING)
        self._where = address or os.environ.get("RAY_ADDRESS") or "auto"
        with self._asked(), _address_first(address):
            self._client: Any = JobSubmissionClient(address, create_cluster_if_needed=False)
            self.url = str(self._client.get_address())

    def jobs(self) -> list[Job]:
        """The newest first."""
        with self._asked():
            found = [_job(one) for one in self._client.list_jobs()]
        return sorted(found, key=lambda job: job.created or 0.0, reverse=True)

    def job(self, id: str) -> Job:
        with self._asked():
            return _job(self._client.get_job_info(id))

    def submit(self, submission: Submission) -> None:
        env = {"working_dir": submission.archive, "env_vars": dict(submission.variables)}
        about = {_KEY + name: value for name, value in submission.about.items()}
        with self._asked():
            self._client.submit_job(
                entrypoint=submission.command, submission_id=submission.id, runtime_env=env, metadata=about
            )

    def output(self, id: str) -> str:
        """All that it has printed by now."""
        with self._asked():
            return str(self._client.get_job_logs(id))

    def follow(self, id: str, tell: Callable[[str], None]) -> None:
        """What it prints, from the first line on, as it comes; returns when the job has ended. KeyboardInterrupt leaves
        the job alone."""

        async def pump() -> None:
            async for text in self._client.tail_job_logs(id):
                tell(text)

        with self._asked():
            asyncio.run(pump())

    def beginnings(self, ids: Sequence[str], is_enough: Callable[[str], bool], within_s: float) -> dict[str, str]:
        """The first lines of what each job has printed, as many as are enough; fewer if it has ended, or has printed no
        more by then."""
        texts = dict.fromkeys(ids, "")

        async def read(id: str) -> None:
            async for text in self._client.tail_job_logs(id):
                texts[id] += text
                if is_enough(texts[id]):
                    return

        async def read_all() -> None:
            with suppress(TimeoutError):
                async with asyncio.timeout(within_s):
                    await asyncio.gather(*map(read, ids), return_exceptions=True)

        with self._asked():
            asyncio.run(read_all())
        return texts

    def stop(self, id: str) -> None:
        """Ask it to save and return; Ray kills it if it has not done so after STOP_S."""
        with self._asked():
            self._client.stop_job(id)

    def await_end(self, id: str, deadline: float | None) -> Job:
        """As it is then: not ended, if the time was over."""
        while True:
            job = self.job(id)
            left_s = _LOOK_S if deadline is None else deadline - time.monotonic()
            if job.is_final or left_s <= 0:
                return job
            time.sleep(min(_LOOK_S, left_s))

    @contextmanager
    def _asked(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # whatever its parts raise: connections, HTTP, addresses that are none
            raise ResourcesError(_why(self._where, error)) from error


@contextmanager
def _address_first(address: str | None) -> Iterator[None]:
    """Ray itself prefers its variables to an address that it is given."""
    hidden = {name: os.environ.pop(name) for name in _VARIABLES if address is not None and name in os.environ}
    try:
        yield
    finally:
        os.environ.update(hidden)


def _why(where: str, error: Exception) -> str:
    text = " ".join(str(error).split())
    known = f"{type(error).__name__} {text}".lower()
    if _REFUSED.search(known):
        return f"The Ray cluster at {where} refuses. {_TOKEN}"
    if "multiple active ray instances" in known:
        return f"Several Ray clusters run on this machine: name one with --address or RAY_ADDRESS. ({text[:200]})"
    if "no available agent" in known:
        return (
            f"The Ray cluster at {where} has no agent that takes jobs. If it has just been started, try again in a "
            "moment. If it is not the first on its machine, start it with a port of its own: ray start --head "
            f"--dashboard-agent-listen-port PORT. ({text[:200]})"
        )
    hint = "" if where != "auto" else " Name one with --address or RAY_ADDRESS, or start one: ray start --head."
    return f"There is no Ray cluster at {where}, or it does not answer.{hint} ({text[:200]})"


def _job(one: Any) -> Job:
    began, ended = (None if not at else at / 1e3 for at in (one.start_time, one.end_time))
    state = getattr(one.status, "value", str(one.status))
    said = (one.message or "").splitlines()
    told = one.metadata if isinstance(one.metadata, Mapping) else {}
    return Job(
        id=one.submission_id or one.job_id or "",
        state=state,
        command=one.entrypoint or "",
        duration_s=None if began is None else (ended or time.time()) - began,
        said=said[-1] if said and state == "FAILED" else "",
        created=began,
        ended=ended,
        about={str(name)[len(_KEY) :]: str(value) for name, value in told.items() if str(name).startswith(_KEY)},
    )
