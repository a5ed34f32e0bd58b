import csv
import resource

import numpy as np
import pytest

from paceline.callbacks import CSVLoggerCallback
from paceline.errors import ArgumentError, ArgumentTypeError


def started(run_dir, is_resumed=False, **kwargs):
    callback = CSVLoggerCallback(**kwargs)
    callback.start_training(str(run_dir), {}, run_id="run_001", num_workers=2, world_size=2, is_resumed=is_resumed)
    return callback


def logged(run_dir, *results, **kwargs):
    callback = started(run_dir, **kwargs)
    for result in results:
        callback.handle_result([result, {}])
    callback.finish_training()
    return callback.log_path.read_text()


def table(callback):
    with callback.log_path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_one_row_per_step(tmp_path):
    callback = started(tmp_path)
    assert callback.log_path.read_text() == ""
    for step in (1, 2):
        callback.handle_result([{"loss": 0.5 * step, "_training_iteration": step}, {"loss": 9}])
    callback.finish_training()
    assert callback.log_path == tmp_path / "results.csv"
    assert callback.log_path.read_text() == "loss,_training_iteration\n0.5,1\n1.0,2\n"


def test_all_workers_with_their_rank(tmp_path):
    callback = started(tmp_path, worker_to_log=None)
    callback.handle_result([{"loss": 1}, {"loss": 2, "extra": 3}])
    callback.finish_training()
    assert callback.log_path.read_text() == "_rank,loss,extra\n0,1,\n1,2,3\n"


def test_quoting_and_kinds_of_values(tmp_path):
    callback = started(tmp_path)
    result = {
        "text": 'a "quoted", text\nwith lines',
        "nested": {"x": {"y": 1}},
        "list": [1, 2],
        "array": np.array([1.5, 2.5]),
        "scalar": np.float32(0.25),
        "nothing": None,
        "nan": float("nan"),
        "flag": True,
    }
    callback.handle_result([result, {}])
    callback.finish_training()
    assert table(callback) == [
        {
            "text": 'a "quoted", text\nwith lines',
            "nested/x/y": "1",
            "list": "[1,2]",
            "array": "[1.5,2.5]",
            "scalar": "0.25",
            "nothing": "",
            "nan": "nan",
            "flag": "True",
        }
    ]


def test_new_keys_widen_the_table(tmp_path):
    callback = started(tmp_path)
    steps = [
        {
            "text": 'line "1"\nline 2,',
            "array": list(range(60_000)),
        },  # a cell too large for csv.reader's default
        {"text": "plain"},
        {"accuracy": 0.5},
        {"text": "later", "accuracy": 0.75, "x": {"y": 1}},
    ]
    for step in steps:
        callback.handle_result([step, {}])
    callback.finish_training()
    limit = csv.field_size_limit(10**7)
    try:
        rows = table(callback)
    finally:
        csv.field_size_limit(limit)
    assert [row["text"] for row in rows] == ['line "1"\nline 2,', "plain", "", "later"]
    assert [row["accuracy"] for row in rows] == ["", "", "0.5", "0.75"]
    assert [row["x/y"] for row in rows] == ["", "", "", "1"]
    assert len(rows[0]["array"]) > 131_072
    assert None not in rows[0], "no row is longer than the header"
    assert [path.name for path in tmp_path.iterdir()] == ["results.csv"]


def test_a_table_of_thousands_of_rows_is_widened(tmp_path):
    callback = started(tmp_path)
    for step in range(2_500):
        callback.handle_result([{"step": step}, {}])
    callback.handle_result([{"step": 2_500, "late": 1}, {}])
    callback.finish_training()
    rows = table(callback)
    assert [int(row["step"]) for row in rows] == list(range(2_501))
    assert [row["late"] for row in rows] == [""] * 2_500 + ["1"]


def test_disk_full_while_widening(tmp_path):
    callback = started(tmp_path)
    callback.handle_result([{"loss": 1.0}, {}])
    before = callback.log_path.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 5, hard))
    try:
        with pytest.raises(OSError, match=r"results\.csv"):
            callback.handle_result([{"accuracy_on_the_validation_set": 1.0}, {}])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert callback.log_path.read_bytes() == before
    callback.handle_result([{"loss": 2.0, "late": 3}, {}])
    callback.finish_training(error=True)
    assert callback.log_path.read_text() == "loss,late\n1.0,\n2.0,3\n"
    assert [path.name for path in tmp_path.iterdir()] == ["results.csv"]


def test_worker_to_log_is_checked(tmp_path):
    with pytest.raises(ArgumentTypeError, match="worker_to_log must be a rank"):
        CSVLoggerCallback(worker_to_log="0")
    with pytest.raises(ArgumentError, match="worker_to_log asks for rank 2"):
        started(tmp_path, worker_to_log=2)


def test_ranks_come_and_go(tmp_path):
    all_ranks, second = CSVLoggerCallback(worker_to_log=None), CSVLoggerCallback(filename="1.csv", worker_to_log=1)
    for callback in (all_ranks, second):
        callback.start_training(str(tmp_path), {}, num_workers=3, world_size=1)
        for size in (1, 2, 1):
            callback.handle_result([{"size": size}] * size)
        callback.finish_training()
    assert all_ranks.log_path.read_text() == "_rank,size\n0,1\n0,2\n1,2\n0,1\n"
    assert second.log_path.read_text() == "size\n2\n"


def test_a_resumed_run_continues_the_table(tmp_path):
    logged(tmp_path, {"loss": 1, 'odd, "key"\nof two lines': 2})
    (tmp_path / ".results.csv.tmp").write_text("of a driver that was killed while it widened the table")
    callback = started(tmp_path, is_resumed=True)
    assert [path.name for path in tmp_path.iterdir()] == ["results.csv"]
    for result in ({"loss": 3}, {"loss": 4, 'odd, "key"\nof two lines': 5, "late": 6}):
        callback.handle_result([result, {}])
    callback.finish_training()
    odd = 'odd, "key"\nof two lines'
    assert table(callback) == [
        {"loss": "1", odd: "2", "late": ""},
        {"loss": "3", odd: "", "late": ""},
        {"loss": "4", odd: "5", "late": "6"},
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["results.csv"]


def test_a_resumed_run_without_a_table_begins_one(tmp_path):
    assert logged(tmp_path, {"loss": 1}, is_resumed=True) == "loss\n1\n"


def test_a_run_that_is_not_resumed_begins_anew(tmp_path):
    logged(tmp_path, {"loss": 1})
    assert logged(tmp_path, {"loss": 2}) == "loss\n2\n"


def test_driver_is_killed_inside_a_write(tmp_path):
    rows = ["loss,text\n", '1,"two\nlines, ""quoted"""\n', "2,plain\n"]
    whole = "".join(rows)
    for num_bytes in range(len(whole) + 1):
        (tmp_path / "results.csv").write_text(whole[:num_bytes])
        kept = [row for end, row in enumerate(rows, 1) if len("".join(rows[:end])) <= num_bytes]
        expected = "".join(kept or rows[:1]) + "3,x\n"
        assert logged(tmp_path, {"loss": 3, "text": "x"}, is_resumed=True) == expected
