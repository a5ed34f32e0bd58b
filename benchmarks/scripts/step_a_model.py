"""Train an MLP for some steps, by hand or with a trainer, alone or as a rank of torchrun's: `step_a_model.py SPEC`."""

import json
import os
import sys
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.marks import mark


class Timer:
    """From the step that is the first to count to the last one."""

    def __init__(self, spec):
        self.spec, self.count, self.begin = spec, 0, 0.0

    def __call__(self):
        self.count += 1
        if self.count == self.spec["num_warm"]:
            self.begin = time.perf_counter()
        elif self.count == self.spec["num_steps"]:
            mark("steps", seconds=time.perf_counter() - self.begin)


def make_model(spec):
    torch.manual_seed(0)
    width = spec["width"]
    layers = [part for _ in range(spec["depth"]) for part in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(width, 10))


def make_data(spec, num_ranks=1):
    generator = torch.Generator().manual_seed(0)
    size = spec["batch_size"] * spec["num_steps"] * num_ranks
    few = 64 * spec["batch_size"] * num_ranks
    x = torch.randn(few, spec["width"], generator=generator).repeat(-(-size // few), 1)[:size]
    return TensorDataset(x, torch.randint(10, (size,), generator=generator))


def bare(spec):
    """With a loss that is read now and then, as a loop that logs does."""
    num_ranks = int(os.environ.get("WORLD_SIZE", 1))
    data, model, sampler = make_data(spec, num_ranks), make_model(spec), None
    if num_ranks > 1:
        torch.distributed.init_process_group("gloo")
        model = nn.parallel.DistributedDataParallel(model)
        sampler = torch.utils.data.DistributedSampler(data, shuffle=False)
    optimizer, timer = torch.optim.SGD(model.parameters(), lr=0.01), Timer(spec)
    for number, (x, y) in enumerate(DataLoader(data, spec["batch_size"], sampler=sampler)):
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if number % 100 == 99:
            loss.item()
        timer()
    if num_ranks > 1:
        torch.distributed.destroy_process_group()


def trial(spec):
    from paceline import pytorch

    num_ranks = int(os.environ.get("WORLD_SIZE", 1))

    class Stepping(pytorch.PyTorchTrial):
        def __init__(self, context):
            self.context, self.timer = context, Timer(spec)
            self.model = context.wrap_model(make_model(spec))
            self.optimizer = context.wrap_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.01))

        def train_batch(self, batch, epoch_idx, batch_idx):
            x, y = batch
            loss = nn.functional.cross_entropy(self.model(x), y)
            self.context.backward(loss)
            self.context.step_optimizer(self.optimizer)
            self.timer()
            return {"loss": loss}

        def evaluate_batch(self, batch):
            return {"rows": len(batch[0])}

        def build_training_data_loader(self):
            return pytorch.DataLoader(make_data(spec, num_ranks), spec["batch_size"])

        def build_validation_data_loader(self):
            return pytorch.DataLoader(TensorDataset(torch.zeros(4, spec["width"])), 1)

    with pytorch.init(logdir="results") as context:
        pytorch.Trainer(Stepping(context), context).fit(max_length=pytorch.Batch(spec["num_steps"]))


def lightning(spec):
    import lightning as L

    class Stepping(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.model, self.timer = make_model(spec), Timer(spec)

        def training_step(self, batch, batch_idx):
            x, y = batch
            loss = nn.functional.cross_entropy(self.model(x), y)
            self.log("loss", loss)
            return loss

        def on_train_batch_end(self, *args):
            self.timer()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.01)

    quiet = {
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "logger": False,
    }
    trainer = L.Trainer(max_epochs=1, accelerator="cpu", devices=1, log_every_n_steps=100, **quiet)
    trainer.fit(Stepping(), DataLoader(make_data(spec), spec["batch_size"]))


def transformers(spec):
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Stepping(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = make_model(spec)

        def forward(self, x, labels):
            scores = self.model(x)
            return {"loss": nn.functional.cross_entropy(scores, labels), "logits": scores}

    class Watch(TrainerCallback):
        timer = Timer(spec)

        def on_step_end(self, *args, **kwargs):
            self.timer()

    arguments = TrainingArguments(
        output_dir="out",
        max_steps=spec["num_steps"],
        per_device_train_batch_size=spec["batch_size"],
        logging_steps=100,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        optim="sgd",
    )
    rows = [{"x": x, "labels": y} for x, y in make_data({**spec, "num_steps": 64})]
    Trainer(Stepping(), arguments, train_dataset=rows, callbacks=[Watch()]).train()


SYSTEMS = {"torch": bare, "paceline": trial, "lightning": lightning, "transformers": transformers}

if __name__ == "__main__":
    torch.set_num_threads(1)
    spec = json.loads(sys.argv[1])
    SYSTEMS[spec["kind"]](spec)
