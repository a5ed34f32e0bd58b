"""What a driver has set up, as a value; and what another process makes of it. Here that is the same process."""

import json
import logging
import os
import sys
import threading
import warnings
from types import SimpleNamespace

import pytest
import torch

from paceline import frameworks
from paceline.workers import log_setup, surroundings
from paceline.workers.edits import Edits, UserFiles
from paceline.workers.installed import is_installed


@pytest.fixture
def logger():
    """One that a script has made, with a handler for the terminal."""
    logger = logging.getLogger("a_script_of_mine")
    yield logger
    logger.handlers.clear()
    logger.setLevel(logging.NOTSET)


def test_levels_and_formats_are_carried_and_given_back(logger, capsys):
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("%(levelname)s|%(message)s"))
    handler.setLevel(logging.INFO)
    logger.addHandler(handler)
    logger.addHandler(logging.NullHandler())
    logger.setLevel(logging.DEBUG)
    setup = {"a_script_of_mine": log_setup.loggers()["a_script_of_mine"]}
    logger.handlers.clear()
    logger.setLevel(logging.NOTSET)

    log_setup.adopt(setup, {})
    logger.debug("too little")
    logger.info("shown")
    assert capsys.readouterr().out == "INFO|shown\n"
    log_setup.adopt(setup, setup)
    assert len(logger.handlers) == 1, "adopting again does not double it"
    logger.addHandler(logging.StreamHandler())
    log_setup.adopt(setup, setup)
    assert len(logger.handlers) == 1, "nor where a package has added one by itself"
    logger.handlers.clear()
    log_setup.adopt({}, setup)
    assert (logger.level, logger.handlers) == (logging.NOTSET, [])


def test_handlers_of_a_package_are_its_own(logger, monkeypatch):
    """It adds them when it is imported, in a worker too."""
    logger.addHandler(logging.StreamHandler())
    logger.setLevel(logging.ERROR)
    assert log_setup.loggers()[logger.name].consoles
    monkeypatch.setitem(sys.modules, logger.name, sys)
    assert log_setup.loggers()[logger.name] == log_setup.LoggerSetup(logging.ERROR)


def test_formatter_that_cannot_travel_costs_the_format_alone(logger):
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter())
    handler.formatter.lock = threading.Lock()
    logger.addHandler(handler)
    [console] = log_setup.loggers()[logger.name].consoles
    assert console.formatter is None


def test_warning_filters():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        theirs = surroundings.now().filters
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "of a package")
        mine = warnings.filters[0]
        surroundings._adopt_filters((*theirs, ("ignore", None, "not_loaded:Warning", None, 0)), ())
        assert warnings.filters[0][:3] == ("ignore", None, UserWarning)
        assert mine in warnings.filters
        warnings.warn("not shown", UserWarning, stacklevel=1)
        surroundings._adopt_filters((), theirs)
        assert warnings.filters == [mine]


def test_settings_of_torch():
    torch_framework = next(one for one in frameworks.every() if one.name == "torch")
    assert torch_framework.settings() == {}
    torch.set_default_dtype(torch.float64)
    torch.set_float32_matmul_precision("high")
    try:
        settings = torch_framework.settings()
        torch_framework.adopt({})
        assert (torch.get_default_dtype(), torch.get_float32_matmul_precision()) == (torch.float32, "highest")
        torch_framework.adopt(settings)
        assert (torch.get_default_dtype(), torch.get_float32_matmul_precision()) == (torch.float64, "high")
    finally:
        torch_framework.adopt({})


def test_changed_variables_are_told_also_when_they_are_as_before(monkeypatch):
    monkeypatch.setattr(surroundings, "_changed", set())
    monkeypatch.setattr(surroundings, "_environ_before", {**os.environ, "GONE": "1"})
    monkeypatch.setenv("NEW", "2")
    monkeypatch.setenv("RANK", "3")
    assert surroundings.now().environ == {"NEW": "2", "GONE": None}, "the rank is each worker's own"
    monkeypatch.setenv("GONE", "1")
    assert surroundings.now().environ == {"NEW": "2", "GONE": "1"}


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module of the user's that this process has imported."""
    path = tmp_path / "module_of_mine.py"
    path.write_text("VALUE = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    __import__("module_of_mine")
    yield path
    sys.modules.pop("module_of_mine", None)


def test_files_of_the_user_are_told_once(module):
    files = UserFiles()
    told = files.news()
    assert str(module) in told
    assert not [file for file in told if "site-packages" in file or "/lib/python3" in file]
    assert files.news() == []


@pytest.mark.parametrize("folder", ["site-packages", "dist-packages/inner"])
def test_packages_of_another_environment_are_not_the_users(folder, tmp_path):
    assert is_installed(str(tmp_path / "lib" / folder / "package.py"))
    assert is_installed(json.__file__)
    assert not is_installed(str(tmp_path / "lib" / "package.py"))


def test_files_that_the_nursery_has_imported_are_told_without_looking_at_its_modules_again(module):
    class Touched:
        """A module as the nursery has many: a worker that touches them all has to copy their memory."""

        @property
        def __file__(self):
            raise AssertionError("it was looked at again")

    files = UserFiles()
    files.remember()
    sys.modules["module_of_mine"] = Touched()
    assert str(module) in files.news()
    (module.parent / "another_of_mine.py").touch()
    try:
        __import__("another_of_mine")
        assert files.news() == [str(module.parent / "another_of_mine.py")]
    finally:
        sys.modules.pop("another_of_mine", None)


def test_module_without_a_place_is_nobodys(monkeypatch):
    """As torch.ops says that it is `_ops.py`: one of the user's that is called so would be taken for it."""
    monkeypatch.setitem(sys.modules, "made_up", SimpleNamespace(__file__="made_up.py"))
    assert not [file for file in UserFiles().news() if not os.path.isabs(file)]


def test_module_that_was_edited_after_the_fork_is_imported_again(module):
    files = UserFiles()
    files.remember()
    files.forget_edited()
    assert "module_of_mine" in sys.modules
    others = {name: sys.modules[name] for name in sys.modules}
    os.utime(module, ns=(1, 1))
    files.forget_edited()
    try:
        assert "module_of_mine" not in sys.modules
        assert "paceline" in sys.modules
    finally:
        sys.modules.update(others)


def test_edits_are_noticed(tmp_path):
    before, during = tmp_path / "before.py", tmp_path / "during.py"
    for path, time in ((before, 1_000), (during, 3_000)):
        path.touch()
        os.utime(path, ns=(time, time))
    edits = Edits()
    edits.learn([str(before), str(tmp_path / "on_another_machine.py")], begin_ns=2_000)
    assert edits.edited() == []
    edits.learn([str(during)], begin_ns=2_000)
    assert edits.edited() == [str(during)], "nobody knows which of the two the worker has read"
    os.utime(before, ns=(2_000, 2_000))
    assert edits.edited() == [str(before), str(during)]
    edits.clear()
    assert edits.edited() == []
