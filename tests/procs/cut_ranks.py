"""What the ranks of test_cut.py do. Each worker that starts imports this module, and so it imports little."""

import os
import random
import signal
import threading

import paceline

NUM_STEPS = 24


def wait_for(path):
    while not os.path.exists(path):
        threading.Event().wait(0.005)


def train_apart(config):
    """Two ranks that never meet. Rank 1 waits in its step `kill_at` until rank 0 has done all it can, and is killed."""
    checkpoint = paceline.load_checkpoint() or {"step": 0}
    rank, done = paceline.world_rank(), config["dir"] + "/rank_0_is_done"
    for step in range(checkpoint["step"] + 1, NUM_STEPS + 1):
        if rank == 1 and step == config["kill_at"] and not os.path.exists(config["dir"] + "/killed"):
            wait_for(done)
            open(config["dir"] + "/killed", "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        paceline.report(step=step, rank=rank)
        if step % config["save_every"] == 0:
            own = {"drawn": random.random()} if config["own"] else None
            paceline.save_checkpoint(step=step, per_rank=own)
    if rank == 0:
        paceline.load_checkpoint()
        open(done, "w").close()
    return checkpoint["step"]


def train_with_own_numbers(config):
    """Sums random numbers of each rank's own; killed once, at some step, on one rank."""
    paceline.enable_reproducibility(3)
    random.seed(paceline.world_rank())
    checkpoint = paceline.load_checkpoint()
    step, total = (checkpoint["step"], checkpoint.per_rank["total"]) if checkpoint else (0, 0.0)
    while step < NUM_STEPS:
        step += 1
        total += random.random()
        paceline.report(step=step, rank=paceline.world_rank(), total=total)
        paceline.save_checkpoint(step=step, per_rank={"total": total})
        if [paceline.world_rank(), step] == config["kill"] and not os.path.exists(config["killed"]):
            open(config["killed"], "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
    return total


def train_where_rank_0_saves(config):
    """Rank 0 does not run far ahead: of too many checkpoints that wait for rank 1's reports, some are given up."""
    checkpoint = paceline.load_checkpoint() or {"step": 0}
    for step in range(checkpoint["step"] + 1, NUM_STEPS + 1):
        paceline.report(step=step, rank=paceline.world_rank())
        if paceline.world_rank() == 0:
            paceline.save_checkpoint(step=step)
        if paceline.world_rank() == 0 and step == 5:
            wait_for(config["go"])
        if paceline.world_rank() == 1 and step == 12 and not checkpoint["step"]:
            wait_for(config["go"])
            os.kill(os.getpid(), signal.SIGKILL)
    return checkpoint["step"]


def train_unequally(config):
    for step in range(1, 4):
        paceline.report(step=step)
        if paceline.world_rank() == 0 or step < 3:
            paceline.save_checkpoint(step=step)


def train_and_die_before_saving(config):
    """Data-parallel: nothing is a rank's own. Rank 1 has reported step 5, and dies before it can save it."""
    checkpoint = paceline.load_checkpoint() or {"step": 0}
    for step in range(checkpoint["step"] + 1, NUM_STEPS + 1):
        paceline.report(step=step, rank=paceline.world_rank())
        if paceline.world_rank() == 1 and step == 5 and not checkpoint["step"]:
            paceline.load_checkpoint()  # by then, the driver has the report
            wait_for(config["go"])
            os.kill(os.getpid(), signal.SIGKILL)
        paceline.save_checkpoint(step=step, per_rank={"x": 1} if config["own"] else None)
        if paceline.world_rank() == 0 and step == 5 and not checkpoint["step"]:
            paceline.load_checkpoint()
            open(config["go"], "w").close()
    return checkpoint["step"]
