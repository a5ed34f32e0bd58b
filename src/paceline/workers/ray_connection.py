"""This process's connection to a Ray cluster: to which one, and whether it is still the same."""

import os
import socket

import ray

from paceline.errors import ResourcesError
from paceline.workers import takes_jobs_only

_REACH_S = 10.0
"""How long the head of a cluster may take to answer."""


def connect() -> None:
    """Connect this process to a cluster unless it is: to that of RAY_ADDRESS, else to a new one on this machine."""
    if ray.is_initialized():
        return
    address = os.environ.get("RAY_ADDRESS", "")
    if takes_jobs_only(address):  # Ray's own words know nothing of our ways out
        raise ResourcesError(
            f"RAY_ADDRESS is {address}: jobs are sent there, but workers cannot be started from here. To train on that "
            "cluster, send a job: paceline train launch (--resume goes on with a run); or, on one of its machines, set "
            "RAY_ADDRESS=HOST:6379. To train without it, unset RAY_ADDRESS."
        )
    _check_reachable(address)
    ray.init(log_to_driver=False)


def _check_reachable(address: str) -> None:
    """ResourcesError if nobody listens at HOST:PORT, of which Ray would convince itself for minutes. Other addresses,
    such as "auto", are for Ray to judge."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or "/" in host:
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), _REACH_S).close()
    except (OSError, OverflowError, UnicodeError) as error:
        raise ResourcesError(
            f"RAY_ADDRESS is {address}, but no Ray cluster answers there ({error}). Start one with `ray start --head`, "
            "name another, or unset RAY_ADDRESS to train without it."
        ) from error


def connection() -> tuple[str, ...] | None:
    """What tells this process's connection to a cluster from any other, to the same one too; None if there is none.
    Nobody is asked for it: a Ray client would have to ask its server, which may be out of reach for a moment."""
    if not ray.is_initialized():
        return None
    client = ray.util.client.ray.get_context().client_worker  # type: ignore[no-untyped-call]
    if client is not None:
        return (client._client_id,)
    context = ray.get_runtime_context()
    return context.get_job_id(), context.get_node_id()
