"""conf.yaml from code, and the code's changes in a conf.yaml that somebody has edited."""

import typed_experiment
from hydra.utils import instantiate
from omegaconf import OmegaConf

from paceline.experiment import bind, check, diff, fresh, schema_of
from paceline.experiment.binding import dump

SCHEMA = schema_of(typed_experiment.Experiment)
TEXT = fresh(SCHEMA)


def test_sections_are_in_their_order_under_dotted_names():
    keys = [line.removesuffix(":") for line in TEXT.splitlines() if line and line[0] not in " -"]
    names = ["Datasets", "Models", "Optimizers", "Losses", "Metrics", "Tools"]
    assert keys == ["paceline.experiment.TrainConfig", *(f"typed_experiment.{name}" for name in names)]


def test_shape_of_the_file():
    [start] = [place for place, line in enumerate(TEXT.splitlines()) if line.endswith(".Optimizers:")]
    assert TEXT.splitlines()[start : start + 6] == [
        "typed_experiment.Optimizers:",
        "  _target_: typed_experiment.Optimizers",
        "  sgd:",
        "    _target_: torch.optim.sgd.SGD",
        "    params: ???",
        "    lr: 0.0001",
    ]
    assert "      sizes:\n      - 1\n      - 2.0\n      mode: a\n" in TEXT


def test_binding_what_is_bound_changes_nothing():
    again = bind(SCHEMA, TEXT)
    assert (again.text, again.added, again.removed, again.edited) == (TEXT, (), (), ())
    assert check(SCHEMA, TEXT) == []
    assert diff(SCHEMA, TEXT) == ""


def test_edits_and_comments_stay():
    edited = "# all mine\n" + TEXT.replace("lr: 0.0001", "lr: 0.5   # tried 0.1").replace("      mode: a\n", "")
    bound = bind(SCHEMA, edited)
    assert bound.added == ("models.net.block.mode",)
    assert bound.edited == ("optimizers.sgd.lr: 0.5 (code: 0.0001)",)
    assert bound.text == "# all mine\n" + TEXT.replace("lr: 0.0001", "lr: 0.5   # tried 0.1")
    assert check(SCHEMA, edited) == ["missing: models.net.block.mode"]
    assert "+      mode: a" in diff(SCHEMA, edited).splitlines()


def test_true_in_the_place_of_one_is_an_edit():
    edited = TEXT.replace("log_every: 1\n", "log_every: true\n")
    assert bind(SCHEMA, edited).edited == ("cfg.log_every: true (code: 1)",)


def test_formatting_of_a_file_that_is_current_stays():
    wide = TEXT.replace("      sizes:\n      - 1\n      - 2.0\n", "      sizes: [1,   2.0]\n")
    assert bind(SCHEMA, wide).text == wide


def test_what_is_gone_is_named_with_its_value():
    edited = TEXT.replace("    lr: 0.0001\n", "    lr: 0.0001\n    warmth: 37\n") + "typed_experiment.Gone:\n  x: 1\n"
    bound = bind(SCHEMA, edited)
    assert bound.text == TEXT
    assert bound.removed == ("typed_experiment.Gone: {'x': 1}", "optimizers.sgd.warmth: 37")


def test_question_marks_give_way_to_what_the_code_knows_now():
    edited = TEXT.replace("lr: 0.0001", "lr: ???")
    assert bind(SCHEMA, edited).text == TEXT


def test_other_class_of_the_user_stays_whole():
    start = TEXT.index("    block:")
    end = TEXT.index("    head:")
    mine = "    block:\n      _target_: typed_experiment.WideBlock\n      width: 3\n"
    edited = TEXT[:start] + mine + TEXT[end:]
    assert bind(SCHEMA, edited).text == edited


def test_plain_hydra_instantiates_the_file(tmp_path):
    path = tmp_path / "conf.yaml"
    path.write_text(TEXT)
    conf = OmegaConf.load(path)
    assert type(instantiate(conf["paceline.experiment.TrainConfig"])).__name__ == "TrainConfig"
    models = instantiate(conf["typed_experiment.Models"])
    assert models.net.head[0].in_features == 3
    assert models.net.block.layer.out_features == 3
    assert type(models.net.block).__name__ == "Block"
    sgd = instantiate(conf["typed_experiment.Optimizers"].sgd, params=list(models.net.parameters()))
    assert sgd.defaults["momentum"] == 0.5
    for name in ("Datasets", "Losses", "Metrics", "Tools"):
        instantiate(conf[f"typed_experiment.{name}"])


def test_values_mean_the_same_to_other_readers_of_yaml(tmp_path):
    values = {"a": "yes", "b": 1e-8, "c": float("inf"), "d": None, "e": "1e3", "f": "12:30:00", "g": "2020-01-01"}
    path = tmp_path / "values.yaml"
    path.write_text(dump(values))
    assert OmegaConf.to_container(OmegaConf.load(path)) == values
