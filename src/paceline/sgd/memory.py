"""Memory that all workers of one machine share with the driver: the gradients of each worker, and their mean.

It has no name anywhere: see `proc_files`. Who cannot open it (another machine, a container of its own) says so.
"""

import mmap
import os

import numpy as np

from paceline.sgd.packing import Array
from paceline.workers.proc_files import Address, new_memory, opened

_PAGE_BYTES = mmap.PAGESIZE


class SharedBuffers:
    """One buffer for each worker and one for the mean, of `num_bytes` each."""

    def __init__(self, fd: int, num_workers: int, num_bytes: int):
        self._stride = _rounded(num_bytes)
        self._num_workers, self._num_bytes = num_workers, num_bytes
        self._map = np.frombuffer(mmap.mmap(fd, self._stride * (num_workers + 1)), np.uint8)

    @classmethod
    def create(cls, num_workers: int, num_bytes: int) -> "tuple[SharedBuffers, int]":
        """On the driver: the buffers, and the descriptor by which workers find them, to be closed when they have."""
        fd = new_memory("sgd", _rounded(num_bytes) * (num_workers + 1))
        try:
            return cls(fd, num_workers, num_bytes), fd
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def open(cls, address: Address, num_workers: int, num_bytes: int) -> "SharedBuffers | None":
        """In a worker; None if it is not within reach."""
        try:
            fd = opened(address, os.O_RDWR)
        except OSError:
            return None
        try:
            return cls(fd, num_workers, num_bytes)
        finally:
            os.close(fd)

    def of(self, rank: int) -> Array:
        return self._map[rank * self._stride : rank * self._stride + self._num_bytes]

    @property
    def mean(self) -> Array:
        return self.of(self._num_workers)


def _rounded(num_bytes: int) -> int:
    return max(1, -(-num_bytes // _PAGE_BYTES)) * _PAGE_BYTES
