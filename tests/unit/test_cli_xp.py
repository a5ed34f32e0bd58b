"""`paceline xp` in process, on real run folders."""

import fcntl
import json
import os
import shutil
import signal
import tarfile
import time

import numpy as np
import pytest
from typer.testing import CliRunner

import paceline
from paceline import BackendConfig, Trainer
from paceline.cli.app import build
from paceline.cli.xp_compare import short_endings
from paceline.errors import ConfigError
from paceline.runs import RunFolder, load_run

EVIL = "\x1b]0;owned\x07\x1b[2J\x9b31m"


def train(config):
    loss = 1.0
    for epoch in range(config["epochs"]):
        loss *= config["rate"]
        paceline.report(epoch=epoch, loss=loss, accuracy=1 - loss)
    paceline.save_checkpoint(loss=loss)
    if config.get("fails"):
        raise ValueError("the data is upside down")
    return loss


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    root = tmp_path_factory.mktemp("pristine")
    with Trainer(BackendConfig(), num_workers=0, logdir=root / "digits") as trainer:
        trainer.run(train, {"epochs": 4, "rate": 0.5, "opt": {"name": "adam"}})
        trainer.run(train, {"epochs": 6, "rate": 0.25, "opt": {"name": "sgd"}})
    with (
        Trainer(BackendConfig(), num_workers=0, logdir=root / "broken") as trainer,
        pytest.raises(ValueError, match="upside"),
    ):
        trainer.run(train, {"epochs": 1, "rate": 0.9, "fails": True})
    return root


@pytest.fixture
def root(pristine, tmp_path, monkeypatch):
    shutil.copytree(pristine, tmp_path / "results")
    monkeypatch.setenv("PACELINE_RESULTS", str(tmp_path / "results"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "results"


def xp(*words, code=0, **options):
    result = CliRunner().invoke(build("xp"), ["xp", *map(str, words)], **options)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, f"{result.stdout}\n{result.stderr}"
    assert "\x1b" not in result.output
    return result


def xp_json(*words, **options):
    return json.loads(xp(*words, "--json", **options).stdout)


def test_folder_in_which_no_run_has_begun_is_not_the_latest(root):
    shutil.copytree(root / "broken/run_001", root / "digits/run_003", ignore=lambda *_: ["status.json"])
    shutil.copytree(root / "digits/run_003", root / "digits/run_004")
    os.mkfifo(root / "digits/run_004/status.json")
    (root / "digits/run_005").mkdir()
    assert [
        xp_json("show", *words)["name"] for words in (["latest"], ["digits"], ["digits", "-3"], ["digits", "5"])
    ] == [
        "broken/run_001",
        "digits/run_002",
        "digits/run_005",
        "digits/run_005",
    ]
    assert len(xp_json("ls")) == 6


# --- ls, best, compare -----------------------------------------------------------------------------------------------


def test_ls_shows_the_newest_first(root):
    lines = xp("ls").stdout.splitlines()
    assert lines[0].split() == ["name", "run", "state", "steps", "metric", "curve", "workers", "age", "took"]
    assert [line.split()[:4] for line in lines[1:]] == [
        ["broken", "run_001", "FAILED", "1"],
        ["digits", "run_002", "SUCCEEDED", "6"],
        ["digits", "run_001", "SUCCEEDED", "4"],
    ]
    assert lines[3].split()[4:7] == ["loss", "0.0625", "█▄▂▁"]


def test_ls_again_is_the_same_from_the_index(root):
    past = time.time() - 60
    first = xp_json("ls")
    for path in root.rglob("*"):
        os.utime(path, (past, past))
    again = xp_json("ls")
    for rows in (first, again):
        for row in rows:
            row.pop("duration_s")
    assert first == again


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (["-n", "1"], ["broken/run_001"]),
        (["--state", "failed"], ["broken/run_001"]),
        (["--state", "SUCCEEDED,LOST"], ["digits/run_002", "digits/run_001"]),
        (["--name", "dig*"], ["digits/run_002", "digits/run_001"]),
        (["--since", "1h"], ["broken/run_001", "digits/run_002", "digits/run_001"]),
        (["--filter", "metrics.loss<0.01 and config.rate<0.3"], ["digits/run_002"]),
        (["--filter", "config.opt.name=adam or state=FAILED"], ["broken/run_001", "digits/run_001"]),
        (["--sort", "metrics.loss"], ["digits/run_002", "digits/run_001", "broken/run_001"]),
        (["--sort", "-metrics.loss", "-n", "1"], ["broken/run_001"]),
        (["--sort", "steps"], ["broken/run_001", "digits/run_001", "digits/run_002"]),
        (["--filter", "steps>100"], []),
    ],
)
def test_ls_narrows_and_sorts(root, options, names):
    assert xp("ls", "-q", *options).stdout.split() == names
    assert [row["name"] for row in xp_json("ls", *options)] == names


