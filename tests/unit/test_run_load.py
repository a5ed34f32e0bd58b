import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.errors import (
    ArgumentError,
    CheckpointError,
    DataError,
    MissingDependencyError,
    RunDamagedError,
    RunNotFoundError,
)
from paceline.runs import RunFolder, list_runs, load_run


@pytest.fixture
def results(tmp_path: Path) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PACELINE_RESULTS", str(tmp_path / "results"))
        yield tmp_path / "results"


@pytest.fixture
def folder(results: Path) -> Iterator[RunFolder]:
    with RunFolder.create(results / "exp") as folder:
        yield folder


def finished(logdir: Path, *, at: float = 0.0, losses: tuple[float, ...] = ()) -> RunFolder:
    with RunFolder.create(logdir, clock=lambda: at) as folder:
        folder.set_state("RUNNING")
        for step, loss in enumerate(losses, 1):
            folder.record_step(step, 1, [{"loss": loss}])
        folder.set_state("SUCCEEDED")
    return folder


def test_a_run_reads_back(folder: RunFolder) -> None:
    folder.write_request({"config": {"lr": 0.1}, "num_workers": 2})
    folder.set_state("RUNNING", worker_pids=[1, 2])
    folder.record_step(1, 1, [{"loss": 1.0}, {"loss": 2.0}])
    folder.record_event("retry", rank=1)
    folder.log_path(1).write_bytes(b"hello\xff")
    folder.set_state("SUCCEEDED")
    run = load_run(folder.path)
    assert run.path == folder.path
    assert run.name == "exp/run_001"
    assert run.config == {"lr": 0.1}
    assert run.request["num_workers"] == 2
    assert run.status.state == "SUCCEEDED"
    assert run.status.worker_pids == (1, 2)
    assert not run.is_alive
    assert run.metrics.to_dict("list") == {
        "step": [1, 1],
        "rank": [0, 1],
        "attempt": [1, 1],
        "loss": [1.0, 2.0],
    }
    assert [event["kind"] for event in run.events] == ["retry"]
    assert run.log(1) == "hello\ufffd"
    with pytest.raises(ArgumentError, match=r"no log of rank 0. It has: \['rank_1'\]"):
        run.log(0)


def test_a_logdir_gives_its_newest_run(results: Path) -> None:
    for number in (2, 999, 1000):
        (results / "exp" / f"run_{number:03d}").mkdir(parents=True)
    assert load_run(results / "exp").path == results / "exp" / "run_1000"
    assert load_run("exp").path == results / "exp" / "run_1000"  # as a Trainer would find it
    assert load_run("exp/run_002").path == results / "exp" / "run_002"


def test_a_renamed_run_is_known_by_its_files(results: Path) -> None:
    finished(results / "exp").path.rename(results / "best")
    assert load_run(results / "best").status.state == "SUCCEEDED"


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("nowhere/deep", r"nowhere/deep does not exist\. .*results contains empty, exp, file\."),
        ("file", "file is a file. Give the run folder"),
        ("empty", r"has no run_001 in it\. .*empty is empty"),
        (".", r"is no Trainer's logdir, but has 1 runs below it: give one of .*/exp\."),
    ],
)
def test_what_is_no_run_is_described(results: Path, path: str, says: str) -> None:
    finished(results / "exp")
    (results / "empty").mkdir()
    (results / "file").write_text("")
    with pytest.raises(RunNotFoundError, match=says):
        load_run(results / path)


def test_steps_done_again_after_a_restart_supersede_the_first_ones(folder: RunFolder) -> None:
    for step, attempt in [(1, 1), (2, 1), (3, 1), (4, 1), (5, 1), (2, 2), (3, 2), (3, 2), (4, 2)]:
        folder.record_step(step, attempt, [{"loss": step + attempt / 10}, None])
    folder.flush()
    run = load_run(folder.path)
    assert list(zip(run.metrics["step"], run.metrics["attempt"], strict=True)) == [
        (1, 1),
        (2, 2),
        (3, 2),
        (4, 2),
    ]
    assert list(run.metrics["loss"]) == [1.1, 2.2, 3.2, 4.2]
    assert list(run.all_metrics["step"]) == [1, 2, 3, 4, 5, 2, 3, 3, 4]


