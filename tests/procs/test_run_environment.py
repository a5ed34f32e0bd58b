"""The environment record, with a real git."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.runs import RunFolder, environment, load_run
from paceline.runs.durable import read_json
from paceline.runs.repository import describe_repository

SOURCES = str(Path(sys.modules[RunFolder.__module__].__file__ or "").parents[2])

RECORD = """
import sys
from paceline.runs import RunFolder

with RunFolder.create(sys.argv[1]) as folder:
    folder.record_environment()
"""


def git(directory: Path, *args: str) -> str:
    identity = ["-c", "user.name=Ada", "-c", "user.email=ada@example.org", "-c", "init.defaultBranch=main"]
    command = ["git", "-C", str(directory), *identity, *args]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    path = tmp_path / "project"
    path.mkdir()
    git(path, "init")
    (path / "train.py").write_text("lr = 1\n")
    git(path, "add", ".")
    git(path, "commit", "-m", "first")
    return path


def test_a_clean_repository_is_its_commit(repository: Path) -> None:
    (repository / "src").mkdir()
    found = describe_repository(repository / "src")
    assert found is not None
    assert found.commit == git(repository, "rev-parse", "HEAD")
    assert found.summary() == {
        "root": str(repository),
        "commit": found.commit,
        "branch": "main",
        "dirty": False,
        "diff_cut": False,
    }
    assert found.diff == ""


def test_the_diff_gives_the_code_back(repository: Path, tmp_path: Path) -> None:
    git(repository, "clone", str(repository), str(tmp_path / "copy"))
    (repository / "train.py").write_text("lr = 2\n")
    (repository / "staged.py").write_text("new\n")
    git(repository, "add", "staged.py")
    (repository / "new file.py").write_text("not in the diff\n")
    found = describe_repository(repository)
    assert found is not None
    assert found.is_dirty
    assert "'new file.py'" in found.diff
    assert "not in the diff\n" not in found.diff
    (tmp_path / "code.diff").write_text(found.diff)
    git(tmp_path / "copy", "apply", str(tmp_path / "code.diff"))
    assert (tmp_path / "copy" / "train.py").read_text() == "lr = 2\n"
    assert (tmp_path / "copy" / "staged.py").read_text() == "new\n"


def test_a_large_diff_is_cut_and_says_so(repository: Path) -> None:
    (repository / "train.py").write_text("x" * 100_000)
    found = describe_repository(repository, max_diff_bytes=1000)
    assert found is not None
    assert found.is_diff_cut
    assert found.diff.endswith("# cut here: only 1000 bytes are kept\n")
    assert len(found.diff) < 1100


def test_a_repository_without_a_commit_is_described(tmp_path: Path) -> None:
    git(tmp_path, "init")
    (tmp_path / "train.py").write_text("lr = 1\n")
    git(tmp_path, "add", ".")
    found = describe_repository(tmp_path)
    assert found is not None
    assert (found.commit, found.branch, found.is_dirty) == (None, "main", True)
    assert "+lr = 1" in found.diff


def test_a_detached_head_has_no_branch(repository: Path) -> None:
    git(repository, "checkout", "--detach")
    found = describe_repository(repository)
    assert found is not None
    assert found.branch is None


def test_the_repository_chooses_no_program_to_run(repository: Path, tmp_path: Path) -> None:
    for name in ("diff.external", "core.fsmonitor", "diff.evil.textconv"):
        git(repository, "config", name, f"touch {tmp_path}/ran; cat")
    (repository / ".gitattributes").write_text("*.py diff=evil\n")
    (repository / "train.py").write_text("lr = 2\n")
    found = describe_repository(repository)
    assert found is not None
    assert "+lr = 2" in found.diff
    assert not (tmp_path / "ran").exists()


def test_no_repository_no_git_and_no_answer_are_none(repository: Path, tmp_path: Path) -> None:
    assert describe_repository(tmp_path) is None
    assert describe_repository(tmp_path / "missing") is None
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(tmp_path))
        assert describe_repository(repository) is None
        (tmp_path / "git").write_text("#!/bin/sh\nexec /bin/sleep 1000\n")
        (tmp_path / "git").chmod(0o755)
        assert describe_repository(repository, timeout_s=0.05) is None


def test_a_run_records_its_environment(repository: Path, tmp_path: Path) -> None:
    (repository / "train.py").write_text(RECORD)
    environ = {**os.environ, "PYTHONPATH": SOURCES, "OMP_NUM_THREADS": "3", "MY_API_KEY": "hush-hush"}
    command = [sys.executable, "train.py", str(tmp_path / "exp"), "--token", "hush-hush"]
    subprocess.run(command, check=True, cwd=repository, env=environ)
    run = load_run(tmp_path / "exp")
    record = run.environment
    assert record["git"]["commit"] == git(repository, "rev-parse", "HEAD")
    assert record["git"]["dirty"] is True
    assert record["command"][1:] == ["train.py", str(tmp_path / "exp"), "--token", "***"]
    assert record["cwd"] == str(repository)
    assert record["variables"]["OMP_NUM_THREADS"] == "3"
    assert record["packages"]["orjson"]
    assert record["python"].startswith(f"{sys.version_info[0]}.{sys.version_info[1]}.")
    assert record["memory_bytes"] > 2**20
    assert "record_environment" in (run.path / "code.diff").read_text()
    assert all(b"hush-hush" not in path.read_bytes() for path in run.path.rglob("*") if path.is_file())


def test_a_script_elsewhere_is_recorded_with_its_own_repository(repository: Path, tmp_path: Path) -> None:
    (repository / "train.py").write_text(RECORD)
    command = [sys.executable, str(repository / "train.py"), str(tmp_path / "exp")]
    subprocess.run(command, check=True, cwd=tmp_path, env={**os.environ, "PYTHONPATH": SOURCES})
    record = read_json(load_run(tmp_path / "exp").path / "environment.json")
    assert record is not None
    assert record["git"]["root"] == str(repository)


def test_a_command_of_ours_is_recorded_with_the_repository_of_the_working_directory(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ours may be a repository too, as for who works on Paceline; it is not what was trained."""
    ours = Path(SOURCES) / "paceline"
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(ours / "__main__.py"), raising=False)
    monkeypatch.chdir(repository)
    found = environment._find_repository()
    assert found is not None
    assert found.root == str(repository)
