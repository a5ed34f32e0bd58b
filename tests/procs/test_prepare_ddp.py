"""The helpers in real gloo groups: several ranks, killed ranks, and one rank against two."""

import prepare_ranks as ranks
import pytest
import torch

from paceline import Trainer
from paceline.errors import WorkersLostError


@pytest.fixture
def on_ranks(tmp_path):
    """Calls a function on all ranks of a group; answers with what each returned."""

    def on_ranks(fn, *args, num_workers=2):
        with Trainer(num_workers=num_workers, engine="local", max_retries=0, logdir=tmp_path / "runs") as trainer:
            return trainer.run(lambda: fn(*args))

    return on_ranks


def test_killed_and_resumed_equals_uninterrupted_to_the_last_bit(on_ranks, tmp_path):
    unbroken = on_ranks(ranks.train)
    assert len(unbroken[0]["losses"]) == ranks.NUM_EPOCHS * 4
    assert unbroken[0]["losses"] != unbroken[1]["losses"]
    assert all(map(torch.equal, unbroken[0]["weights"], unbroken[1]["weights"]))

    with pytest.raises(WorkersLostError, match="SIGKILL"):
        on_ranks(ranks.train, tmp_path, 6)
    resumed = on_ranks(ranks.train, tmp_path)
    for rank in range(2):
        assert resumed[rank]["losses"] == unbroken[rank]["losses"]
        assert all(map(torch.equal, resumed[rank]["weights"], unbroken[rank]["weights"]))


def test_one_rank_equals_two(on_ranks):
    alone = on_ranks(ranks.one_epoch, 8, num_workers=1)[0]
    two = on_ranks(ranks.one_epoch, 4)
    assert sorted(alone["seen"]) == list(range(32))
    for step in range(4):
        together = [sample for rank in two for sample in rank["seen"][4 * step : 4 * step + 4]]
        assert sorted(together) == sorted(alone["seen"][8 * step : 8 * step + 8])
    for rank in two:
        for mine, theirs in zip(rank["weights"], alone["weights"], strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=0)


def test_models_in_a_group(on_ranks):
    answers = on_ranks(ranks.shapes)
    for facts in answers:
        assert facts["wrapped"] == [True, False, False]
        assert facts["again"]
        assert facts["keys"]
        assert facts["dtype"] is torch.float32
        assert facts["narrow"]
        assert facts["kwargs"]
    assert torch.equal(answers[0]["grad"], answers[1]["grad"])
