"""Ray datasets: every rank has its part, whatever happens to the ranks."""

import json
import logging
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tensorboardX  # noqa: F401  # it sets an environment variable when Tune imports it, which is no leak of a test
from reading import fail_at_first, ids_of, read_twice

import paceline
from paceline import BackendConfig, SGDCallback, Trainer, load_run
from paceline.data import resolve_dataset
from paceline.data.ray_shard import RayShard
from paceline.errors import ArgumentError, ArgumentTypeError, RunNotResumableError, TrainerStateError
from paceline.workers.base import Place, WorkerInfo

pytestmark = pytest.mark.usefixtures("ray_cluster")


@pytest.fixture(scope="module")
def ray_data(ray_cluster):
    import ray.data

    ray.data.DataContext.get_current().enable_progress_bars = False
    return ray.data


@pytest.fixture(scope="module")
def trainer(tmp_path_factory, ray_cluster, lasts):
    """Its workers have imported what reads the data."""
    arguments = {"engine": "ray", "cpus_per_worker": 0, "resources_per_worker": {"stays": 1}}
    with trainer_for(tmp_path_factory.mktemp("shared"), **arguments) as trainer, lasts(trainer):
        yield trainer


def trainer_for(tmp_path, **arguments):
    return Trainer(**{"backend": BackendConfig(), "num_workers": 2, "logdir": tmp_path / "runs", **arguments})


def test_ranks_share_the_rows_evenly_in_every_epoch(trainer, ray_data):
    shards = trainer.run(read_twice, {"batch_size": 16}, dataset=ray_data.range(100))
    for epoch in range(2):
        first, second = (shard[epoch] for shard in shards)
        assert len(first) == len(second) == 50
        assert sorted(first + second) == list(range(100))


def test_next_run_has_its_own_dataset_or_none(trainer, ray_data):
    """The workers stay; what they were given before does not."""
    shards = trainer.run(read_twice, {"batch_size": 16}, dataset=ray_data.range(10))
    assert sorted(shards[0][0] + shards[1][0]) == list(range(10))
    with pytest.raises(TrainerStateError, match="this run was given no dataset"):
        trainer.run(read_twice, {"batch_size": 16})


def test_torch_batches(trainer, ray_data):
    """The two ways to get tensors out of a shard."""

    def train():
        shard = paceline.get_data_shard()
        total = sum(batch["id"].sum().item() for batch in shard.iter_torch_batches(batch_size=10))
        pairs = shard.to_torch(label_column="id", batch_size=10)
        return total, sum(label.sum().item() for _, label in pairs)

    dataset = ray_data.range(40).map_batches(lambda batch: {"id": batch["id"], "twice": batch["id"] * 2.0})
    values = trainer.run(train, dataset=dataset)
    assert sum(total for total, _ in values) == sum(range(40))
    assert sum(labels for _, labels in values) == sum(range(40))


def test_tensorflow_batches_move_the_position(ray_data):
    """A resumed rank goes on behind what the loop has had, and TensorFlow has fetched nothing ahead of it."""
    dataset = ray_data.range(40).map_batches(lambda batch: {"id": batch["id"], "twice": batch["id"] * 2.0})
    shard, seen = RayShard(dataset.iterator(), 0, 1), []
    for features, labels in shard.to_tf(["id", "twice"], "id", batch_size=10):
        assert features["twice"].numpy().tolist() == [2.0 * one for one in labels.numpy()]
        seen.append((labels.numpy().tolist(), shard.state()))
    (had, state), *_ = seen
    assert [state["rows"] for _, state in seen] == [10, 20, 30, 40]
    resumed = RayShard(dataset.iterator(), 0, 1)
    resumed.go_on([state])
    rest = [one for _, ids in resumed.to_tf("twice", "id", batch_size=10) for one in ids.numpy()]
    assert sorted(had + rest) == list(range(40))
    with pytest.raises(ValueError, match="nope"):
        shard.to_tf("nope", "id")


def test_several_datasets_by_name(trainer, ray_data):
    def train():
        return [ids_of(paceline.get_data_shard(name)) for name in ("train", "valid")]

    datasets = {"train": ray_data.range(8), "valid": ray_data.range(4)}
    shards = trainer.run(train, dataset=datasets)
    assert sorted(shards[0][0] + shards[1][0]) == list(range(8))
    assert sorted(shards[0][1] + shards[1][1]) == list(range(4))
    with pytest.raises(ArgumentError, match="say which of 'train', 'valid'"):
        trainer.run(lambda: paceline.get_data_shard(), dataset=datasets)
    with pytest.raises(ArgumentError, match=r"get_data_shard\('tset'\).*say which of 'train', 'valid'"):
        trainer.run(lambda: paceline.get_data_shard("tset"), dataset=datasets)


def test_name_where_there_is_none(trainer, ray_data):
    with pytest.raises(ArgumentError, match="one dataset, without a name"):
        trainer.run(lambda: paceline.get_data_shard("train"), dataset=ray_data.range(4))


