"""Which files the code of an experiment is made of."""

from paceline.experiment.code_files import imported_files


def test_files_that_are_imported_from_the_project_are_found(tmp_path):
    files = {
        "src/__init__.py": "",
        "src/experiment.py": "import json\nimport torch.nn\nfrom src import losses\nfrom src.parts.net import Net\n",
        "src/losses.py": "def f():\n    import helpers.late\n",
        "src/parts/__init__.py": "from .deep import *\n",
        "src/parts/deep.py": "from ..experiment import Experiment\n",
        "src/parts/net.py": "this is no Python",
        "helpers/late.py": "",
        "src/other.py": "",
        "main.py": "",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    found = imported_files([tmp_path / "src/experiment.py"], tmp_path)
    assert found == {(tmp_path / name).resolve() for name in files} - {tmp_path / "src/other.py", tmp_path / "main.py"}


def test_installed_packages_are_left_alone(tmp_path):
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages/it.py").write_text("import other")
    (tmp_path / "other.py").write_text("")
    assert imported_files([tmp_path / "site-packages/it.py"], tmp_path) == set()
