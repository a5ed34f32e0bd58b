"""Where the time of a training goes, and what the machine does meanwhile: `with paceline.profile() as profiler`."""

from paceline.profiling.profiler import Profiler, profile

__all__ = ["Profiler", "profile"]
