"""Seeds and generator states: the same run twice, in one process."""

import os
import random

import numpy as np
import pytest
import torch
import torch._dynamo  # torch imports it at some first use and sets a variable then: not inside a test
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from paceline.checkpoints import CheckpointStore, load, snapshot
from paceline.data.seeds import derived_seed
from paceline.errors import ArgumentError
from paceline.prepare import (
    enable_reproducibility,
    prepare_data_loader,
    prepare_model,
    rng_state,
    set_rng_state,
)
from paceline.prepare.rng import RandomStream
from paceline.prepare.scope import close_scope, current_scope
from paceline.testing import as_worker


@pytest.fixture(autouse=True)
def _clean():
    yield
    close_scope()


def draws():
    return random.random(), float(np.random.rand()), torch.rand(1).item()


def losses_of_a_run(seed):
    enable_reproducibility(seed)
    data = TensorDataset(torch.linspace(-1, 1, 32).reshape(32, 1), torch.rand(32, 1))
    model = prepare_model(nn.Sequential(nn.Linear(1, 8), nn.Dropout(0.5), nn.Linear(8, 1)))
    loader = prepare_data_loader(DataLoader(data, batch_size=4, shuffle=True))
    optimizer = torch.optim.Adam(model.parameters())
    losses = []
    for _ in range(2):
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


def test_same_seed_gives_the_same_losses_to_the_last_bit():
    first = losses_of_a_run(3)
    assert losses_of_a_run(3) == first
    assert losses_of_a_run(4) != first


def test_all_generators_are_seeded():
    enable_reproducibility(11)
    first = draws()
    enable_reproducibility(11)
    assert draws() == first
    enable_reproducibility()
    assert draws() != first


def test_only_deterministic_algorithms_are_allowed_until_the_scope_closes():
    enable_reproducibility(0)
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.is_deterministic_algorithms_warn_only_enabled()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert torch.backends.cudnn.benchmark is False
    enable_reproducibility(1)
    close_scope()
    assert not torch.are_deterministic_algorithms_enabled()
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    assert current_scope().seed is None


def test_algorithm_that_is_not_deterministic_is_refused():
    enable_reproducibility(0)
    with pytest.raises(RuntimeError, match="does not have a deterministic implementation"):
        torch.zeros(3).put_(torch.tensor([0, 0]), torch.tensor([1.0, 2.0]), accumulate=False)


def test_workspace_that_the_user_chose_stays(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    enable_reproducibility(0)
    close_scope()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


def test_run_records_the_seed_and_the_next_run_knows_nothing_of_it():
    with as_worker() as wire:
        enable_reproducibility(5)
        assert wire.sent == [("note", ("seed", {"seed": 5}))]
        assert current_scope().seed == 5
    with as_worker():
        assert current_scope().seed is None
        assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("seed", [-1, 1.0, True, "0", None, 2**63])
def test_seed_that_is_none(seed):
    with pytest.raises(ArgumentError, match="expected an integer"):
        enable_reproducibility(seed)
    assert not torch.are_deterministic_algorithms_enabled()


def test_generators_go_on_where_their_state_was_taken():
    random.gauss(0, 1)  # python's and numpy's generators keep the second of two normal numbers
    np.random.randn()
    state = rng_state()
    expected = draws(), random.gauss(0, 1), float(np.random.randn())
    draws()
    set_rng_state(state)
    assert (draws(), random.gauss(0, 1), float(np.random.randn())) == expected


def test_state_survives_a_checkpoint(tmp_path):
    state = rng_state()
    expected = draws()
    store = CheckpointStore(tmp_path)
    store.write(1, snapshot({"rng": state}))
    set_rng_state(load(store.path_of(1))["rng"])
    assert draws() == expected


def test_state_whose_tuples_came_back_as_lists():
    state = rng_state()
    expected = draws()
    version, internal, gauss_next = state["python"]
    set_rng_state(state | {"python": [version, list(internal), gauss_next], "numpy": list(state["numpy"])})
    assert draws() == expected


def test_state_that_lacks_a_part():
    with pytest.raises(ArgumentError, match=r"lacks numpy, torch; expected what rng_state\(\) returned"):
        set_rng_state({"python": random.getstate()})


def test_lent_generators_continue_their_stream_and_are_given_back():
    own = torch.Generator().manual_seed(1)

    def lent_draws(stream):
        with stream.lent():
            return (*draws(), torch.rand(1, generator=own).item())

    whole = RandomStream(7, [own])
    with whole.lent():
        expected = [(*draws(), torch.rand(1, generator=own).item()) for _ in range(2)]
    before, own_before = rng_state(), own.get_state()
    outside = draws()
    set_rng_state(before)
    pieces = RandomStream(7, [own])
    first = lent_draws(pieces)
    assert draws() == outside
    assert [first, lent_draws(pieces)] == expected
    assert torch.equal(own.get_state(), own_before)


def test_generators_are_given_back_after_an_error():
    state = rng_state()
    expected = draws()
    set_rng_state(state)
    with pytest.raises(KeyError), RandomStream(7).lent():
        raise KeyError
    assert draws() == expected


def test_derived_seeds_do_not_meet():
    seeds = {derived_seed(kind, a, b) for kind in ("order", "batch") for a in range(50) for b in range(50)}
    assert len(seeds) == 5000
    assert all(0 <= seed < 2**63 for seed in seeds)
