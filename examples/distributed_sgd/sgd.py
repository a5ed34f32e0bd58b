"""The name that the template imports it from."""

from paceline.sgd import DistributedSGD

__all__ = ["DistributedSGD"]
