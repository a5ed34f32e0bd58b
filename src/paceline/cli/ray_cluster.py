"""A Ray cluster from outside: its dashboard, and the jobs that were submitted to it."""

import time
from dataclasses import dataclass
from typing import Any

from paceline.errors import ArgumentError, MissingDependencyError, ResourcesError

_TOKEN = "It asks for a token: set RAY_AUTH_MODE=token, and put the token into RAY_AUTH_TOKEN or ~/.ray/auth_token."


@dataclass(frozen=True)
class Job:
    id: str
    state: str
    command: str
    duration_s: float | None
    said: str


@dataclass(frozen=True)
class Cluster:
    url: str
    jobs: tuple[Job, ...]


def look(address: str | None) -> Cluster:
    """ResourcesError says that it is not there, or refuses."""
    try:
        from ray.job_submission import JobSubmissionClient
    except ImportError as error:
        raise MissingDependencyError("ray", "ray", "xp ray") from error
    if address is not None and "://" in address and not address.startswith(("http://", "https://", "ray://")):
        raise ArgumentError(f"--address {address}: expected http://HOST:8265, HOST:6379, or auto.")
    where = address or "auto"
    try:
        client: Any = JobSubmissionClient(address, create_cluster_if_needed=False)
        url = str(client.get_address())
        jobs = [_job(one) for one in client.list_jobs()]
    except Exception as error:  # whatever its parts raise: connections, HTTP, addresses that are none
        raise ResourcesError(_why(where, error)) from error
    return Cluster(url, tuple(sorted(jobs, key=lambda job: job.duration_s or 0.0)))


def _why(where: str, error: Exception) -> str:
    text = " ".join(str(error).split())
    known = f"{type(error).__name__} {text}".lower()
    if any(word in known for word in ("401", "403", "unauthorized", "authenticat", "forbidden")):
        return f"The Ray cluster at {where} refuses. {_TOKEN}"
    hint = "" if where != "auto" else " Name one with --address or RAY_ADDRESS, or start one: ray start --head."
    return f"There is no Ray cluster at {where}, or it does not answer.{hint} ({text[:200]})"


def _job(one: Any) -> Job:
    began, ended = one.start_time, one.end_time
    duration = None if not began else (ended / 1e3 if ended else time.time()) - began / 1e3
    state = getattr(one.status, "value", str(one.status))
    said = (one.message or "").splitlines()
    return Job(
        id=one.submission_id or one.job_id or "",
        state=state,
        command=one.entrypoint or "",
        duration_s=duration,
        said=said[-1] if said and state == "FAILED" else "",
    )
