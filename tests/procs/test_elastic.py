"""Groups that grow and shrink, and workers that are taken away, with real workers on both engines."""

import math
import os
import signal
import threading

import torch

import paceline
from paceline import LocalEngine, SGDCallback, Trainer

NUM_STEPS = 12


def train(config):
    """Sums an all-reduced constant whose value does not depend on the number of workers. At the step `die_at` of the
    first attempt, somebody will die; at `wait_at`, the file `go` is waited for, and then for the end, since the group
    grows. The driver may be far behind: what it shall do first must not come after what the workers do next."""
    checkpoint = paceline.load_checkpoint() or {"step": 0, "total": 0.0, "sizes": []}
    total, sizes = checkpoint["total"], [*checkpoint["sizes"]]
    for step in range(checkpoint["step"] + 1, NUM_STEPS + 1):
        value = torch.ones(1) * step / paceline.world_size()
        torch.distributed.all_reduce(value)
        total += value.item()
        sizes.append(paceline.world_size())
        paceline.report(step=step, total=total, size=paceline.world_size(), rank=paceline.world_rank())
        paceline.save_checkpoint(step=step, total=total, sizes=sizes)
        if step == config.get("die_at") and checkpoint["step"] == 0:
            paceline.load_checkpoint()
            threading.Event().wait()
        if step == config["wait_at"]:
            paceline.load_checkpoint()
            wait_for(config["go"])
        if checkpoint["step"] < config["wait_at"] < step:
            while not paceline.should_stop():
                threading.Event().wait(0.01)
            return None
    return total


def wait_for(path):
    while not os.path.exists(path):
        threading.Event().wait(0.01)


class At(SGDCallback):
    """Does something on the driver once, when a step is reported."""

    def __init__(self, step, act, size=None):
        self.step, self.act, self.size, self.sizes = step, act, size, []

    def handle_result(self, results, **info):
        if results[0]["step"] == self.step and self.act is not None and len(results) == (self.size or len(results)):
            act, self.act = self.act, None
            act()

    def handle_resize(self, world_size, **info):
        self.sizes.append((info["former"], world_size))


def sizes_of(trainer):
    """How many workers made each step that counts."""
    frame = paceline.load_run(trainer.latest_run_dir).metrics
    return frame[frame["rank"] == 0]["size"].astype(int).tolist()


def assert_every_step_counts_once(trainer):
    frame = paceline.load_run(trainer.latest_run_dir).metrics
    assert frame[frame["rank"] == 0]["step"].tolist() == list(range(1, NUM_STEPS + 1))
    complete = [group["rank"].tolist() == list(range(int(group["size"].iloc[0]))) for _, group in frame.groupby("step")]
    assert all(complete), "no rank lacks a step that counts"


def kill(trainer, rank):
    os.kill(trainer._crew.group.infos[rank].pid, signal.SIGKILL)


def test_machine_lends_a_slot_and_gets_it_back(tmp_path):
    """Three workers fit. One dies and its room is gone: two go on. Then the room is back: three."""
    engine, go = LocalEngine(slots=3), tmp_path / "go"

    def lend():
        engine.slots = 2
        kill(trainer, 2)

    def get_back():
        engine.slots = 3
        when_there_is_room(trainer, go.touch)

    shrink, grow = At(4, lend), At(8, get_back, size=2)  # three may have reported it, too, before one died
    with Trainer(num_workers=(1, 4), engine=engine, max_retries=1) as trainer:
        values = trainer.run(train, {"die_at": 4, "wait_at": 8, "go": str(go)}, callbacks=[shrink, grow])
    assert shrink.sizes == [(3, 2), (2, 3)]
    assert values == [sum(range(NUM_STEPS + 1))] * 3
    assert_every_step_counts_once(trainer)
    events = paceline.load_run(trainer.latest_run_dir).events
    assert [(e["former"], e["world_size"]) for e in events if e["kind"] == "resize"] == [(3, 2), (2, 3)]
    assert [e["cause"] for e in events if e["kind"] == "restart"] == ["loss", "growth"]


def test_cluster_gets_room_during_a_run(ray_cluster, tmp_path):
    """Each worker takes 2 of 8 CPUs, of which somebody else has 4 at first."""
    while ray_cluster.available_resources().get("CPU", 0) < 8:
        threading.Event().wait(0.02)
    other = ray_cluster.util.placement_group([{"CPU": 4}])
    ray_cluster.get(other.ready())
    go = tmp_path / "go"

    def free():
        ray_cluster.util.remove_placement_group(other)
        when_there_is_room(trainer, go.touch)

    listener = At(4, free)
    with Trainer(num_workers=(1, math.inf), cpus_per_worker=2, engine="ray", max_retries=0) as trainer:
        before = trainer.execute(os.getpid)
        values = trainer.run(train, {"wait_at": 4, "go": str(go)}, callbacks=[listener])
        after = trainer.execute(os.getpid)
    assert len(before) == 2
    assert before == after[:2], "those who were there stay"
    assert [size for size in listener.sizes[:1]] in ([(2, 3)], [(2, 4)])
    assert values == [sum(range(NUM_STEPS + 1))] * listener.sizes[-1][1]
    assert_every_step_counts_once(trainer)


def when_there_is_room(trainer, act):
    """In a thread: the driver goes on, and looks for room, meanwhile."""

    def wait():
        run = paceline.load_run(trainer.latest_run_dir)
        while not any(event["kind"] == "room" for event in run.events) and run.is_alive:
            threading.Event().wait(0.01)
        act()

    threading.Thread(target=wait, name="paceline-test-wait", daemon=True).start()
