"""Whether the run was asked to end: by `Trainer.stop()`, SIGTERM, Ctrl-C, or because a worker will be taken away."""

from enum import StrEnum

from paceline.errors import ArgumentError, TrainerStateError
from paceline.rank_session import Session


class PreemptMode(StrEnum):
    """Who asks. In none of them does a call wait for other ranks, as long as nobody wants an end."""

    WorkersAskChief = "WorkersAskChief"
    """All ranks ask, equally often; they hear of it at the same call, as from `paceline.should_stop()`."""
    ChiefOnly = "ChiefOnly"
    """The chief asks, and tells the others in its own way; they get an error."""
    WorkersAskMaster = "WorkersAskMaster"
    """Each rank asks for itself, and hears of it as soon as it is known there: maybe sooner than others."""


class PreemptContext:
    def __init__(self, running: Session, mode: PreemptMode | str = PreemptMode.WorkersAskChief):
        self._session, self._mode = running, mode_of(mode)

    def should_preempt(self, auto_ack: bool = True) -> bool:
        """Whether to save and leave. With `auto_ack` the first true answer is acknowledged: the run ends as STOPPED, to
        be continued later, when the block ends. Without it, that is so after `acknowledge_preemption_signal()`."""
        if self._mode is PreemptMode.ChiefOnly and self._session.place.world_rank:
            raise TrainerStateError(
                "should_preempt() was called on rank "
                f"{self._session.place.world_rank} with PreemptMode.ChiefOnly: ask on the chief alone, and tell the "
                "others; or use PreemptMode.WorkersAskChief and ask on all ranks."
            )
        agrees = self._mode is PreemptMode.WorkersAskChief
        is_wanted = self._session.should_stop() if agrees else self._session.look()
        if is_wanted and auto_ack:
            self._session.leave()
        return is_wanted

    def acknowledge_preemption_signal(self) -> None:
        """What the script does from now on, it does because it was asked to end. Idempotent."""
        self._session.leave()


def mode_of(mode: PreemptMode | str) -> PreemptMode:
    try:
        return PreemptMode(mode)
    except ValueError:
        names = ", ".join(PreemptMode)
        raise ArgumentError(f"preempt_mode={mode!r}: expected one of {names}.") from None
