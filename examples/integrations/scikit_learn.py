"""Cross-validation of scikit-learn's over workers that need no group: each has some of the folds."""

from sklearn.datasets import load_digits
from sklearn.ensemble import RandomForestClassifier
from sklearn.model_selection import StratifiedKFold

import paceline
from paceline import BackendConfig, LocalEngine, Trainer


def train(config):
    rows, labels = load_digits(return_X_y=True)
    folds = list(StratifiedKFold(config["num_folds"], shuffle=True, random_state=0).split(rows, labels))
    saved = paceline.load_checkpoint()
    scores = dict(saved.per_rank["scores"]) if saved else {}
    for fold in range(paceline.world_rank(), len(folds), paceline.world_size()):
        if fold not in scores:  # else it was done before this worker was lost
            seen, unseen = folds[fold]
            forest = RandomForestClassifier(config["num_trees"], random_state=fold).fit(rows[seen], labels[seen])
            scores[fold] = forest.score(rows[unseen], labels[unseen])
            paceline.report(cv=fold, accuracy=scores[fold])
            paceline.save_checkpoint(per_rank={"scores": scores})
    return scores


if __name__ == "__main__":
    engine = LocalEngine(preload=["sklearn.ensemble"])  # then not each worker has to import it
    with Trainer(backend=BackendConfig(), num_workers=2, engine=engine, logdir="forests") as trainer:
        parts = trainer.run(train, {"num_folds": 6, "num_trees": 20})
        print(f"{len(parts[0] | parts[1])} folds on {len(parts)} workers")
        print(paceline.load_run(trainer.latest_run_dir).folds["accuracy"].round(3).to_string())
