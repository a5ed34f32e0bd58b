"""What Accelerate remembers of the process. It is one run's, and not the next one's, which may want another precision,
or be on another rank."""

import sys
from collections.abc import Callable
from typing import Any

_HOLDERS = ("PartialState", "AcceleratorState", "GradientState")


def putting_back() -> Callable[[], None]:
    """A function by which Accelerate remembers again what it does now; nothing, if nobody has imported it yet."""
    former = {name: dict(shared) for name, shared in _shared().items()}

    def put_back() -> None:
        for name, shared in _shared().items():
            shared.clear()
            shared.update(former.get(name, {}))

    return put_back


def _shared() -> dict[str, dict[str, Any]]:
    """What all instances of each class have in common. It is Accelerate's own affair: a version that has it elsewhere
    must not keep anybody's function from running."""
    module = sys.modules.get("accelerate.state")
    found = {name: getattr(getattr(module, name, None), "_shared_state", None) for name in _HOLDERS}
    return {name: shared for name, shared in found.items() if isinstance(shared, dict)}