def test_ls_json_has_all_there_is_to_know(root):
    row = xp_json("ls", "--name", "digits", "-n", "1")[0]
    assert row["name"] == "digits/run_002"
    assert row["config"]["opt"] == {"name": "sgd"}
    assert row["metrics"]["loss"] == {"last": 0.25**6, "min": 0.25**6, "max": 0.25}
    assert (row["key_metric"], row["num_steps"], row["tags"], row["state"]) == ("loss", 6, [], "SUCCEEDED")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--state", "BROKEN"], "expected one of PENDING, RUNNING"),
        (["--filter", "loss<1"], "'loss' is no field"),
        (["--sort", "beauty"], "expected one of created"),
        (["--since", "soon"], "no length of time"),
        (["--since", "5"], "'5' has no unit: did you mean 5s, 5m, 5h, 5d or 5w?"),
    ],
)
def test_ls_says_what_is_wrong(root, options, told):
    assert told in xp("ls", *options, code=2).stderr


def test_there_are_no_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("PACELINE_RESULTS", str(tmp_path / "nothing"))
    assert xp("ls").stdout == ""
    assert "no runs yet" in xp("show", code=3).stderr
    assert xp_json("ls") == []


def test_live_run_shows_its_progress(root):
    with RunFolder.create(root / "live") as folder:
        folder.set_state("RUNNING")
        folder.record_step(1, 0, [{"loss": 0.5}])
        folder.note_progress(0.25)
        folder.beat()
        assert xp("ls", "-n", 1).stdout.splitlines()[1].split()[:5] == ["live", "run_001", "RUNNING", "1", "25%"]
        assert xp_json("show", "live")["progress"] == 0.25


def test_loss_that_is_not_a_number(root):
    with RunFolder.create(root / "diverged") as folder:
        for step, loss in enumerate([0.5, 0.25, float("nan")], 1):
            folder.record_step(step, 0, [{"loss": loss}])
        folder.set_state("SUCCEEDED")
    for _ in range(2):
        assert "loss nan" in xp("ls", "--name", "diverged").stdout
    assert xp_json("ls", "--name", "diverged")[0]["metrics"]["loss"] == {"last": None, "min": 0.25, "max": 0.5}
    assert xp("ls", "-q", "--name", "d*", "--sort", "metrics.loss").stdout.split()[-1] == "diverged/run_001"
    assert xp_json("diff", "diverged", "diverged")["metrics"]["parts_at"] == {"loss": None}


def test_best(root):
    assert xp("best", "--metric", "loss", "-q").stdout == "digits/run_002\n"
    assert xp("best", "--metric", "accuracy", "-q").stdout == "digits/run_002\n"
    assert xp("best", "--metric", "loss", "--max", "-q").stdout == "broken/run_001\n"
    assert [row["best"] for row in xp_json("best", "--metric", "loss", "-n", 2)] == [0.25**6, 0.5**4]
    assert "There are: accuracy, epoch, loss" in xp("best", "--metric", "beauty", code=3).stderr


def test_compare_shows_what_differs(root):
    lines = xp("compare", "digits/1", "digits/2").stdout.splitlines()
    assert lines[0].split() == ["run", "state", "steps", "epochs", "rate", "opt.name", "epoch", "loss", "accuracy"]
    assert lines[1].split()[:6] == ["digits/run_001", "SUCCEEDED", "4", "4", "0.5", "adam"]
    assert len(xp_json("compare", "digits/*")) == 2


