"""What the machine does: one sample of its processor, memory, disk, network, and GPUs if there are any."""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from typing import Any

import psutil

_MB = 1e6


class System:
    """Samples are rates since the sample before."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._before: tuple[float, Any, Any] | None = None
        self.sample()

    def sample(self) -> dict[str, float]:
        now, disk, network = time.monotonic(), psutil.disk_io_counters(), psutil.net_io_counters()
        before, self._before = self._before, (now, disk, network)
        made = {
            "cpu_percent": psutil.cpu_percent(),
            "process_cpu_percent": self._process.cpu_percent(),
            "free_memory_mb": psutil.virtual_memory().available / _MB,
            "process_memory_mb": self._process.memory_info().rss / _MB,
        }
        if before is not None and now > before[0]:
            elapsed = now - before[0]
            for name, after, former, fields in (
                ("disk", disk, before[1], ("read_bytes", "write_bytes")),
                ("network", network, before[2], ("bytes_recv", "bytes_sent")),
            ):
                if after is not None and former is not None:
                    made |= {
                        f"{name}_{'in' if index == 0 else 'out'}_mb_per_s": (
                            getattr(after, field) - getattr(former, field)
                        )
                        / _MB
                        / elapsed
                        for index, field in enumerate(fields)
                    }
        return made | _gpus()


def _gpus() -> dict[str, float]:
    """Of those that this process uses, by torch's word."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return {}
    made: dict[str, float] = {}
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        made |= {f"gpu{index}_free_memory_mb": free / _MB, f"gpu{index}_memory_mb": total / _MB}
        with suppress(RuntimeError, ModuleNotFoundError):  # pynvml is not there
            made[f"gpu{index}_percent"] = float(torch.cuda.utilization(index))
    return made
