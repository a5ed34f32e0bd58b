"""How many workers, as it is written on a command line."""

import os
import re
from collections.abc import Mapping

from paceline.errors import ArgumentError
from paceline.workers.devices import gpu_ids, num_cpus

SLOTS = "PACELINE_SLOTS"
"""The environment variable by which whoever gives out a machine says how many workers are to run on it."""

Size = int | tuple[int, int]


def size_of(text: str | None, environ: Mapping[str, str] = os.environ) -> Size:
    """`4`; `2:4`, from 2 to 4; `gpu` or `cpu`, one for each; `auto`, the GPUs if there are any, else the cores. Without
    any of it PACELINE_SLOTS says it, and then one for each GPU, or 1. ArgumentError for anything else."""
    source = "-n"
    if text is None and environ.get(SLOTS):
        text, source = environ[SLOTS], SLOTS
    if text is None:
        return len(gpu_ids()) or 1
    if text in ("gpu", "cpu", "auto"):
        return _one_for_each(text)
    match = re.fullmatch(r"(\d{1,6})(?::(\d{1,6}))?", text.strip(), re.ASCII)
    if match is None:
        raise ArgumentError(f"{source} {text!r}: expected a number of workers, or two as in 2:4, or gpu, cpu or auto.")
    least, most = int(match[1]), int(match[2] or match[1])
    if least < 1:
        raise ArgumentError(f"{source} {text}: expected at least 1 worker.")
    if most < least:
        raise ArgumentError(f"{source} {text}: the first number is the least, the second the most: {most}:{least}?")
    return least if match[2] is None else (least, most)


def _one_for_each(what: str) -> int:
    num_gpus = len(gpu_ids()) if what != "cpu" else 0
    if what == "gpu" and not num_gpus:
        raise ArgumentError("-n gpu: there are no GPUs here. Give a number, or cpu.")
    return num_gpus or num_cpus()
