"""Which run somebody means, and which runs fit a condition."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import ArgumentError, PacelineError, RunNotFoundError
from paceline.runs.conditions import parse, seconds
from paceline.runs.selection import select, select_one

NAMES = ["digits/run_012", "digits/run_002", "sweep/lr/run_001", "digits/run_001", "digest/run_001", "lone"]
TAGS = {"digits/run_001": frozenset({"best"}), "sweep/lr/run_001": frozenset({"best", "paper"})}


def tags_of(name):
    return TAGS.get(name, frozenset())


def one(*words, names=NAMES):
    return select_one(words, names, tags_of)


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ([], "digits/run_012"),
        (["latest"], "digits/run_012"),
        (["-1"], "digits/run_012"),
        (["-3"], "sweep/lr/run_001"),
        (["digits"], "digits/run_012"),
        (["dig", "2"], None),
        (["digits", "2"], "digits/run_002"),
        (["digits", "002"], "digits/run_002"),
        (["digits", "run_001"], "digits/run_001"),
        (["digits", "latest"], "digits/run_012"),
        (["digits", "-2"], "digits/run_002"),
        (["digits/run_001"], "digits/run_001"),
        (["digits/1"], "digits/run_001"),
        (["digits/latest"], "digits/run_012"),
        (["digit"], "digits/run_012"),
        (["dige"], "digest/run_001"),
        (["lr"], "sweep/lr/run_001"),
        (["sweep"], "sweep/lr/run_001"),
        (["sweep/lr"], "sweep/lr/run_001"),
        (["sweep/lr/run_001"], "sweep/lr/run_001"),
        (["lr", "1"], "sweep/lr/run_001"),
        (["@best"], "sweep/lr/run_001"),
        (["@paper"], "sweep/lr/run_001"),
        (["dige*"], "digest/run_001"),
        (["lone"], "lone"),
    ],
)
def test_one_run(words, name):
    if name is None:
        with pytest.raises(ArgumentError, match="2 names: digits, digest"):
            one(*words)
    else:
        assert one(*words) == name


def test_several():
    assert select(["digits/*"], NAMES, tags_of) == ["digits/run_012", "digits/run_002", "digits/run_001"]
    assert select(["digits", "run_00*"], NAMES, tags_of) == ["digits/run_002", "digits/run_001"]
    assert select(["@best"], NAMES, tags_of) == ["sweep/lr/run_001", "digits/run_001"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["dig"], "beginning of 2 names: digits, digest"),
        (["digits", "run_0"], "beginning of 3 runs: digits/run_012"),
        (["digits/*"], "means 3 runs, and one is expected"),
        (["a", "b", "c"], "not 3 words"),
        (["--frob"], "neither an option nor a run"),
    ],
)
def test_not_clear_which(words, told):
    with pytest.raises(ArgumentError, match=told):
        one(*words)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["digts"], "Did you mean digits"),
        (["nothing"], "The newest is digits/run_012"),
        (["digits", "7"], "has no run '7'. It has run_012, run_002, run_001"),
        (["-9"], "there are 6 runs"),
        (["-0"], "there are 6 runs"),
        (["digits", "-9"], "there are 3 runs of digits"),
        (["@none"], "No run has the tag 'none'"),
        (["x*"], "No run matches"),
        ([""], "begins with ''"),
    ],
)
def test_no_such_run(words, told):
    with pytest.raises(RunNotFoundError, match=told):
        one(*words)


def test_there_are_no_runs():
    with pytest.raises(RunNotFoundError, match="no runs yet"):
        one(names=[])


@given(st.lists(st.text(alphabet="digts/run_01-@*[ \x1b", max_size=8), max_size=3))
def test_whatever_is_said(words):
    with contextlib.suppress(PacelineError):
        assert select_one(words, NAMES, tags_of) in NAMES


RUN = {
    "name": "digits",
    "state": "FAILED",
    "steps": 20,
    "duration": 90.0,
    "tags": ("best", "paper"),
    "metrics.loss": 0.05,
    "metrics.val/acc-1": 0.9,
    "min.loss": 0.01,
    "config.lr": 0.1,
    "config.opt.name": "adam",
    "config.amp": True,
    "config.width": "8",
}


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ("metrics.loss<0.1", True),
        ("metrics.loss < 0.1 and config.lr>0.01", True),
        ("metrics.loss<0.1 and config.lr>1", False),
        ("metrics.loss>0.1 or config.lr=0.1", True),
        ("not (metrics.loss<0.1 or state=FAILED)", False),
        ("not metrics.loss>1 and steps>=20", True),
        ("state=failed", True),
        ("state!=SUCCEEDED", True),
        ("tags=paper", True),
        ("tags=other", False),
        ("name~git", True),
        ("name~dig*", True),
        ("name~git*", False),
        ("config.opt.name='adam'", True),
        ('config.opt.name=="sgd"', False),
        ("config.amp=true", True),
        ("config.amp=1", False),
        ("config.width=8", True),
        ("metrics.nothing<1", False),
        ("metrics.nothing!=1", False),
        ("metrics.nothing", False),
        ("config.lr", True),
        ("duration>1m", True),
        ("duration>2m", False),
        ("metrics.val/acc-1>=.9", True),
        ("metrics.loss<-1e-3", False),
        ("config.opt.name<5", False),
    ],
)
def test_condition(text, fits):
    assert parse(text)(RUN.get) is fits


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "it is empty"),
        ("loss<1", "'loss' is no field; expected one of name, run"),
        ("metrics.<1", "is no field"),
        ("metrics.loss<", "a value is missing"),
        ("metrics.loss< <", "expected a value before"),
        ("(metrics.loss<1", r"a `\)` is missing"),
        ("metrics.loss<1 metrics.loss<2", "expected `and` or `or`"),
        ("__import__('os').system('x')", "is no field"),
        ("duration>soon", "no length of time"),
        ("age<5", "'5' has no unit"),
        ("(" * 100 + "steps", "nested more than 50"),
        ("steps>1 and " * 1000, "at most 2000"),
        ("steps > 'x", "cannot be read from"),
    ],
)
def test_not_a_condition(text, told):
    with pytest.raises(ArgumentError, match=told):
        parse(text)


@given(st.text(alphabet="metrics.loss<>=~()andort 'x1", max_size=40))
def test_whatever_is_asked(text):
    with contextlib.suppress(ArgumentError):
        assert parse(text)(RUN.get) in (True, False)


def test_lengths_of_time():
    assert [seconds(text) for text in ("90s", "1.5m", "2h", "2d", "1w", "0")] == [90, 90, 7200, 172800, 604800, 0]
    assert seconds("90", "s") == 90
    with pytest.raises(ArgumentError, match=r"'5' has no unit: did you mean 5s, 5m, 5h, 5d or 5w\?"):
        seconds("5")


def test_name_that_looks_like_something_else():
    names = ["a[1]/run_002", "@x/run_001", "a[1]/run_001", "a1/run_001", "x*/run_001"]
    assert one("a[1]", names=names) == "a[1]/run_002"
    assert one("a[1]", "1", names=names) == "a[1]/run_001"
    assert one("a[1]/run_001", names=names) == "a[1]/run_001"
    assert one("@x", names=names) == "@x/run_001"
    assert one("x*", names=names) == "x*/run_001"
    names = ["-x/run_002", "-x/run_001", "-1/run_001"]
    for words in (["-x"], ["-x", "2"], ["-x/run_002"], ["-x/2"]):
        assert one(*words, names=names) == "-x/run_002"
    assert one("-1/run_001", names=names) == "-1/run_001"


def test_names_are_looked_through_a_few_times_only():
    class Names(list):
        num_times = 0

        def __iter__(self):
            Names.num_times += 1
            return super().__iter__()

    names = Names(f"exp_{number}/run_{run:03d}" for number in range(100) for run in range(3))
    assert one("exp_7", "2", names=names) == "exp_7/run_002"
    assert Names.num_times < 20


def test_names_that_differ_by_their_dates_mean_the_newest():
    """As `paceline run train.py` names them, twice."""
    names = ["train_2026-05-02_08-00-00/run_001", "train_2026-05-01_12-30-00/run_001", "trainee/run_001"]
    assert select_one(["train_"], names, lambda name: frozenset()) == names[0]
    assert select_one(["train_2026-05-01"], names, lambda name: frozenset()) == names[1]
    assert select_one(["train"], names[:2], lambda name: frozenset()) == names[0]
    with pytest.raises(ArgumentError, match="is the beginning of 3 names"):
        select_one(["train"], names, lambda name: frozenset())
