"""Configurations and project files by somebody who means no good."""

import json

import pytest
import torch
import typed_experiment

from paceline.errors import ConfigError
from paceline.experiment import build_experiment, load, schema_of
from paceline.experiment.allowed import Allowed, allowed_names
from paceline.experiment.coercion import Mismatch, coerce
from paceline.experiment.plan import Build
from paceline.experiment.project import load_experiment

SCHEMA = schema_of(typed_experiment.Experiment)


def test_name_with_a_star_allows_what_is_defined_there_and_not_what_is_imported_there():
    allowed = Allowed(frozenset(), ("typed_experiment.*", "json.*"))
    assert allowed.find("typed_experiment.Block") is typed_experiment.Block
    assert allowed.find("json.JSONDecoder") is json.JSONDecoder
    for path in ("typed_experiment.os._Environ", "typed_experiment.Path", "typed_experiment.torch.nn.Linear"):
        assert "comes from elsewhere" in allowed.find(path)
    assert Allowed(frozenset(), ("typed_experiment.Path",)).find("typed_experiment.Path") is typed_experiment.Path


@pytest.mark.parametrize("path", ["json..decoder", "json.", ".json", "json.*", "json.décoder.JSONDecoder", "ʲson.x"])
def test_name_of_no_module_is_refused(path):
    assert isinstance(Allowed(frozenset(), ("json.*",)).find(path), str)


@pytest.mark.parametrize(
    "text",
    [
        "tool = 1",
        "[tool]\npaceline = 3",
        "[tool.paceline]\nallow = ['*']",
        "[tool.paceline]\nallow = ['. *']",
        "[tool.paceline]\nallow = 'os.*'",
        "a = " + "[" * 5000,
    ],
    ids=["tool", "paceline", "star", "stars", "text", "deep"],
)
def test_hostile_project_file_is_refused_in_words(tmp_path, text):
    (tmp_path / "pyproject.toml").write_text(text)
    with pytest.raises(ConfigError, match=r"pyproject\.toml"):
        allowed_names(tmp_path)


def test_experiment_that_is_no_name_is_refused(tmp_path):
    (tmp_path / "pyproject.toml").write_text("[tool.paceline]\nexperiment = 3\n")
    with pytest.raises(ConfigError, match="experiment is 3; expected"):
        load_experiment(tmp_path)


@pytest.mark.parametrize(
    ("value", "annotation"),
    [
        (10**400, float),
        ([[1]], set),
        ([{"a": 1}], frozenset),
        ([Build(torch.nn.Linear)], set[torch.nn.Linear]),
        ("cuda:99999999999999999999", torch.device),
        ("\0", torch.device),
    ],
    ids=["overflow", "set", "frozenset", "calls", "device", "nul"],
)
def test_value_that_python_refuses_is_a_mismatch(value, annotation):
    with pytest.raises(Mismatch):
        coerce(value, annotation)


def test_number_that_is_too_large_is_one_of_the_problems():
    with pytest.raises(ConfigError, match="expected a number that fits a float"):
        build_experiment(load(SCHEMA, "", [f"models.net.block.dropout=1{'0' * 400}"]))
