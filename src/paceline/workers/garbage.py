"""What a call leaves behind in a worker that stays for the next one."""

import gc
import sys


class Garbage:
    """Collects it, without walking each time through all modules: with torch that takes 0.1 s, and with pandas and
    scikit-learn as long again.

    What is imported stays, and so the collector is told to leave alone what there is after a call that has imported
    something. The price is small: what that very call left alive, in a reference cycle, stays too.
    """

    def __init__(self) -> None:
        self._num_modules = len(sys.modules)

    def collect(self) -> None:
        """After each call: a DDP model in a reference cycle must not outlive its process group."""
        gc.collect()
        if len(sys.modules) > self._num_modules:
            self.leave_modules_alone()

    def leave_modules_alone(self) -> None:
        gc.freeze()
        self._num_modules = len(sys.modules)
