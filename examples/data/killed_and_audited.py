"""Kill workers in the middle of an epoch, shrink the group, and show that every row was used exactly once.

    python examples/data/killed_and_audited.py

Four workers train from Parquet files. One is killed; four go on. Another one is killed and its place is gone: three go
on. The run folder knows which rows went into which step, and the audit counts them.
"""

import os
import signal
import tempfile
from pathlib import Path

import pandas as pd

import paceline
from paceline import BackendConfig, Callback, LocalEngine, Trainer
from paceline.data import audit, read_parquet

NUM_ROWS = 2_000


def main():
    engine = LocalEngine(slots=4)
    with tempfile.TemporaryDirectory() as folder:
        frame = pd.DataFrame({"id": range(NUM_ROWS), "x": 1.0})
        frame.to_parquet(Path(folder, "rows.parquet"), row_group_size=100)
        dataset = read_parquet(folder).filter(lambda row: row["id"] % 10 > 0).random_shuffle()
        arguments = {"backend": BackendConfig(), "engine": engine, "replacement_timeout_s": 0.1}
        with Trainer(num_workers=(2, 4), **arguments) as trainer:
            trainer.run(train, {"folder": folder}, callbacks=[Lend(engine)], dataset=dataset, record_ids=True)
        report = audit(trainer.latest_run_dir)
    events = paceline.load_run(trainer.latest_run_dir).events
    sizes = [str(event["world_size"]) for event in events if event["kind"] == "attempt"]
    print(f"attempts with {', '.join(sizes)} workers")
    print(report)
    print("every row exactly once" if report.is_clean else "rows are missing, or came twice")


class Lend(Callback):
    """After the second death, one place of this machine is somebody else's."""

    def __init__(self, engine):
        self.engine = engine

    def handle_restart(self, number, reason, **info):
        if number == 2:
            self.engine.slots = 3


def train(config):
    checkpoint = paceline.load_checkpoint() or {"step": 0}
    step = checkpoint["step"]
    for batch in paceline.get_data_shard().iter_batches(global_batch_size=96, epochs=2):
        step += 1
        paceline.report(step=step, total=batch["x"].sum())
        paceline.save_checkpoint(step=step)
        death = Path(config["folder"], f"died at {step}")
        if step in (13, 26) and paceline.world_rank() == 1 and not death.exists():
            death.touch()
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
