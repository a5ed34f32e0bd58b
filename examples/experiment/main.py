"""Trains as src/conf.yaml says: `python main.py cfg.num_epochs=3 optimizers.adam.lr=1e-2`."""

import sys

from src.experiment import Experiment

from paceline.experiment import run_experiment

if __name__ == "__main__":
    run = run_experiment(Experiment, overrides=sys.argv[1:])
    print(f"{run.path} {run.config_hash}")