def typed(root, number, lr):
    """As an experiment is written down."""
    net = {"_target_": "src.Net", **{f"width_{place}": place for place in range(50)}, "device": None}
    parts = {"models": {"net": net}, "optimizers": {"adam": {"_target_": "torch.optim.Adam", "lr": lr}}}
    told = {"config_hash": f"hash{number}", "code_hash": "0", "overrides": [f"lr={lr}"], "cfg": {"name": "typed"}}
    with RunFolder.create(root / "typed") as folder:
        folder.write_request({"config": {**told, **parts}, "num_workers": 1})
        values = {f"a_long_name_{place}": 0.123 for place in range(9)}
        folder.record_step(1, 0, [{"epoch": 0, **values, "val_loss": lr}])
        folder.set_state("SUCCEEDED")


@pytest.fixture
def typed_runs(root):
    for number, lr in enumerate((0.1, 0.01)):
        typed(root, number, lr)
    return root


def test_compare_shows_in_80_columns_by_what_runs_differ_and_how_well_they_went(typed_runs, monkeypatch):
    monkeypatch.setattr("paceline.cli.drawing.width", lambda: 80)
    lines = xp("compare", "typed/*").stdout.splitlines()
    assert lines[0].split()[:4] == ["run", "state", "steps", "lr"]
    assert {"val_loss", "a_long_name_0"} <= {*lines[0].split()}
    assert max(map(len, lines)) <= 80
    assert "hash" not in lines[0]


def test_compare_keeps_the_columns_by_which_most_runs_differ(root, monkeypatch):
    """Of a sweep beside other runs: what was swept, and not what one of them had otherwise."""
    for number, lr in enumerate((0.1, 0.1, 0.2, 0.3)):
        with RunFolder.create(root / "swept") as folder:
            once = {f"a_setting_{place}": int(number == place) for place in range(4)}
            folder.write_request({"config": {"cfg": once, "optimizers": {"adam": {"lr": lr}}}, "num_workers": 1})
            folder.set_state("SUCCEEDED")
    monkeypatch.setattr("paceline.cli.drawing.width", lambda: 60)
    told = xp("compare", "swept/*")
    assert told.stdout.splitlines()[0].split() == ["run", "state", "steps", "a_setting_0", "lr"]
    assert "No room for a_setting_1, a_setting_2, a_setting_3:" in told.stderr


@pytest.mark.parametrize(
    ("keys", "endings"),
    [
        (["optimizers.adam.lr", "cfg.seed"], ["lr", "seed"]),
        (["g.adam.lr", "d.adam.lr"], ["g.adam.lr", "d.adam.lr"]),
        (["a.lr", "lr"], ["a.lr", "lr"]),
        (["a.b.c", "b.c.d", "x.c"], ["b.c", "d", "x.c"]),
        ([], []),
    ],
)
def test_short_endings_tell_keys_apart(keys, endings):
    assert short_endings(keys) == endings


def test_show_of_an_experiment_has_its_learning_rate(typed_runs):
    shown = xp("show", "typed").stdout
    assert "optimizers.adam.lr" in shown
    assert "_target_" not in shown
    assert "None" not in shown.partition("metrics")[0]


# --- show, plot, diff, audit -----------------------------------------------------------------------------------------


def test_show(root):
    shown = xp("show", "digits").stdout
    for text in ("digits/run_002  SUCCEEDED", "opt.name", "sgd", "least 0.0002441", "┤", "checkpoint_000001", "python"):
        assert text in shown
    failed = xp("show", "broken").stdout
    assert "FAILED" in failed
    assert "the data is upside down" in failed
    fields = xp_json("show", "digits", "1")
    assert fields["checkpoints"][0]["id"] == 1
    assert fields["environment"]["python"]


def test_show_has_the_word_of_the_profiler(root):
    with RunFolder.create(root / "slow") as folder:
        for number in range(3):
            parts = {"dataloader": 0.8, "forward": 0.2}
            folder.record_event("profile", rank=0, steps=10, parts_s=parts, time=100.0 + number, cpu_percent=10.0)
        folder.set_state("SUCCEEDED")
    assert "The bottleneck is 'dataloader'. Training waits for data." in xp("show", "slow").stdout
    assert "dataloader" in xp_json("show", "slow")["bottleneck"]


def test_show_a_path(root, pristine):
    assert "digits/run_001" in xp("show", pristine / "digits" / "run_001").stdout


