"""A loop with Lightning Fabric, as it runs under python and torchrun, which reports and goes on after a failure.

paceline run -n 2 examples/integrations/fabric.py
"""

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.integrations.fabric import PacelineLogger, load_checkpoint, save_checkpoint


def main():
    num_devices = paceline.local_world_size()  # as the launcher says, 1 without one
    strategy = "ddp" if num_devices > 1 else "auto"
    fabric = Fabric(accelerator="cpu", devices=num_devices, strategy=strategy, loggers=PacelineLogger())
    fabric.launch()
    fabric.seed_everything(0)
    inputs = torch.randn(256, 8)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    loader = fabric.setup_dataloaders(DataLoader(data, batch_size=16, shuffle=True))
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    model, optimizer = fabric.setup(model, torch.optim.Adam(model.parameters(), lr=1e-2))
    state = {"model": model, "optimizer": optimizer, "loader": loader, "epoch": 0}
    load_checkpoint(fabric, state)
    while state["epoch"] < 6 and not paceline.should_stop():
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x), y)
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        state["epoch"] += 1
        fabric.log_dict({"epoch": state["epoch"], "loss": fabric.all_reduce(loss)})
        save_checkpoint(fabric, state)
    fabric.print(f"epoch {state['epoch']}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
