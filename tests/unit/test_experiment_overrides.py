"""Overrides: where they go, and what a sweep expands to."""

import pytest
import typed_experiment

from paceline.errors import ConfigError
from paceline.experiment import expand, fresh, load, schema_of

SCHEMA = schema_of(typed_experiment.Experiment)
TEXT = fresh(SCHEMA)


def resolved(*overrides):
    return load(SCHEMA, TEXT, overrides).resolved()


@pytest.mark.parametrize(
    "path",
    [
        "optimizers.sgd.lr",
        "Optimizers.sgd.lr",
        "typed_experiment.Optimizers.sgd.lr",
        "[typed_experiment.Optimizers].sgd.lr",
        "sgd.lr",
        "lr",
        "++optimizers.sgd.lr",
    ],
)
def test_ways_to_name_a_value(path):
    assert resolved(f"{path}=1e-3")["optimizers"]["sgd"]["lr"] == 1e-3


def test_values_are_those_of_yaml():
    made = resolved("cfg.seed=null", "cfg.use_gpu=true", "cfg.name='a, b'", "names=[x, 'y']", "sizes.0=7", "sizes[1]=8")
    assert (made["cfg"]["seed"], made["cfg"]["use_gpu"], made["cfg"]["name"]) == (None, True, "a, b")
    assert made["models"]["net"]["names"] == ["x", "y"]
    assert made["models"]["net"]["block"]["sizes"] == [7, 8.0]


@pytest.mark.parametrize("path", ["cfg.nope=1", "cfg.nope.deeper=1", "~losses.mse.nope", "losses.mse.nope.deeper=1"])
def test_plus_is_advised_only_where_it_helps(path):
    with pytest.raises(ConfigError) as refused:
        resolved(path)
    assert "To add it" not in str(refused.value)
    with pytest.raises(ConfigError, match=r"To add it, say \+losses.mse.dist_sync_on_step="):
        resolved("losses.mse.dist_sync_on_step=true")


def test_class_with_kwargs_takes_what_is_added():
    assert resolved("+losses.mse.dist_sync_on_step=true")["losses"]["mse"]["dist_sync_on_step"] is True


def test_removed_value_is_that_of_the_code():
    text = TEXT.replace("lr: 0.0001", "lr: 5.0")
    assert load(SCHEMA, text, ["~optimizers.sgd.lr"]).resolved()["optimizers"]["sgd"]["lr"] == 1e-4


def test_later_override_wins():
    assert resolved("lr=1.0", "lr=2.0")["optimizers"]["sgd"]["lr"] == 2.0


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("optimizers.sdg.lr=1", "there is no optimizers.sdg. Did you mean 'sgd'?"),
        ("optimzers.sgd.lr=1", "there is no 'optimzers.sgd.lr'. Did you mean 'optimizers.sgd.lr'?"),
        ("batch_size=1", "may be any of datasets.train.batch_size, datasets.val.batch_size"),
        ("+optimizers.sgd.lr=1", "is there already"),
        ("optimizers.sgd.lr.x=1", "has nothing inside it"),
        ("optimizers.sgd.lr", "is no override"),
        ("=3", "is no override"),
        ("~lr=3", "is no override"),
        ("lr=[1", "not YAML"),
    ],
)
def test_wrong_override_is_refused_in_words(override, told):
    with pytest.raises(ConfigError) as caught:
        load(SCHEMA, TEXT, [override])
    assert told in str(caught.value)


def test_dotted_section_is_not_taken_for_a_tree():
    made = load(SCHEMA, TEXT, ["typed_experiment.Models.net.block.width=5"])
    assert made.resolved()["models"]["net"]["block"]["width"] == 5
    assert "typed_experiment" not in made.as_document()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["a=1"], [["a=1"]]),
        (["a=1,2", "b=x"], [["a=1", "b=x"], ["a=2", "b=x"]]),
        (["a=1,2", "b=choice(x,'y,z')"], [["a=1", "b=x"], ["a=1", "b='y,z'"], ["a=2", "b=x"], ["a=2", "b='y,z'"]]),
        (["a=range(3)"], [["a=0"], ["a=1"], ["a=2"]]),
        (["a=range(1,4,2)"], [["a=1"], ["a=3"]]),
        (["a=range(0,0.3,0.1)"], [["a=0.0"], ["a=0.1"], ["a=0.2"]]),
        (["a=range(3,0,-1)"], [["a=3"], ["a=2"], ["a=1"]]),
        (["a=range(0.1,0.4,0.1)"], [["a=0.1"], ["a=0.2"], ["a=0.3"]]),
        (["a=range(-0.3,0.1,0.1)"], [["a=-0.3"], ["a=-0.2"], ["a=-0.1"], ["a=0.0"]]),
        (["a=range(1e-13,3e-13,1e-13)"], [["a=1e-13"], ["a=2e-13"]]),
        (["a=range(0,2.5)"], [["a=0"], ["a=1"], ["a=2"]]),
        (["a=[1,2],[3]"], [["a=[1,2]"], ["a=[3]"]]),
        (["a={x: 1, y: 2}"], [["a={x: 1, y: 2}"]]),
        (["~a", "++b=1,2"], [["~a", "++b=1"], ["~a", "++b=2"]]),
    ],
)
def test_sweep_is_every_combination(given, expected):
    assert expand(given) == expected


@pytest.mark.parametrize(
    "wrong",
    [
        "a=range(a)",
        "a=range(1,5,0)",
        "a=range(1,2,3,4)",
        "a=interval(0,1)",
        "a=choice()",
        "a=range(nan)",
        "a=range(inf)",
    ],
)
def test_sweep_that_is_none_is_refused_in_words(wrong):
    with pytest.raises(ConfigError, match="expected"):
        expand([wrong])


def test_sweep_has_an_end():
    for many in ("a=range(1e9)", "a=range(0,1,1e-5)", "a=range(1e300)"):
        with pytest.raises(ConfigError, match="has more than 10000 values: expected fewer"):
            expand([many])
    with pytest.raises(ConfigError, match="has 1000000 runs"):
        expand(["a=range(1000)", "b=range(1000)"])


def test_all_that_is_wrong_is_told_at_once():
    with pytest.raises(ConfigError) as caught:
        load(SCHEMA, TEXT.replace("num_epochs:", "num_epoch:"), ["optimizers.sdg.lr=1", "lr=fast"])
    assert [problem.partition(":")[0] for problem in caught.value.problems] == [
        "override 'optimizers.sdg.lr=1'",
        "line 6",
        "override 'lr=fast'",
    ]
