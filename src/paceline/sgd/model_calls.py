"""What the driver asks of models once in a while: functions that run in a worker, `fn(wire, *args)`."""

from collections.abc import Callable, Mapping
from typing import Any

from paceline.sgd.serving import SIDE
from paceline.workers.base import Wire
from paceline.workers.outcome import pack_value


def packed_state(wire: Wire) -> bytes:
    """Weights and optimizer, which the driver only passes on: it need not have the framework."""
    return pack_value(wire.shared[SIDE].replicas[0].state_dict())


def foreach_model(wire: Wire, fn: Callable[[Any], Any]) -> list[Any]:
    return [fn(replica.model) for replica in wire.shared[SIDE].replicas]


def foreach_worker(wire: Wire, fn: Callable[[list[Any]], Any]) -> Any:
    return fn([replica.model for replica in wire.shared[SIDE].replicas])


def for_model(wire: Wire, fn: Callable[[Any], Any]) -> Any:
    return fn(wire.shared[SIDE].replicas[0].model)


def weights(wire: Wire) -> dict[str, Any]:
    found: dict[str, Any] = wire.shared[SIDE].replicas[0].weights()
    return found


def set_weights(wire: Wire, given: Mapping[str, Any]) -> None:
    for replica in wire.shared[SIDE].replicas:
        replica.set_weights(given)


def state(wire: Wire) -> dict[str, Any]:
    found: dict[str, Any] = wire.shared[SIDE].replicas[0].state_dict()
    return found


def validate(wire: Wire) -> list[dict[str, Any]]:
    return [replica.validate() for replica in wire.shared[SIDE].replicas]


def model(wire: Wire) -> Any:
    """As it travels: a TorchModel's module, else the user's object."""
    replica = wire.shared[SIDE].replicas[0]
    module = getattr(replica, "module", None)
    return replica.model if module is None else module
