"""Which files are the code of an experiment: the project's own, however they are imported."""

import importlib
import sys

import pytest
import torch

from paceline.experiment import TrainConfig
from paceline.experiment.own_code import code_hash_of, own_files, root_of

FILES = {
    "project/__init__.py": "",
    "project/experiment.py": "from project.data import Rows\nimport torch, json\n\nclass Experiment: pass\n",
    "project/data.py": "from .lib import reading\nfrom . import names\n\nclass Rows: pass\n",
    "project/names.py": "NAME = 1\n",
    "project/lib/__init__.py": "",
    "project/lib/reading.py": "def read():\n    import other\n    from ..lib.deep import one\n",
    "project/lib/deep.py": "from project import experiment\none = 1\n",
    "project/unused.py": "",
    "other.py": "not python (",
}


@pytest.fixture
def project(tmp_path, monkeypatch):
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("project.experiment").Experiment
    for name in [name for name in sys.modules if name.partition(".")[0] in ("project", "other")]:
        del sys.modules[name]


def test_own_modules_are_followed_and_no_others(project, tmp_path):
    names = {"project", "project.experiment", "project.data", "project.names", "project.lib", "project.lib.reading"}
    assert set(own_files(["project.experiment"])) == names | {"project.lib.deep", "other"}
    assert root_of("project.experiment") == tmp_path
    assert [root_of(one) for one in ("torch.nn", "json", "paceline.experiment", "nowhere")] == [None] * 4


@pytest.mark.parametrize("name", FILES)
def test_hash_changes_with_every_file_that_counts(project, tmp_path, name):
    before = code_hash_of([project, TrainConfig, torch.nn.Linear])
    assert code_hash_of([project]) == before
    with (tmp_path / name).open("a") as file:
        file.write("# changed\n")
    assert (code_hash_of([project]) != before) == (name != "project/unused.py")
