"""Where rank 0 of a group can be reached: at its own address alone, on a port that the system picks."""

import socket

from paceline.errors import WorkerStartError


def listen_at(address: str, backlog: int | None = None) -> socket.socket:
    """WorkerStartError if this machine does not have the address."""
    try:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        return socket.create_server((address, 0), family=family, backlog=backlog)
    except OSError as error:
        raise cannot_listen(address, error) from error


def cannot_listen(address: str, error: OSError) -> WorkerStartError:
    return WorkerStartError(
        f"Rank 0 cannot listen on {address}, where the other workers are to reach it: {error}. On a Ray cluster, start "
        "each node with an address that the node itself has: ray start --node-ip-address=..."
    )
