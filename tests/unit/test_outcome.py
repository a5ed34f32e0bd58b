import threading
from dataclasses import dataclass, replace

import pytest

from paceline.control.attempt import Facts as AllFacts
from paceline.control.attempt import Wish, settle_s
from paceline.control.outcome import Budget, Finish, GiveUp, Restart, Stop, as_exception, conclude
from paceline.errors import ReportMismatchError, SaveMismatchError, TrainFunctionError, WorkersLostError
from paceline.recording.gather import Mismatch
from paceline.recording.ledger import SaveMismatch
from paceline.workers.base import Died, Raised
from paceline.workers.outcome import describe_error, pack_value, raised, returned

BROKEN = Raised(0, "RuntimeError", "Connection closed by peer", "…", RuntimeError("Connection closed by peer"))
OWN = Raised(1, "KeyError", "'lr'", "the worker's traceback", KeyError("lr"))
DEATH = Died(1, "was killed by SIGKILL")


def is_suspect(error):
    return error is BROKEN


def Facts(**facts):
    return AllFacts(2, **facts)


def judge(facts, num_restarts=0, max_retries=3, wish=None):
    budget = Budget(max_retries=max_retries, num_losses=num_restarts)
    return conclude(facts, wish, is_suspect=is_suspect, budget=budget)


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


def test_unequal_saves():
    decision = judge(Facts(mismatch=SaveMismatch((3, 1), (1,))))
    assert type(decision.error) is SaveMismatchError
    assert "rank 1 ended after 1 save(s), while rank 0 has made 3 so far" in str(decision.error)


def test_all_have_returned():
    assert judge(Facts(values={0: "a", 1: "b"})) == Finish()


def test_some_have_not_ended_because_there_is_room():
    assert judge(Facts(grows=True)) == Restart("there is room for more workers", "growth")


STOP, TERMINATE = Wish("stop", 0.0), Wish("terminate", 0.0)


@pytest.mark.parametrize("wish", [STOP, TERMINATE])
@pytest.mark.parametrize(
    "facts",
    [
        {"values": {0: "a", 1: "b"}},
        {"died": [DEATH]},
        {"died": [DEATH], "raised": [BROKEN]},
        {"preempted": {1: "got SIGTERM"}},
        {"preempted": {1: "got SIGTERM"}, "died": [DEATH]},
        {"raised": [BROKEN]},
        {"mismatch": Mismatch((1, 2), (0,))},
        {"mismatch": SaveMismatch((1, 2), (0,))},
        {"grows": True},
        {},
    ],
    ids=[
        "all returned",
        "death",
        "death and echo",
        "notice",
        "notice and death",
        "echo",
        "reports",
        "saves",
        "room",
        "-",
    ],
)
def test_who_wants_the_end_gets_it_and_nothing_is_started_again(facts, wish):
    assert judge(Facts(**facts), wish=wish) == Stop()


@pytest.mark.parametrize("wish", [STOP, TERMINATE])
def test_users_exception_is_raised_whatever_was_wanted(wish):
    decision = judge(Facts(raised=[OWN], preempted={0: "got SIGTERM"}), wish=wish)
    assert type(decision.error) is KeyError


def test_exception_that_could_not_travel():
    decision = judge(Facts(raised=[Raised(0, "Odd", "lock inside", "tb", None)]))
    assert isinstance(decision.error, TrainFunctionError)
    assert "Odd: lock inside" in str(decision.error)


@dataclass(frozen=True)
class Frozen(Exception):
    code: int


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt("x"), GeneratorExit("x"), SystemExit(2), StopIteration(3), Frozen(4)]
)
def test_exception_that_would_mean_something_else_here(error):
    raised = as_exception(Raised(1, type(error).__qualname__, "why", "the worker's traceback", error))
    assert type(raised) is TrainFunctionError
    assert str(raised) == f"{type(error).__qualname__}: why"
    assert "on rank 1" in raised.__notes__[0]
    assert "the worker's traceback" in raised.__notes__[0]


def test_a_broken_collective_waits_longer_for_its_cause_and_a_death_not_at_all():
    suspect = settle_s(Facts(raised=[BROKEN]), is_suspect)
    own = settle_s(Facts(raised=[OWN]), is_suspect)
    assert suspect > own > settle_s(Facts(died=[DEATH], raised=[BROKEN]), is_suspect) == 0


def test_worker_that_was_told_to_leave_and_died_explains_the_exceptions_of_others():
    facts = Facts(died=[DEATH], raised=[replace(OWN, rank=0)], preempted={1: "got SIGTERM"})
    assert judge(facts) == Restart("rank 1 got SIGTERM", "preemption")


@pytest.mark.parametrize(
    ("cause", "expected"),
    [("loss", Budget(num_losses=1)), ("preemption", Budget(num_preemptions=1)), ("growth", Budget())],
)
def test_each_cause_has_its_own_budget_and_growth_costs_nothing(cause, expected):
    assert Budget().after(cause) == expected


@pytest.mark.parametrize(("leaving", "outcome"), [(set(), Finish), ({0}, Restart)])
def test_preempted_after_the_last_step(leaving, outcome):
    """What all ranks return by themselves is the result. If one has seen should_stop(), it may have left early."""
    facts = Facts(values={0: "a", 1: "b"}, preempted={1: "got SIGTERM"}, leaving=leaving)
    assert isinstance(judge(facts), outcome)


def test_preempted_while_a_rank_is_not_done():
    assert isinstance(judge(Facts(values={0: "a"}, preempted={1: "got SIGTERM"})), Restart)


def test_value_that_cannot_travel_is_not_called_what_we_have_put_it_into():
    """A run packs what the function returned together with what it knows of the group."""
    with pytest.raises(TrainFunctionError, match="What the function returned cannot be pickled") as caught:
        pack_value((threading.Lock(), True))
    assert "tuple" not in str(caught.value)


@pytest.mark.parametrize("kind", [ValueError, SystemExit])
def test_long_message_travels_once(kind):
    """It would else be in the message, in the traceback and in the exception, of every rank, and in the run folder."""
    message = "first " + 1_000_000 * "x" + " last"
    error = describe_error(kind(message))
    _, told, text, packed = error
    for part in (told, text):
        assert len(part) < 101_000
        assert "first xxx" in part
        assert "xxx last" in part
        assert "characters are left out" in part
    assert message in str(raised(0, error).exception)
    assert len(packed) < 1_001_000


class Unwelcome:
    """Travels, and cannot be had where it arrives."""

    def __init__(self, error):
        self.error = error

    def __reduce__(self):
        return _raise, (self.error,)


def _raise(error):
    raise error


@pytest.mark.parametrize("error", [ZeroDivisionError("of the user's"), SystemExit(3)])
def test_value_that_cannot_be_unpickled_is_an_error_of_its_rank_and_ends_no_driver(error):
    event = returned(1, pack_value(Unwelcome(error)))
    assert (event.rank, event.type_name) == (1, type(error).__name__)
    with pytest.raises(TrainFunctionError, match="cannot unpickle the value"):
        raise as_exception(event)