def test_plot(root):
    shown = xp("plot", "digits/1", "digits/2", "-m", "loss").stdout
    assert "loss  digits/run_001" in shown
    assert "┤" in shown
    curves = xp_json("plot", "digits/1", "-m", "loss")
    assert curves["loss"]["digits/run_001"] == {"steps": [1, 2, 3, 4], "values": [0.5, 0.25, 0.125, 0.0625]}
    assert "nothing to draw" in xp("plot", "digits/1", "-m", "beauty", code=3).stderr


def test_diff_says_where_runs_part(root):
    shown = xp("diff", "digits/1", "digits/2").stdout
    assert "opt.name: adam → sgd" in shown
    assert "loss: the same until step 1, where they have 0.5 and 0.25" in shown
    assert "data\n  not recorded by digits/run_001" in shown
    same = xp_json("diff", "digits/1", "digits/1")
    assert (same["config"], same["code"], same["environment"]) == ({}, {}, {})
    assert set(same["metrics"]["parts_at"].values()) == {None}
    parted = xp_json("diff", "-2", "-1")["metrics"]["parts_at"]["loss"]
    assert parted == {"step": 1, "a": 0.25, "b": 0.9}


def read_rows():
    for batch in paceline.get_data_shard().iter_batches(10):
        paceline.report(rows=len(batch["x"]))


def test_audit_and_diff_of_data(root):
    import numpy as np

    with Trainer(BackendConfig(), num_workers=0, logdir=root / "data") as trainer:
        for seed in (1, 2):
            data = paceline.data.from_numpy({"x": np.arange(100)}).random_shuffle(seed=seed)
            trainer.run(read_rows, dataset=data, record_ids=True)
    shown = xp("audit", "data").stdout
    assert shown.splitlines()[-1] == "clean"
    assert xp_json("audit", "data")["is_clean"] is True
    assert "step 1, dataset: data/run_001 has" in xp("diff", "data/1", "data/2").stdout
    assert "record_ids" in xp("audit", "digits", code=2).stderr


# --- logs, wait, stop, resume, retry ---------------------------------------------------------------------------------


@pytest.fixture
def logged(root):
    (root / "digits" / "run_001" / "logs" / "rank_0.log").write_bytes(b"one\ntwo 50%\rtwo 100%\nthree\nno newline")
    return root


def test_logs(logged):
    assert xp("logs", "digits", "1").stdout == "one\ntwo 100%\nthree\nno newline\n"
    assert xp("logs", "digits", "1", "--tail", "2").stdout == "three\nno newline\n"
    assert xp("logs", "digits", "1", "--tail", "0").stdout == ""
    assert xp("logs", "digits", "1", "--grep", "^t").stdout == "two 100%\nthree\n"
    lines = [json.loads(line) for line in xp("logs", "digits", "1", "--json").stdout.splitlines()]
    assert lines[0] == {"rank": 0, "line": "one"}
    assert "no regular expression" in xp("logs", "digits", "1", "--grep", "(", code=2).stderr


def test_logs_of_several_ranks(logged):
    (logged / "digits" / "run_001" / "logs" / "rank_1.log").write_bytes(b"other\n")
    assert "[rank 0] one\n" in xp("logs", "digits", "1").stdout
    assert xp("logs", "digits", "1", "--rank", "1").stdout == "other\n"
    assert "has no logs of rank" in xp("logs", "digits", "1", "--rank", "7").stderr


def test_wait_and_its_exit_codes(root):
    assert xp_json("wait", "digits")["state"] == "SUCCEEDED"
    assert "FAILED" in xp("wait", "broken", code=1).stderr
    with RunFolder.create(root / "live") as folder:
        folder.set_state("RUNNING")
        assert "RUNNING" in xp("wait", "live", "--timeout", "0", code=124).stderr


def test_stop_is_idempotent(root):
    assert "has ended already (SUCCEEDED)" in xp("stop", "digits").stderr
    assert xp_json("stop", "digits")[0]["state"] == "SUCCEEDED"


