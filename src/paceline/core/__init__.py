"""The pieces of a run that a script uses by itself, without a Trainer."""
