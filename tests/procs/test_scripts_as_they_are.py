"""What a script has set up, and what it defines, is there in its workers."""

import logging
import os
import sys
import warnings

import pytest
import torch

from paceline import BackendConfig, LocalEngine, Trainer
from paceline.errors import TrainerStateError

SCRIPT = """
import io, logging, os, sys, warnings
import torch

class Net(torch.nn.Linear):
    pass

class Squares(torch.utils.data.Dataset):
    def __len__(self):
        return 3

    def __getitem__(self, index):
        return index * index

def save_and_load():
    file = io.BytesIO()
    torch.save(Net(1, 1), file)
    file.seek(0)
    return type(torch.load(file, weights_only=False)) is Net

def load_in_a_spawned_process():
    loader = torch.utils.data.DataLoader(Squares(), num_workers=1, multiprocessing_context="spawn")
    return [int(batch) for batch in loader]

def look_around():
    logging.getLogger("a_script").info("as in the script")
    warnings.warn("ignored there")
    os.environ.pop("LOOKED", None)
    return os.getcwd(), os.environ.get("PACELINE_TEST"), sys.argv[0], sys.path[0], torch.ones(1).dtype
"""


@pytest.fixture(scope="module")
def script():
    names = {"__name__": "__main__"}
    exec(SCRIPT, names)
    return names


@pytest.fixture(scope="module", params=["local", "ray"])
def warm(request, lasts):
    """One worker on each engine; it need not have torch, until it gets a function that does."""
    engine, arguments = request.param, {}
    if engine == "ray":
        request.getfixturevalue("ray_cluster")
        arguments = {"cpus_per_worker": 0, "resources_per_worker": {"stays": 1}}
    trainer = Trainer(backend=BackendConfig(), num_workers=1, engine=engine, logdir=f"scripts_{engine}", **arguments)
    with trainer, lasts(trainer):
        yield trainer


def test_class_of_the_script_is_pickled_by_name_in_a_worker(warm, script):
    assert warm.run(script["save_and_load"]) == [True]


def test_dataset_of_the_script_is_loaded_in_a_spawned_process(script):
    """No main guard is needed, and no file: it gets what the worker has."""
    with Trainer(num_workers=1, logdir="scripts_spawn") as trainer:
        assert trainer.run(script["load_in_a_spawned_process"]) == [[0, 1, 4]]


def test_warm_worker_learns_what_the_script_has_changed(warm, script, monkeypatch, tmp_path):
    [before] = warm.run(script["look_around"])
    assert before == (os.getcwd(), None, sys.argv[0], sys.path[0], torch.float32)
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(levelname)s|%(message)s"))
    logger = logging.getLogger("a_script")
    monkeypatch.setenv("PACELINE_TEST", "1")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "argv", ["other.py"])
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    torch.set_default_dtype(torch.float64)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            [after] = warm.run(script["look_around"])
    finally:
        torch.set_default_dtype(torch.float32)
        logger.handlers.clear()
        logger.setLevel(logging.NOTSET)
    assert after == (str(tmp_path), "1", "other.py", str(tmp_path), torch.float64)
    log = (warm.latest_run_dir / "logs" / "rank_0.log").read_text()
    assert "INFO|as in the script\n" in log
    assert "ignored there" not in log
    monkeypatch.undo()
    assert warm.run(script["look_around"]) == [before], "and what it has taken back"
    assert "ignored there" in (warm.latest_run_dir / "logs" / "rank_0.log").read_text()


def test_edited_module_is_what_the_next_run_uses(warm, monkeypatch, tmp_path, caplog):
    module = tmp_path / "module_that_is_edited.py"
    module.write_text("VALUE = 1")
    monkeypatch.syspath_prepend(tmp_path)

    def value():
        import module_that_is_edited

        return module_that_is_edited.VALUE, os.getpid()

    [(first, pid)] = warm.run(value)
    [again] = warm.run(value)
    assert (first, again) == (1, (1, pid)), "nothing has changed, and the worker stays"
    module.write_text("VALUE = 22")
    [(second, other_pid)] = warm.run(value)
    assert second == 22
    assert other_pid != pid


def test_edited_module_of_the_nursery(monkeypatch, tmp_path):
    module = tmp_path / "module_that_is_preloaded.py"
    module.write_text("VALUE = 1")
    monkeypatch.syspath_prepend(tmp_path)

    def value():
        import sys

        was_there = "module_that_is_preloaded" in sys.modules
        import module_that_is_preloaded

        return was_there, module_that_is_preloaded.VALUE

    engine = LocalEngine(preload=["module_that_is_preloaded"])
    with Trainer(backend=BackendConfig(), num_workers=1, engine=engine, logdir="scripts_preload") as trainer:
        assert trainer.run(value) == [(True, 1)]
        module.write_text("VALUE = 22")
        assert trainer.run(value) == [(False, 22)]


def test_workers_that_hold_an_object_stay_and_it_is_said(monkeypatch, tmp_path, caplog):
    module = tmp_path / "module_of_an_object.py"
    module.write_text("VALUE = 1")
    monkeypatch.syspath_prepend(tmp_path)

    class Holder:
        def __init__(self):
            import module_of_an_object

            self.value = module_of_an_object.VALUE

    trainer = Trainer(backend=BackendConfig(), num_workers=1, logdir="scripts_holder")
    trainer.start(Holder)
    pids = trainer.execute(lambda holder: os.getpid())
    module.write_text("VALUE = 22")
    assert trainer.run(os.getpid) == pids
    assert trainer.execute(lambda holder: holder.value) == [1]
    assert "module_of_an_object.py was edited" in caplog.text
    assert "Holder lives in them" in caplog.text
    trainer.shutdown()


def test_nobody_types_in_a_worker(warm):
    with pytest.raises(TrainerStateError, match=r"num_workers=0"):
        warm.run(lambda: input("name? "))


def test_breakpoint_in_a_worker():
    """On Ray, it is that of Ray's own debugger."""

    def train():
        breakpoint()
        return

    trainer = Trainer(backend=BackendConfig(), num_workers=1, logdir="scripts_breakpoint")
    with trainer, pytest.raises(TrainerStateError, match=r"num_workers=0"):
        trainer.run(train)


def test_debugger_of_ones_own_is_called(warm, monkeypatch):
    monkeypatch.setenv("PYTHONBREAKPOINT", "os.getpid")
    [(from_breakpoint, pid)] = warm.run(lambda: (breakpoint(), os.getpid()))
    assert from_breakpoint == pid
