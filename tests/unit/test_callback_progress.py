import io
import math
import re
import sys
import time
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from rich.console import Console

from paceline.callbacks import ProgressCallback, default_progress
from paceline.callbacks.progress_view import Progress, ProgressView, _time_left, summary

STEP = {
    "loss": 0.123456,
    "accuracy": {"top1": 0.5},
    "name": "x",
    "_timestamp": 1,
    "_training_iteration": 1234,
}


def terminal(width=100):
    return Console(file=io.StringIO(), force_terminal=True, width=width, _environ={"TERM": "xterm"})


def shown(renderable):
    console = Console(file=io.StringIO(), width=100)
    console.print(renderable)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())


def plain(text):
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)


def started(console):
    callback = ProgressCallback(console)
    callback.start_training("/results/sgd/run_001", {}, run_id="run_001", num_workers=2, world_size=2)
    return callback


def checkpoint(iteration):
    return SimpleNamespace(id=1, path="/c", score=None, iteration=iteration, time=0.0, num_bytes=1)


def test_a_frame_shows_the_run():
    progress = Progress("/results/sgd/run_001", 2, started_s=time.monotonic() - 61)
    progress.num_steps, progress.latest = 1234, STEP
    progress.num_checkpoints, progress.last_checkpoint_step, progress.num_restarts = 3, 1200, 1
    first, second, third = shown(ProgressView(progress)).splitlines()
    assert re.search(r"sgd/run_001  2 workers · 1:0\d", first)
    assert re.search(r"step 1,234 · [\d.]+ steps/s · 3 checkpoints \(last at step 1,200\) · 1 restart$", second)
    assert third.strip() == "loss 0.1235  accuracy/top1 0.5"


def test_a_frame_before_the_first_report():
    assert "waiting for the first report" in shown(ProgressView(Progress("/results/sgd/run_001", 1)))


def test_progress_has_a_bar_a_percentage_and_the_time_left():
    now = time.monotonic()
    progress = Progress("/r/run_001", 1, started_s=now - 500)
    progress.first_done, progress.done = (now - 100, 0.2), (now, 0.3)
    [_, line] = shown(ProgressView(progress)).splitlines()
    assert re.fullmatch(r"━{30} 30 % · 11:3\d|━{30} 30 % · 11:4\d left|━{30} 30 % · 11:[34]\d left", line.strip()), line


def test_time_left_goes_down_between_two_tellings():
    progress = Progress("/r/run_001", 1, started_s=0.0, first_done=(100.0, 0.2), done=(200.0, 0.3))
    assert [_time_left(progress, now) for now in (200.0, 260.0, 5000.0)] == ["11:40 left", "10:40 left", "0.0 s left"]


def test_progress_that_was_told_once_is_measured_from_the_beginning():
    now = time.monotonic()
    progress = Progress("/r/run_001", 1, started_s=now - 30)
    progress.first_done = progress.done = (now, 0.25)
    progress.num_steps, progress.latest = 3, STEP
    [_, line, step, _] = shown(ProgressView(progress)).splitlines()
    assert "25 % · 1:" in line or "25 % · 89" in line
    assert step.strip().startswith("step 1,234")


def test_progress_is_taken_from_a_run():
    callback = started(terminal())
    callback.show_progress(0.5)
    assert callback._progress.done[1] == 0.5
    callback.handle_restart(1, "rank 1 died", cause="loss")
    callback.show_progress(0.25)
    assert callback._progress.first_done[1] == 0.25
    callback.finish_training()
    callback.show_progress(1.0)


def test_speed_is_that_of_the_last_frames():
    progress = Progress("/r/run_001", 1, started_s=time.monotonic() - 1000)
    progress.num_steps, progress.latest = 1100, STEP
    progress.samples.append((time.monotonic() - 2, 100))
    speed = re.search(r"([\d.]+) steps/s", shown(ProgressView(progress)))
    assert float(speed[1]) == pytest.approx(500, rel=0.5), "1000 steps in about 2 s, not 1100 in 1000 s"


def test_slow_steps_are_shown_as_seconds_per_step():
    progress = Progress("/r/run_001", 1, started_s=time.monotonic() - 100)
    progress.num_steps, progress.latest = 2, STEP
    assert re.search(r"5\d(\.\d+)? s/step", shown(ProgressView(progress)))


def test_many_metrics_are_cut_and_counted():
    progress = Progress("/r/run_001", 1)
    progress.num_steps, progress.latest = 1, {f"m{index}": index for index in range(11)}
    frame = shown(ProgressView(progress))
    assert "m7 7" in frame
    assert "m8" not in frame
    assert "+3 more" in frame


@pytest.mark.parametrize(("status", "mark"), [("SUCCEEDED", "✓"), ("FAILED", "✗"), ("STOPPED", "■")])
def test_summary(status, mark):
    progress = Progress("/results/sgd/run_001", 2, started_s=100.0, ended_s=112.3, status=status)
    progress.num_steps, progress.num_checkpoints = 1, 2
    line = f"{mark} {status} · 1 step in 12.3 s · 2 checkpoints → /results/sgd/run_001"
    assert summary(progress).plain == line


