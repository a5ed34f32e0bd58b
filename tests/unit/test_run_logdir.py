import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.errors import ArgumentError, ArgumentTypeError
from paceline.runs.logdir import make_run_dir, resolve_logdir, results_dir


@pytest.fixture
def results(tmp_path: Path) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PACELINE_RESULTS", str(tmp_path / "results"))
        yield tmp_path / "results"


def test_results_folder_is_in_the_home_folder_unless_chosen() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", "/home/ada")
        patch.delenv("PACELINE_RESULTS", raising=False)
        assert results_dir() == Path("/home/ada/paceline_results")
        patch.setenv("PACELINE_RESULTS", "")
        assert results_dir() == Path("/home/ada/paceline_results")
        patch.setenv("PACELINE_RESULTS", "~/elsewhere")
        assert results_dir() == Path("/home/ada/elsewhere")


def test_default_logdirs_of_one_second_differ(results: Path) -> None:
    made = [resolve_logdir(None, clock=lambda: 1_700_000_000.5) for _ in range(3)]
    first = made[0].name
    assert first.startswith("sgd_2023-11-1")
    assert [path.name for path in made] == [first, f"{first}_2", f"{first}_3"]
    assert all(path.is_dir() and path.parent == results for path in made)


def test_prefix_names_the_folder(results: Path) -> None:
    assert resolve_logdir(None, "tune").name.startswith("tune_")


def test_a_path_is_used_as_it_is_and_a_name_lies_in_the_results_folder(results: Path, tmp_path: Path) -> None:
    assert resolve_logdir(tmp_path / "a" / "b") == tmp_path / "a" / "b"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(tmp_path / "home"))
        assert resolve_logdir("~/mine") == tmp_path / "home" / "mine"
    assert resolve_logdir("exp/one") == results / "exp" / "one"
    assert resolve_logdir(Path("exp/one")) == results / "exp" / "one"  # it may exist
    assert (results / "exp" / "one").is_dir()


@pytest.mark.parametrize("logdir", ["taken", "taken/below"])
def test_a_file_in_the_way_is_named(results: Path, logdir: str) -> None:
    results.mkdir()
    (results / "taken").write_text("")
    with pytest.raises(ArgumentError, match=r"results/taken is a file\. Give a logdir"):
        resolve_logdir(logdir)


def test_a_results_folder_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PACELINE_RESULTS", str(tmp_path / "taken"))
        with pytest.raises(ArgumentError, match=r"/taken is a file\. .*PACELINE_RESULTS"):
            resolve_logdir(None)


def test_a_parent_that_cannot_be_written_is_named() -> None:
    with pytest.raises(ArgumentError, match=r"runs cannot be written to /proc/paceline/here: .*PACELINE_RESULTS"):
        resolve_logdir("/proc/paceline/here")
    with pytest.raises(ArgumentError, match="runs cannot be written to /proc/paceline"):
        make_run_dir(Path("/proc/paceline"))


@pytest.mark.parametrize(
    ("logdir", "says"),
    [
        ("../out", "leads out of it. Give an absolute path"),
        ("  ", "empty"),
        ("s3://bucket/runs", "storage_path"),
        ("~nobody-of-this-name/x", "home folder of a user"),
    ],
)
def test_a_logdir_that_cannot_be_meant_is_refused(results: Path, logdir: str, says: str) -> None:
    with pytest.raises(ArgumentError, match=says):
        resolve_logdir(logdir)
    assert not results.exists()


def test_a_logdir_of_another_type_is_refused() -> None:
    with pytest.raises(ArgumentTypeError, match="not int: 3"):
        resolve_logdir(3)  # type: ignore[arg-type]


def test_run_numbers_go_on_after_the_last(tmp_path: Path) -> None:
    assert make_run_dir(tmp_path / "new").name == "run_001"
    for name in ("run_002", "run_999", "run_1", "run_x", "checkpoints"):
        (tmp_path / name).mkdir()
    assert make_run_dir(tmp_path).name == "run_1000"
    assert make_run_dir(tmp_path).name == "run_1001"


def test_runs_made_at_once_get_different_numbers(tmp_path: Path) -> None:
    made: list[str] = []
    start = threading.Barrier(8)

    def make() -> None:
        start.wait()
        made.extend(make_run_dir(tmp_path).name for _ in range(10))

    threads = [threading.Thread(target=make) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(made) == [f"run_{n:03d}" for n in range(1, 81)]


def test_a_name_that_runs_have_is_refused(results: Path) -> None:
    """Listings take such a folder for a run, and look into it no further."""
    for logdir in ("run_001", "deep/run_012", results / "run_1234"):
        with pytest.raises(ArgumentError, match="is called as runs themselves are"):
            resolve_logdir(logdir)
    (results / "run_001").mkdir(parents=True)  # of an earlier version: what is in it can be gone on with
    assert resolve_logdir("run_001") == results / "run_001"
    assert resolve_logdir("run_1") == results / "run_1"
