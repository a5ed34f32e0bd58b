"""Run as the `__main__` of a process that is spawned from a worker, by `multiprocessing`. See `main_module`."""

from paceline.workers import main_module

globals().update(main_module.unpacked())
