"""What the callbacks of all libraries share, without any of the libraries."""

import math
import subprocess
import sys

import pytest

import paceline
from paceline import BackendConfig, CheckpointStrategy, Trainer, session
from paceline.errors import TrainerStateError
from paceline.integrations.joining import begun_from, join, scored, with_file


@pytest.fixture
def saved(tmp_path):
    """The path of a checkpoint with a file."""
    folder = tmp_path / "files"
    folder.mkdir()
    (folder / "state").write_text("of the trainer")

    def save():
        paceline.save_checkpoint(folder, epoch=1)

    with Trainer(backend=BackendConfig(), num_workers=0, logdir="integrations_shared") as trainer:
        trainer.run(save)
    return trainer.latest_checkpoint_path


def in_run(function, **arguments):
    """What a function returns that is given the session of a run."""
    with Trainer(backend=BackendConfig(), num_workers=0, logdir="integrations_shared") as trainer:
        [value] = trainer.run(lambda: function(session.current()), **arguments)
    return value


def test_run_goes_on_from_a_checkpoint_that_has_the_file(saved):
    assert in_run(lambda running: begun_from(running, "state")["epoch"], checkpoint=saved) == 1
    assert in_run(lambda running: begun_from(running, "another"), checkpoint=saved) is None
    assert in_run(lambda running: begun_from(running, "state")) is None
    assert in_run(lambda running: begun_from(running, "state"), checkpoint={"epoch": 1}) is None, "it has no files"


@pytest.mark.parametrize("has_looked", [False, True])
def test_who_begins_after_something_was_saved_goes_on_from_nothing(saved, tmp_path, has_looked):
    """Neither from what was saved by a trainer before, nor again from what that one began with."""
    later = tmp_path / "later"
    later.mkdir()
    (later / "state").write_text("of a trainer that was before")

    def look(running):
        assert not has_looked or begun_from(running, "state")["epoch"] == 1
        paceline.save_checkpoint(later, epoch=2)
        return begun_from(running, "state")

    assert in_run(look, checkpoint=saved) is None


def test_file_is_added_to_those_of_a_checkpoint_and_removed_with_the_run(saved):
    def look(running):
        directory = begun_from(running, "state").directory
        folder = with_file(directory, "own", b"of this rank", running)
        assert (folder / "state").read_text() == "of the trainer"
        assert (folder / "own").read_bytes() == b"of this rank"
        replaced = with_file(directory, "state", b"another", running)
        assert (replaced / "state").read_bytes() == b"another"
        assert [file.name for file in directory.iterdir()] == ["state"]
        assert (directory / "state").read_text() == "of the trainer"
        return folder, replaced

    assert not any(folder.exists() for folder in in_run(look, checkpoint=saved))


def test_trainer_that_does_not_see_the_others_is_refused():
    with pytest.raises(TrainerStateError, match=r"rank 0 sees 2 process\(es\), and the run has 1 workers: do this\."):
        in_run(lambda running: join(running, "a trainer", 2, "do this"))


def test_second_trainer_in_a_run_is_warned_of(caplog):
    def train_two(running):
        one, other = object(), object()
        join(running, one, 1, "")
        join(running, one, 1, "")
        assert not caplog.records
        join(running, other, 1, "")

    in_run(train_two)
    assert "A second trainer saves into this run" in caplog.text


def test_checkpoint_before_the_first_evaluation_is_the_worst(caplog):
    def save(running):
        for kept in ({"loss": 3.0}, {"loss": 2.0}, {"loss": 2.0, "val_loss": 1.0}):
            running.save_checkpoint(scored(running, kept), None, None)

    by = CheckpointStrategy(checkpoint_score_attribute="val_loss", checkpoint_score_order="min")
    with Trainer(backend=BackendConfig(), num_workers=0, logdir="integrations_shared") as trainer:
        trainer.run(lambda: save(session.current()), checkpoint_strategy=by)
    scores = [one.score for one in paceline.load_run(trainer.latest_run_dir).checkpoints]
    assert (*map(math.isnan, scores[:2]), scores[2]) == (True, True, 1.0)
    assert trainer.best_checkpoint["val_loss"] == 1.0
    assert caplog.text.count("ranked by 'val_loss', which has not been logged yet") == 1
    assert in_run(lambda running: scored(running, {"loss": 3.0})) == {"loss": 3.0}, "the newest is the best"


@pytest.mark.parametrize(("name", "missing"), [("transformers", "torch"), ("lightning", "lightning")])
def test_missing_library_is_an_error_with_the_line_that_installs_it(name, missing):
    code = f"import sys; sys.modules[{missing!r}] = None; import paceline.integrations.{name}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    told = f"paceline.integrations.{name} needs the package '{missing}', which is not installed."
    assert f"{told} Install it with: pip install 'paceline[integrations]'" in done.stderr
