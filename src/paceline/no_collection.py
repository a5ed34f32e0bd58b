"""Times at which there is nothing for the collector of garbage to find."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collection() -> Iterator[None]:
    """While much is made that stays: of modules that are imported, the collector would walk every one again and again.
    Who has turned it off turns it on, also when threads overlap."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
