"""A LightningModule on two workers, one of which is killed: the curve goes on as if nothing had happened."""

import os
import signal

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline import LocalEngine, Trainer
from paceline.integrations.lightning import PacelineCallback  # one


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 1))

    def training_step(self, batch):
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


class Misfortune(lightning.Callback):
    """Kills the worker that is rank 1, in the fourth epoch, the first time that it comes there."""

    def __init__(self, mark):
        self.mark = mark

    def on_train_epoch_start(self, trainer, model):
        if trainer.current_epoch == 3 and trainer.global_rank == 1 and not os.path.exists(self.mark):
            open(self.mark, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)


def train(config):
    lightning.seed_everything(0, verbose=False)
    inputs = torch.randn(256, 8)
    loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=16, shuffle=True)
    trainer = lightning.Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=paceline.local_world_size(),
        max_epochs=6,
        callbacks=[Misfortune(config["mark"])] if "mark" in config else None,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
    )
    PacelineCallback().attach(trainer)  # two
    trainer.fit(Model(), loader)


def curve(trainer):
    metrics = paceline.load_run(trainer.latest_run_dir).metrics
    return metrics[metrics["rank"] == 0]["loss"].tolist()


if __name__ == "__main__":
    engine = LocalEngine(preload=["paceline.integrations.lightning"])
    with Trainer(num_workers=2, engine=engine, logdir="lightning") as trainer:
        trainer.run(train, {})
        undisturbed = curve(trainer)
        trainer.run(train, {"mark": os.path.abspath("killed_once")})
        print("loss", " ".join(f"{loss:.4f}" for loss in curve(trainer)))
        print("the same as undisturbed:", curve(trainer) == undisturbed)
