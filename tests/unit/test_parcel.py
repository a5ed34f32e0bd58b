"""What travels between driver and worker, and what comes along with it."""

import linecache
import pickle
import sys
import threading
import types
import warnings
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from paceline.errors import ArgumentTypeError
from paceline.runs import RunRequest, kept_call
from paceline.workers import parcel
from paceline.workers.base import Call
from paceline.workers.contents import culprit


def there_and_back(value):
    return parcel.loads(parcel.dumps(value))


def of_main(source, **names):
    """What a script defines, as its functions and classes are seen by pickle."""
    namespace = {"__name__": "__main__", **names}
    exec(source, namespace)
    return namespace


@pytest.mark.parametrize("name", ["torch.ops", "torch.ops.aten", "torch.backends.cudnn", "torch.backends", "os.path"])
def test_module_of_whatever_class_travels_by_name(name):
    parent, _, attribute = name.rpartition(".")
    module = getattr(sys.modules.get(parent) or getattr(torch, parent.removeprefix("torch.")), attribute)
    assert there_and_back(module) is module


def test_module_that_is_known_under_another_name(monkeypatch):
    module = types.ModuleType("its_own_name")
    monkeypatch.setitem(sys.modules, "another_name", module)
    assert there_and_back(module) is module


def test_plain_tensors_travel_as_arrays():
    """torch would write a file for each of them."""
    sent = [torch.randn(2, 3), torch.tensor(7), torch.tensor([True]), torch.zeros(0, 4), torch.randn(10)[2:5]]
    sent.append(torch.randn(2, 1, 4, 4).to(memory_format=torch.channels_last))
    packed = parcel.dumps([*sent, sent[0]])
    *arrived, again = parcel.loads(packed)
    assert b"_load_from_bytes" not in packed
    assert again is arrived[0]
    for one, other in zip(arrived, sent, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
        assert one.stride() == other.stride()
        assert one.untyped_storage().resizable()
        assert other.untyped_storage().resizable()


def test_tensors_that_are_more_than_numbers_in_a_row_stay_what_they_are():
    named = torch.zeros(2)
    named.note = "mine"
    parameter, turned, grad, half, note, conj, nested = there_and_back(
        [
            torch.nn.Parameter(torch.ones(2)),
            torch.randn(3, 2).t(),
            torch.ones(2, requires_grad=True),
            torch.ones(2, dtype=torch.bfloat16),
            named,
            torch.ones(2, dtype=torch.complex64).conj(),
            torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]),
        ]
    )
    assert isinstance(parameter, torch.nn.Parameter)
    assert turned.stride() == (1, 2)
    assert grad.requires_grad
    assert half.dtype == torch.bfloat16
    assert note.note == "mine"
    assert conj.is_conj()
    assert nested.is_nested


def test_function_of_main_that_touches_a_module_of_its_own_class():
    train = of_main("def train():\n    torch.backends.cudnn.benchmark\n    return torch.ops.aten", torch=torch)["train"]
    assert there_and_back(train)() is torch.ops.aten


def test_functions_and_classes_of_main_are_brought_along_by_name():
    names = of_main("class Net: pass\ndef helper(): return Net\ndef train(): return helper(), lambda: 1")
    train, brought = there_and_back((names["train"], parcel.Brought()))
    assert sorted(brought.by_value) == ["Net", "helper", "train"]
    assert brought.by_value["train"] is train
    assert brought.by_value["Net"] is train()[0]


def test_of_two_with_one_name_that_which_is_meant_now_is_brought(monkeypatch):
    old, new = of_main("def f(): return 'old'")["f"], of_main("def f(): return 'new'")["f"]
    monkeypatch.setattr(sys.modules["__main__"], "f", new, raising=False)
    for pair in ([old, new], [new, old]):
        brought = there_and_back([*pair, parcel.Brought()])[-1]
        assert brought.by_value["f"]() == "new"


def test_lines_of_code_without_a_file_are_brought_along(monkeypatch):
    source = "def train():\n    return 1 / 0\n"
    monkeypatch.setitem(linecache.cache, "<cell 3>", (len(source), None, source.splitlines(keepends=True), "<cell 3>"))
    namespace = {"__name__": "__main__"}
    exec(compile(source, "<cell 3>", "exec"), namespace)
    brought = there_and_back((namespace["train"], parcel.Brought()))[1]
    assert brought.sources == {"<cell 3>": source.splitlines(keepends=True)}


def test_nothing_is_brought_by_what_is_imported():
    assert there_and_back((pickle.dumps, torch.nn.Linear, parcel.Brought()))[2] == parcel.Brought()


def test_what_cannot_travel_is_named_with_the_way_to_it():
    lock = threading.Lock()

    def helper():
        return lock

    def train(config):
        return helper()

    request = RunRequest(train_func=train, config={"a": {"b": [1, open]}})
    with pytest.raises(ArgumentTypeError, match=r"train_func → closure variable 'helper' → closure variable 'lock' is"):
        _ = Call(lambda wire, task: None, (request,), label="train_func 'train'").packed
    with pytest.raises(ArgumentTypeError, match=r"config → \['a'\] → \['lock'\] is of type lock \(TypeError: cannot"):
        _ = Call(lambda wire, task: None, (RunRequest(train_func=max, config={"a": {"lock": lock}}),)).packed
    with pytest.raises(ArgumentTypeError, match=r"fn → the function in the partial → global variable 'held' is of"):
        _ = Call(lambda wire, fn: None, (partial(of_main("def f(x): return held", held=lock)["f"], 1),)).packed


@pytest.mark.parametrize(
    ("value", "way"),
    [
        (SimpleNamespace(inner=(1, threading.Lock())), "it → .inner → [1]"),
        (partial(max, threading.Lock()), "it → argument 0"),
        (partial(max, key=threading.Lock()), "it → argument 'key'"),
        ({threading.Lock()}, "it → an element"),
        (of_main("class Net:\n  lock = held", held=threading.Lock())["Net"], "it → attribute 'lock'"),
        (of_main("class Net:\n  def run(self, x=held): pass", held=threading.Lock())["Net"]().run, None),
    ],
)
def test_ways_to_what_cannot_travel(value, way):
    found, part = culprit({"it": value})
    assert isinstance(part, type(threading.Lock()))
    assert found == (way or "it → the object it is a method of → its class → attribute 'run' → the default of 'x'")


def test_function_that_carries_much_says_what_it_is(tmp_path, monkeypatch):
    monkeypatch.setattr(kept_call, "LARGE_BYTES", 1 << 20)
    small, large = bytes(1000), bytes(2 << 20)

    def train(config):
        return len(large) + len(small)

    with pytest.warns(UserWarning, match=r"train_func → closure variable 'large' takes 2 MB"):
        kept_call.keep_call(tmp_path, RunRequest(train_func=train))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kept_call.keep_call(tmp_path, RunRequest(train_func=lambda: small))
