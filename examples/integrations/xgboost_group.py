"""XGBoost's own collective over our workers: each has a part of the rows, and all get the same trees.

It is a backend of a few lines: rank 0 starts XGBoost's tracker, and all ranks join it. Workers that are lost are
replaced, join anew, and go on from the trees that were saved.
"""

import os
import signal
from dataclasses import dataclass
from typing import ClassVar

from sklearn.datasets import load_breast_cancer

import paceline
from paceline import BackendConfig, LocalEngine, Trainer


@dataclass(frozen=True, kw_only=True)
class XGBoostConfig(BackendConfig):
    name: ClassVar[str] = "xgboost"
    package: ClassVar[str | None] = "xgboost"

    def join(self, call, *, use_gpu):
        call.all(join_tracker, call.one(0, start_tracker))

    def is_broken_collective(self, error):
        return error.type_name == "XGBoostError"  # of a rank that waits for one that is gone


def start_tracker(wire):
    from xgboost.tracker import RabitTracker

    wire.shared["tracker"] = tracker = RabitTracker(n_workers=wire.place.world_size, host_ip=wire.address)
    tracker.start()
    return tracker.worker_args()


def join_tracker(wire, arguments):
    from xgboost import collective

    collective.init(**arguments, dmlc_task_id=str(wire.place.world_rank))
    wire.leaving.callback(collective.finalize)


def train(config):
    import xgboost

    rows, labels = load_breast_cancer(return_X_y=True)
    mine = slice(paceline.world_rank(), None, paceline.world_size())
    matrix = xgboost.DMatrix(rows[mine], labels[mine])
    saved = paceline.load_checkpoint()
    model = None if saved is None else xgboost.Booster(model_file=bytearray(saved["model"]))
    for tree in range(0 if model is None else model.num_boosted_rounds(), config["num_trees"]):
        found = {}
        parameters = {"objective": "binary:logistic", "tree_method": "hist", "max_depth": 3}
        model = xgboost.train(
            parameters, matrix, 1, evals=[(matrix, "train")], evals_result=found, xgb_model=model, verbose_eval=False
        )
        paceline.report(tree=tree, logloss=found["train"]["logloss"][0])
        paceline.save_checkpoint(model=bytes(model.save_raw()))
        if tree == 5 and paceline.world_rank() == 1 and "mark" in config and not os.path.exists(config["mark"]):
            open(config["mark"], "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
    return bytes(model.save_raw())


if __name__ == "__main__":
    engine = LocalEngine(preload=["sklearn.datasets", "xgboost"])  # then a worker that is replaced need not import them
    with Trainer(backend=XGBoostConfig(), num_workers=2, engine=engine, logdir="xgboost") as trainer:
        undisturbed = trainer.run(train, {"num_trees": 10})
        killed = trainer.run(train, {"num_trees": 10, "mark": os.path.abspath("killed_once")})
        losses = paceline.load_run(trainer.latest_run_dir).metrics.groupby("tree")["logloss"].first()
        print(f"log loss {losses.iloc[0]:.3f} → {losses.iloc[-1]:.3f}")
        print("the same trees on both ranks:", len(set(killed)) == 1)
        print("and as if nobody was killed:", killed == undisturbed)
