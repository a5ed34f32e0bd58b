"""What scripts ask that may also be started by the master of a cluster."""

from typing import Any


def get_cluster_info() -> Any:
    """None: no master has started this process, whoever else has. A script that runs both ways then takes the way on
    which it brings its own hyperparameters and checkpoint."""
    return None