def test_the_display_from_start_to_end():
    console = terminal()
    callback = started(console)
    callback.handle_result([STEP, {}])
    callback.handle_checkpoint(checkpoint(1234))
    callback.handle_restart(1, "rank 1 was killed")
    callback.finish_training(error=True, status="FAILED", exception=ZeroDivisionError("x"))
    text = plain(console.file.getvalue())
    assert "waiting for the first report" in text
    last, metrics = text.strip().splitlines()[-2:]
    assert "loss" in metrics, "the last numbers stay on the screen"
    assert "✗ FAILED · 1 step in " in last
    assert last.endswith("1 checkpoint · 1 restart · ZeroDivisionError → /results/sgd/run_001")


def test_what_is_printed_meanwhile_stays_whole(monkeypatch):
    console = terminal()
    monkeypatch.setattr(sys, "stdout", console.file)
    callback = started(console)
    for step in range(20):
        callback.handle_result([STEP, {}])
        print(f"[rank 0] line {step}")
    callback.finish_training(status="SUCCEEDED", exception=None)
    assert sys.stdout is console.file, "stdout is given back"
    lines = plain(console.file.getvalue()).replace("\r", "\n").splitlines()
    assert [line for line in lines if "[rank 0]" in line] == [f"[rank 0] line {step}" for step in range(20)]


def test_one_callback_serves_two_runs():
    console = terminal()
    callback = ProgressCallback(console)
    for run in ("run_001", "run_002"):
        callback.start_training(f"/results/sgd/{run}", {}, world_size=1)
        callback.finish_training(status="SUCCEEDED")
    assert plain(console.file.getvalue()).count("✓ SUCCEEDED") == 2


@pytest.mark.parametrize(
    ("is_terminal", "wish", "is_shown"),
    [
        (True, None, True),
        (False, None, False),
        (True, "0", False),
        (False, "1", True),
        (False, "", False),
    ],
)
def test_default_progress(is_terminal, wish, is_shown):
    class Stream(io.StringIO):
        def isatty(self):
            return is_terminal

    with looking_at(Stream(), wish):
        assert isinstance(default_progress(), ProgressCallback) is is_shown


def test_default_progress_without_a_stdout():
    with looking_at(None):
        assert default_progress() is None


@contextmanager
def looking_at(stdout, wish=None):
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("PACELINE_PROGRESS", raising=False)
        if wish is not None:
            patch.setenv("PACELINE_PROGRESS", wish)
        patch.setattr(sys, "stdout", stdout)
        yield


def test_the_number_of_workers_is_shown_when_it_changes():
    callback = started(terminal())
    progress = callback._progress
    callback.handle_resize(3, former=2, reason="the run has begun")
    assert "run_001  3 workers ·" in shown(ProgressView(progress)), "nothing has changed for who looks at it"
    callback.handle_result([STEP, {}, {}])
    callback.handle_restart(1, "there is room for more workers", cause="growth")
    callback.handle_resize(4, former=3, reason="there is room for more workers")
    frame = shown(ProgressView(progress))
    assert "run_001  4 workers (before: 3) ·" in frame
    assert "restart" not in frame, "growth is no failure"
    callback.handle_restart(2, "rank 1 was killed", cause="loss")
    callback.handle_resize(2, former=4, reason="rank 1 was killed")
    frame = shown(ProgressView(progress))
    assert "run_001  2 workers (before: 4) ·" in frame
    assert frame.splitlines()[1].endswith("· 1 restart")
    callback.finish_training(status="SUCCEEDED")
    assert summary(progress).plain.endswith(" · 3 → 4 → 2 workers · 1 restart → /results/sgd/run_001")


def test_of_many_sizes_the_last_are_shown():
    progress = Progress("/r/run_001", 9, started_s=0.0, ended_s=1.0, status="SUCCEEDED", former_sizes=list(range(1, 9)))
    assert " · … → 5 → 6 → 7 → 8 → 9 workers → " in summary(progress).plain


def test_restarts_of_earlier_drivers_are_not_counted():
    callback = ProgressCallback(terminal())
    callback.start_training("/r/run_001", {}, num_workers=math.inf, world_size=2, is_resumed=True)
    progress = callback._progress
    callback.handle_restart(5, "rank 1 was killed", cause="loss")
    callback.finish_training(status="SUCCEEDED")
    assert " · 1 restart → " in summary(progress).plain


def test_a_frame_shows_what_workers_have_not_finished():
    callback = started(terminal())
    try:
        callback.show_unfinished({rank: f"\x1b[32m{rank}0%\x1b[0m" + "=" * 200 for rank in range(10)})
        frame = shown(ProgressView(callback._progress)).splitlines()
    finally:
        callback.finish_training()
    assert frame[2].startswith("  [rank 0] 00%===")
    assert len(frame[2]) <= 100, "one line for each rank"
    assert frame[-2].startswith("  [rank 7] 70%")
    assert frame[-1] == "  +2 more ranks"
