"""`python -m pytest` in this folder: is everything in place?"""

from pathlib import Path

from src.experiment import Experiment

from paceline import load_run
from paceline.experiment import check, run_experiment, schema_of

PROJECT = Path(__file__).parents[1]


def test_conf_is_what_the_code_says():
    assert check(schema_of(Experiment), (PROJECT / "src/conf.yaml").read_text()) == []


def test_parts_fit_together():
    experiment = Experiment.init_module(PROJECT / "src/conf.yaml")
    batch = experiment.datasets.train.ray_map_batches(
        {"item": [experiment.datasets.train[index] for index in range(4)]}
    )
    assert experiment.models.dnn(batch["inputs"]).shape == batch["label"].shape


def test_loss_falls(tmp_path, monkeypatch):
    monkeypatch.setenv("PACELINE_RESULTS", str(tmp_path))
    run = run_experiment(Experiment, overrides=["cfg.num_epochs=2", "cfg.start_workers=0", "cfg.seed=0"])
    metrics = load_run(run.path).metrics
    losses = metrics[metrics["batch"].isna()]["val_loss1"].tolist()
    assert losses[1] < losses[0]
