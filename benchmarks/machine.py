"""What the figures were measured on and with."""

import importlib.metadata
import os
import platform
import tempfile
import time
from pathlib import Path

import psutil

_PACKAGES = ("paceline", "torch", "accelerate", "lightning", "ray", "pyarrow", "datasets", "litdata")


def describe_machine() -> dict[str, str]:
    return {
        "time": time.strftime("%Y-%m-%d %H:%M %Z"),
        "processor": f"{_processor()}, {len(os.sched_getaffinity(0))} cores",
        "memory": f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
        "system": f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
        "scratch": f"{_file_system(Path(tempfile.gettempdir()))} at {tempfile.gettempdir()}",
        "load at start": f"{os.getloadavg()[0]:.2f}",
        "versions": ", ".join(f"{name} {_version(name)}" for name in _PACKAGES),
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _file_system(path: Path) -> str:
    mounts = [part for part in psutil.disk_partitions(all=True) if path.resolve().is_relative_to(part.mountpoint)]
    return max(mounts, key=lambda part: len(part.mountpoint)).fstype if mounts else "unknown file system"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