def test_metrics_called_like_our_columns_are_kept(folder: RunFolder) -> None:
    folder.record_step(1, 1, [{"step": 100, "loss": float("nan")}, {"rank": 9}])
    folder.flush()
    metrics = load_run(folder.path).metrics
    assert list(metrics.columns) == ["step", "rank", "attempt", "reported_step", "loss", "reported_rank"]
    assert list(metrics["step"]) == [1, 1]
    assert list(metrics["rank"]) == [0, 1]
    assert metrics["reported_step"][0] == 100
    assert metrics["loss"].isna().all()


def test_a_living_run_is_read_anew(folder: RunFolder) -> None:
    run = load_run(folder.path)
    assert (run.status.state, run.is_alive) == ("PENDING", True)
    assert list(run.metrics.columns) == ["step", "rank", "attempt"]
    assert len(run.metrics) == 0
    folder.set_state("RUNNING")
    folder.record_step(1, 1, [{"loss": 1.0}])
    folder.flush()
    assert run.status.state == "RUNNING"
    assert len(run.metrics) == 1


def test_a_running_run_without_heartbeats_is_lost(results: Path) -> None:
    with RunFolder.create(results / "exp", clock=lambda: 1000.0) as folder:
        folder.set_state("RUNNING")
        assert load_run(folder.path, clock=lambda: 1020.0).status.state == "RUNNING"
        lost = load_run(folder.path, clock=lambda: 1040.0)
    assert lost.status.state == "LOST"
    assert not lost.is_alive


def test_driver_dies_before_the_first_status(results: Path) -> None:
    (results / "exp" / "run_001").mkdir(parents=True)
    made = (results / "exp" / "run_001").stat().st_mtime
    assert load_run("exp", clock=lambda: made + 1).status.state == "PENDING"
    late = load_run("exp", clock=lambda: made + 31)
    assert late.status.state == "LOST"
    assert (late.config, late.events, late.environment, late.seed) == ({}, [], {}, None)
    assert len(late.metrics) == 0
    assert "LOST" in str(late)


@pytest.mark.parametrize("name", ["status.json", "run.json", "environment.json", "metrics.jsonl", "events.jsonl"])
@pytest.mark.parametrize(
    "damage",
    [b"", b'{"st', b"\x00" * 100, b"[]", b'{"state": 3, "step": "x", "config": 1}\n'],
    ids=["empty", "torn", "zeros", "another type", "other values"],
)
def test_driver_dies_while_writing_a_file(results: Path, name: str, damage: bytes) -> None:
    folder = finished(results / "exp", losses=(1.0,))
    (folder.path / name).write_bytes(damage)
    run = load_run(folder.path)
    assert run.status.state in ("SUCCEEDED", "PENDING")
    assert run.config == {}
    assert len(run.metrics) == (0 if name == "metrics.jsonl" else 1)
    assert isinstance(str(run), str)


def test_the_seed_is_the_last_that_was_set(folder: RunFolder) -> None:
    folder.write_request({"config": {"seed": 1}})
    assert load_run(folder.path).seed == 1
    folder.record_event("seed", seed=2)
    folder.record_event("seed", seed=3)
    folder.flush()
    assert load_run(folder.path).seed == 3


def test_a_run_prints_what_one_wants_to_know(results: Path) -> None:
    times = iter([0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 9.5])
    with RunFolder.create(results / "exp", clock=lambda: next(times, 9.5)) as folder:
        folder.set_state("RUNNING")
        folder.record_step(7, 1, [{"loss": 0.123456789, "_pid": 5}])
        folder.set_state("FAILED", "rank 1 raised ValueError")
    run = load_run(folder.path)
    text = str(run)
    for words in ("exp/run_001", "FAILED", "rank 1 raised ValueError", "0.123457"):
        assert words in text
    assert "_pid" not in text
    assert [line.split() for line in text.splitlines() if line.startswith("steps")] == [["steps", "7"]]
    assert repr(run) == f"Run({str(folder.path)!r}, FAILED)"