def test_outside_of_a_run():
    with pytest.raises(TrainerStateError, match="for training functions"):
        paceline.get_data_shard()


@pytest.mark.parametrize("dataset", [[1, 2], {"train": "a.csv"}], ids=["list", "dict"])
def test_not_a_dataset(trainer, dataset):
    former = trainer.latest_run_dir
    with pytest.raises(ArgumentTypeError, match=r"expected a torch dataset|expected pairs"):
        trainer.run(lambda: None, dataset=dataset)
    assert trainer.latest_run_dir == former, "nothing has begun"


def test_rank_is_killed_while_all_wait_for_data(trainer, ray_data):
    """The survivor may be waiting for rows that it would share with the dead one. The data is cut again, and each rank
    skips what it had."""

    def train():
        resumed = paceline.load_checkpoint()
        shard = paceline.get_data_shard()
        seen = [*resumed.per_rank["seen"]] if resumed else []
        for batch in shard.iter_batches(batch_size=5, prefetch_batches=0):
            seen.extend(map(int, batch["id"]))
            paceline.report(num_seen=len(seen))
            if resumed is None:
                paceline.save_checkpoint(pid=os.getpid(), per_rank={"seen": [*seen]})
                if paceline.world_rank() == 1 and len(seen) >= 10:
                    os.kill(os.getpid(), signal.SIGKILL)
        return {"seen": seen, "is_same_process": resumed is not None and resumed["pid"] == os.getpid()}

    def slowly(batch):
        threading.Event().wait(0.05)
        return batch

    dataset = ray_data.range(100, override_num_blocks=20).map_batches(slowly, batch_size=5)
    values = trainer.run(train, dataset=dataset)
    assert sorted(values[0]["seen"] + values[1]["seen"]) == list(range(100)), "each row counts once"
    assert values[0]["is_same_process"], "the survivor was not stuck in its shard"


class MakeRoom(SGDCallback):
    """Lets go of what others held, and tells the function when the group could grow."""

    def __init__(self, trainer, make_room, path):
        self.trainer, self.make_room, self.path = trainer, make_room, path

    def handle_result(self, results, **info):
        if len(results) == 1 and not self.path.exists():
            self.make_room()
            threading.Thread(target=self.wait, name="paceline-test-wait").start()

    def wait(self):
        run = paceline.load_run(self.trainer.latest_run_dir)
        while not any(event["kind"] == "room" for event in run.events) and run.is_alive:
            threading.Event().wait(0.01)
        self.path.touch()


def test_elastic_group_grows_and_the_data_is_cut_again(tmp_path, ray_cluster, ray_data):
    """One worker fits at first: somebody else has 5 of the 8 CPUs; reading takes one."""

    def train(config):
        state = paceline.load_checkpoint() or {"rows": []}
        ids = ids_of(paceline.get_data_shard())
        paceline.report(num_rows=len(ids))
        while paceline.world_size() == 1 and not os.path.exists(config["room"]):
            threading.Event().wait(0.01)
        paceline.save_checkpoint(rows=[*state["rows"], len(ids)])
        while paceline.world_size() == 1 and not paceline.should_stop():  # it is called again, with company
            threading.Event().wait(0.01)
        return ids

    other = ray_cluster.util.placement_group([{"CPU": 5}])
    ray_cluster.get(other.ready())
    room = tmp_path / "room"
    with trainer_for(tmp_path, num_workers=(1, 2), cpus_per_worker=2, engine="ray") as elastic:
        listener = MakeRoom(elastic, lambda: ray_cluster.util.remove_placement_group(other), room)
        shards = elastic.run(train, {"room": str(room)}, callbacks=[listener], dataset=ray_data.range(12))
        assert elastic.latest_checkpoint["rows"] == [12, 6]
    assert [len(shard) for shard in shards] == [6, 6]
    assert sorted(shards[0] + shards[1]) == list(range(12))


# --- streams ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def supply_of(ray_data):
    """Makes supplies of a dataset, and closes them."""
    made = []

    def supply_of(dataset):
        made.append(resolve_dataset(dataset))
        return made[-1]

    yield supply_of
    for supply in made:
        supply.close()


def workers(size):
    return [WorkerInfo(Place(rank, rank, 0, size, size), 0, "here") for rank in range(size)]


def read_streams(handouts):
    """All at once, as ranks do."""
    with ThreadPoolExecutor(len(handouts)) as ranks:
        return list(ranks.map(lambda handout: ids_of(handout.items[None]), handouts))


