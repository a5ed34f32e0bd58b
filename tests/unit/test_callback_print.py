import numpy as np
import pytest

from paceline.callbacks import PrintCallback
from paceline.errors import ArgumentError

RESULTS = [
    {
        "loss": 0.123456789,
        "nested": {"n": np.int64(3)},
        "name": "x",
        "_training_iteration": 7,
        "_timestamp": 1,
    },
    {"loss": np.float32(0.5), "_training_iteration": 7},
]


def test_prints_a_line_per_worker(capsys):
    callback = PrintCallback()
    callback.start_training("/run", {}, world_size=2)
    callback.handle_result(RESULTS)
    assert capsys.readouterr().out.splitlines() == [
        "step 7  rank 0  loss=0.123457  nested/n=3  name=x",
        "step 7  rank 1  loss=0.5",
    ]


def test_prints_the_selected_workers(capsys):
    PrintCallback(workers_to_log=1).handle_result(RESULTS)
    assert capsys.readouterr().out == "step 7  rank 1  loss=0.5\n"


def test_rank_out_of_range():
    with pytest.raises(ArgumentError, match="asks for rank 3"):
        PrintCallback(workers_to_log=[0, 3]).start_training("/run", {}, num_workers=3, world_size=2)


def test_a_step_without_the_selected_worker_prints_nothing(capsys):
    callback = PrintCallback(workers_to_log=1)
    callback.start_training("/run", {}, num_workers=2, world_size=1)
    callback.handle_result(RESULTS[:1])
    assert capsys.readouterr().out == ""
