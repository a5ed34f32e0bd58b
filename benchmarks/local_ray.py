"""A Ray of its own for one measurement."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import ray


@contextmanager
def local_ray(num_cpus: int) -> Iterator[None]:
    """On this machine, without a dashboard; it ends with the block and leaves no files. The CPUs are Ray's to count:
    there may be more of them than cores."""
    home = tempfile.mkdtemp(prefix="ray_")  # its sockets need a short path
    try:
        ray.init(num_cpus=num_cpus, include_dashboard=False, log_to_driver=False, logging_level="ERROR", _temp_dir=home)
        yield
    finally:
        ray.shutdown()
        shutil.rmtree(home, ignore_errors=True)
