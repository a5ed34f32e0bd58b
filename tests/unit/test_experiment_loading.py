"""A configuration is checked as a whole, and calls nothing that the experiment does not lead to."""

import contextlib
import importlib
import os
import sys
from pathlib import Path

import pytest
import torch
import typed_experiment
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import ConfigError
from paceline.experiment import build_experiment, fresh, load, schema_of
from paceline.experiment.allowed import allowed_by, allowed_names
from paceline.experiment.document import entry_of, parse
from paceline.experiment.loading import _Reader, completed
from paceline.experiment.overrides import Override, _changed_section, _resolve
from paceline.experiment.plan import Plan, hash_of, targets
from paceline.experiment.project import load_plan

SCHEMA = schema_of(typed_experiment.Experiment)
TEXT = fresh(SCHEMA)


def block(**changes):
    return [f"models.net.block.{name}={value}" for name, value in changes.items()]


def problems(text=TEXT, overrides=(), **options):
    with pytest.raises(ConfigError) as caught:
        load(SCHEMA, text, overrides, **options)
    assert all(problem in str(caught.value) for problem in caught.value.problems)
    return list(caught.value.problems)


def test_bound_file_loads_and_builds_what_the_code_has():
    experiment = build_experiment(load(SCHEMA, TEXT))
    assert experiment.models.net.block.given["color"] is typed_experiment.Color.BLUE
    assert experiment.models.net.block.given["sizes"] == (1, 2.0)
    assert experiment.optimizers.sgd.param_groups[0]["lr"] == 1e-4
    params = experiment.optimizers.sgd.param_groups[0]["params"]
    assert [id(one) for one in params] == [id(one) for one in experiment.models.net.parameters()]


def test_defaults_are_made_anew():
    one, other = (build_experiment(load(SCHEMA, TEXT)) for _ in range(2))
    assert one.models.net.block is not other.models.net.block
    assert one.models.net.block is not typed_experiment.Net.__init__.__defaults__[0]


def test_empty_file_is_the_code():
    assert load(SCHEMA, "").config_hash == load(SCHEMA, TEXT).config_hash


def test_values_are_coerced_by_annotation():
    changes = block(color="RED", folder="/tmp", sizes="[3, 4]", mode="b", dtype="float64")
    given = build_experiment(load(SCHEMA, TEXT, changes)).models.net.block.given
    assert given == {
        "color": typed_experiment.Color.RED,
        "folder": Path("/tmp"),
        "sizes": (3, 4.0),
        "mode": "b",
        "dtype": torch.float64,
    }
    assert type(given["sizes"][1]) is float


def test_all_problems_are_told_at_once_with_lines_and_suggestions():
    text = TEXT.replace("num_epochs: 10", "num_epochs: ten").replace("momentum: 0.5", "momentun: 0.5")
    text = text.replace("width: 3", "width: ???") + "typed_experiment.Model:\n  x: 1\n"
    lines = text.splitlines()
    expected = [
        (
            "typed_experiment.Model:",
            "there is no section 'typed_experiment.Model'. Did you mean 'typed_experiment.Models'?",
        ),
        ("  num_epochs: ten", "cfg.num_epochs is 'ten'; expected a whole number"),
        ("      width: ???", "models.net.block.width is ???: give it a value"),
        ("    momentun: 0.5", "optimizers.sgd has no 'momentun'. Did you mean 'momentum'?"),
    ]
    assert problems(text) == [f"line {lines.index(line) + 1}: {told}" for line, told in expected]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (block(color="GREEN"), "expected one of RED, BLUE"),
        (block(sizes="[1]"), "expected a list of 2"),
        (block(mode="c"), "expected one of 'a', 'b'"),
        (block(dtype="float31"), "expected a dtype such as float32 or null"),
        (block(width="1.5"), "expected a whole number"),
        (block(width="true"), "expected a whole number"),
        (["models.net.block=3"], "expected a Block, with _target_"),
        (["models.net.names=[1]"], "expected a list, each item text or null"),
        (["models.net={a: 1}"], "expected a Net"),
        (["optimizers.sgd.lr=high"], "expected a number or a Tensor"),
        (["models.teacher.in_features=null"], "expected a whole number"),
        (["tools.patience.most=[1]"], "expected a whole number or a number or null"),
    ],
)
def test_wrong_value_is_told_with_what_is_expected(change, told):
    [problem] = problems(overrides=change)
    assert problem.startswith(f"override {change[0]!r}: ")
    assert told in problem


