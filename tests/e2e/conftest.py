"""Commands in the folder of a project, in this process, which has torch imported: where a new one shows no more."""

import sys

import pytest
from typer.testing import CliRunner

from paceline.cli.app import build


@pytest.fixture
def work_in(monkeypatch):
    """Goes to a project, whose runs go to another folder; in the end its modules are not imported any more."""

    def work_in(project, results):
        monkeypatch.chdir(project)
        monkeypatch.syspath_prepend(project)
        monkeypatch.setenv("PACELINE_RESULTS", str(results))

    yield work_in
    forget()


@pytest.fixture(scope="session")
def call():
    """Runs `paceline` in this process; gives standard output and standard error."""

    def call(*words, code=0):
        done = CliRunner().invoke(build(words[0]), words)
        assert done.exit_code == code, done.output
        return done.stdout, done.stderr

    return call


@pytest.fixture(name="forget", scope="session")
def _forget():
    """Removes the modules of a project from those that are imported."""
    return forget


def forget():
    for name in [name for name in sys.modules if name == "src" or name.startswith("src.")]:
        del sys.modules[name]
