"""A run that is killed and resumed ends bit for bit like one that was not.

    python examples/resume_exactly.py

Trains three times: undisturbed; with a worker that is killed half-way (Paceline restarts it from its last checkpoint);
and stopped half-way, then continued from the path of its checkpoint. The weights are the same to the last bit.
"""

import os
import signal

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline import Trainer


def train(config):
    paceline.enable_reproducibility(seed=7)
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(256, 8, generator=generator), torch.randn(256, 1, generator=generator))
    loader = paceline.prepare_data_loader(DataLoader(data, batch_size=16, shuffle=True))
    model = paceline.prepare_model(nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.3), nn.Linear(32, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    step = 0
    if (checkpoint := paceline.load_checkpoint()) is not None:
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        loader.load_state_dict(checkpoint["loader"])
        step = checkpoint["step"]
    first_attempt = step == 0

    while step < config["num_steps"]:
        for inputs, targets in loader:
            inputs = inputs + 0.1 * torch.randn(inputs.shape[0] // (1 + paceline.world_rank()), 1).mean()
            loss = nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            paceline.report(step=step, loss=loss.item())
            if step % 5 == 0:
                paceline.save_checkpoint(
                    step=step,
                    model=model.state_dict(),
                    optimizer=optimizer.state_dict(),
                    loader=loader.state_dict(),
                )
            if first_attempt and step == config.get("kill_at") and paceline.world_rank() == 1:
                paceline.load_checkpoint()  # waits until the last save is on storage: there is one to go on from
                os.kill(os.getpid(), signal.SIGKILL)
            if step == config["num_steps"]:
                break
    return {name: value.clone() for name, value in model.state_dict().items()}


def main():
    with Trainer(backend="torch", num_workers=2) as trainer:
        undisturbed = trainer.run(train, {"num_steps": 40})[0]
        killed = trainer.run(train, {"num_steps": 40, "kill_at": 23})[0]
        trainer.run(train, {"num_steps": 20})
        resumed = trainer.run(train, {"num_steps": 40}, checkpoint=trainer.latest_checkpoint_path)[0]
    for name, value in undisturbed.items():
        assert torch.equal(value, killed[name]), name
        assert torch.equal(value, resumed[name]), name
    print("undisturbed, killed and resumed runs end with the same weights, bit for bit")


if __name__ == "__main__":
    main()
