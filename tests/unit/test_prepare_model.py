"""get_device, prepare_model and the walk through nested values, without a process group."""

import copy
import inspect
import pickle
from collections import OrderedDict, namedtuple
from dataclasses import dataclass, field
from types import MappingProxyType

import pytest
import torch
from torch import nn

from paceline import session
from paceline.errors import ArgumentTypeError, TrainerStateError
from paceline.prepare import accelerate, get_device, prepare_model, unwrap_model
from paceline.prepare.device import device_at, move_batch
from paceline.prepare.model import ddp_defaults
from paceline.prepare.nesting import map_tensors
from paceline.prepare.scope import close_scope
from paceline.testing import make_session
from paceline.workers.base import Place

CPU, META = torch.device("cpu"), torch.device("meta")


@pytest.fixture
def enter(monkeypatch):
    """Make this process a worker at the given place."""

    def worker(**place):
        monkeypatch.setattr(session, "_current", make_session(Place(**place)))

    return worker


@pytest.fixture(autouse=True)
def _clean():
    yield
    close_scope()


@pytest.mark.parametrize(
    ("place", "in_worker", "num_gpus", "device"),
    [
        (Place(), False, 0, "cpu"),
        (Place(), False, 1, "cuda:0"),
        (Place(world_rank=3, local_rank=1), False, 2, "cuda:1"),
        (Place(world_rank=3, local_rank=3), False, 2, "cuda:1"),
        (Place(), True, 1, "cpu"),
        (Place(device_index=0), True, 1, "cuda:0"),
        (Place(local_rank=1, device_index=1), True, 2, "cuda:1"),
    ],
)
def test_device_follows_from_the_place(place, in_worker, num_gpus, device):
    assert device_at(place, in_worker=in_worker, num_gpus=num_gpus) == torch.device(device)


def test_device_of_a_worker_without_gpus_is_the_cpu(enter):
    enter(world_rank=1, world_size=2)
    assert get_device() == CPU


def test_ddp_is_told_the_gpu_only_of_a_model_that_was_moved_there():
    gpu = torch.device("cuda", 1)
    assert ddp_defaults(gpu, True) == {"device_ids": [gpu], "output_device": gpu}
    assert ddp_defaults(gpu, False) == ddp_defaults(CPU, True) == {}


def test_model_outside_a_worker_is_returned_itself():
    model = nn.Linear(2, 1)
    assert prepare_model(model) is model
    assert "forward" not in vars(model)


def test_model_is_moved_only_when_asked(monkeypatch):
    # The meta device stands in for a GPU: tensors really move there.
    monkeypatch.setattr("paceline.prepare.model.get_device", lambda: META)
    assert prepare_model(nn.Linear(2, 1), move_to_device=False).weight.device == CPU
    assert prepare_model(nn.Linear(2, 1)).weight.device == META


def test_model_for_two_workers_without_a_process_group(enter):
    enter(world_rank=0, world_size=2)
    with pytest.raises(TrainerStateError, match="2 workers, but they form no process group"):
        prepare_model(nn.Linear(2, 1))
    unwrapped = nn.Linear(2, 1)
    assert prepare_model(unwrapped, wrap_ddp=False) is unwrapped


def test_model_that_ddp_would_refuse_is_not_wrapped(enter):
    enter(world_rank=0, world_size=2)
    frozen = nn.Linear(2, 1).requires_grad_(False)
    loss = nn.MSELoss()
    assert prepare_model(frozen) is frozen
    assert prepare_model(loss) is loss


def test_something_else_than_a_model():
    with pytest.raises(ArgumentTypeError, match=r"type type; expected a torch.nn.Module"):
        prepare_model(nn.Linear)


Pair = namedtuple("Pair", "left right")


@dataclass(frozen=True)
class Output:
    logits: torch.Tensor
    hidden: list = field(default_factory=list)


class ManyOutputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x, *, scale=1):
        y = self.layer(x) * scale
        self.seen = y.dtype
        return {
            "tensor": y,
            "tuple": (y, [y, {"deep": y}]),
            "named": Pair(y, "text"),
            "dataclass": Output(y, [y]),
            "double": y.double(),
            "integer": y.long(),
            "max": y.max(dim=1),
            "none": None,
        }


