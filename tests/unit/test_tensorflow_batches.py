"""What `to_tf` gives, with TensorFlow itself: which rows, as what, and where the shard then is."""

import threading

import numpy as np
import pyarrow as pa
import pytest

from paceline.data import as_dataset, from_numpy
from paceline.data.shard import Shard
from paceline.errors import ArgumentError, DataError


@pytest.fixture(scope="module", autouse=True)
def tf():
    """Imported by the first test, not when tests are collected: it takes seconds."""
    return pytest.importorskip("tensorflow")


SIZE = 1000
ROWS = from_numpy(
    {
        "id": np.arange(SIZE),
        "x": (np.arange(SIZE) / SIZE).astype("f4"),
        "pair": np.arange(2 * SIZE, dtype="f4").reshape(SIZE, 2),
        "text": np.array([f"row {number}" for number in range(SIZE)]),
    }
)


def ids_of(dataset):
    return [int(number) for _, ids in dataset for number in ids.numpy()]


# --- which rows -------------------------------------------------------------------------------------------------------


def test_each_loop_is_an_epoch_with_each_row_once_in_its_own_order():
    made = ROWS.random_shuffle(seed=1).to_tf("x", "id", batch_size=64)
    first, second = ids_of(made), ids_of(made)
    assert first != second
    assert sorted(first) == sorted(second) == [*range(SIZE)]
    assert first == [int(n) for batch in ROWS.random_shuffle(seed=1).iter_batches(64) for n in batch["id"]]


def test_ranks_share_the_rows():
    found = [ids_of(Shard(ROWS.random_shuffle().tree, rank, 3).to_tf("x", "id", batch_size=50)) for rank in range(3)]
    assert sorted([*found[0], *found[1], *found[2]]) == [*range(SIZE)]
    assert {len(ids) for ids in found} == {333, 334}


@pytest.mark.parametrize(
    ("rest", "sizes"),
    [("uneven", [[4, 4, 0], [4, 4, 1], [4, 4, 1]]), ("pad", [[4, 4, 4]] * 3), ("drop", [[4, 4]] * 3)],
)
def test_rest_of_an_epoch(rest, sizes):
    """A rank without rows gets an empty batch, so that all take equally many steps."""
    shards = [Shard(ROWS.limit(26).tree, rank, 3) for rank in range(3)]
    made = [shard.to_tf("pair", "id", global_batch_size=12, rest=rest) for shard in shards]
    batches = [[*one.as_numpy_iterator()] for one in made]
    assert [[len(ids) for _, ids in one] for one in batches] == sizes
    assert {pair.shape[1:] for one in batches for pair, _ in one} == {(2,)}


# --- as what ----------------------------------------------------------------------------------------------------------


def test_one_column_is_a_tensor_and_several_are_a_dict(tf):
    made = ROWS.to_tf(["pair", "text"], "x", batch_size=3)
    features, label = made.element_spec
    assert features == {"pair": tf.TensorSpec((None, 2), tf.float32), "text": tf.TensorSpec((None,), tf.string)}
    assert label == tf.TensorSpec((None,), tf.float32)
    batch, _ = next(iter(made))
    assert batch["pair"].numpy().tolist() == [[0, 1], [2, 3], [4, 5]]
    assert batch["text"].numpy().tolist() == [b"row 0", b"row 1", b"row 2"]


def test_tensorflow_does_not_shard_it_again(tf):
    policy = ROWS.to_tf("x", "id").options().experimental_distribute.auto_shard_policy
    assert policy == tf.data.experimental.AutoShardPolicy.OFF


def test_keras_fits_it():
    import keras

    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Rescaling(1 / SIZE), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    count = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: batches.append(batch))
    batches, made = [], ROWS.random_shuffle().to_tf("pair", "x", batch_size=50)
    losses = model.fit(made, epochs=3, verbose=0, shuffle=False, callbacks=[count]).history["loss"]
    assert losses == sorted(losses, reverse=True)
    assert batches == [*range(20)] * 3


