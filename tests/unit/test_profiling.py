"""Where the time goes: sections, what they mean, and what is left in the run folder."""

import threading

import pytest

import paceline
from paceline.errors import ArgumentError
from paceline.profiling import Profiler
from paceline.profiling.clock import Clock, section
from paceline.profiling.verdict import judge


class Hands:
    """A clock that shows what it is told."""

    def __init__(self):
        self.at = 0.0

    def __call__(self):
        return self.at


def test_sections_are_not_counted_twice():
    hands = Hands()
    clock = Clock(now=hands)
    with clock.section("outer"):
        hands.at += 1
        with clock.section("inner"):
            hands.at += 4
        hands.at += 2
    with clock.section("inner"):
        hands.at += 1
    clock.step()
    assert clock.take() == ({"inner": 5.0, "outer": 3.0}, 1)
    assert clock.take() == ({}, 0)


def test_waiting_for_items_is_timed():
    hands = Hands()
    clock = Clock(now=hands)

    def slow():
        for number in range(3):
            hands.at += 2
            yield number

    items = []
    for item in clock.timed("data", slow()):
        items.append(item)
        hands.at += 10
    assert items == [0, 1, 2]
    assert clock.take()[0] == {"data": 6.0}


def test_section_that_raises_is_counted_too():
    hands = Hands()
    clock = Clock(now=hands)

    def fail():
        with clock.section("a"):
            hands.at += 1
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert clock.take()[0] == {"a": 1.0}


def test_gpu_is_waited_for_at_both_ends():
    waits = []
    clock = Clock(sync=lambda: waits.append(1))
    with clock.section("a"):
        assert len(waits) == 1
    assert len(waits) == 2
    with section(None, "off"):
        pass


def test_verdict_names_the_bottleneck_and_what_to_do():
    verdict = judge({"dataloader": 6.0, "forward": 2.0}, 100, 10.0, [{"cpu_percent": 20.0}])
    assert verdict.bottleneck == "dataloader"
    assert [(line.name, line.mean_ms, line.share) for line in verdict.lines] == [
        ("dataloader", 60.0, 0.6),
        ("forward", 20.0, 0.2),
        ("other", 20.0, 0.2),
    ]
    assert "num_workers" in str(verdict)
    assert "would not help" not in str(verdict)
    busy = judge({"dataloader": 6.0}, 100, 6.0, [{"cpu_percent": 99.0}, {"cpu_percent": 97.0}])
    assert "98 % busy, so more processes would not help" in str(busy)
    assert str(judge({}, 0, 0.0, [])) == "Nothing was measured."
    assert judge({"mine": 1.0}, 1, 1.0, []).advice == "The bottleneck is 'mine'."


def test_profile_leaves_samples_in_the_run_folder(tmp_path):
    with paceline.record_run(logdir=tmp_path) as run_dir, paceline.profile() as profiler:
        for item in profiler.timed("dataloader", range(5)):
            with profiler.section("forward"):
                sum(range(item))
            profiler.step()
    verdict = profiler.verdict()
    assert verdict.num_steps == 5
    assert {line.name for line in verdict.lines} >= {"dataloader", "forward"}
    samples = [event for event in paceline.load_run(run_dir).events if event["kind"] == "profile"]
    assert sum(sample["steps"] for sample in samples) == 5
    assert {"cpu_percent", "process_memory_mb", "free_memory_mb"} <= set(samples[0])
    assert set(samples[0]["parts_s"]) == {"dataloader", "forward"}


def test_trace_of_torchs_own_profiler(tmp_path):
    torch = pytest.importorskip("torch")
    with paceline.profile(trace_dir=tmp_path / "traces"):
        torch.ones(3).sum()
    [trace] = (tmp_path / "traces").iterdir()
    assert trace.name == "rank_0.pt.trace.json"
    assert "aten::sum" in trace.read_text()


def test_samples_have_some_distance():
    with pytest.raises(ArgumentError, match=r"every_s=0.01.*at least 0.1"), paceline.profile(every_s=0.01):
        pass


def test_nothing_is_lost_or_counted_twice_when_another_thread_looks():
    clock, total, is_over = Clock(now=iter(range(10**9)).__next__), [0.0, 0], threading.Event()

    def look():
        while not is_over.is_set():
            sums, num_steps = clock.take()
            total[0] += sum(sums.values())
            total[1] += num_steps

    looking = threading.Thread(target=look)
    looking.start()
    for _ in range(20_000):
        with clock.section("a"):
            pass
        clock.step()
    is_over.set()
    looking.join()
    sums, num_steps = clock.take()
    assert (total[0] + sum(sums.values()), total[1] + num_steps) == (20_000, 20_000)


def test_samples_of_a_long_training_are_thinned_out_evenly():
    profiler = Profiler()
    for number in range(10_000):
        profiler._keep({"number": number})
    kept = [sample["number"] for sample in profiler.samples]
    assert kept == list(range(0, 10_000, kept[1]))
    assert 1_000 < len(kept) <= 4096
