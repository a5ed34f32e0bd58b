"""The torch helpers in real workers: same bits again, mixed precision, loaders that share the data."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline


def train(config):
    paceline.enable_reproducibility(config["seed"])
    data = TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
    loader = paceline.prepare_data_loader(DataLoader(data, batch_size=8, shuffle=True))
    model = paceline.prepare_model(nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.5), nn.Linear(16, 1)))
    optimizer = paceline.prepare_optimizer(torch.optim.Adam(model.parameters()))
    losses = []
    for _ in range(3):
        for inputs, targets in loader:
            loss = nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            paceline.backward(loss)
            optimizer.step()
            losses.append(loss.item())
    return losses, [parameter.detach() for parameter in model.parameters()]


def test_same_seed_gives_the_same_bits_on_a_second_run_and_another_seed_does_not(warm):
    first, second, other = (warm.run(train, {"seed": seed}) for seed in (3, 3, 4))
    for rank in (0, 1):
        assert first[rank][0] == second[rank][0]
        assert all(map(torch.equal, first[rank][1], second[rank][1]))
        assert first[rank][0] != other[rank][0]


def test_seed_of_one_run_is_gone_in_the_next(warm):
    warm.run(train, {"seed": 3})
    assert warm.run(lambda: torch.are_deterministic_algorithms_enabled()) == [False, False]


def test_accelerate_trains_in_bf16_on_the_cpu(warm):
    def train_func():
        seen = []

        class Look(nn.Linear):
            def forward(self, inputs):
                output = super().forward(inputs)
                seen.append(output.dtype)
                return output

        model, loss_fn = paceline.accelerate(Look(4, 1), nn.MSELoss(), mixed_precision=True)
        output = model(torch.randn(8, 4))
        loss_fn(output, torch.zeros(8, 1)).backward()
        wrapped = type(model).__name__
        return wrapped, seen[0], output.dtype, next(model.parameters()).grad is not None

    for answer in warm.run(train_func):
        assert answer == ("SharedModel", torch.bfloat16, torch.float32, True)


def test_fp16_on_the_cpu_says_what_to_use(warm):
    with pytest.raises(ValueError, match="bf16"):
        warm.run(lambda: paceline.accelerate(nn.Linear(1, 1), mixed_precision="fp16"))


def test_dict_batches_are_shared_out_completely(warm):
    def train_func():
        data = [{"number": number} for number in range(10)]
        loader = paceline.prepare_data_loader(DataLoader(data, batch_size=2))
        return [number for batch in loader for number in batch["number"].tolist()]

    mine, theirs = warm.run(train_func)
    assert len(mine) == len(theirs) == 5
    assert {*mine, *theirs} == set(range(10))


def test_device_is_the_cpu_here(warm):
    assert warm.run(lambda: str(paceline.get_device())) == ["cpu", "cpu"]


def test_state_of_a_prepared_model_fits_any_number_of_workers(warm):
    def save():
        model = paceline.prepare_model(nn.Linear(2, 2))
        paceline.save_checkpoint(model=model.state_dict())
        model.load_state_dict(paceline.load_checkpoint()["model"])
        return sorted(model.state_dict())

    assert warm.run(save) == [["bias", "weight"]] * 2
    nn.Linear(2, 2).load_state_dict(warm.latest_checkpoint["model"])


def test_evaluation_over_ranks_counts_each_sample_once(warm):
    """Of datasets that do not divide evenly, with loader processes and without, in the loop and after it, and when it
    goes on in the middle of an epoch."""

    def evaluate():
        found = {}
        for size, num_workers, done in [(1, 0, 0), (7, 0, 0), (7, 0, 4), (8, 1, 0)]:
            loader = paceline.prepare_data_loader(DataLoader(torch.arange(size), batch_size=2, num_workers=num_workers))
            loader.load_state_dict({"epoch": 0, "done": done})
            seen, own = [], []
            for batch in loader:
                gathered = paceline.gather_for_metrics({"x": batch, "more": [(batch > 3, batch.bfloat16()[:, None])]})
                assert torch.equal(gathered["more"][0][0], gathered["x"] > 3)
                assert gathered["more"][0][1].shape == (len(gathered["x"]), 1)
                seen += gathered["x"].tolist()
                own += batch.tolist()
            found[size, num_workers, done] = seen, paceline.gather_for_metrics(torch.tensor(own)).tolist()
        return found, paceline.gather_for_metrics(torch.tensor(paceline.world_rank())).tolist()

    for found, ranks in warm.run(evaluate):
        assert ranks == [0, 1]
        for (size, _, done), (seen, after) in found.items():
            assert seen == after == list(range(done, size))


def test_ranks_gather_different_numbers_of_rows_but_not_different_things(warm):
    def gather(columns):
        return paceline.gather_for_metrics(torch.full((paceline.world_rank() * 2 + 1, columns()), 1.0)).shape

    assert warm.run(lambda: gather(lambda: 2)) == [(4, 2), (4, 2)]
    with pytest.raises(ValueError, match=r"more than the number of rows \(rank 0: .*rank 1: "):
        warm.run(lambda: gather(lambda: paceline.world_rank() + 1))


def test_bare_model_of_a_prepared_one(warm):
    def unwrap():
        bare = nn.Linear(2, 1)
        model = paceline.prepare_model(bare)
        return model is not bare, paceline.unwrap_model(model) is bare

    assert warm.run(unwrap) == [(True, True), (True, True)]