def test_column_is_not_there():
    with pytest.raises(ArgumentError, match="no column 'y'; there are id, x, pair, text"):
        ROWS.to_tf("x", "y")
    with pytest.raises(ArgumentError, match="no column 'z'"):
        ROWS.to_tf(["x", "z"], "id")


def test_column_is_no_tensor():
    ragged = as_dataset(pa.table({"a": [1, 2], "b": [[1], [2, 3]]}))
    assert len([*ragged.to_tf("a", "a")]) == 1
    with pytest.raises(DataError, match=r"'b' holds values that are no tensor; make numbers of them with \.map"):
        ragged.to_tf("a", "b")


def test_rows_are_no_columns():
    with pytest.raises(DataError, match=r"to_tf\(\) needs columns"):
        ROWS.map(lambda row: (row["x"], row["id"])).to_tf("x", "id")


def test_error_of_a_function_of_the_user_is_told(tf):
    def fail(row):
        if row["id"] == 7:
            raise ValueError("seven is bad")
        return row

    with pytest.raises(tf.errors.InvalidArgumentError, match="seven is bad"):
        ids_of(ROWS.map(fail).to_tf("x", "id", batch_size=4))


# --- where the shard is -----------------------------------------------------------------------------------------------


def had(shard):
    return shard.state()["stop"]


def gone_on(shard, others=()):
    new = Shard(shard.tree, shard.rank, shard.world_size)
    new.go_on([shard.state(), *(one.state() for one in others)])
    return new


def test_a_batch_counts_as_had_when_the_loop_has_it():
    """TensorFlow would fetch the next one meanwhile, and a checkpoint would then leave that out."""
    shard = Shard(ROWS.random_shuffle().tree)
    seen = []
    batches = iter(shard.to_tf("x", "id", batch_size=64))
    for number in range(1, 6):
        seen += next(batches)[1].numpy().tolist()
        assert had(shard) == 64 * number
    seen += ids_of(gone_on(shard).to_tf("x", "id", batch_size=10))
    assert sorted(seen) == [*range(SIZE)]


def test_goes_on_with_another_number_of_ranks():
    tree = ROWS.random_shuffle().tree
    two = [Shard(tree, rank, 2) for rank in (0, 1)]
    seen, loops = [], [iter(shard.to_tf("x", "id", batch_size=30)) for shard in two]
    for _ in range(4):
        for loop in loops:
            seen += next(loop)[1].numpy().tolist()
    three = [Shard(tree, rank, 3) for rank in range(3)]
    for shard in three:
        shard.go_on([one.state() for one in two])
        seen += ids_of(shard.to_tf("x", "id", batch_size=30))
    assert sorted(seen) == [*range(SIZE)]


def test_what_is_prefetched_on_demand_counts_as_had(wait_until):
    shard = Shard(ROWS.tree)
    batches = iter(shard.to_tf("x", "id", batch_size=10).prefetch(3))
    next(batches)
    wait_until(lambda: had(shard) >= 40, "the three that are prefetched")
    assert had(shard) == 40, "and not one more"


def test_after_an_epoch_the_next_one_follows():
    shard = Shard(ROWS.random_shuffle().tree)
    made = shard.to_tf("x", "id", batch_size=300)
    first = ids_of(made)
    assert shard.epoch == 1
    assert ids_of(gone_on(shard).to_tf("x", "id", batch_size=300)) == ids_of(made) != first


def test_loop_that_is_left_ends_its_threads(wait_until):
    def ours():
        return {thread.name for thread in threading.enumerate() if thread.name.startswith("paceline")}

    batches = iter(ROWS.map(lambda row: row).to_tf("x", "id", batch_size=4))
    next(batches)
    assert ours()
    del batches
    wait_until(lambda: not ours(), "the end of the threads that read")