def leaves(value):
    found = []
    map_tensors(lambda tensor: found.append(tensor) or tensor, value)
    return found


def test_forward_in_autocast_gives_float32_at_any_depth():
    model = accelerate(ManyOutputs(), mixed_precision="bf16")
    output = model(torch.ones(1, 2), scale=2)
    assert model.seen is torch.bfloat16
    assert output["double"].dtype is torch.float64
    assert output["integer"].dtype is torch.int64
    assert output["max"].indices.dtype is torch.int64
    assert type(output["max"]).__name__ == "max"
    assert type(output["named"]) is Pair
    assert output["named"].right == "text"
    assert type(output["dataclass"]) is Output
    narrow = [t.dtype for t in leaves(output) if t.dtype not in (torch.int64, torch.float64)]
    assert narrow == [torch.float32] * 8


def test_autocast_changes_neither_class_nor_state_nor_signature():
    plain = ManyOutputs()
    keys, signature = list(plain.state_dict()), inspect.signature(plain.forward)
    model = accelerate(plain, mixed_precision=True)
    assert model is plain
    assert type(model) is ManyOutputs
    assert list(model.state_dict()) == keys
    assert inspect.signature(model.forward) == signature


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copy_of_a_model_runs_in_autocast_on_its_own_weights(duplicate):
    model = accelerate(nn.Linear(2, 1), mixed_precision="bf16")
    twin = duplicate(model)
    with torch.no_grad():
        twin.weight.zero_()
        twin.bias.fill_(1 + 2**-12)  # bfloat16 has no such number
    assert twin(torch.ones(1, 2)).item() == 1.0
    assert model(torch.ones(1, 2)).item() != 1.0


def test_preparing_a_model_twice_keeps_one_forward():
    model = accelerate(nn.Linear(2, 1), mixed_precision="bf16")
    forward = model.forward
    assert prepare_model(model).forward is forward


def test_forward_that_was_replaced_on_the_object_is_the_one_that_runs():
    model = nn.Linear(2, 1)
    model.forward = lambda x: (x @ x.T, "mine")
    prepared = accelerate(model, mixed_precision="bf16")
    product, word = prepared(torch.ones(1, 2))
    assert (product.dtype, word) == (torch.float32, "mine")


class MovesItself:
    device = CPU

    def to(self, device):
        moved = MovesItself()
        moved.device = device
        return moved


def test_batch_moves_at_any_depth_and_keeps_its_types():
    x = torch.ones(2)
    batch = OrderedDict(
        pair=Pair(x, (x, [x])),
        data=Output(x, [x]),
        own=MovesItself(),
        text="words",
        nothing=None,
        view=MappingProxyType({"x": x}),
    )
    moved = move_batch(batch, META)
    assert [t.device for t in leaves(moved)] == [META] * 6
    assert list(moved) == list(batch)
    assert type(moved) is OrderedDict
    assert type(moved["pair"]) is Pair
    assert type(moved["data"]) is Output
    assert moved["own"].device == META
    assert (moved["text"], moved["nothing"]) == ("words", None)
    assert [t.device for t in leaves(batch)] == [CPU] * 6


def test_batch_that_is_there_already_is_not_copied():
    batch = {"x": [torch.ones(2)], "y": (1, 2)}
    assert move_batch(batch, CPU) is batch


def test_packed_sequence_moves_whole():
    packed = nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)])
    moved = move_batch((packed,), META)[0]
    assert type(moved) is type(packed)
    assert moved.data.device == META


def test_unwrap_model_finds_the_bare_module():
    bare = nn.Linear(2, 2)
    compiled = nn.Module()  # as torch.compile makes it, which takes seconds
    compiled.add_module("_orig_mod", nn.DataParallel(bare))
    for model in (bare, prepare_model(bare), nn.DataParallel(bare), compiled):
        assert unwrap_model(model) is bare
    with pytest.raises(ArgumentTypeError, match="unwrap_model was given 3 of type int"):
        unwrap_model(3)
