"""NumPy: what all other frameworks' arrays become on their way to the driver. See `Framework` for what is asked."""

import sys
from typing import Any, ClassVar

from paceline.frameworks.base import ArrayCodec, Framework


class Numpy(Framework):
    """Threads are not its business here: the libraries below it read the variables that torch names."""

    name: ClassVar[str] = "numpy"
    packages: ClassVar[tuple[str, ...]] = ("numpy",)
    array_tag: ClassVar[str | None] = "ndarray"
    value_tags: ClassVar[tuple[str, ...]] = ("numpy",)

    def codec(self) -> ArrayCodec:
        from paceline.frameworks import numpy_arrays

        return numpy_arrays

    def reseed(self) -> None:
        if "numpy.random" in sys.modules:  # numpy comes without it; whoever imports it now gets fresh seeds
            from numpy import random

            random.seed()

    def seed(self, seed: int) -> None:
        from numpy import random

        random.seed(seed % 2**32)

    def rng_state(self) -> Any:
        from numpy import random

        return random.get_state()

    def set_rng_state(self, state: Any) -> None:
        from numpy import random

        random.set_state(tuple(state))