def test_stop_sends_nothing_to_a_process_that_is_not_the_driver(root):
    """A folder that names this very process, which has never opened it."""
    with RunFolder.create(root / "live") as folder:
        folder.set_state("RUNNING")
        shutil.copytree(folder.path, root / "forged" / "run_001")
    assert "does not drive this run" in xp("stop", "forged", code=2).stderr
    status = json.loads((root / "forged" / "run_001" / "status.json").read_text())
    status |= {"host": "elsewhere"}
    (root / "forged" / "run_001" / "status.json").write_text(json.dumps(status))
    assert "on elsewhere, which cannot be seen from here" in xp("stop", "forged", code=2).stderr


def heal(config):
    paceline.report(loss=0.1)
    if not os.path.exists(config["mended"]):
        raise ValueError("not yet")


def test_resume_and_retry(root, tmp_path):
    with (
        Trainer(BackendConfig(), num_workers=0, logdir=root / "heals") as trainer,
        pytest.raises(ValueError, match="not yet"),
    ):
        trainer.run(heal, {"mended": str(tmp_path / "mended")})
    assert "not yet" in xp("resume", "heals", code=1).stderr
    (tmp_path / "mended").touch()
    assert "heals/run_001: SUCCEEDED" in xp("resume", "heals").stderr
    refused = xp("resume", "heals", code=2).stderr
    assert "nothing left to do" in refused
    assert "goes on" not in refused
    assert xp_json("retry", "heals", "1")["name"] == "heals/run_002"
    assert load_run(root / "heals" / "run_002").config == {"mended": str(tmp_path / "mended")}


def misconfigured():
    raise ConfigError("lr: expected a number")


def test_error_of_ours_that_the_function_raises_is_the_end_of_the_run(root):
    with Trainer(BackendConfig(), num_workers=0, logdir=root / "typo") as trainer, pytest.raises(ConfigError):
        trainer.run(misconfigured)
    for verb, name in (("resume", "typo/run_001"), ("retry", "typo/run_002")):
        told = xp(verb, "typo/1", code=1).stderr
        assert "lr: expected a number" in told
        assert f"{name}: FAILED" in told


class Reads:
    """As an experiment that reads Ray Data: the folder does not have the dataset, and the function makes it again."""

    def __init__(self, mended):
        self.mended = mended

    def __call__(self):
        rows = [int(row) for batch in paceline.get_data_shard().iter_batches(batch_size=2) for row in batch["data"]]
        if not self.mended.exists():
            raise ValueError("not yet")
        paceline.report(rows=sum(rows))

    def make_dataset(self):
        return np.arange(4)


def test_resume_and_retry_of_a_function_that_makes_its_dataset(root, tmp_path):
    reads = Reads(tmp_path / "mended")
    with (
        Trainer(BackendConfig(), num_workers=0, logdir=root / "reads") as trainer,
        pytest.raises(ValueError, match="not yet"),
    ):
        trainer.run(reads, dataset=reads.make_dataset())
    (tmp_path / "mended").touch()
    assert "reads/run_001: SUCCEEDED" in xp("resume", "reads").stderr
    assert xp_json("retry", "reads")["state"] == "SUCCEEDED"
    assert [load_run(root / "reads" / name).metrics["rows"].tolist() for name in ("run_001", "run_002")] == [[6], [6]]


def begin():
    paceline.report(first=paceline.load_checkpoint()["first"])


def test_retry_is_asked_all_that_the_run_was(root):
    """Of a function without arguments, as an experiment is one, the config is known and not handed over."""
    with Trainer(BackendConfig(), num_workers=0, logdir=root / "typed") as trainer:
        trainer.run(begin, {"config_hash": "0123456789", "lr": 0.1}, checkpoint={"first": 3})
    (root / "typed" / "run_001" / "conf.yaml").write_text("lr: 0.1\n")
    assert xp_json("retry", "typed")["state"] == "SUCCEEDED"
    again = load_run(root / "typed" / "run_002")
    assert again.config == {"config_hash": "0123456789", "lr": 0.1}
    assert again.metrics["first"].tolist() == [3]
    assert (again.path / "conf.yaml").read_text() == "lr: 0.1\n"


