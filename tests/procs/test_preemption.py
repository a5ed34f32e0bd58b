"""SIGTERM to a worker: the function saves and returns, and the run goes on with a worker in its place."""

import os
import signal
import threading
from dataclasses import replace

import torch

import paceline
from paceline import SGDCallback


def train(config):
    """Sums up to ten, saving only when it is asked to stop; returns where this attempt began."""
    checkpoint = paceline.load_checkpoint() or {"step": 0, "total": 0.0}
    total = checkpoint["total"]
    for step in range(checkpoint["step"] + 1, 11):
        value = torch.ones(1) * step
        torch.distributed.all_reduce(value)
        total += value.item()
        paceline.report(step=step, pid=os.getpid())
        if step == 4 and not checkpoint["step"]:
            while not paceline.should_stop():
                threading.Event().wait(0.01)
            if not config["listens"]:
                threading.Event().wait()
            paceline.save_checkpoint(step=step, total=total)
            return "early"
    return checkpoint["step"], total


class Terminate(SGDCallback):
    """Tells rank 1 to go, once."""

    def __init__(self):
        self.pid, self.causes = None, []

    def handle_result(self, results, **info):
        if results[0]["step"] == 4 and self.pid is None:
            self.pid = results[1]["pid"]
            os.kill(self.pid, signal.SIGTERM)

    def handle_restart(self, attempt, reason, **info):
        self.causes.append((info["cause"], reason))


def test_preempted_worker_saves_and_is_replaced(warm):
    listener = Terminate()
    values = warm.run(train, {"listens": True}, callbacks=[listener])
    assert values == [(4, 110.0)] * 2, "from the checkpoint that was saved in the grace period"
    assert listener.causes == [("preemption", "rank 1 got SIGTERM")]
    assert listener.pid not in warm.execute(os.getpid)
    run = paceline.load_run(warm.latest_run_dir)
    assert run.status.state == "SUCCEEDED"
    assert [event["rank"] for event in run.events if event["kind"] == "preempted"] == [1]
    assert run.metrics["step"].tolist() == [step for step in range(1, 11) for _ in range(2)]


def train_without_listening(config):
    """Ten steps, and never looks at `should_stop`; the first time it waits for ever at the fourth."""
    for step in range(1, 11):
        paceline.report(step=step, pid=os.getpid())
        if step == 4 and not os.path.exists(config["marker"]):
            threading.Event().wait()
    return os.getpid()


def test_function_that_does_not_listen_is_ended_after_the_grace_period(warm, monkeypatch, tmp_path):
    monkeypatch.setattr(warm, "limits", replace(warm.limits, grace_s=0.2))
    marker, listener = tmp_path / "restarted", Terminate()
    listener.handle_restart = lambda attempt, reason, **info: marker.touch()
    pids = warm.run(train_without_listening, {"marker": str(marker)}, callbacks=[listener])
    assert listener.pid not in pids
    events = paceline.load_run(warm.latest_run_dir).events
    assert [event["cause"] for event in events if event["kind"] == "restart"] == ["preemption"]


def test_ranks_leave_at_the_same_step(warm):
    """Both are in a collective most of the time: who left a step sooner than the other would leave it there."""

    def train():
        state = paceline.load_checkpoint()
        first, own = (state["step"], state.per_rank["step"]) if state else (0, 0)
        for step in range(first + 1, 301):
            torch.distributed.all_reduce(torch.ones(1))
            paceline.report(step=step)
            should_stop = paceline.should_stop()
            if should_stop:
                paceline.save_checkpoint(step=step, per_rank={"step": step})
                return None
            if step == 150 and first == 0 and paceline.world_rank() == 1:
                os.kill(os.getpid(), signal.SIGTERM)
        return first, own

    values = warm.run(train)
    first, own = values[0]
    assert values == [(first, own)] * 2
    assert 150 <= first == own
