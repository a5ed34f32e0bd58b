"""The driver's loop: poll the workers, decide what the facts mean, act."""
