"""Who has the state to go on with when workers were lost, and what it means for the step. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass

from paceline.errors import WorkersLostError


@dataclass(frozen=True)
class Recovery:
    """From the state of `keeper`, which has made `step` steps. If that is one more than before, the step stands: its
    mean was complete, whoever did not live to apply it. Else it is made again."""

    keeper: int
    step: int
    stands: bool


def choose(made: Mapping[int, int], before: int) -> Recovery:
    """Of those that are left, by how many steps they have made; `before` is how many all had made before the loss.

    One that has applied the mean is preferred: nothing is computed twice then. Among equals the lowest rank, since
    their states are the same."""
    keeper = min(made, key=lambda rank: (-made[rank], rank))
    return Recovery(keeper, made[keeper], made[keeper] > before)


def may_replace(num_losses: int, max_retries: int) -> bool:
    """Whether workers may be replaced once more. `num_losses` were before."""
    return max_retries < 0 or num_losses < max_retries


def check_budget(reason: str, num_losses: int, max_retries: int) -> None:
    """WorkersLostError if workers may not be replaced once more."""
    if may_replace(num_losses, max_retries):
        return
    tried = f"after they were replaced {num_losses} time(s)" if num_losses else "and are not replaced"
    raise WorkersLostError(
        f"Workers were lost {tried} (max_retries={max_retries}): {reason}. The logs of the ranks are in the run "
        "folder; raise max_retries if the machine is at fault rather than the model."
    )


def nobody_left(reason: str) -> WorkersLostError:
    return WorkersLostError(
        f"No worker is left that has the state of the model: {reason}. Make a new DistributedSGD and go on from what "
        "you have saved: sgd.restore_checkpoint(...)."
    )
