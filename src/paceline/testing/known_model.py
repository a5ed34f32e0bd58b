"""A model whose every loss is known in closed form, so that tests can be exact."""

from dataclasses import dataclass


@dataclass(frozen=True)
class KnownModel:
    """One weight w, trained by gradient descent on (w - target)² from w = 0.

    Each step multiplies the distance to the target by (1 - 2·lr). With `lr` and `target` powers of two, every value is
    exact in binary floating point, whatever the number of ranks that average it.
    """

    lr: float = 0.25
    target: float = 1.0

    def weight_after(self, num_steps: int) -> float:
        return self.target * (1 - (1 - 2 * self.lr) ** num_steps)

    def loss_at(self, step: int) -> float:
        """The loss before the given step, counted from 0."""
        return (self.weight_after(step) - self.target) ** 2
