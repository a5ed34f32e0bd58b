"""Tools: whatever else a loop needs. They derive from nothing; what changes in them is part of every checkpoint."""


class EarlyStopping:
    """True when a loss has not become better for `patience` epochs."""

    def __init__(self, patience=11, min_delta=0):
        self.patience = patience
        self.min_delta = min_delta
        self.best_loss = float("inf")
        self.counter = 0

    def __call__(self, val_loss):
        if val_loss < self.best_loss - self.min_delta:
            self.best_loss, self.counter = val_loss, 0
        else:
            self.counter += 1
        return self.counter >= self.patience


class LRScheduler:
    """The learning rate rises for `warmup_steps`, then falls to zero at `total_steps`, each along a line."""

    def __init__(self, warmup_steps: int = 20, total_steps: int = 10000):
        self.warmup_steps = warmup_steps
        self.total_steps = total_steps
        self.num_steps = 0

    def step(self, optimizer):
        self.num_steps += 1
        rest = max(self.total_steps - self.num_steps, 0) / max(self.total_steps - self.warmup_steps, 1)
        factor = min(self.num_steps / max(self.warmup_steps, 1), rest, 1.0)
        for group in optimizer.param_groups:
            group["lr"] = group.setdefault("base_lr", group["lr"]) * factor
