"""What each rank does in test_core: a program for plain python, told its place by arguments. Without torch, which takes
seconds to import."""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import paceline
from paceline import core
from paceline.errors import PacelineError


def main():
    scenario, rank, size, port, logdir = sys.argv[1:]
    rank, size = int(rank), int(size)
    distributed = core.DistributedContext(
        rank=rank,
        size=size,
        local_rank=rank,
        local_size=size,
        cross_rank=0,
        cross_size=1,
        chief_port=int(port),
        timeout_s=30,
    )
    with core.init(distributed, {"scenario": scenario}, logdir=logdir) as context:
        told = {"run_dir": str(context.run_dir), "rank": paceline.world_rank(), "size": paceline.world_size()}
        told |= globals()[scenario](context) or {}
    print(json.dumps(told))


def everything(context):
    rank = context.distributed.rank
    for step in (1, 2):
        context.train.report_training_metrics(step, {"loss": step + rank / 10})
        context.train.report_progress(step / 2)
    context.train.report_validation_metrics(2, {"loss": 0.5})
    try:
        context.train.report_training_metrics(2, {"loss": 0})
    except ValueError as error:
        twice = str(error)
    paceline.save_checkpoint(step=2, per_rank={"mine": rank})
    mine = paceline.load_checkpoint().per_rank["mine"]
    return {"twice": twice, "mine": mine, "files": files(context, Path()), "refused": refusals(context, Path())}


def files(context, folder):
    """A sharded checkpoint, there and back."""
    rank = context.distributed.rank
    metadata = {"steps_completed": 2, "ranks": {str(rank): rank}}
    with context.checkpoint.store_path(metadata, shard=True) as (path, id):
        (path / "same.txt").write_text("same")
        (path / "deep").mkdir()
        (path / "deep" / f"{rank}.txt").write_text(str(rank))
    with context.checkpoint.restore_path(id) as there:
        found = {str(one.relative_to(there)): one.read_text() for one in there.rglob("*.txt")}
    copy = folder / f"copy_{rank}"
    context.checkpoint.download(id, copy, selector=lambda name: name == "deep/1.txt")
    context.distributed.allgather(None)
    second = context.checkpoint.upload(copy if rank else None, shard=True)
    context.distributed.allgather(None)
    if rank == 1:
        context.checkpoint.delete(second)
        try:
            context.checkpoint.delete(second)
        except FileNotFoundError:
            second = f"{second} deleted"
    selected = [str(one.relative_to(copy)) for one in copy.rglob("*.txt")]
    return [id, found, context.checkpoint.get_metadata(id), selected, second]


def refusals(context, folder):
    """What is said of checkpoints that cannot be."""
    rank, checkpoint = context.distributed.rank, context.checkpoint
    mine = folder / f"refused_{rank}"
    mine.mkdir()
    (mine / "weights").write_text(f"of rank {rank}")
    refused = {}
    for name, act in {
        "differs": lambda: checkpoint.upload(mine, shard=True),
        "metadata": lambda: checkpoint.upload(mine, {"a": {"b": rank}}, shard=True, selector=lambda name: False),
        "value": lambda: checkpoint.upload(mine, {"a": threading.Lock() if rank else 1}, shard=True),
        "missing": lambda: checkpoint.upload("nowhere" if rank else mine, shard=True),
        "outside": lambda: checkpoint.delete("../checkpoint_000001"),
        "alone": lambda: checkpoint.upload(mine),
    }.items():
        try:
            act()
        except PacelineError as error:
            refused[name] = f"{type(error).__name__}: {error}"
    return refused


def chief_alone(context, folder=Path()):
    """As scripts do it that report and save on rank 0 only."""
    if context.distributed.is_chief:
        (folder / "weights").mkdir()
        (folder / "weights" / "w.txt").write_text("w")
        context.train.report_training_metrics(1, {"loss": 1})
        id = context.checkpoint.upload(folder / "weights", {"steps_completed": 1})
    else:
        id = None
    id = context.distributed.broadcast(id)
    with core.init() as again:  # in a run that is there
        assert again.distributed.allgather(again.distributed.rank) == list(range(again.distributed.size))
    with context.checkpoint.restore_path(id) as path:
        return {"found": (path / "w.txt").read_text(), "metadata": context.checkpoint.get_metadata(id)}


def stops(context):
    """Rank 1 gets SIGTERM; all leave at the same call, and save."""
    for step in range(1, 10_000):
        context.distributed.allgather(step)
        paceline.report(step=step)
        if step == 5 and context.distributed.rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        if context.preempt.should_preempt():
            paceline.save_checkpoint(step=step, per_rank={"step": step})
            print(json.dumps({"stopped_at": step}), flush=True)
            return


def raises(context):
    train_on(context, lambda: raise_(ValueError("no such thing")))


def is_killed(context):
    """And leaves a child behind, as loaders do, which has its open files: it stays as long as rank 0 is there."""
    chief_pid = context.distributed.broadcast(os.getpid())

    def fate():
        if os.fork() == 0:
            os.closerange(0, 3)
            deadline = time.monotonic() + 100
            while os.path.exists(f"/proc/{chief_pid}/exe") and time.monotonic() < deadline:
                time.sleep(0.02)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)

    train_on(context, fate)


def is_terminated(context):
    """Before it has looked whether it should stop."""
    train_on(context, lambda: os.kill(os.getpid(), signal.SIGTERM))


def exits(context):
    context.distributed.allgather(None)
    paceline.report(step=0)
    sys.exit(0)


def forks(context):
    """On every rank, a child that leaves the block as a program ends, and one that would report."""
    rank = context.distributed.rank
    Path("mine").mkdir(exist_ok=True)
    Path("mine", f"{rank}.txt").write_text(str(rank))
    id = context.checkpoint.upload("mine", shard=True, selector=lambda name: name == f"{rank}.txt")
    with context.checkpoint.restore_path(id, selector=lambda name: name == "1.txt") as path:
        ended = [in_fork(act) for act in (lambda: sys.exit(7), lambda: paceline.report(step=9), lambda: None)]
        found = (path / "1.txt").read_text()
    paceline.report(step=context.distributed.allgather(1)[0])
    return {"ended": ended, "found": found}


def in_fork(act):
    """Its exit code."""
    pid = os.fork()
    if pid == 0:
        act()
        sys.exit()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def chief_is_killed(context):
    train_on(context, lambda: os.kill(os.getpid(), signal.SIGKILL), victim=0)


def train_on(context, fate, victim=1):
    """Reports for as long as it can, without waiting for others; the victim meets its fate."""
    context.distributed.allgather(None)
    paceline.report(step=0)
    if context.distributed.rank == victim:
        fate()
    step = 0
    while True:
        step += 1
        paceline.should_stop()
        paceline.report(step=step)
        time.sleep(0.01)


def reports_unequally(context):
    for step in range(2 + context.distributed.rank):
        paceline.report(step=step)


def raise_(error):
    raise error


if __name__ == "__main__":
    main()
