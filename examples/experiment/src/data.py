"""Rows to learn from: each has 180 numbers, of which 10 others follow."""

import torch
from torch.utils.data import Dataset


class Rows(Dataset):
    """What the three datasets have in common. The rows of one seed are always the same."""

    def __init__(self, num_rows: int, seed: int, noise: float = 0.0):
        rows = torch.Generator().manual_seed(seed)
        self.data = torch.randn(num_rows, 180, generator=rows)
        rule = torch.randn(180, 10, generator=torch.Generator().manual_seed(0)) / 180**0.5
        self.labels = self.data @ rule + noise * torch.randn(num_rows, 10, generator=rows)

    def __len__(self):
        return len(self.data)

    def __getitem__(self, idx):
        return self.data[idx], self.labels[idx]

    @staticmethod
    def ray_map_batches(batch):
        rows = batch["item"]  # what __getitem__ has returned, for each row
        return {"inputs": torch.stack([row[0] for row in rows]), "label": torch.stack([row[1] for row in rows])}


class TrainDataset(Rows):
    def __init__(self, batch_size: int = 32, noise: float = 0.01):
        super().__init__(num_rows=1000, seed=1, noise=noise)
        self.batch_size = batch_size
        self.shuffle = True


class ValDataset(Rows):
    def __init__(self, batch_size: int = 32):
        super().__init__(num_rows=201, seed=2)
        self.batch_size = batch_size


class TestDataset(Rows):
    def __init__(self, batch_size: int = 32):
        super().__init__(num_rows=200, seed=3)
        self.batch_size = batch_size
