"""The place of a process as its launcher tells it."""

import pytest

import paceline
from paceline.errors import ArgumentError
from paceline.testing import as_worker
from paceline.workers.place import Place, place_from_environ, rank_environ


def test_torchrun():
    environ = {"RANK": "3", "LOCAL_RANK": "1", "GROUP_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
    assert place_from_environ(environ) == Place(3, 1, 1, 4, 2)


def test_what_we_tell_a_worker_reads_back():
    place = Place(5, 1, 2, 6, 2)
    assert place_from_environ(rank_environ(place)) == place


def test_a_worker_looks_launched(monkeypatch):
    """By what Lightning asks, which otherwise starts processes of its own."""
    from torch.distributed import is_torchelastic_launched

    assert not is_torchelastic_launched()
    for name, value in rank_environ(Place(1, 1, 0, 2, 2)).items():
        monkeypatch.setenv(name, value)
    assert is_torchelastic_launched()


def test_launcher_that_sets_rank_and_world_size_only():
    assert place_from_environ({"RANK": "1", "WORLD_SIZE": "2"}) == Place(1, 1, 0, 2, 2)


def test_srun():
    environ = {
        "SLURM_PROCID": "3",
        "SLURM_LOCALID": "1",
        "SLURM_NODEID": "1",
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_NTASKS_PER_NODE": "2",
    }
    assert place_from_environ(environ) == Place(3, 1, 1, 4, 2)
    assert place_from_environ({**environ, "RANK": "0", "WORLD_SIZE": "1"}) == Place(), "the inner launcher decides"


@pytest.mark.parametrize(
    "environ", [{}, {"RANK": "1"}, {"WORLD_SIZE": "2"}, {"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}]
)
def test_no_launcher(environ):
    assert place_from_environ(environ) is None


@pytest.mark.parametrize(("rank", "size"), [("x", "2"), ("-1", "2"), ("2", "2"), ("0", "1.5"), ("9" * 5000, "2")])
def test_variables_that_cannot_be(rank, size):
    with pytest.raises(ArgumentError, match=r"RANK|WORLD_SIZE"):
        place_from_environ({"RANK": rank, "WORLD_SIZE": size})


def test_session_functions_know_their_place_without_a_trainer(monkeypatch):
    for name, value in rank_environ(Place(3, 1, 1, 4, 2)).items():
        monkeypatch.setenv(name, value)
    assert (paceline.world_rank(), paceline.world_size()) == (3, 4)
    assert (paceline.local_rank(), paceline.local_world_size(), paceline.node_rank()) == (1, 2, 1)
    assert not paceline.in_worker()
    with as_worker(Place(0, 0, 0, 1, 1)):
        assert paceline.world_size() == 1, "a session knows better"