def test_runs_are_listed_newest_first_and_damaged_ones_too(results: Path, tmp_path: Path) -> None:
    second = finished(results / "b", at=2000.0)
    first = finished(results / "deep" / "a", at=1000.0)
    third = finished(results / "b", at=3000.0)
    broken = results / "c" / "run_001"
    broken.mkdir(parents=True)
    (broken / "status.json").write_bytes(b"\x00")
    os.utime(broken, (500, 500))
    (results / "notes.txt").write_text("")
    (results / "link").symlink_to(results)  # would never end
    assert [run.path for run in list_runs()] == [third.path, second.path, first.path, broken]
    assert [run.path for run in list_runs(results / "b")] == [third.path, second.path]
    assert [run.path for run in list_runs(first.path)] == [first.path]
    assert list_runs(tmp_path / "nowhere") == []


def test_pandas_is_missing(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'paceline\[data\]'"):
        _ = load_run(folder.path).metrics


def test_checkpoints_are_those_that_were_committed(folder: RunFolder) -> None:
    from paceline.checkpoints import CheckpointStore, snapshot

    run = load_run(folder.path)
    assert (run.checkpoints, run.latest_checkpoint_path, run.best_checkpoint_path) == ([], None, None)
    store = CheckpointStore(folder.checkpoints_dir)
    for number, accuracy in enumerate([0.1, 0.9, 0.5], 1):
        store.write(number, snapshot({"accuracy": accuracy}), score=accuracy, iteration=number)
    (folder.checkpoints_dir / "checkpoint_000004").mkdir()  # killed before it was whole
    assert [info.id for info in run.checkpoints] == [1, 2, 3]
    assert run.latest_checkpoint_path == str(folder.checkpoints_dir / "checkpoint_000003")
    assert run.best_checkpoint_path == run.latest_checkpoint_path


def test_the_best_checkpoint_is_the_best_by_the_strategy_of_the_run(folder: RunFolder, tmp_path: Path) -> None:
    from paceline.checkpoints import CheckpointStore, CheckpointStrategy, snapshot

    store = CheckpointStore(tmp_path / "elsewhere")
    for number, loss in enumerate([0.5, 0.1, 0.9], 1):
        store.write(number, snapshot({"loss": loss}), score=loss, iteration=number)
    strategy = CheckpointStrategy(
        checkpoint_score_attribute="loss", checkpoint_score_order="min", storage_path=store.root
    )
    folder.write_request({"checkpoint_root": store.root, "checkpoint_strategy": strategy})
    run = load_run(folder.path)
    assert run.best_checkpoint_path == store.path_of(2)
    assert run.latest_checkpoint_path == store.path_of(3)


def elsewhere(folder: RunFolder, url: str) -> str:
    """A checkpoint at a URL, where the run says that it keeps them."""
    from paceline.checkpoints import CheckpointStore, CheckpointStrategy, snapshot

    store = CheckpointStore(url)
    store.write(1, snapshot({"x": 1}))
    folder.write_request({"checkpoint_root": url, "checkpoint_strategy": CheckpointStrategy(storage_path=url)})
    return store.path_of(1)


def test_own_run_finds_its_checkpoints_elsewhere(folder: RunFolder) -> None:
    path = elsewhere(folder, "memory://own/exp/run_001")
    assert load_run(folder.path).latest_checkpoint_path == path


def test_key_cannot_be_kept_but_this_process_knows_its_own_runs(
    results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    with RunFolder.create(results / "exp") as folder:
        path = elsewhere(folder, "memory://unkept/exp/run_001")
    assert load_run(folder.path).latest_checkpoint_path == path


def test_place_that_a_foreign_run_names_is_not_opened(
    folder: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = elsewhere(folder, "memory://foreign/exp/run_001")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "of another account"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fsspec.core.url_to_fs", lambda url: pytest.fail(f"{url} was opened"))
        run = load_run(folder.path)
        assert run.checkpoint_root == "memory://foreign/exp/run_001"
        for read in (lambda: run.checkpoints, lambda: run.best_checkpoint_path, lambda: run.latest_checkpoint_path):
            with pytest.raises(CheckpointError, match=r"at memory://foreign/.* load_run\(path, checkpoint_root="):
                read()
        assert "PENDING" in str(run)
    assert load_run(folder.path, checkpoint_root=run.checkpoint_root).latest_checkpoint_path == path


def test_place_that_was_changed_is_not_opened(folder: RunFolder, tmp_path: Path) -> None:
    elsewhere(folder, "memory://changed/exp/run_001")
    text = (folder.path / "run.json").read_text()
    for other in ("memory://evil/exp/run_001", str(tmp_path), "file:///", "s3:/x", "../../x", "a\\u0000b"):
        (folder.path / "run.json").write_text(text.replace("memory://changed/exp/run_001", other))
        with pytest.raises(CheckpointError, match="nothing shows that this user's account has written that"):
            _ = load_run(folder.path).checkpoints


def test_moved_run_has_its_checkpoints_with_it(folder: RunFolder, results: Path) -> None:
    from paceline.checkpoints import CheckpointStore, snapshot

    CheckpointStore(folder.checkpoints_dir).write(1, snapshot({"x": 1}))
    folder.write_request({"checkpoint_root": str(folder.checkpoints_dir), "checkpoint_strategy": {"num_to_keep": None}})
    folder.path.rename(results / "moved")
    [info] = load_run(results / "moved").checkpoints
    assert info.path == str(results / "moved" / "checkpoints" / "checkpoint_000001")


def test_strategy_of_a_damaged_run_is_said_to_be_damaged(folder: RunFolder) -> None:
    folder.write_request({"checkpoint_strategy": {"num_to_keep": "many"}})
    with pytest.raises(RunDamagedError, match=r"run\.json is none: num_to_keep is 'many'"):
        _ = load_run(folder.path).best_checkpoint_path


def test_place_of_the_checkpoints_does_not_answer(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere(folder, "memory://silent/exp/run_001")

    def refuse(url: str) -> None:
        raise TimeoutError(f"{url} is silent")

    monkeypatch.setattr("fsspec.core.url_to_fs", refuse)
    with pytest.raises(CheckpointError, match="cannot be listed: memory://silent/exp/run_001 is silent"):
        _ = load_run(folder.path).checkpoints


def test_a_run_shows_as_a_table_in_a_notebook(folder: RunFolder) -> None:
    folder.record_step(1, 1, [{"note": "<script>alert(1)</script>"}])
    folder.set_state("FAILED", reason="1 < 2 & more")
    html = load_run(folder.path)._repr_html_()
    assert html.startswith("<table>")
    assert "1 &lt; 2 &amp; more" in html
    assert "&lt;script&gt;" in html
    assert "<script>" not in html


def test_folds_of_a_cross_validation(folder: RunFolder) -> None:
    for step, (cv, loss) in enumerate([(0, 9.0), (0, 1.0), (1, 9.0), (1, 3.0)], 1):
        folder.record_step(step, 1, [{"cv": cv, "loss": loss, "note": "x"}, {"cv": cv, "loss": loss + 1}])
    folder.record_step(5, 1, [{"cv": 1, "accuracy": 0.5, "_timestamp": 1.0}, {"cv": 1, "accuracy": 1.0}])
    folder.record_step(6, 1, [{"loss": 100.0}, {"loss": 100.0}])
    folder.flush()
    frame = load_run(folder.path).folds
    assert list(frame.index) == [0, 1, "mean", "std"]
    assert list(frame["loss"]) == [1.5, 3.5, 2.5, pytest.approx(2**0.5)]
    assert list(frame["accuracy"][1:3]) == [0.75, 0.75]
    assert list(frame.columns) == ["loss", "accuracy"], "numbers only, and none of Paceline's own"


def test_folds_after_a_restart_are_those_that_count(folder: RunFolder) -> None:
    folder.record_step(1, 1, [{"cv": 0, "loss": 1.0}])
    folder.record_step(2, 1, [{"cv": 1, "loss": 9.0}])
    folder.record_step(2, 2, [{"cv": 1, "loss": 2.0}])
    folder.flush()
    assert list(load_run(folder.path).folds["loss"][:3]) == [1.0, 2.0, 1.5]


def test_run_without_folds_says_what_to_report(folder: RunFolder) -> None:
    for _ in range(2):
        with pytest.raises(DataError, match=r"exp/run_001: no report says of which fold it is.*report\(cv=index"):
            _ = load_run(folder.path).folds
        folder.record_step(1, 1, [{"loss": 1.0}])
        folder.flush()
