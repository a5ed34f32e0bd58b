"""What test_two_machines.py runs on a machine with a disk of its own, while Ray puts the workers on another one.

Each line that it prints is what happened in one run, as JSON.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import numpy
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import paceline
from paceline import BackendConfig, CheckpointStrategy, Trainer
from paceline.checkpoints import CheckpointStore, load
from paceline.errors import CheckpointWriteError


def look(config):
    return {"host": os.uname().nodename, "sees": Path(config["file"]).exists()}


def wait_for_the_end():
    while not paceline.should_stop():
        threading.Event().wait(0.01)


def train(config):
    """Four steps. In the first attempt a rank is killed in the third, when the second is committed."""
    resumed = paceline.load_checkpoint()
    begin = resumed["step"] if resumed else 0
    for step in range(begin + 1, 5):
        paceline.report(step=step)
        if step == 3 and begin == 0:
            paceline.load_checkpoint()
            if paceline.world_rank() == config["dies"]:
                os.kill(os.getpid(), signal.SIGKILL)
            wait_for_the_end()
        mine = numpy.full(config["num_values"], step + 10 * paceline.world_rank(), dtype="float32")
        paceline.save_checkpoint(step=step, weights=mine)
    last = paceline.load_checkpoint()
    return {"begin": begin, "step": last["step"], "mean": float(last["weights"].mean()), "on": os.uname().nodename}


def keep_files():
    """What was in the files that the run began with, and in those saved here."""
    former = paceline.load_checkpoint()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "deep").mkdir()
        Path(folder, "deep", "notes.txt").write_text(f"of rank {paceline.world_rank()}")
        Path(folder, "empty").touch()
        paceline.save_checkpoint(folder, step=1)
    return [contents(former), contents(paceline.load_checkpoint())]


def contents(checkpoint):
    if checkpoint is None:
        return None
    files = sorted(path for path in checkpoint.directory.rglob("*") if path.is_file())
    return {str(path.relative_to(checkpoint.directory)): path.read_text() for path in files}


def load_only():
    return paceline.load_checkpoint()["step"]


def fill_the_disk():
    """Rank 0 saves what does not fit, and goes on."""
    if paceline.world_rank() != 0:
        return None
    paceline.save_checkpoint(step=1)
    paceline.save_checkpoint(step=2, weights=numpy.zeros(12_000_000, dtype="uint8"))
    try:
        paceline.load_checkpoint()
    except CheckpointWriteError as error:
        paceline.save_checkpoint(step=3)
        return [str(error), paceline.load_checkpoint()["step"]]


def fail_while_saving():
    """Rank 1 fails when rank 0 has begun to send something large. Both are on one machine."""
    begun = Path(tempfile.gettempdir(), "rank_0_has_begun_to_send")
    if paceline.world_rank() == 0:
        paceline.save_checkpoint(step=1)
        paceline.load_checkpoint()
        paceline.save_checkpoint(step=2, weights=numpy.ones(50_000_000, dtype="uint8"))
        begun.touch()
        wait_for_the_end()
    paceline.save_checkpoint(step=1)
    paceline.load_checkpoint()
    paceline.save_checkpoint(step=2)
    while not begun.exists():
        threading.Event().wait(0.01)
    raise KeyError("mine")


def tell(trainer, **facts):
    """And what is on this machine's disk: every checkpoint is read, which compares its checksums."""
    root = Path(trainer.latest_checkpoint_dir)
    infos = CheckpointStore(root).list()
    on_disk = {info.id: load(info.path)["step"] for info in infos}
    left = sorted(set(os.listdir(root)) - {Path(info.path).name for info in infos}) if root.is_dir() else []
    print(json.dumps({**facts, "on_disk": on_disk, "left": left}), flush=True)


@ray.remote(num_cpus=1)
class Holder:
    """Takes a CPU, so that nobody else comes here."""

    def ready(self):
        pass


def run_all(results):
    ray.init(log_to_driver=False)
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    holder = Holder.options(scheduling_strategy=here).remote()
    ray.get(holder.ready.remote())
    with Trainer(BackendConfig(), num_workers=2, cpus_per_worker=0.5, engine="ray", logdir=results / "far") as trainer:
        run_far_away(trainer, results)
    ray.kill(holder)
    with Trainer(BackendConfig(), num_workers=2, cpus_per_worker=1, engine="ray", logdir=results / "both") as trainer:
        tell(trainer, values=trainer.run(train, {"dies": 1, "num_values": 10}))


def run_far_away(trainer, results):
    file = results / "file"
    file.touch()
    tell(trainer, values=trainer.run(look, {"file": str(file)}))
    small = {"dies": 1, "num_values": 10}
    tell(trainer, values=trainer.run(train, small, checkpoint_strategy=CheckpointStrategy(num_to_keep=1)))
    given = trainer.latest_checkpoint_path
    tell(trainer, values=trainer.run(train, {"dies": 0, "num_values": 8_000_000}))
    tell(trainer, values=trainer.run(load_only, checkpoint=given))
    in_memory = CheckpointStrategy(num_to_keep=0)
    tell(trainer, values=trainer.run(load_only, checkpoint=given, checkpoint_strategy=in_memory))
    tell(trainer, values=trainer.run(keep_files))
    path = trainer.latest_checkpoint_path
    tell(trainer, values=trainer.run(keep_files, checkpoint=path), read=contents(load(path)))
    tiny = results / "tiny"
    tiny.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", tiny], check=True)
    tell(trainer, values=trainer.run(fill_the_disk, checkpoint_strategy=CheckpointStrategy(storage_path=tiny)))
    for train_func, strategy in (
        (keep_files, CheckpointStrategy(storage_path=file / "below")),
        (fail_while_saving, CheckpointStrategy()),
    ):
        try:
            trainer.run(train_func, checkpoint_strategy=strategy)
        except Exception as error:
            tell(trainer, error=f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    run_all(Path(sys.argv[1]))
