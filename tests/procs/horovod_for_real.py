"""What only a compiled Horovod can show, beside the suites of tests/contract. `make test-horovod` runs it: its name is
that of no test file, so that `make test` does not look for what it cannot have.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import paceline
from paceline import Trainer

EXAMPLES = Path(__file__).parents[2] / "examples/porting"


@pytest.fixture(scope="module")
def warm(lasts):
    with Trainer(backend="horovod", num_workers=2, engine="local", logdir="horovod") as trainer, lasts(trainer):
        yield trainer


def pids(trainer):
    return [info.pid for info in trainer._crew.ensure().infos]


def place():
    import horovod.torch as hvd

    hvd.init()
    return hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()


def total(name="total"):
    import horovod.torch as hvd
    import torch

    return hvd.allreduce(torch.tensor(hvd.rank() + 1), name=name, op=hvd.Sum).item()


PLACES = [(0, 2, 0, 2, 0, 1), (1, 2, 1, 2, 0, 1)]


# --- scripts as they are --------------------------------------------------------------------------------------------


def test_init_of_a_script_finds_the_group(warm):
    before = pids(warm)
    assert warm.run(place) == PLACES
    assert warm.run(place) == PLACES
    assert pids(warm) == before, "and the next script does too"


def test_process_sets_of_a_script_are_its_own(warm):
    def of_the_second():
        import horovod.torch as hvd
        import torch

        alone = hvd.ProcessSet([1])
        hvd.init(process_sets=[alone])
        if hvd.rank() == 1:
            return hvd.allreduce(torch.tensor(7), process_set=alone).item(), total()
        return None, total()

    for _ in range(2):
        assert warm.run(of_the_second) == [(None, 3), (7, 3)]
    assert warm.run(total) == [3, 3]


def test_dynamic_process_sets_are_gone_with_their_script(warm):
    def add_one():
        import horovod.torch as hvd

        hvd.init(process_sets="dynamic")
        return hvd.add_process_set([0]).size()

    for _ in range(2):
        assert warm.run(add_one) == [1, 1]
    assert warm.run(lambda: os.environ.get("HOROVOD_DYNAMIC_PROCESS_SETS")) == [None, None]


def test_script_shuts_down_and_begins_again(warm):
    def twice():
        import horovod.torch as hvd

        first = total()
        hvd.shutdown()
        hvd.init()
        return first, total()

    before = pids(warm)
    assert warm.run(twice) == [(3, 3), (3, 3)]
    assert warm.run(total) == [3, 3]
    assert pids(warm) == before, "it has left a group behind"


def test_script_shuts_down_at_its_end(warm):
    def shut_down():
        import horovod.torch as hvd

        hvd.shutdown()

    before = pids(warm)
    warm.run(shut_down)
    assert warm.run(total) == [3, 3]
    assert set(pids(warm)).isdisjoint(before)


def test_in_this_process_and_out_of_it_again():
    environ = dict(os.environ)
    with Trainer(backend="horovod", num_workers=0) as trainer:
        assert trainer.run(lambda: (place(), total())) == [((0, 1, 0, 1, 0, 1), 1)]
    import horovod.torch as hvd

    assert not hvd.is_initialized()
    assert dict(os.environ) == environ


# --- errors ---------------------------------------------------------------------------------------------------------


def test_shapes_that_do_not_fit_are_the_users_mistake(warm):
    """On all ranks at once, and not the echo of anything."""

    def mismatched():
        import horovod.torch as hvd
        import torch

        return hvd.allreduce(torch.zeros(hvd.rank() + 1), name="shapes")

    with pytest.raises(RuntimeError, match="Mismatched ALLREDUCE tensor shapes") as raised:
        warm.run(mismatched)
    assert type(raised.value).__name__ == "HorovodInternalError"
    assert warm.run(total) == [3, 3]


# --- examples -------------------------------------------------------------------------------------------------------


def run(*command, cwd):
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_example_after_gives_the_numbers_of_the_one_before(tmp_path):
    """The one before runs as Horovod's own launcher starts it."""
    launcher = [sys.executable, "-m", "horovod.runner.launch", "--gloo", "-np", "2", "--network-interfaces", "lo"]
    shown = run(*launcher, sys.executable, EXAMPLES / "horovod_before.py", cwd=tmp_path)
    before = [float(loss) for loss in re.findall(r"epoch \d: loss ([\d.]+)", shown)]
    returned = run(sys.executable, EXAMPLES / "horovod_after.py", cwd=tmp_path)
    frame = paceline.list_runs()[0].metrics
    after = frame[frame["rank"] == 0]["loss"].round(4).tolist()
    assert len(before) == 5
    assert after == pytest.approx(before, abs=2e-4)
    assert after[-1] < after[0] / 2
    assert returned.startswith("[")
