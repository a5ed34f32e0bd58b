"""In a worker: one call that lasts as long as the workers do, and does what the driver asks for, again and again.

A call of its own for every step would pack the function and the driver's surroundings anew, and unpack them on every
rank; that takes longer than an empty step may.
"""

from collections.abc import Callable
from typing import Any

from paceline.rank_session import Task
from paceline.session import EndingForks, open_session
from paceline.sgd.side import Contribution, Side, Spec
from paceline.workers import parcel
from paceline.workers.base import DirectWire, Wire
from paceline.workers.outcome import describe_error, pack_value

TOPIC = "sgd"
"""A worker asks for what to do next, and tells with it what came of the last thing."""

SIDE = "sgd"
"""Where a worker has its side of it, in `wire.shared`."""


Reply = tuple[str, Any]
"""What came of a command, and its value. A plain tuple, as is all that travels with every step: to pack and unpack a
class of our own takes several times as long."""

DONE, PACKED, FAILED = "done", "packed", "failed"
"""With what the side has returned; what a user's function has, packed; or the error, as `outcome.raised` takes it."""


def serve(wire: DirectWire, task: Task, spec: Spec) -> None:
    """Until the command is None, or the engine ends this call. Then nothing of it stays: on Ray, this process may be in
    the next group, and collectives that its side has begun would keep the connections of the former one open."""
    with open_session(wire, task):
        try:
            reply = _tried(lambda: (DONE, set_up(wire, spec)))
            while (command := _ask(wire, reply)) is not None:
                del reply  # gradients, maybe
                reply = _tried(_performed, wire, *command)
        finally:
            wire.shared.pop(SIDE, None)


def _ask(wire: DirectWire, reply: Reply) -> Any:
    side: Side | None = wire.shared.get(SIDE)
    if side is None or not side.needs_engine:
        return wire.ask_directly(TOPIC, reply)
    wire.hang_up()
    return wire.ask(TOPIC, reply)


def set_up(wire: Wire, spec: Spec) -> Any:
    side = wire.shared[SIDE] = Side(spec, wire.place)
    return side.layouts


def _performed(wire: Wire, verb: str, args: tuple[Any, ...]) -> Reply:
    """A verb of the side; or a call, packed by the driver, `fn(wire, *args)`."""
    if verb == "call":
        fn, arguments = parcel.loads(args[0])
        return PACKED, pack_value(fn(wire, *arguments))
    value = getattr(wire.shared[SIDE], verb)(*args)
    return DONE, tuple(value) if isinstance(value, Contribution) else value


def _tried(fn: Callable[..., Reply], *args: Any) -> Reply:
    """What the driver has to know in any case. No BaseException of an engine's, which ends this call. A process that a
    model forks ends here: it would ask for commands in our name."""
    try:
        with EndingForks():
            return fn(*args)
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__module__.startswith("paceline.workers."):
            raise
        return FAILED, describe_error(error)
