"""What the runs of test_datasets.py do with their data. Their workers import this module, and so it imports little."""

import paceline


def ids_of(shard, **options):
    return sorted(int(one) for batch in shard.iter_batches(**options) for one in batch["id"])


def read_twice(config):
    shard = paceline.get_data_shard()
    return [ids_of(shard, batch_size=config["batch_size"]) for _ in range(2)]


def fail_at_first(config):
    rows = ids_of(paceline.get_data_shard())
    if paceline.load_checkpoint() is None:
        paceline.report(num_rows=len(rows))
        paceline.save_checkpoint(num_rows=len(rows))
        raise ValueError("once")
    return rows