def test_subclass_may_take_the_place_of_its_base():
    swapped = ["models.net.block={_target_: typed_experiment.WideBlock, width: 3}"]
    made = build_experiment(load(SCHEMA, TEXT, swapped)).models.net.block
    assert (type(made), made.scale) == (typed_experiment.WideBlock, 2.0)
    path = ["models.net.block._target_=typed_experiment.WideBlock", "models.net.block.width=3"]
    assert type(build_experiment(load(SCHEMA, TEXT, path)).models.net.block) is typed_experiment.WideBlock


def test_class_of_another_kind_does_not():
    [problem] = problems(overrides=["models.net.block={_target_: torch.nn.Linear, in_features: 1, out_features: 1}"])
    assert "expected a Block" in problem


HOSTILE = [
    "os.system",
    "builtins.exec",
    "builtins.open",
    "builtins.object",
    "builtins.type",
    "torch.load",
    "torch.hub.load",
    "subprocess.Popen",
    "subprocess.run",
    "pathlib.Path.unlink",
    "pathlib.Path",
    "pickle.loads",
    "shutil.rmtree",
    "hydra_zen.funcs.get_obj",
    "hydra_zen.funcs.zen_processing",
    "hydra.utils.instantiate",
    "importlib.import_module",
    "typed_experiment.os.system",
    "typed_experiment.Experiment",
    "paceline.experiment.building.make",
    "torch.nn.Module.__init__",
    "antigravity",
    "this.s",
    "",
    ".",
    "..",
    "a b",
]


@pytest.mark.parametrize("target", HOSTILE)
@pytest.mark.parametrize("place", ["models.net.block", "models.net.names", "tools.patience.most", "models.net.head"])
def test_hostile_target_is_not_called(target, place, tmp_path):
    witness = tmp_path / "witness"
    told = problems(overrides=[f"{place}={{_target_: {target!r}, _args_: ['touch {witness}']}}"])
    assert told
    assert not witness.exists()


@pytest.mark.parametrize("target", HOSTILE)
def test_hostile_target_is_refused_wherever_it_stands(target):
    """Whatever an annotation would say to it: a parameter may have none."""
    assert isinstance(allowed_by(SCHEMA).find(target), str)


HEADS = [
    ("torch.nn.modules.linear.Identity", True),  # of the package in which nn.Module is
    ("torch.nn.modules.container.Sequential", True),
    ("typed_experiment.WideBlock", True),  # of this project
    ("somebodys_layers.Head", False),  # which happens to be imported
    ("somebodys_layers.inner.Head", False),
    ("torch.ao.nn.quantized.Linear", False),
    ("torchmetrics.regression.mse.MeanSquaredError", True),  # which the experiment has elsewhere
    ("torchmetrics.image.fid.FrechetInceptionDistance", False),
]


