"""Files without a name that one process holds, and others of its machine open by way of /proc. Nothing of them is left,
however the processes end."""

import os
import secrets

Address = tuple[str, str]
"""A path, and what is there if it is ours."""


def new_memory(kind: str, num_bytes: int = 0) -> int:
    """A descriptor of memory, whose address no other machine has."""
    fd = os.memfd_create(f"paceline_{kind}_{secrets.token_hex(8)}", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, num_bytes)
    except BaseException:
        os.close(fd)
        raise
    return fd


def address_of(fd: int) -> Address:
    """Where other processes of this machine find what this one holds."""
    path = f"/proc/{os.getpid()}/fd/{fd}"
    return path, os.readlink(path)


def opened(address: Address, flags: int) -> int:
    """OSError if it is not within reach: on another machine, that number is somebody else's, and in a container of its
    own, there is none."""
    path, name = address
    if os.readlink(path) != name:
        raise FileNotFoundError(f"{path} is not {name}")
    fd = os.open(path, flags | os.O_CLOEXEC)
    if os.readlink(f"/proc/self/fd/{fd}") != name:  # it has become another one's meanwhile
        os.close(fd)
        raise FileNotFoundError(f"{path} is not {name} any more")
    return fd