@pytest.mark.parametrize(("num_rows", "size"), [(12, 2), (13, 3)])
def test_every_rank_has_equally_many_rows_that_no_other_has(supply_of, ray_data, num_rows, size):
    found = read_streams(supply_of(ray_data.range(num_rows, override_num_blocks=2)).cut(workers(size)))
    assert [len(rows) for rows in found] == [num_rows // size] * size
    together = [number for rows in found for number in rows]
    assert len(set(together)) == len(together), "no row twice"


def test_cutting_again_and_closing_end_the_former_streams(supply_of, ray_data):
    supply = supply_of(ray_data.range(12, override_num_blocks=2))
    [former] = supply.cut(workers(1))
    handouts = supply.cut(workers(2))
    with pytest.raises(Exception, match=r".+"):
        ids_of(former.items[None])
    assert sorted(number for rows in read_streams(handouts) for number in rows) == list(range(12))
    supply.close()
    supply.close()
    [handout] = supply.cut(workers(1))
    assert ids_of(handout.items[None]) == list(range(12)), "and it may be cut again"


def test_description_is_for_the_run_folder(supply_of, ray_data):
    one = supply_of(ray_data.range(4)).describe()
    several = supply_of({"train": ray_data.range(4), "valid": np.arange(3)}).describe()
    assert json.loads(json.dumps([one, several], allow_nan=False)) == [one, several]
    assert several["valid"]["source"]["num_rows"] == 3


# --- where the workers live ------------------------------------------------------------------------------------------


def test_ray_dataset_brings_its_workers_to_ray(tmp_path, ray_data):
    with trainer_for(tmp_path) as trainer:
        assert trainer.engine.name == "local"
        trainer.run(read_twice, {"batch_size": 4}, dataset=ray_data.range(4))
        assert trainer.engine.name == "ray"
        assert load_run(trainer.latest_run_dir).request["engine"] == "ray"


def test_function_in_this_process(tmp_path, ray_data):
    with trainer_for(tmp_path, num_workers=0) as trainer:
        assert trainer.run(read_twice, {"batch_size": 4}, dataset=ray_data.range(4)) == [[[0, 1, 2, 3]] * 2]


def test_engine_that_cannot_read_it(tmp_path, ray_data):
    trainer = trainer_for(tmp_path, engine="local")
    with pytest.raises(ArgumentError, match=r"on engine='ray' only; the workers of this Trainer live on 'local'"):
        trainer.run(read_twice, {"batch_size": 4}, dataset=ray_data.range(4))
    keeps_objects = trainer_for(tmp_path, num_workers=1)
    keeps_objects.start(dict)
    with pytest.raises(ArgumentError, match="engine='ray' only"):
        keeps_objects.run(read_twice, {"batch_size": 4}, dataset=ray_data.range(4))
    keeps_objects.shutdown()


def test_no_cpu_left_to_read_with(tmp_path, ray_data, caplog):
    """It may still come free: the run says what it waits for."""
    in_memory = ray_data.range(8).materialize()
    with (
        trainer_for(tmp_path, num_workers=1, cpus_per_worker=8, engine="ray") as all_there_are,
        caplog.at_level(logging.WARNING),
    ):
        all_there_are.run(read_twice, {"batch_size": 4}, dataset=in_memory)
        assert "reading the dataset" not in caplog.text, "it needs nobody to read it"
        source = resolve_dataset(ray_data.range(8))
        source.cut([WorkerInfo(Place(), 0, "here")])
        source.close()
        assert "reading the dataset takes at least one" in caplog.text


# --- tuning and resuming ---------------------------------------------------------------------------------------------


def test_every_trial_has_all_of_the_data(tmp_path, ray_data):
    from ray import tune

    def train(config):
        both = (paceline.get_data_shard(name).iter_batches(config["batch_size"]) for name in ("rays", "ours"))
        for batch, own in zip(*both, strict=True):
            paceline.report(total=int(batch["id"].sum()), own=int(own["data"].sum()))

    datasets = {"rays": ray_data.range(20), "ours": np.arange(20)}
    trainable = trainer_for(tmp_path).to_tune_trainable(train, dataset=datasets, all_ranks=True)
    tuner = tune.Tuner(
        trainable,
        param_space={"batch_size": tune.grid_search([5, 10])},
        tune_config=tune.TuneConfig(max_concurrent_trials=1, reuse_actors=True),
        run_config=tune.RunConfig(storage_path=str(tmp_path / "tune"), verbose=0),
    )
    results = tuner.fit()
    assert not results.errors
    for run in paceline.list_runs(tmp_path / "runs"):
        assert run.metrics["total"].sum() == run.metrics["own"].sum() == sum(range(20))
        assert len(run.metrics) == 2 * 10 // run.config["batch_size"], "a report for each batch of each rank"


def test_resumed_run_is_given_its_dataset_again(tmp_path, trainer, ray_data):
    (tmp_path / "rows.json").write_text("".join(f'{{"id": {number}}}\n' for number in range(10)))
    dataset = ray_data.read_json(str(tmp_path / "rows.json"))
    with pytest.raises(ValueError, match="once"):
        trainer.run(fail_at_first, {}, dataset=dataset)
    with pytest.raises(RunNotResumableError, match=r"Trainer.resume\(run_dir, dataset=...\)"):
        Trainer.resume(trainer.latest_run_dir)
    rows = Trainer.resume(trainer.latest_run_dir, dataset=dataset)
    assert sorted(rows[0] + rows[1]) == list(range(10))