@pytest.mark.parametrize(("target", "is_admitted"), HEADS)
def test_broad_annotation_admits_the_project_s_own_and_the_package_s(target, is_admitted, tmp_path, monkeypatch):
    """`head: nn.Module` does not admit whatever some package has derived from it."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    installed = tmp_path / "site-packages"
    (installed / "somebodys_layers").mkdir(parents=True)
    head = "from torch import nn\nclass Head(nn.Identity): pass\n"
    (installed / "somebodys_layers/__init__.py").write_text(head)
    (installed / "somebodys_layers/inner.py").write_text(head)
    sys.path.append(str(installed))
    with contextlib.suppress(ImportError):
        importlib.import_module(target.rpartition(".")[0])
    try:
        found = allowed_by(SCHEMA).find(target)
    finally:
        for name in [name for name in sys.modules if name.startswith("somebodys_layers")]:
            del sys.modules[name]
    assert isinstance(found, type) is is_admitted, found
    if not is_admitted:
        assert f'allow = ["{target}"]' in found


def test_hostile_module_is_not_imported(tmp_path, monkeypatch):
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'witness')!r}, 'w')\nclass Block: pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    [problem] = problems(overrides=["models.net.block={_target_: evil.Block}"])
    assert 'allow = ["evil.Block"]' in problem
    assert not (tmp_path / "witness").exists()


def test_section_cannot_become_something_else():
    [problem] = problems(TEXT.replace("_target_: typed_experiment.Models", "_target_: typed_experiment.Tools"))
    assert "expected a Models" in problem


def test_project_allows_classes_by_name(tmp_path, monkeypatch):
    (tmp_path / "more_blocks.py").write_text(
        "from typed_experiment import Block\nclass Thin(Block): pass\ndef make(): raise SystemExit\n"
    )
    (tmp_path / "pyproject.toml").write_text('[tool.paceline]\nallow = ["more_blocks.*"]\n')
    monkeypatch.syspath_prepend(tmp_path)
    names = allowed_names(tmp_path)
    thin = ["models.net.block={_target_: more_blocks.Thin, width: 3}"]
    assert type(build_experiment(load(SCHEMA, TEXT, thin, names)).models.net.block).__name__ == "Thin"
    [problem] = problems(overrides=["models.net.block={_target_: more_blocks.make}"], allow=names)
    assert "only classes are ever called" in problem
    [problem] = problems(overrides=["models.net.block={_target_: more_blocks.Thick}"], allow=names)
    assert "there is no such class" in problem


def test_project_without_a_word_allows_nothing(tmp_path):
    assert allowed_names(tmp_path) == ()
    (tmp_path / "pyproject.toml").write_text("[tool.paceline]\nallow = ['*']\n")
    with pytest.raises(ConfigError, match="expected a list of names"):
        allowed_names(tmp_path)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a: [1", "not YAML"),
        ("- 1", "expected sections"),
        ("a: 1\na: 2", "line 2: 'a' comes twice"),
        ("a: !!python/object/apply:os.system [ls]", "is not known; write plain values"),
        ("a: ${oc.env:HOME}", "interpolation"),
        ("1: a", "is no text"),
        (
            "a: &a [x, x, x]\nb: &b [*a,*a,*a]\n"
            + "".join(f"c{n}: &c{n} [{','.join(['*b'] * 3)}]\n" for n in range(3)),
            "there is no section",
        ),
        ("a: &x [*x]", "deeper than"),
        ("[" * 70 + "}", "deeper than"),  # and what follows is not looked at
    ],
)
def test_what_is_no_configuration_is_refused_in_words(text, told):
    assert told in "\n".join(problems(text))


def test_file_that_is_huge_deep_or_no_text_is_refused_in_words(tmp_path):
    hostile = {
        "deep": b"[" * 2_000,
        "deep_blocks": b"".join(b" " * n + b"a:\n" for n in range(300)),
        "long": b"a: " + b"x" * 2**20,
        "many": b"a:\n" + b"-\n" * 200_000,
        "latin": "a: caf\xe9".encode("latin-1"),
        "utf16": "a: 1".encode("utf-16"),
        "nul": b"a: \0",
        "surrogate": b"a: '\xed\xa0\x80'",
        "escape": TEXT.replace("name: experiment", 'name: "\\ud800"').encode(),
        "number": TEXT.replace("num_epochs: 10", "num_epochs: 0x" + "f" * 10_000).encode(),
        "digits": b"a: " + b"9" * 10_000,
        "time": b"a: 2001-99-99",
        "base60": b"a: 1:99:99",
        "merge": b"<<: {a: 1}",
        "tag": b"a: !!python/name:os.system x",
        "own_tag": b"!evil {a: 1}",
        "directive": b"%YAML 9.9\n---\na: 1",
        "two": b"a: 1\n---\nb: 2",
    }
    for name, content in hostile.items():
        (path := tmp_path / f"{name}.yaml").write_bytes(content)
        with pytest.raises(ConfigError):
            load_plan(typed_experiment.Experiment, path)
    for path in (tmp_path, tmp_path / "nothing.yaml", Path("/dev/zero")):
        with pytest.raises(ConfigError, match=r"cannot be read|no configuration is so long"):
            load_plan(typed_experiment.Experiment, path)


def test_anchors_do_not_grow_without_end():
    levels = ["a0: &a0 [x]\n", *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 9))]
    [problem] = problems("".join(levels))
    assert "more than 20000 values" in problem


def test_anchor_that_comes_again_is_no_warning(recwarn):
    load(SCHEMA, TEXT.replace("num_epochs: 10", "num_epochs: &a 10").replace("start_epoch: 0", "start_epoch: &a 0"))
    assert not list(recwarn)


def test_of_very_many_problems_the_first_are_told():
    with pytest.raises(ConfigError, match="500 problems") as caught:
        load(SCHEMA, TEXT + "".join(f"key{number}: 1\n" for number in range(500)))
    lines = str(caught.value).splitlines()
    assert "key0" in lines[1]
    assert (len(lines), lines[-1].strip(), len(caught.value.problems)) == (52, "and 450 more", 500)


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from([*HOSTILE, "???"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=6) | st.sampled_from(["_target_", "_args_", "net", "lr"]), inner, max_size=4)
    ),
    max_leaves=12,
)
PATHS = st.sampled_from(
    [
        "cfg",
        "models",
        "models.net",
        "models.net.block",
        "models.net.block.sizes",
        "optimizers.sgd.lr",
        "tools",
        "metrics",
    ]
)


def outcome(text, overrides=()):
    """A plan, or why there is none: anything else that is raised is a defect."""
    try:
        return load(SCHEMA, text, overrides)
    except ConfigError as error:
        return error


@settings(max_examples=50)
@given(st.text(max_size=200) | st.binary(max_size=100).map(lambda raw: raw.decode("latin-1")))
def test_any_text_loads_or_is_refused(text):
    assert isinstance(outcome(text), Plan | ConfigError)


@settings(max_examples=50)
@given(PATHS, PLAIN)
def test_any_value_anywhere_loads_or_is_refused(path, value):
    document = completed(SCHEMA, parse(TEXT))
    override = Override("++", path, "", path)
    section, *keys = _resolve(SCHEMA, document, override)
    changed = _changed_section(SCHEMA, document, section, keys, override, entry_of(value, "line 1"))
    reader = _Reader(allowed_by(SCHEMA))
    sections = reader.sections(SCHEMA, changed)
    assert {*targets([*sections.values()])} <= allowed_by(SCHEMA).bases


@settings(max_examples=50)
@given(st.integers(0, len(TEXT)), st.text(alphabet="abc:-[]{}&*!|>'\"%@`\n\t ?#0.", max_size=12), st.integers(0, 40))
def test_any_edit_loads_or_is_refused(place, inserted, num_gone):
    assert isinstance(outcome(TEXT[:place] + inserted + TEXT[place + num_gone :]), Plan | ConfigError)


YAML_VALUES = st.recursive(
    st.sampled_from(
        ["1", "-.5", "true", "null", "???", "'a'", "x y", "~", "os.system", "2001-01-01", "&a 1", "*a", "!!int x", "@"]
    )
    | st.text(max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3).map(lambda items: f"[{', '.join(items)}]")
        | st.dictionaries(st.sampled_from(["_target_", "_args_", "lr", "net", "<<"]), inner, max_size=3).map(
            lambda pairs: "{" + ", ".join(f"{key}: {value}" for key, value in pairs.items()) + "}"
        )
    ),
    max_leaves=6,
)
LINES = [number for number, line in enumerate(TEXT.splitlines()) if ": " in line]


@settings(max_examples=50)
@given(st.lists(st.tuples(st.sampled_from(LINES), YAML_VALUES), min_size=1, max_size=3))
def test_any_values_in_the_places_of_others_load_or_are_refused(changes):
    lines = TEXT.splitlines()
    for number, value in changes:
        lines[number] = f"{lines[number].partition(': ')[0]}: {value}"
    with contextlib.suppress(ConfigError):
        plan = load(SCHEMA, "\n".join(lines))
        assert {*targets([*plan.sections.values()])} <= allowed_by(SCHEMA).bases | {typed_experiment.WideBlock}


@settings(max_examples=50)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["", "+", "++", "~"]), PATHS | st.text(max_size=10), st.sampled_from(["", "="]), YAML_VALUES
        ),
        max_size=3,
    )
)
def test_any_overrides_load_or_are_refused(overrides):
    assert isinstance(outcome(TEXT, ["".join(words) for words in overrides]), Plan | ConfigError)


def test_hash_is_of_values_not_of_writing():
    base = load(SCHEMA, TEXT).config_hash
    assert load(SCHEMA, TEXT.replace("lr: 0.0001", "lr: 1e-4")).config_hash == base
    assert load(SCHEMA, TEXT, ["optimizers.sgd.lr=1e-3"]).config_hash != base
    assert hash_of({"a": 1, "b": 2.0}) == hash_of({"b": 2, "a": 1})
    assert hash_of({"a": True}) != hash_of({"a": 1})


def test_error_of_a_constructor_says_where_it_is_in_the_configuration():
    with pytest.raises(ValueError, match="probability") as caught:
        build_experiment(load(SCHEMA, TEXT, block(dropout="2.0")))
    assert caught.value.__notes__ == ["It was raised by Block, which is models.net.block of the configuration."]


def test_nothing_of_the_working_directory_is_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "conf.yaml").write_text("a: [1")
    assert load(SCHEMA, TEXT)
    assert os.listdir(tmp_path) == ["conf.yaml"]
