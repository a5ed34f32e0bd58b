"""What travels between driver and worker, and what comes along with it."""

import linecache
import pickle
import sys
import types

import pytest
import torch

from paceline.workers import parcel


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
