"""A trial that classifies handwritten digits. The same script, however it is started:

python examples/trials/digits.py                                    one process
torchrun --nproc_per_node=2 examples/trials/digits.py               two, by torch's launcher
paceline run -n 2 examples/trials/digits.py                         two, by ours: a killed one is replaced
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

from paceline import pytorch


class DigitsTrial(pytorch.PyTorchTrial):
    def __init__(self, context):
        self.context = context
        images, labels = load_digits(return_X_y=True)
        data = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
        sizes = [1500, len(data) - 1500]
        self.train_set, self.test_set = torch.utils.data.random_split(data, sizes, torch.Generator().manual_seed(0))

        model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 10))
        self.model = context.wrap_model(model)
        adam = torch.optim.Adam(self.model.parameters(), context.get_hparam("lr"))
        self.optimizer = context.wrap_optimizer(adam)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        context.wrap_lr_scheduler(scheduler, pytorch.LRScheduler.StepMode.STEP_EVERY_EPOCH)

    def train_batch(self, batch, epoch_idx, batch_idx):
        images, labels = batch
        loss = nn.functional.cross_entropy(self.model(images), labels)
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}

    def evaluate_batch(self, batch):
        images, labels = batch
        scores = self.model(images)
        accuracy = (scores.argmax(1) == labels).float().mean()
        return {"validation_loss": nn.functional.cross_entropy(scores, labels), "accuracy": accuracy}

    def build_training_data_loader(self):
        return pytorch.DataLoader(self.train_set, self.context.get_per_slot_batch_size(), shuffle=True)

    def build_validation_data_loader(self):
        return pytorch.DataLoader(self.test_set, self.context.get_per_slot_batch_size())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--profile", action="store_true", help="say where the time goes")
    args = parser.parse_args()
    with pytorch.init(hparams={"global_batch_size": 32, "lr": 0.003}, seed=0) as context:
        trainer = pytorch.Trainer(DigitsTrial(context), context)
        trainer.configure_profiler(enabled=args.profile)
        result = trainer.fit(max_length=pytorch.Epoch(args.epochs), validation_period=pytorch.Epoch(1))
        if context.distributed.is_chief:
            print(f"{result.epochs} epochs, accuracy {result.validation_metrics['accuracy']:.1%}, {result.run_dir}")


if __name__ == "__main__":
    main()
