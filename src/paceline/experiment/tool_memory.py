"""What the tools of an experiment remember: a checkpoint has what has changed since they were made."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Set
from typing import Any

from paceline import session
from paceline.experiment.keeping import attributes, changes, footprints, is_holdable, losses, put_back

logger = logging.getLogger(__name__)

_VALUES = ""
"""Among the tools, by the name that none can have: plain values that their container has itself."""


def tools_in(container: Any) -> dict[str, Any]:
    held = vars(container) if container is not None else {}
    return {name: one for name, one in held.items() if not is_holdable(one)}


class ToolMemory:
    """Made when nothing has been trained yet. `elsewhere` are the ids of what tools may hold and other parts of the
    checkpoint have."""

    def __init__(self, container: Any, elsewhere: Set[int]):
        self._container = container
        self._first = {name: copy.deepcopy(attributes(tool)) for name, tool in self._held().items()}
        self._footprints = {name: footprints(tool, elsewhere) for name, tool in tools_in(container).items()}

    def state(self, elsewhere: Set[int]) -> dict[str, Any]:
        self._tell_losses(elsewhere)
        held = {name: changes(tool, self._first.get(name, {}), elsewhere) for name, tool in self._held().items()}
        return {**held, _VALUES: {"attributes": held[_VALUES]["attributes"]}}  # the tools are there by themselves

    def restore(self, state: Mapping[str, Any], elsewhere: Set[int]) -> None:
        for name, tool in self._held().items():
            missing = put_back(tool, state.get(name, {}), elsewhere)
            if missing and session.world_rank() == 0:
                told = ", ".join(missing)
                logger.warning(
                    "tools.%s: the checkpoint has a state of %s, which is not there now: it begins anew.", name, told
                )

    def _held(self) -> dict[str, Any]:
        return {_VALUES: self._container, **tools_in(self._container)}

    def _tell_losses(self, elsewhere: Set[int]) -> None:
        """Once, when tools have been used for the first time."""
        first, self._footprints = self._footprints, {}
        for name, prints in first.items():
            lost = losses(getattr(self._container, name, None), prints, elsewhere)
            if lost and session.world_rank() == 0:
                logger.warning(
                    "tools.%s: a checkpoint cannot hold %s, so that it begins anew after a restart. Use numbers, text, "
                    "tensors, lists and dicts; make what has a state in __init__; or give the tool state_dict and "
                    "load_state_dict.",
                    name,
                    ", ".join(lost),
                )