def ends(config):
    if not os.path.exists(config["mended"]):
        raise ValueError("not yet")
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("verb", ["resume", "retry"])
def test_run_that_is_ended_by_sigterm_is_told_like_any_other(root, tmp_path, verb):
    with (
        Trainer(BackendConfig(), num_workers=0, logdir=root / "ends") as trainer,
        pytest.raises(ValueError, match="not yet"),
    ):
        trainer.run(ends, {"mended": str(tmp_path / "mended")})
    (tmp_path / "mended").touch()
    assert xp_json(verb, "ends", code=143)["state"] == "STOPPED"


def test_ctrl_c_before_there_is_a_folder(root, monkeypatch):
    def interrupted(self, request):
        raise KeyboardInterrupt

    monkeypatch.setattr(Trainer, "new_folder", interrupted)
    assert xp("retry", "digits", "1", code=130).stdout == ""


def test_disk_that_has_no_room_for_the_configuration_of_a_run_that_is_made_again(root, monkeypatch):
    def refuse(path, data, durable=True):
        if str(path).endswith("conf.yaml"):
            raise OSError(28, "No space left on device")
        real(path, data, durable)

    from paceline.runs import durable, folder

    real = durable.write_atomic
    (root / "digits" / "run_001" / "conf.yaml").write_text("lr: 0.1\n")
    for module in (durable, folder):
        monkeypatch.setattr(module, "write_atomic", refuse)
    assert xp_json("retry", "digits", "1")["state"] == "SUCCEEDED"


# --- tag, rm, restore, gc, export ------------------------------------------------------------------------------------


def test_tags(root):
    assert xp("tag", "digits/1", "paper", "best").stdout == "digits/run_001: best paper\n"
    assert xp("ls", "-q", "--tag", "paper").stdout == "digits/run_001\n"
    assert xp_json("show", "@best")["tags"] == ["best", "paper"]
    assert xp("tag", "digits/1", "--remove", "best").stdout == "digits/run_001: paper\n"
    assert "paper" in xp("ls").stdout
    assert "is no tag" in xp("tag", "digits/1", "no spaces", code=2).stderr
    assert "one word: NAME/1" in xp("tag", "digits", "1", "paper", code=2).stderr  # it would have been run_002


