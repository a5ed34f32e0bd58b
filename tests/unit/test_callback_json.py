import enum
import json
import math
import resource
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from paceline.callbacks import JsonLoggerCallback
from paceline.callbacks.tail_file import TailFile
from paceline.errors import ArgumentError
from paceline.json_text import encode


@contextmanager
def no_file_larger_than(num_bytes):
    """A disk that is full, for this process: a write stops at the limit, and the next one is refused."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def started(run_dir, world_size=2, is_resumed=False, **kwargs):
    callback = JsonLoggerCallback(**kwargs)
    sizes = {"num_workers": world_size, "world_size": world_size}
    callback.start_training(str(run_dir), {}, run_id="run_001", is_resumed=is_resumed, **sizes)
    return callback


def report(step, world_size=2):
    return [{"step": step, "rank": rank} for rank in range(world_size)]


def test_the_file_is_valid_after_every_call(tmp_path):
    callback = started(tmp_path)
    expected = []
    assert json.loads(callback.log_path.read_text()) == expected
    for step in range(3):
        callback.handle_result(report(step))
        expected.append([{"step": step, "rank": 0}])
        assert json.loads(callback.log_path.read_text()) == expected
    callback.finish_training()
    assert callback.log_path == tmp_path / "results.json"
    assert callback.logdir == tmp_path
    assert callback.log_path.read_text().splitlines() == [
        "[",
        '[{"step":0,"rank":0}],',
        '[{"step":1,"rank":0}],',
        '[{"step":2,"rank":0}]',
        "]",
    ]


@pytest.mark.parametrize(("workers", "ranks"), [(1, [1]), ([0, 1], [0, 1]), (None, [0, 1])])
def test_workers_to_log(tmp_path, workers, ranks):
    callback = started(tmp_path, workers_to_log=workers)
    callback.handle_result(report(0))
    callback.finish_training()
    assert json.loads(callback.log_path.read_text()) == [[{"step": 0, "rank": rank} for rank in ranks]]


def test_explicit_folder_and_name(tmp_path):
    callback = started(tmp_path / "run", logdir=tmp_path / "mine", filename="x.json")
    callback.finish_training()
    assert callback.log_path == tmp_path / "mine" / "x.json"
    assert json.loads(callback.log_path.read_text()) == []


def test_paths_are_unknown_before_a_run():
    callback = JsonLoggerCallback()
    assert callback.logdir is None
    assert callback.log_path is None


def test_rank_out_of_range_before_anything_is_written(tmp_path):
    with pytest.raises(ArgumentError, match="asks for rank 2, but this run has 2 workers: ranks 0 to 1"):
        started(tmp_path, workers_to_log=2)
    assert list(tmp_path.iterdir()) == []


def test_ranks_come_and_go(tmp_path):
    callback = JsonLoggerCallback(workers_to_log=[1, 2])
    callback.start_training(str(tmp_path), {}, num_workers=math.inf, world_size=1)
    for step, size in enumerate([1, 2, 3, 1]):
        callback.handle_result(report(step, size))
    callback.finish_training()
    logged = json.loads(callback.log_path.read_text())
    assert [[(item["step"], item["rank"]) for item in element] for element in logged] == [[(1, 1)], [(2, 1), (2, 2)]]


def written(run_dir, num_steps):
    callback = started(run_dir)
    for step in range(num_steps):
        callback.handle_result(report(step))
    callback.finish_training()
    return callback.log_path.read_bytes()


def resumed_steps(run_dir, step):
    """What the file holds after a driver has resumed the run and logged one step."""
    callback = started(run_dir, is_resumed=True)
    before = json.loads(callback.log_path.read_text())
    callback.handle_result(report(step))
    callback.finish_training()
    after = json.loads(callback.log_path.read_text())
    assert after == [*before, [{"step": step, "rank": 0}]]
    return [element[0]["step"] for element in after]


@pytest.mark.parametrize("num_steps", [0, 1, 5])
def test_a_resumed_run_continues_the_file(tmp_path, num_steps):
    written(tmp_path, num_steps)
    assert resumed_steps(tmp_path, 77) == [*range(num_steps), 77]


def test_a_resumed_run_without_a_file_begins_one(tmp_path):
    assert resumed_steps(tmp_path, 7) == [7]


def test_a_run_that_is_not_resumed_begins_anew(tmp_path):
    written(tmp_path, 3)
    assert json.loads(written(tmp_path, 0)) == []


@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_driver_is_killed_inside_a_write(tmp_path, num_steps):
    before, after = written(tmp_path, num_steps), written(tmp_path, num_steps + 1)
    for num_done in range(len(before) - 2, len(after) + 1):
        torn = after[:num_done] + before[num_done:]
        (tmp_path / "results.json").write_bytes(torn)
        kept = resumed_steps(tmp_path, 77)
        assert kept in ([*range(num_steps), 77], [*range(num_steps + 1), 77]), torn


@pytest.mark.parametrize("damage", [b"\0" * 5000, b'\n]{"half', b""])
def test_what_a_crash_of_the_machine_or_a_full_disk_left_is_cut_off(tmp_path, damage):
    whole = written(tmp_path, 3)
    (tmp_path / "results.json").write_bytes(whole.removesuffix(b"\n]") + b",\n" * (damage != b"") + damage)
    assert resumed_steps(tmp_path, 77) == [0, 1, 2, 77]


def test_nothing_but_the_beginning_was_written(tmp_path):
    for size in range(3):
        (tmp_path / "results.json").write_bytes(b"[\n]"[:size])
        assert resumed_steps(tmp_path, 1) == [1]


def test_a_file_that_somebody_has_indented_is_moved_aside(tmp_path, caplog):
    text = json.dumps(json.loads(written(tmp_path, 2)), indent=2)
    (tmp_path / "results.json").write_text(text)
    assert resumed_steps(tmp_path, 3) == [3]
    assert (tmp_path / "results.json.old").read_text() == text
    assert "results.json.old" in caplog.text


class Colour(enum.Enum):
    RED = "red"


class Unknown:
    def __repr__(self):
        return "<something>"


CYCLE: dict = {"loss": 1.0}
CYCLE["self"] = CYCLE


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (float("nan"), None),
        (float("inf"), None),
        (np.float32("nan"), None),
        (np.float32(0.5), 0.5),
        (np.int64(7), 7),
        (np.array([1.0, np.nan]), [1.0, None]),
        (np.array(3), 3),
        (np.arange(6).reshape(2, 3)[:, ::2], [[0, 2], [3, 5]]),
        ({"a": {"b": (1, 2)}}, {"a": {"b": [1, 2]}}),
        ({1: "x"}, {"1": "x"}),
        ({3}, [3]),
        (Path("/x"), "/x"),
        (Colour.RED, "red"),
        (Unknown(), "<something>"),
        (2**70, str(2**70)),
        ({(1, 2): float("nan"), "n": np.array([1])}, {"(1, 2)": None, "n": [1]}),
        ("half \ud800", "half \\ud800"),
    ],
)
def test_whatever_is_reported_becomes_json(value, expected):
    assert json.loads(encode([value])) == [expected]


def test_a_value_that_contains_itself():
    assert json.loads(encode(CYCLE)) == {"loss": 1.0, "self": "..."}


def test_disk_full_while_logging(tmp_path):
    callback = started(tmp_path)
    callback.handle_result(report(0))
    before = callback.log_path.read_bytes()
    too_much = [{"text": "x" * 1000}, {}]
    with no_file_larger_than(len(before) + 100), pytest.raises(OSError, match=r"results\.json") as raised:
        callback.handle_result(too_much)
    assert raised.value.filename == str(callback.log_path)
    assert callback.log_path.read_bytes() == before
    callback.handle_result(report(1))  # there is space again
    callback.finish_training(error=True)
    assert [step[0]["step"] for step in json.loads(callback.log_path.read_text())] == [0, 1]


def test_disk_full_at_the_very_start(tmp_path):
    with no_file_larger_than(0), pytest.raises(OSError, match=r"results\.json"):
        started(tmp_path)


def test_tail_file_restores_a_tail_of_any_length(tmp_path):
    file = TailFile(tmp_path / "file", b"0123456789")
    with no_file_larger_than(12), pytest.raises(OSError, match="file"):
        file.replace_tail(b"56789", b"abcdefghij")
    assert file.path.read_bytes() == b"0123456789"
    file.replace_tail(b"56789", b"abcdef")
    assert file.path.read_bytes() == b"01234abcdef"
    file.close()
    file.close()
