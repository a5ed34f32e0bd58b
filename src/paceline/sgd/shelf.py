"""Where workers that share no memory put arrays for each other. The driver carries no more than tokens."""

from typing import Any, Protocol

from paceline.sgd.packing import Array


class Shelf(Protocol):
    needs_engine: bool
    """Whether tokens are on their way which none but the engine can carry."""

    def put(self, arrays: list[Array]) -> Any:
        """Returns a token, which travels through the driver to whoever gets them."""

    def get(self, token: Any) -> list[Array]:
        """They may be read-only."""


class MessageShelf:
    """No shelf at all: the token is the arrays."""

    needs_engine = False

    def put(self, arrays: list[Array]) -> Any:
        return arrays

    def get(self, token: Any) -> list[Array]:
        arrays: list[Array] = token
        return arrays