def test_two_who_tag_at_once_do_not_undo_each_other(root, monkeypatch):
    from paceline.runs import tags

    def read_tags(run_dir):
        fd = os.open(run_dir, os.O_RDONLY)
        with pytest.raises(BlockingIOError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(fd)
        return real(run_dir)

    real = tags.read_tags
    monkeypatch.setattr(tags, "read_tags", read_tags)
    assert tags.change_tags(root / "digits" / "run_001", ["paper"]) == {"paper"}


def test_rm_is_undone_until_gc(root):
    xp("rm", "digits", "1")
    assert xp("ls", "-q").stdout.split() == ["broken/run_001", "digits/run_002"]
    assert xp_json("restore")[0]["name"] == "digits/run_001"
    xp("restore", "digits/run_001")
    assert load_run(root / "digits" / "run_001").status.state == "SUCCEEDED"
    xp("rm", "broken")
    assert "Nobody is there to answer" in xp("gc", code=2).stderr
    assert "'1' has no unit" in xp("gc", "--older-than", "1", "--yes", code=2).stderr
    xp("gc", "--older-than", "1d", "--yes")
    assert len(xp_json("restore")) == 1
    xp("gc", "--yes")
    assert xp_json("restore") == []
    assert "not in the trash" in xp("restore", "broken/run_001", code=3).stderr


def test_gc_takes_what_was_removed_by_a_clock_that_was_set_back_since(root):
    xp("rm", "broken")
    [about] = (root / ".trash").glob("*/removed.json")
    about.write_text(json.dumps({**json.loads(about.read_text()), "time": time.time() + 1e6}))
    xp("gc", "--older-than", "1s", "--yes")
    assert len(xp_json("restore")) == 1
    xp("gc", "--yes")
    assert xp_json("restore") == []


@pytest.mark.parametrize(
    "words", [["digits", "1"], ["digits/1"], ["dig", "run_001"], ["*/run_001"], ["broken", "digits/1"]]
)
def test_restore_takes_the_words_of_rm(root, words):
    xp("rm", "digits", "1")
    xp("rm", "digits", "2")
    xp("rm", "broken")
    xp("restore", *words)
    assert "digits/run_001" in xp("ls", "-q").stdout.split()
    assert "digits/run_002" not in xp("ls", "-q").stdout.split()
    assert "digits 7 is not in the trash" in xp("restore", "digits", "7", code=3).stderr


def test_restored_run_gets_another_number_if_its_own_is_taken(root):
    xp("rm", "digits", "2")
    shutil.copytree(root / "digits" / "run_001", root / "digits" / "run_002")
    assert "as digits/run_003" in xp("restore", "digits/run_002").stderr


def test_live_run_is_not_removed(root):
    with RunFolder.create(root / "live") as folder:
        folder.set_state("RUNNING")
        assert "live/run_001 goes on" in xp("rm", "live", code=2).stderr
    assert folder.path.is_dir()


def test_rm_wants_to_be_told_what(root):
    assert "Which run?" in xp("rm", code=2).stderr
    assert "--yes" in xp("rm", "digits/*", code=2).stderr
    xp("rm", "digits/*", "--yes")
    assert xp("ls", "-q").stdout.split() == ["broken/run_001"]


def test_export(root, tmp_path):
    xp("export", "digits", "1", "-o", "run.tar.gz")
    with tarfile.open("run.tar.gz") as archive:
        names = archive.getnames()
        archive.extractall(tmp_path / "out", filter="data")
    assert "digits/run_001/run.json" in names
    assert load_run(tmp_path / "out" / "digits" / "run_001").config["rate"] == 0.5
    assert "exists" in xp("export", "digits", "1", "-o", "run.tar.gz", code=2).stderr
    xp("export", "digits", "1", "-o", "m.csv")
    header, first, *_ = (tmp_path / "m.csv").read_text().splitlines()
    assert header.startswith("step,epoch,loss,accuracy,")
    assert first.startswith("1,0,0.5,0.5,")
    xp("export", "digits", "1", "-o", "m.json")
    assert json.loads((tmp_path / "m.json").read_text())[3]["loss"] == 0.0625
    assert "expected a name that ends in" in xp("export", "digits", "-o", "x.zip", code=2).stderr


def test_export_to_what_is_no_file(root, tmp_path):
    os.mkfifo(tmp_path / "pipe.csv")
    (tmp_path / "folder.tar").mkdir()
    (tmp_path / "file").touch()
    for name in ("pipe.csv", "folder.tar"):
        for force in ([], ["--force"]):
            told = xp("export", "digits", "1", "-o", name, *force, code=2).stderr
            assert f"{name} is a folder, or no regular file: name a file" in told
    assert (tmp_path / "pipe.csv").is_fifo()
    assert "file/m.csv cannot be written: Not a directory." in xp("export", "digits", "-o", "file/m.csv", code=2).stderr
    assert "-o -: expected a name that ends in, or a --format" in xp("export", "digits", "-o", "-", code=2).stderr
    assert "--format xlsx: expected" in xp("export", "digits", "--format", "xlsx", code=2).stderr


# --- folders of others -----------------------------------------------------------------------------------------------


def test_not_found(root):
    assert "Did you mean digits" in xp("show", "digts", code=3).stderr
    assert "neither an option" in xp("show", "--frob", code=2).stderr


@pytest.fixture
def hostile(root, tmp_path):
    """A run in which everything is something else, and says more than it should."""
    secret = tmp_path / "secret"
    secret.write_text("SECRET")
    path = root / f"evil{EVIL.replace('/', '')}" / "run_001"
    shutil.copytree(root / "digits" / "run_001", path)
    for name in ("environment.json", "code.diff", "tags.json", "rows.bin"):
        (path / name).unlink(missing_ok=True)
        (path / name).symlink_to(secret)
    (path / "logs" / "rank_0.log").write_text(f"hello{EVIL}\n")
    (path / "logs" / "rank_1.log").symlink_to(secret)
    os.mkfifo(path / "logs" / "rank_2.log")
    os.mkfifo(path / "pipe")
    (path / "up").symlink_to("/")
    (path / "events.jsonl").write_text(json.dumps({"kind": EVIL, "time": EVIL, "x": EVIL}) + "\n")
    (path / "run.json").write_text(
        json.dumps({"config": {EVIL: EVIL}, "function": {"name": EVIL}, "num_workers": EVIL})
    )
    with open(path / "metrics.jsonl", "ab") as file:
        file.write(json.dumps({"step": 5, "attempt": 0, "ranks": [{EVIL: 1.0}]}).encode() + b"\n")
    status = json.loads((path / "status.json").read_text())
    (path / "status.json").write_text(json.dumps({**status, "reason": EVIL, "host": EVIL}))
    return path


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["ls"], 0),
        (["ls", "-q"], 0),
        (["ls", "--json"], 0),
        (["show", "evil"], 0),
        (["show", "evil", "--json"], 0),
        (["plot", "evil"], 0),
        (["logs", "evil", "--rank", "0"], 0),
        (["logs", "evil", "--rank", "1"], 2),
        (["logs", "evil", "--rank", "2"], 2),
        (["compare", "evil", "digits"], 0),
        (["diff", "digits/1", "evil"], 2),
        (["best", "--metric", "loss"], 0),
        (["wait", "evil"], 0),
        (["stop", "evil"], 0),
        (["tag", "evil"], 0),
        (["audit", "evil"], 2),
        (["export", "evil", "-o", "evil.tar"], 0),
        (["retry", "evil"], 0),
        (["rm", "evil"], 0),
    ],
)
def test_hostile_folder_does_nothing(hostile, words, code, monkeypatch):
    if words[0] == "retry":  # its call is sealed, and was changed
        (hostile / "call.pkl").write_bytes(b"x" * 100)
        code = 2
    result = xp(*words, code=code)
    for text in (result.stdout, result.stderr):
        assert not {*text} & {"\x1b", "\x07", "\x9b"}
        assert "SECRET" not in text
    if words[0] == "export":
        with tarfile.open("evil.tar") as archive:
            assert all(member.isreg() for member in archive.getmembers())
        assert "were left out" in result.stderr


