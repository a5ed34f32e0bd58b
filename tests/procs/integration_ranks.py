"""Training functions with trainers of other libraries, small enough to be run often."""

import os
import signal
import time

import paceline
from paceline import session


def disturb(config, step):
    """What happens to one rank at one step, in the first attempt: it is killed, or told that it will be."""
    running = session.current()
    if running is None or running.attempt > 0:
        return
    if config.get("killed_at") == (step, session.world_rank()):
        os.kill(os.getpid(), signal.SIGKILL)
    if config.get("preempted_at") == (step, session.world_rank()):
        os.kill(os.getpid(), signal.SIGTERM)
        while not running.is_stop_wanted:  # or the training may have ended before it is
            time.sleep(0.001)


def train_transformer(config):
    """12 steps on 2 ranks, 6 in an epoch, of a model that draws random numbers. Returns its weights."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed

    from paceline.integrations.transformers import PacelineCallback

    class Killer(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            disturb(config, state.global_step)

    set_seed(0)
    shape = {"vocab_size": 17, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(**shape, bos_token_id=0, eos_token_id=0))
    tokens = torch.randint(0, 17, (48, 8))
    rows = [{"input_ids": row, "labels": row} for row in tokens]
    arguments = TrainingArguments(
        config["output_dir"],
        max_steps=config.get("max_steps", 12),
        per_device_train_batch_size=4,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        eval_strategy="epoch",
        **config.get("arguments", {"save_steps": 2, "save_total_limit": 1}),
    )
    trainer = Trainer(model, arguments, train_dataset=rows, eval_dataset=rows[:8], callbacks=[Killer()])
    PacelineCallback(**config.get("callback", {})).attach(trainer)
    trainer.train(config.get("resume_from"))
    return [parameter.detach().numpy() for parameter in model.parameters()]


def fit_lightning(config):
    """5 epochs of 6 steps on 2 ranks, of a model that draws random numbers. Returns its weights."""
    import lightning
    import torch
    from lightning.pytorch.callbacks import Callback
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    from paceline.integrations.lightning import PacelineCallback

    class Model(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 1))

        def training_step(self, batch):
            loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
            self.log("loss", loss, on_step=False, on_epoch=True)
            return loss

        def validation_step(self, batch):
            self.log("val_loss", nn.functional.mse_loss(self.net(batch[0]), batch[1]), sync_dist=True)

        def on_train_epoch_end(self):
            self.log("logged_last", float(self.current_epoch))

        def configure_optimizers(self):
            optimizer = torch.optim.Adam(self.parameters(), lr=1e-2)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2)]

    class Killer(Callback):
        def on_train_batch_end(self, trainer, *args):
            disturb(config, trainer.global_step)

    lightning.seed_everything(0)
    inputs = torch.randn(48, 4)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    model = Model()
    trainer = lightning.Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=paceline.local_world_size(),
        max_epochs=5,
        min_epochs=config.get("min_epochs"),
        callbacks=[Killer()],
        default_root_dir=config["output_dir"],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    PacelineCallback(**config.get("callback", {})).attach(trainer)
    loader = DataLoader(data, batch_size=4, shuffle=True, **config.get("loader", {}))
    trainer.fit(model, loader, DataLoader(data, batch_size=8))
    trained = [parameter.detach().numpy() for parameter in model.parameters()]
    trainer.validate(
        model, DataLoader(data, batch_size=8), verbose=False
    )  # of what was trained, not of what was loaded
    assert all((a == b.detach().numpy()).all() for a, b in zip(trained, model.parameters(), strict=True))
    return trained


def train_with_fabric(config):
    """5 epochs of 6 steps on 2 ranks, of a model that draws random numbers. Returns its weights."""
    import torch
    from lightning.fabric import Fabric
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    from paceline.integrations.fabric import PacelineLogger, load_checkpoint, save_checkpoint

    fabric = Fabric(accelerator="cpu", strategy="ddp", devices=paceline.local_world_size(), loggers=PacelineLogger())
    fabric.launch()
    fabric.seed_everything(0)
    inputs = torch.randn(48, 4)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    loader = fabric.setup_dataloaders(DataLoader(data, batch_size=4, shuffle=True, **config.get("loader", {})))
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 1))
    model, optimizer = fabric.setup(model, torch.optim.Adam(model.parameters(), lr=1e-2))
    state = {"model": model, "optimizer": optimizer, "loader": loader, "epoch": 0}
    load_checkpoint(fabric, state)
    while state["epoch"] < 5:
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x), y)
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        state["epoch"] += 1
        fabric.log_dict({"loss": loss}, step=state["epoch"])
        disturb(config, state["epoch"])
        save_checkpoint(fabric, state)
    return [parameter.detach().numpy() for parameter in model.parameters()]


def train_with_accelerate(config):
    """A script of Accelerate's as it is. Returns its weights, and what it ran on."""
    import torch
    from accelerate import Accelerator
    from accelerate.utils import set_seed
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    accelerator = Accelerator(cpu=True, mixed_precision=config["precision"])
    set_seed(0)
    inputs = torch.randn(48, 4)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=4, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for x, y in loader:
        loss = nn.functional.mse_loss(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    weights = [parameter.detach().numpy() for parameter in model.parameters()]
    return weights, accelerator.num_processes, accelerator.process_index, accelerator.mixed_precision
