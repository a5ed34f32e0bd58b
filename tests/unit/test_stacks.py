"""Out of the stacks of all ranks: who is where."""

import os

import pytest

from paceline.workers.stacks import standstill, user_line, without_stacks

STACKS = f"""Thread 0x00007f01 (most recent call first):
  File "{os.path.dirname(os.__file__)}/threading.py", line 327 in wait
  File "/home/me/watch.py", line 3 in watch

Current thread 0x00007f02 (most recent call first):
  File "/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 4000 in barrier
  File "/lib/paceline/prepare/model.py", line 12 in wrapped
  File "/home/me/train.py", line 6 in step
  File "/home/me/train.py", line 20 in train
  File "/lib/paceline/session.py", line 180 in _value_of
  File "/lib/paceline/workers/worker_process.py", line 100 in _answer
"""


def test_users_innermost_line():
    assert user_line(STACKS) == "train.py line 6"


@pytest.mark.parametrize("text", ["", "(pid 7 gave no answer)", STACKS.replace("session.py", "other.py")])
def test_function_does_not_run(text):
    assert user_line(text) is None


@pytest.mark.parametrize(
    ("returned", "lines", "expected"),
    [
        ([], {0: "a.py line 1", 1: "a.py line 1"}, None),
        ([0], {0: None, 1: "a.py line 6"}, "rank 0 has returned, rank 1 is still in a.py line 6"),
        (
            [0, 2],
            {0: None, 1: "a.py line 6", 2: None, 3: None},
            "ranks 0, 2 have returned, rank 1 is still in a.py line 6, rank 3 is still in a place that is not known",
        ),
        (
            [],
            {0: "a.py line 1", 1: "a.py line 2", 2: "a.py line 2"},
            "rank 0 is still in a.py line 1, ranks 1, 2 are still in a.py line 2",
        ),
    ],
)
def test_who_is_where(returned, lines, expected):
    assert standstill(returned, lines) == expected


def test_who_gives_no_stacks_is_told_from_who_waits():
    assert without_stacks({2: "(pid 7 gave no answer)", 1: STACKS, 0: "(no answer)"}) == [0, 2]
