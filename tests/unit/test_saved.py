"""Where the next attempt of a run begins, and whose silence means something: values, without a run."""

from paceline.checkpoints import CheckpointInfo, CheckpointStore, CheckpointStrategy, snapshot
from paceline.control.attempt import Attempt
from paceline.control.gather import Gather
from paceline.control.plan import Plan
from paceline.control.saved import ResumePoint, Saved
from paceline.workers.base import Asked


def plan(root, **changes):
    given = {"checkpoint": None, "checkpoint_root": str(root), "strategy": CheckpointStrategy(), **changes}
    return Plan(fn=print, config={}, takes_config=False, **given)


def commit(root, id, iteration):
    return CheckpointStore(root).commit(id, snapshot({"id": id}), iteration=iteration)


def test_new_run_begins_with_what_it_was_given(tmp_path):
    assert Saved(plan(tmp_path)).resume_point() == ResumePoint(None, 0, 1)
    given = plan(tmp_path, checkpoint="elsewhere", first_iteration=7)
    assert Saved(given).resume_point() == ResumePoint("elsewhere", 7, 1)
    assert Saved(plan(tmp_path, checkpoint={"a": 1})).resume_point().name == "a dict given to run()"


def test_run_goes_on_from_the_newest_checkpoint_it_is_told_of_or_finds(tmp_path):
    saved = Saved(plan(tmp_path))
    first, second = commit(tmp_path, 1, 10), commit(tmp_path, 2, 20)
    assert saved.is_news(first)
    assert not saved.is_news(first)
    assert saved.look() == [second], "a worker died before it could tell"
    assert saved.look() == []
    assert saved.resume_point() == ResumePoint(second.path, 20, 3)


def test_checkpoints_of_a_former_life_are_not_its_own(tmp_path):
    commit(tmp_path, 1, 10)
    saved = Saved(plan(tmp_path, checkpoint="restored", first_checkpoint_id=2, first_iteration=5))
    assert saved.look() == []
    assert saved.resume_point() == ResumePoint("restored", 5, 2)


def test_state_in_memory_counts_where_nothing_is_written(tmp_path):
    saved = Saved(plan(tmp_path, strategy=CheckpointStrategy(num_to_keep=0)))
    saved.kept = ({"step": 3}, 3)
    assert saved.look() == []
    assert saved.resume_point() == ResumePoint({"step": 3}, 3, 1)


def test_older_checkpoint_is_no_news(tmp_path):
    saved = Saved(plan(tmp_path))
    assert saved.is_news(CheckpointInfo(2, "two", None, 2, 0.0, 0))
    assert not saved.is_news(CheckpointInfo(1, "one", None, 1, 0.0, 0))
    assert saved.latest.path == "two"


class Answers:
    def __init__(self):
        self.given = []

    def answer(self, question, value):
        self.given.append(question.rank)


def test_rank_that_waits_for_its_turn_or_has_returned_is_not_silent():
    attempt = Attempt(Answers(), Gather(3), [1.0, 2.0, 3.0])
    assert attempt.silent_rank() == 0
    attempt.turns.append(Asked(0, 1, "turn", 4))
    assert attempt.silent_rank() == 1
    attempt.values[1] = None
    assert attempt.silent_rank() == 2
    attempt.values[2] = None
    assert attempt.silent_rank() is None


def test_turn_is_granted_when_the_next_step_is_wanted_and_the_clock_starts_anew():
    group = Answers()
    attempt = Attempt(group, Gather(2), [0.0, 0.0])
    attempt.turns += [Asked(0, 1, "turn", 4), Asked(1, 1, "turn", 5)]
    attempt.wanted = 4
    attempt.grant_turns(now=9.0)
    assert group.given == [0]
    assert attempt.progress == [9.0, 0.0]
    assert [turn.rank for turn in attempt.turns] == [1]
