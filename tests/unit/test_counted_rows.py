"""What counts of the rows that were recorded, in runs that are written down by hand: and what an audit makes of it."""

import json

import numpy as np
import pytest

import paceline
from paceline.data import audit, diff
from paceline.data.row_codec import DATA, MESSAGE, encoded_end, encoded_ids, item
from paceline.errors import ArgumentError, RunDamagedError
from paceline.runs.rows_file import RowsFile


class Written:
    """A run folder, as a driver would leave it. `num_rows` is what the dataset has."""

    def __init__(self, path, num_rows=8, **about):
        self.path = path / "run_001"
        self.path.mkdir(parents=True)
        self.file = RowsFile(self.path / "rows.bin")
        self.about = {"key": "k", "name": None, "column": None, "num_rows": num_rows, "is_cut": False}
        self.about |= {"sources": [[num_rows, 1]]} | about
        self.steps, self.events, self.numbers = [], [], {}
        (self.path / "run.json").write_text("{}")

    def begins(self, number, world_size=1, first_id=1, checkpoint=None, ranks=None, iteration=0, is_given=False):
        self.attempt = number
        self.file.append_begin(
            {"number": number, "world_size": world_size, "first_id": first_id, "iteration": iteration}
            | {"checkpoint": checkpoint, "ranks": ranks, "is_given": is_given}
        )
        return self

    def message(self, rank, step, save, *items):
        number = self.numbers.setdefault((self.attempt, rank), 0)
        self.numbers[self.attempt, rank] += 1
        head = b"" if number else item(DATA, 0, 0, json.dumps(self.about).encode())
        self.file.append_rows(self.attempt, rank, MESSAGE.pack(step, save, number) + head + b"".join(items))
        return self

    def rows(self, rank, step, save, ids, epoch=0):
        return self.message(rank, step, save, encoded_ids(0, epoch, np.array(ids)))

    def ends(self, rank, step, save, epoch=0, left_out=0):
        return self.message(rank, step, save, encoded_end(0, epoch, left_out))

    def reports(self, *steps):
        self.steps += [{"step": step, "attempt": self.attempt, "ranks": [{}]} for step in steps]
        return self

    def event(self, **fields):
        self.events.append(fields)
        return self

    def done(self):
        self.file.close()
        for name, lines in (("metrics.jsonl", self.steps), ("events.jsonl", self.events)):
            (self.path / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
        return self.path


@pytest.fixture
def run(tmp_path):
    return lambda name="a", **about: Written(tmp_path / name, **about)


def numbers(report, place=0):
    epoch = report.epochs[place]
    return epoch.state, epoch.once, epoch.twice, epoch.never


def test_killed_between_report_and_save(run):
    written = run().begins(0).rows(0, 1, 1, [0, 1]).rows(0, 2, 2, [2, 3]).rows(0, 3, 2, [4, 5])
    written.begins(1, first_id=2, checkpoint=1, ranks=[0], iteration=1)
    written.rows(0, 2, 2, [2, 3]).rows(0, 3, 2, [4, 5]).rows(0, 4, 2, [6, 7]).ends(0, 5, 2)
    report = audit(written.done())
    assert numbers(report) == ("finished", 8, 0, 0)
    assert report.is_clean
    assert report.epochs[0].steps == (1, 4)


def test_saved_before_it_was_reported(run):
    """The rows of step 2 are in checkpoint 1, which was saved when one step was reported."""
    written = run().begins(0).rows(0, 1, 1, [0, 1]).rows(0, 2, 1, [2, 3]).rows(0, 3, 2, [4, 5])
    written.begins(1, first_id=2, checkpoint=1, ranks=[0], iteration=1)
    written.rows(0, 2, 2, [4, 5]).rows(0, 3, 2, [6, 7]).ends(0, 4, 2)
    report = audit(written.done())
    assert (numbers(report), report.is_clean) == (("finished", 8, 0, 0), True)


def test_ranks_out_of_step_when_they_saved(run):
    """Rank 1 had two batches more than rank 0 when it saved: the next attempt deals what is left."""
    written = run().begins(0, world_size=2).rows(0, 1, 1, [0]).rows(0, 2, 2, [2])
    written.rows(1, 1, 1, [1]).rows(1, 2, 1, [3]).rows(1, 3, 1, [5]).rows(1, 4, 2, [7])
    written.begins(1, world_size=2, first_id=2, checkpoint=1, ranks=[0, 1], iteration=1)
    written.rows(0, 2, 2, [2, 4]).rows(1, 2, 2, [6, 7]).ends(0, 3, 2).ends(1, 3, 2)
    report = audit(written.done())
    assert (numbers(report), report.is_clean) == (("finished", 8, 0, 0), True)


@pytest.mark.parametrize("saves_first", [False, True])
def test_rank_0_saves_alone(run, saves_first):
    """Of rank 1 counts what it had taken up to the step that rank 0 was in."""
    step = 2 - saves_first  # as it is numbered when it was reported
    written = run().begins(0, world_size=2).rows(0, 1, 1, [0]).rows(0, 2, 1, [2])
    written.rows(1, 1, 1, [1]).rows(1, 2, 1, [3]).rows(1, 3, 1, [5])
    written.begins(1, world_size=2, first_id=2, checkpoint=1, ranks=[0], iteration=step)
    written.rows(0, step + 1, 2, [4, 6]).rows(1, step + 1, 2, [5, 7]).ends(0, step + 2, 2).ends(1, step + 2, 1)
    report = audit(written.done())
    assert (numbers(report), report.is_clean) == (("finished", 8, 0, 0), True)


def test_attempts_that_no_checkpoint_leads_to_do_not_count(run):
    written = run().begins(0).rows(0, 1, 1, [0, 1]).rows(0, 2, 2, [2, 3])
    written.begins(1, first_id=2, checkpoint=1, ranks=[0], iteration=1).rows(0, 2, 2, [2, 3]).rows(0, 3, 2, [4])
    written.begins(2, first_id=2, checkpoint=1, ranks=[0], iteration=1).rows(0, 2, 2, [2, 3, 4]).rows(0, 3, 3, [5])
    written.begins(3, first_id=3, checkpoint=2, ranks=[0], iteration=2).rows(0, 3, 3, [5, 6, 7]).ends(0, 4, 3)
    report = audit(written.done())
    assert (numbers(report), report.is_clean) == (("finished", 8, 0, 0), True)


def test_attempt_that_did_nothing_takes_nothing_back(run):
    """As Run.metrics, which has the steps of the one before."""
    written = run().begins(0).rows(0, 1, 1, [0, 1]).rows(0, 2, 2, [2, 3]).reports(1, 2)
    path = written.begins(1, first_id=2, checkpoint=1, ranks=[0], iteration=1).done()
    assert numbers(audit(path)) == ("unfinished", 4, 0, None)
    assert [*paceline.load_run(path).metrics["step"]] == [1, 2]


def test_attempt_that_only_reported_does(run):
    written = run().begins(0).rows(0, 1, 1, [0, 1]).rows(0, 2, 2, [2, 3]).reports(1, 2)
    path = written.begins(1, first_id=2, checkpoint=1, ranks=[0], iteration=1).reports(2).done()
    assert numbers(audit(path)) == ("unfinished", 2, 0, None)


def test_rows_that_come_again(run):
    """The function did not go on where the checkpoint was."""
    written = run().begins(0).rows(0, 1, 1, [0, 1]).rows(0, 2, 2, [2, 3])
    written.begins(1, first_id=2, checkpoint=1, ranks=[0], iteration=1)
    written.rows(0, 2, 2, [0, 1, 2]).rows(0, 3, 2, [3, 4, 5]).ends(0, 4, 2)
    report = audit(written.done())
    assert numbers(report) == ("finished", 4, 2, 2)
    assert not report.is_clean
    assert str(report.epochs[0].twice_rows[1]) == "row 1 at step 1 (rank 0) and at step 2 (rank 0)"
    assert report.epochs[0].never_rows == (6, 7)
    assert "epoch 0: 2 rows never came: 6, 7 (by the numbers of its rows)\nnot clean" in str(report)
    assert "<td" in report._repr_html_()


def test_unfinished_and_left_early(run):
    path = run().begins(0).rows(0, 1, 1, [0, 1]).rows(0, 2, 1, [5], epoch=1).done()
    report = audit(path)
    assert [numbers(report, place) for place in (0, 1)] == [("left early", 2, 0, None), ("unfinished", 1, 0, None)]
    assert report.is_clean


def test_left_out_as_it_was_asked(run):
    report = audit(run().begins(0).rows(0, 1, 1, [*range(6)]).ends(0, 2, 1, left_out=2).done())
    assert (numbers(report), report.is_clean) == (("finished", 6, 0, 2), True)


def test_by_what_it_is_known_which_rows_there_are(run):
    by_other = run("other", num_rows=None, sources=[[None, 1]]).begins(0).rows(0, 1, 1, [0, 1, 2]).ends(0, 2, 1)
    by_other.rows(0, 2, 1, [0, 2], epoch=1).ends(0, 3, 1, epoch=1)
    epochs = audit(by_other.done()).epochs
    assert [(one.never, one.never_rows, one.known_by) for one in epochs] == [
        (0, (), "the rows of its other epochs"),
        (1, (1,), "the rows of its other epochs"),
    ]
    by_total = run("total", column="id").begins(0).rows(0, 1, 1, [70, 80]).ends(0, 2, 1)
    [epoch] = audit(by_total.done()).epochs
    assert (epoch.never, epoch.known_by) == (6, "the number of its rows")
    alone = run("alone", num_rows=None, sources=[[None, 1]]).begins(0).rows(0, 1, 1, [0]).ends(0, 2, 1)
    assert numbers(audit(alone.done())) == ("finished", 1, 0, None)
    data = paceline.data.from_numpy({"id": np.array([70, 80, 90])})
    [epoch] = audit(by_total.path, dataset=data).epochs
    assert (epoch.never, epoch.never_rows, epoch.known_by) == (1, (90,), "the dataset that was given")


def test_repeated_rows_come_as_often_as_they_should(run):
    about = {"num_rows": 4, "sources": [[2, 2]]}
    good = run("good", **about).begins(0).rows(0, 1, 1, [0, 1]).rows(0, 2, 1, [1, 0]).ends(0, 3, 1)
    assert numbers(audit(good.done())) == ("finished", 2, 0, 0)
    bad = run("bad", **about).begins(0).rows(0, 1, 1, [0, 1]).rows(0, 2, 1, [0, 0]).ends(0, 3, 1)
    assert numbers(audit(bad.done())) == ("finished", 0, 1, 1)


def test_run_that_began_with_anothers_checkpoint(run):
    written = run().begins(0, first_id=5, is_given=True).rows(0, 1, 5, [6, 7]).ends(0, 2, 5)
    report = audit(written.rows(0, 2, 5, [*range(8)], epoch=1).ends(0, 3, 5, epoch=1).done())
    assert numbers(report) == ("finished, begun in another run", 2, 0, None)
    assert (numbers(report, 1), report.is_clean) == (("finished", 8, 0, 0), True)


@pytest.mark.parametrize("is_own", [True, False])
def test_trial_that_goes_on_with_a_checkpoint_of_its_own(run, is_own):
    written = run().begins(0).rows(0, 1, 1, [*range(6)])
    written.begins(1, first_id=2, checkpoint=1, ranks=[0], is_given=True, iteration=1).rows(0, 2, 2, [6, 7])
    written.ends(0, 3, 2)
    if is_own:
        written.event(kind="checkpoint", id=1)
    expected = ("finished", 8, 0, 0) if is_own else ("finished, begun in another run", 2, 0, None)
    assert numbers(audit(written.done())) == expected


def test_lost_and_repeated_records(run):
    written = run().begins(0).rows(0, 1, 1, [0, 1])
    written.numbers[0, 0] = 0
    written.rows(0, 1, 1, [0, 1]).rows(0, 2, 1, [2])  # a driver that was interrupted wrote the first one twice
    report = audit(written.done())
    assert (numbers(report)[1:3], report.num_damaged, report.is_clean) == ((3, 0), 0, True)
    lost = run("lost").begins(0).rows(0, 1, 1, [0, 1])
    lost.numbers[0, 0] = 4
    report = audit(lost.rows(0, 2, 1, [2]).done())
    assert (report.num_damaged, report.is_clean) == (3, False)
    assert "3 records of rows are lost" in str(report)
    full = run("full").begins(0).rows(0, 1, 1, [0]).event(kind="lines_lost", num_rows=2)
    assert audit(full.done()).num_damaged == 2


def test_forged_folders_give_an_answer_or_an_error_of_ours(run):
    fields = {"number": 0, "world_size": 1, "first_id": 1, "iteration": 0, "checkpoint": None}
    for place, (name, wrong) in enumerate(
        (name, wrong) for name in (*fields, "ranks") for wrong in ("x", -1, 2**63, 1e300, None, [None], {"a": 1}, True)
    ):
        written = run(str(place))
        written.attempt = 0
        written.file.append_begin({**fields, name: wrong})
        path = written.rows(0, 1, 1, [0]).reports(1).done()
        (path / "metrics.jsonl").write_text('{"attempt": [1]}\n')
        str(audit(path))
    for place, about in enumerate(({"sources": 3}, {"sources": [[1]]}, {"sources": [[2**60, 1]]}, {"num_rows": "x"})):
        path = run(f"about{place}", **about).begins(0).rows(0, 1, 1, [0]).ends(0, 2, 1).done()
        try:
            str(audit(path))
        except RunDamagedError:
            assert about == {"sources": [[1]]}
    nameless = run("nameless").begins(0)
    nameless.numbers[0, 0] = 1
    with pytest.raises(RunDamagedError, match="of which nobody says"):
        audit(nameless.rows(0, 1, 1, [0]).done())


def test_run_that_did_not_record(run):
    path = run().done()
    (path / "rows.bin").unlink()
    with pytest.raises(ArgumentError, match=r"no rows\.bin.*record_ids=True"):
        audit(path)


def test_difference_of_two_runs(run):
    one = run("one").begins(0, world_size=2).rows(0, 1, 1, [0, 1]).rows(1, 1, 1, [2, 3]).rows(0, 2, 1, [4, 5])
    same = run("same").begins(0).rows(0, 1, 1, [3, 2, 1, 0]).rows(0, 2, 1, [5, 4])
    other = run("other").begins(0).rows(0, 1, 1, [3, 2, 1, 0]).rows(0, 2, 1, [5, 6, 7])
    short = run("short").begins(0).rows(0, 1, 1, [3, 2, 1, 0])
    paths = [each.done() for each in (one, same, other, short)]
    assert diff(paths[0], paths[1]) is None
    first = diff(paths[0], paths[2])
    assert (first.step, first.only_a, first.only_b, first.num_only_b) == (2, (4,), (6, 7), 2)
    assert str(first) == (
        "step 2, dataset: one/run_001 has 1 rows that the other has not: 4; other/run_001 has 2 rows that the other "
        "has not: 6, 7"
    )
    assert (diff(paths[3], paths[0]).step, diff(paths[3], paths[0]).only_b) == (2, (4, 5))
