"""Offline processing over all ranks: each row once, whoever dies."""

import json
import os
import signal

import pytest
import torch

import paceline
from paceline import Trainer, pytorch
from paceline.errors import ArgumentError, ArgumentTypeError
from paceline.pytorch.batch_process import discard_from

NUM_ROWS = 101


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return NUM_ROWS

    def __getitem__(self, index):
        return torch.tensor(index)


class Doubling(pytorch.TorchBatchProcessor):
    kill_at = None

    def __init__(self, context):
        self.context, self.rows = context, []
        self.total = context.wrap_reducer(sum, "total")
        self.model = context.prepare_model_for_inference(torch.nn.Linear(1, 1))

    def process_batch(self, batch, batch_idx):
        assert not torch.is_grad_enabled()
        if batch_idx == self.kill_at and self.context.distributed.rank == 1:
            marker = self.context.output_dir.parents[1] / "killed"
            if not marker.exists():
                marker.touch()
                os.kill(os.getpid(), signal.SIGKILL)
        self.rows += (batch * 2).tolist()
        self.total.update(int(batch.sum()))

    def on_checkpoint_start(self):
        if self.rows:
            (self.context.output_dir / "rows.json").write_text(json.dumps(self.rows))
        self.rows = []


class Dying(Doubling):
    kill_at = 7


def written(output):
    return sorted(row for path in output.glob("rank_*/rows.json") for row in json.loads(path.read_text()))


EXPECTED = [2 * number for number in range(NUM_ROWS)]


def test_one_process(tmp_path):
    metrics = pytorch.torch_batch_process(Doubling, Numbers(), 8, output_dir=tmp_path / "out", logdir=tmp_path)
    assert metrics == {"total": sum(range(NUM_ROWS))}
    assert written(tmp_path / "out") == EXPECTED


class Telling(Doubling):
    """Asks and tells by methods."""

    def __init__(self, context):
        super().__init__(context)
        self.place = (context.get_distributed_rank(), context.get_distributed_size())
        self.traces = context.get_tensorboard_path()

    def on_checkpoint_start(self):
        with self.context.upload_path() as path:
            (path / "rows.json").write_text(json.dumps(self.rows))
        self.rows = []

    def on_finish(self):
        (self.traces / "trace").touch()
        self.context.report_metrics("inference", steps_completed=5, metrics={"rank": self.place[0]})


def test_processor_reports_uploads_and_traces(tmp_path):
    pytorch.torch_batch_process(Telling, Numbers(), batch_size=8, output_dir=tmp_path / "out", logdir=tmp_path / "log")
    assert written(tmp_path / "out") == EXPECTED
    run = paceline.load_run(tmp_path / "log")
    assert run.metrics["inference/rank"].dropna().tolist() == [0]
    assert (run.path / "tensorboard" / "trace").exists()


def test_no_more_than_asked_for(tmp_path):
    pytorch.torch_batch_process(Doubling, Numbers(), 8, max_batches=3, output_dir=tmp_path / "out", logdir=tmp_path)
    assert written(tmp_path / "out") == EXPECTED[:24]


def test_rank_is_killed_and_every_row_is_there_once(tmp_path):
    def process(config):
        return pytorch.torch_batch_process(
            Dying, Numbers(), 4, checkpoint_interval=3, output_dir=config["out"], dataloader_kwargs={"num_workers": 0}
        )

    with Trainer(backend="torch", engine="local", num_workers=2, max_retries=1) as trainer:
        found = trainer.run(process, {"out": str(tmp_path / "out")})
    assert [event["kind"] for event in paceline.load_run(trainer.latest_run_dir).events].count("restart") == 1
    assert written(tmp_path / "out") == EXPECTED
    assert found == [{"total": sum(range(NUM_ROWS))}] * 2, "what was collected before counts, and once"


def test_what_was_made_after_the_checkpoint_is_thrown_away(tmp_path):
    """By whichever ranks there were, finished or not; nothing else."""
    names = ["rank_0_part_000001", "rank_0_part_000002", "rank_7_part_000003", ".rank_1_part_000002", "mine"]
    for name in names:
        (tmp_path / name).mkdir()
    discard_from(tmp_path, 2)
    assert {path.name for path in tmp_path.iterdir()} == {"rank_0_part_000001", "mine"}


class Few(Doubling):
    def on_finish(self):
        assert self.context.distributed.size == 2


def test_fewer_rows_than_ranks(tmp_path):
    def process(config):
        rows = torch.utils.data.Subset(Numbers(), [7])
        return pytorch.torch_batch_process(Few, rows, 4, checkpoint_interval=1, output_dir=config["out"])

    with Trainer(backend="torch", engine="local", num_workers=2) as trainer:
        assert trainer.run(process, {"out": str(tmp_path / "out")}) == [{"total": 7}] * 2
    assert written(tmp_path / "out") == [14]


class Stopping(Doubling):
    def process_batch(self, batch, batch_idx):
        super().process_batch(batch, batch_idx)
        if batch_idx == 3:  # it has been looked at once by then
            os.kill(os.getpid(), signal.SIGTERM)


def test_asked_to_stop_it_does_so_after_a_checkpoint(tmp_path):
    with pytest.raises(SystemExit):
        pytorch.torch_batch_process(
            Stopping, Numbers(), 4, checkpoint_interval=3, output_dir=tmp_path / "out", logdir=tmp_path
        )
    assert written(tmp_path / "out") == EXPECTED[:24]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"batch_size": 0}, r"batch_size=0"),
        ({"checkpoint_interval": 0}, r"checkpoint_interval=0"),
        ({"max_batches": 0}, r"max_batches=0"),
        ({"dataloader_kwargs": {"shuffle": True}}, r"'shuffle'.*in their order"),
    ],
)
def test_mistakes(arguments, said):
    with pytest.raises(ArgumentError, match=said):
        pytorch.torch_batch_process(Doubling, Numbers(), **arguments)


def test_dataset_without_a_length():
    with pytest.raises(ArgumentTypeError, match="without a length"):
        pytorch.torch_batch_process(Doubling, iter([1, 2]))
