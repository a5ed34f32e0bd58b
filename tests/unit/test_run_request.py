"""The one record of what was asked: what travels, what is told, and how little a new option takes."""

import dataclasses
import inspect

import pytest

from paceline import CheckpointStrategy, Trainer
from paceline.arguments import bound, request_of
from paceline.errors import ArgumentTypeError
from paceline.runs import RunRequest


class Source:
    def describe(self):
        return "rows"


def train(config):
    pass


def request(**options):
    return RunRequest(train_func=train, takes_config=True, config={"lr": 1}, trainer={"num_workers": 2}, **options)


def test_option_of_run_is_an_argument_there_and_a_field_here():
    arguments = inspect.signature(Trainer.run).parameters
    assert inspect.signature(Trainer.run_iterator).parameters == arguments
    assert set(arguments) - {"self", "callbacks"} <= {one.name for one in dataclasses.fields(RunRequest)}


def test_new_option_reaches_workers_and_the_folder_by_itself():
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Extended(RunRequest):
        patience: int = 3

    asked = Extended(train_func=train, patience=7)
    assert asked.for_workers().patience == 7
    assert asked.for_folder()["patience"] == 7


def test_what_is_the_drivers_stays_with_it():
    asked = request(dataset=Source(), parent={"kind": "tune"}, checkpoint={"step": 1}, first_checkpoint_id=4)
    sent = asked.for_workers()
    assert (sent.train_func, sent.config, sent.takes_config) == (train, {"lr": 1}, True)
    assert (sent.dataset, sent.parent, sent.checkpoint, sent.trainer, sent.first_checkpoint_id) == (None,) * 3 + ({}, 1)


def test_folder_is_told_what_a_reader_can_use():
    told = request(dataset=Source(), checkpoint="/some/checkpoint").for_folder()
    assert told["function"]["name"] == "train"
    assert (told["config"], told["checkpoint"], told["dataset"]) == ({"lr": 1}, "/some/checkpoint", "rows")
    assert told["checkpoint_strategy"] == CheckpointStrategy()
    assert not {"train_func", "takes_config", "trainer", "in_step"} & set(told)
    assert request(checkpoint={"a": 1}).for_folder()["checkpoint"] is None, "a dict may be large"


def test_options_are_checked_by_name():
    asked = request_of(train, config=None, checkpoint=None, checkpoint_strategy=None, dataset=None, trainer={})
    assert (asked.config, asked.checkpoint_strategy, asked.takes_config) == ({}, CheckpointStrategy(), True)
    with pytest.raises(ArgumentTypeError, match="config is"):
        request_of(train, config=[1])


def test_arguments_of_a_call_by_name():
    assert bound(Trainer.run, None, train, checkpoint="x")["checkpoint"] == "x"
    with pytest.raises(TypeError, match="unexpected keyword argument 'epochs'"):
        bound(Trainer.run, None, train, epochs=3)