@pytest.mark.parametrize("words", [["ls"], ["show", "deep"], ["compare", "deep", "digits"], ["diff", "deep", "digits"]])
def test_values_that_are_nested_without_end(root, words):
    run_dir = root / "deep" / "run_001"
    shutil.copytree(root / "digits" / "run_001", run_dir)
    nested = "[" * 500 + "]" * 500
    (run_dir / "run.json").write_text(f'{{"config": {{"x": {nested}}}, "num_workers": {nested}, "function": {nested}}}')
    (run_dir / "events.jsonl").write_text(f'{{"kind": {nested}, "time": {nested}, "parts_s": {nested}}}\n')
    (run_dir / "environment.json").write_text(f'{{"python": {nested}, "git": {nested}, "packages": {{"x": {nested}}}}}')
    for options in ([], ["--json"]):
        assert xp(*words, *options).stdout


@pytest.mark.parametrize("value", [2**64 - 1, -(2**63), 1e300, -1e300, 0])
def test_times_beyond_all_measure(root, value):
    status = root / "digits" / "run_001" / "status.json"
    fields = json.loads(status.read_text())
    status.write_text(json.dumps({**fields, "created": value, "started": value, "ended": value}))
    for _ in range(2):
        assert len(xp("ls", "-q").stdout.split()) == 3
        xp("ls")
        xp("show", "digits/1")


def test_log_and_archive_without_end(root):
    log = root / "digits" / "run_001" / "logs" / "rank_0.log"
    log.touch()
    os.truncate(log, 2**40)
    assert len(xp("logs", "digits", "1", "--tail", "1", "--grep", "nothing").stdout) == 0
    assert "no room for so much" in xp("export", "digits", "1", "-o", "x.tar", code=2).stderr
    assert not os.path.exists("x.tar")


def test_trash_that_names_other_places_restores_nothing(root, tmp_path):
    for name in ("../escaped", "/etc/x", ".hidden/x", "a/../../b"):
        place = root / ".trash" / f"t{abs(hash(name))}"
        (place / "run").mkdir(parents=True)
        (place / "removed.json").write_text(json.dumps({"name": name, "time": 1.0}))
    xp("restore", "--all")
    assert not (tmp_path / "escaped").exists()
    assert xp_json("restore") == []


def test_completion_knows_runs(root):
    from paceline.cli.asking import complete_runs

    assert complete_runs("dig") == ["digits", "digits/run_002", "digits/run_001"]
    assert complete_runs("lat") == ["latest"]
