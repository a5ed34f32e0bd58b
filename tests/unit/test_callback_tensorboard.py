import logging
import resource

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import HISTOGRAMS, EventAccumulator

from paceline.callbacks import TBXLoggerCallback
from paceline.errors import ArgumentError


def started(run_dir, is_resumed=False, **kwargs):
    callback = TBXLoggerCallback(**kwargs)
    callback.start_training(str(run_dir), {}, run_id="run_001", num_workers=2, world_size=2, is_resumed=is_resumed)
    return callback


def read_back(log_dir):
    accumulator = EventAccumulator(str(log_dir), size_guidance={HISTOGRAMS: 0})
    return accumulator.Reload()


def scalars(log_dir, tag):
    return [(event.step, event.value) for event in read_back(log_dir).Scalars(tag)]


def stamped(step, **values):
    return {**values, "_timestamp": 1, "_time_total_s": 2.0, "_pid": 3, "_training_iteration": step}


def test_scalars_of_one_worker(tmp_path):
    callback = started(tmp_path, worker_to_log=1)
    for step in (1, 2, 3):
        callback.handle_result([stamped(step, loss=9.0), stamped(step, loss=step / 2, nested={"a": {"b": step}})])
    callback.finish_training()
    assert scalars(tmp_path, "loss") == [(1, 0.5), (2, 1.0), (3, 1.5)]
    assert scalars(tmp_path, "nested/a/b") == [(1, 1.0), (2, 2.0), (3, 3.0)]
    assert read_back(tmp_path).Tags()["scalars"] == ["loss", "nested/a/b"]


def test_kinds_of_values(tmp_path):
    import torch

    callback = started(tmp_path)
    result = stamped(
        1,
        i=1,
        f=np.float32(0.5),
        n=np.int64(3),
        nan=float("nan"),
        text="x",
        nothing=None,
        empty=[],
        empty_array=np.array([]),
        numbers=[1, 2, 3, 4],
        matrix=np.ones((3, 2)),
        tensor=torch.arange(3.0, requires_grad=True),
        scalar_tensor=torch.tensor(2.5),
    )
    callback.handle_result([result, {}])
    callback.finish_training()
    events = read_back(tmp_path)
    assert sorted(events.Tags()["scalars"]) == ["f", "i", "n", "scalar_tensor"]
    assert sorted(events.Tags()["histograms"]) == ["matrix", "numbers", "tensor"]
    histogram = events.Histograms("numbers")[0].histogram_value
    assert (histogram.min, histogram.max, histogram.num, histogram.sum) == (1, 4, 4, 10)


def test_bad_histogram_values_are_warned_about_once(tmp_path, caplog):
    callback = started(tmp_path)
    with caplog.at_level(logging.WARNING):
        for step in (1, 2):
            callback.handle_result([stamped(step, words=["a", "b"], endless=[1.0, float("inf")], good=1), {}])
    callback.finish_training()
    assert [record.args[0] for record in caplog.records] == ["words", "endless"]
    assert scalars(tmp_path, "good") == [(1, 1.0), (2, 1.0)]


def test_a_restart_that_repeats_steps_replaces_them(tmp_path):
    callback = started(tmp_path)
    for step in (1, 2, 3):
        callback.handle_result([stamped(step, loss=1.0), {}])
    callback.handle_restart(1, "rank 1 was killed")
    for step in (2, 3, 4):
        callback.handle_result([stamped(step, loss=5.0), {}])
    callback.finish_training()
    assert scalars(tmp_path, "loss") == [(1, 1.0), (2, 5.0), (3, 5.0), (4, 5.0)]


def test_a_resumed_run_adds_a_file_and_replaces_the_steps_made_again(tmp_path):
    for first_step, is_resumed in ((1, False), (3, True), (5, True)):
        callback = started(tmp_path, is_resumed=is_resumed)
        for step in range(first_step, first_step + 4):
            callback.handle_result([stamped(step, loss=first_step), {}])
        callback.finish_training()
    assert scalars(tmp_path, "loss") == [(1, 1), (2, 1), (3, 3), (4, 3), (5, 5), (6, 5), (7, 5), (8, 5)]
    assert len(list(tmp_path.iterdir())) == 3, "a file per driver"


def test_a_resumed_run_that_repeats_nothing_loses_nothing(tmp_path):
    for step, is_resumed in ((1, False), (2, True)):
        callback = started(tmp_path, is_resumed=is_resumed)
        callback.handle_result([stamped(step, loss=step), {}])
        callback.finish_training()
    assert scalars(tmp_path, "loss") == [(1, 1), (2, 2)]


def test_many_restarts_within_a_second_stay_in_order(tmp_path):
    callback = started(tmp_path)
    for attempt in range(12):
        callback.handle_result([stamped(1, attempt=attempt), {}])
    callback.finish_training()
    assert scalars(tmp_path, "attempt") == [(1, 11)]


def test_the_worker_comes_and_goes(tmp_path):
    callback = started(tmp_path, worker_to_log=1)
    for step, size in ((1, 2), (2, 2), (3, 2), (2, 1), (3, 1), (4, 2)):
        callback.handle_result([stamped(step, loss=step)] * size)
    callback.finish_training()
    assert scalars(tmp_path, "loss") == [(1, 1), (4, 4)], "steps 2 and 3 were made again without it"


def test_what_was_reported_before_a_checkpoint_is_on_disk(tmp_path):
    callback = started(tmp_path)
    for step in (1, 2, 3):
        callback.handle_result([stamped(step, loss=step), {}])
    callback.handle_checkpoint(None)
    assert scalars(tmp_path, "loss") == [(1, 1), (2, 2), (3, 3)]
    callback.finish_training()


def test_the_first_report_is_on_disk_while_training_goes_on(tmp_path):
    callback = started(tmp_path)
    callback.handle_result([stamped(1, loss=1.0), {}])
    assert scalars(tmp_path, "loss") == [(1, 1.0)]
    callback.finish_training()


def test_explicit_folder(tmp_path):
    callback = started(tmp_path / "run", logdir=tmp_path / "mine")
    callback.handle_result([stamped(1, loss=1.0), {}])
    callback.finish_training()
    assert callback.logdir == tmp_path / "mine"
    assert scalars(tmp_path / "mine", "loss") == [(1, 1.0)]


def test_disk_full_while_logging_raises_instead_of_blocking(tmp_path):
    callback = started(tmp_path)
    callback.handle_result([stamped(1, loss=1.0), {}])
    more_than_any_buffer = stamped(2, **{f"metric_{index}": 1.0 for index in range(10_000)})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200, hard))
    try:
        with pytest.raises(OSError, match=f"File too large.*{tmp_path}"):
            callback.handle_result([more_than_any_buffer, {}])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    callback.finish_training(error=True)


def test_rank_out_of_range(tmp_path):
    with pytest.raises(ArgumentError, match="worker_to_log asks for rank 2"):
        started(tmp_path, worker_to_log=2)
