"""Train from Parquet files that are larger than the memory a worker may use.

    python examples/data/larger_than_memory.py --rows 4_000_000 --limit-mb 100

Makes the files in a temporary folder: ten columns, whose label is a known function of them. Two workers stream them,
shuffled, for one epoch, and show how much memory they took.
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import torch

import paceline
from paceline import Trainer
from paceline.data import read_parquet

NUM_FEATURES = 9


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=4_000_000)
    parser.add_argument("--limit-mb", type=float, default=100, help="by how much a worker may grow")
    args = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        num_mb = write(Path(folder), args.rows) / 2**20
        dataset = read_parquet(folder).random_shuffle(window=50_000)
        with Trainer(backend="torch", num_workers=2, cpus_per_worker=1) as trainer:
            results = trainer.run(train, {"batch_size": 1024}, dataset=dataset)
    grown_mb = max(result["grown_mb"] for result in results)
    print(f"{num_mb:.0f} MB of rows, {sum(result['num_rows'] for result in results):,} in all")
    print(f"a worker grew by {grown_mb:.0f} MB: {'within' if grown_mb <= args.limit_mb else 'beyond'} the limit")
    print(f"loss {results[0]['first_loss']:.3f} → {results[0]['last_loss']:.3f}")


def write(folder, num_rows):
    """Returns how many bytes the rows are in memory."""
    weights = np.linspace(-1, 1, NUM_FEATURES, dtype=np.float32)
    random, num_bytes = np.random.default_rng(0), 0
    for number, start in enumerate(range(0, num_rows, 500_000)):
        features = random.normal(size=(min(500_000, num_rows - start), NUM_FEATURES)).astype(np.float32)
        columns = {f"x{column}": features[:, column] for column in range(NUM_FEATURES)}
        table = pa.table({**columns, "y": features @ weights})
        num_bytes += table.nbytes
        pq.write_table(table, folder / f"part-{number:03}.parquet", row_group_size=25_000)
    return num_bytes


def train(config):
    process, losses, num_rows = psutil.Process(), [], 0
    model = paceline.prepare_model(torch.nn.Linear(NUM_FEATURES, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    before = most = 0
    for step, (x, y) in enumerate(paceline.get_data_shard().to_torch(batch_size=config["batch_size"], rest="drop")):
        loss = torch.nn.functional.mse_loss(model(x)[:, 0], y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        num_rows += len(x)
        if step % 50 == 0:
            paceline.report(loss=losses[-1])
            most = max(most, process.memory_info().rss)
            before = before or most  # with the libraries, the model and the first rows
    grown_mb = (most - before) / 2**20
    return {"num_rows": num_rows, "grown_mb": grown_mb, "first_loss": losses[0], "last_loss": losses[-1]}


if __name__ == "__main__":
    main()
