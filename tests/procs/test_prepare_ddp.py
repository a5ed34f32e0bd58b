"""The helpers in real gloo groups: several ranks, killed ranks, and one rank against two."""

from multiprocessing import resource_tracker
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp


@pytest.fixture(scope="module", autouse=True)
def _tracker():
    """Python starts this process with the first one that it spawns; here it ends with the module."""
    resource_tracker.ensure_running()
    yield
    resource_tracker._resource_tracker._stop()


@pytest.fixture
def ranks(monkeypatch):
    """The module that the spawned processes import by name."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    import prepare_ranks

    return prepare_ranks


@pytest.fixture
def spawn(ranks, tmp_path_factory):
    """Run a function on all ranks; answers with what each returned and the folder they shared."""

    def run(fn, *args, world_size=2):
        folder = tmp_path_factory.mktemp(fn.__name__)
        mp.spawn(ranks.run_rank, (world_size, str(folder), fn, args), nprocs=world_size)
        return [torch.load(folder / f"answer_{rank}") for rank in range(world_size)]

    return run


def test_killed_and_resumed_equals_uninterrupted_to_the_last_bit(ranks, spawn, tmp_path):
    unbroken = spawn(ranks.train, None, None)
    assert len(unbroken[0]["losses"]) == ranks.NUM_EPOCHS * 4
    assert unbroken[0]["losses"] != unbroken[1]["losses"]
    assert all(map(torch.equal, unbroken[0]["weights"], unbroken[1]["weights"]))

    with pytest.raises(mp.ProcessExitedException, match="SIGKILL"):
        mp.spawn(ranks.run_rank, (2, str(tmp_path), ranks.train, (6, None)), nprocs=2)
    resumed = spawn(ranks.train, None, str(tmp_path))
    for rank in range(2):
        assert resumed[rank]["losses"] == unbroken[rank]["losses"]
        assert all(map(torch.equal, resumed[rank]["weights"], unbroken[rank]["weights"]))


def test_one_rank_equals_two(ranks, spawn):
    alone = spawn(ranks.one_epoch, 8, world_size=1)[0]
    two = spawn(ranks.one_epoch, 4)
    assert sorted(alone["seen"]) == list(range(32))
    for step in range(4):
        together = [sample for rank in two for sample in rank["seen"][4 * step : 4 * step + 4]]
        assert sorted(together) == sorted(alone["seen"][8 * step : 8 * step + 8])
    for rank in two:
        for mine, theirs in zip(rank["weights"], alone["weights"], strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=0)


def test_models_in_a_group(ranks, spawn):
    answers = spawn(ranks.shapes)
    for facts in answers:
        assert facts["wrapped"] == [True, False, False]
        assert facts["again"]
        assert facts["keys"]
        assert facts["dtype"] is torch.float32
        assert facts["narrow"]
        assert facts["kwargs"]
    assert torch.equal(answers[0]["grad"], answers[1]["grad"])
