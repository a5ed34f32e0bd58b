import pytest

from paceline.control.failure import Budget, Facts, GiveUp, Restart, decide, settle_s
from paceline.control.gather import Mismatch
from paceline.errors import ReportMismatchError, TrainFunctionError, WorkersLostError
from paceline.workers.base import Died, Raised

BROKEN = Raised(0, "RuntimeError", "Connection closed by peer", "…", RuntimeError("Connection closed by peer"))
OWN = Raised(1, "KeyError", "'lr'", "the worker's traceback", KeyError("lr"))
DEATH = Died(1, "was killed by SIGKILL")


def is_suspect(error):
    return error is BROKEN


def judge(facts, num_restarts=0, max_retries=3):
    return decide(facts, is_suspect=is_suspect, budget=Budget(max_retries=max_retries, num_losses=num_restarts))


def test_worker_is_killed():
    assert judge(Facts(died=[DEATH])) == Restart("rank 1 was killed by SIGKILL")


def test_death_outranks_the_echo_of_other_ranks():
    assert isinstance(judge(Facts(died=[DEATH], raised=[BROKEN])), Restart)


@pytest.mark.parametrize(("max_retries", "allowed"), [(0, 0), (1, 1), (3, 3)])
def test_max_retries_is_the_number_of_restarts(max_retries, allowed):
    decisions = [judge(Facts(died=[DEATH]), restarts, max_retries) for restarts in range(allowed + 1)]
    assert all(isinstance(decision, Restart) for decision in decisions[:-1])
    assert isinstance(decisions[-1], GiveUp)
    assert isinstance(decisions[-1].error, WorkersLostError)
    assert f"max_retries={max_retries}" in str(decisions[-1].error)


def test_negative_max_retries_never_gives_up():
    assert isinstance(judge(Facts(died=[DEATH]), num_restarts=1000, max_retries=-1), Restart)


def test_user_exception_keeps_its_type_and_names_rank_and_traceback():
    decision = judge(Facts(raised=[BROKEN, OWN]))
    assert isinstance(decision, GiveUp)
    assert type(decision.error) is KeyError
    notes = "\n".join(decision.error.__notes__)
    assert "rank 1" in notes
    assert "the worker's traceback" in notes
    assert "Connection closed" in notes, "what other ranks said is not hidden either"


def test_broken_collective_alone_is_raised_as_it_is():
    decision = judge(Facts(raised=[BROKEN]))
    assert isinstance(decision, GiveUp)
    assert decision.error is BROKEN.exception


def test_user_exception_outranks_unequal_reports():
    mismatch = Mismatch((1, 2), (0,))
    assert type(judge(Facts(raised=[OWN], mismatch=mismatch)).error) is KeyError
    assert type(judge(Facts(raised=[BROKEN], mismatch=mismatch)).error) is ReportMismatchError


def test_exception_that_could_not_travel():
    decision = judge(Facts(raised=[Raised(0, "Odd", "lock inside", "tb", None)]))
    assert isinstance(decision.error, TrainFunctionError)
    assert "Odd: lock inside" in str(decision.error)


def test_a_broken_collective_waits_longer_for_its_cause_and_a_death_not_at_all():
    suspect = settle_s(Facts(raised=[BROKEN]), is_suspect)
    own = settle_s(Facts(raised=[OWN]), is_suspect)
    assert suspect > own > settle_s(Facts(died=[DEATH], raised=[BROKEN]), is_suspect) == 0
