"""What goes into a checkpoint comes out of it, bit for bit; what cannot is refused by name."""

import dataclasses
import enum
import json
import math
import random
from collections import Counter, OrderedDict, defaultdict, namedtuple
from datetime import UTC, date, datetime, timedelta, timezone
from pathlib import Path, PurePosixPath, PureWindowsPath
from zoneinfo import ZoneInfo

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch

from paceline.checkpoints import Buffers, Checkpoint, CheckpointStore, copy_of, load, snapshot
from paceline.checkpoints.content.snapshot import ARRAYS_FILE, STATE_FILE, encode, read_state
from paceline.checkpoints.content.tensorfile import header_bytes, lay_out
from paceline.errors import CheckpointDamagedError, CheckpointValueError
from paceline.frameworks.base import Block

Point = namedtuple("Point", "x y")


class Colour(enum.Enum):
    RED = 1


@dataclasses.dataclass
class Settings:
    lr: float = 0.1


@pytest.fixture(scope="module", autouse=True)
def torch_is_wholly_imported():
    """Its first optimizer imports more of it and sets environment variables: no leak of the test."""
    torch.optim.SGD([torch.ones(1, requires_grad=True)]).step()


@pytest.fixture(params=["memory", "disk"])
def there_and_back(request, tmp_path):
    """Both ways a state can be copied: through memory alone, and through the files."""
    if request.param == "memory":
        return copy_of

    def through_disk(state):
        return load(CheckpointStore(tmp_path).write(1, snapshot(state)).path)

    return through_disk


PLAIN_VALUES = [
    None, True, False, 0, -1, 2**63 - 1, 2**63, -(2**63) - 1, 1 << 50_000,
    0.1, -0.0, 5e-324, 1e308, math.inf, -math.inf,
    "", "text", "ünïcode \U0001f600", "lone \ud800 surrogate", "$",
    b"", b"\x00\xff", b"x" * 5000, bytearray(b"abc"), bytearray(b"y" * 5000),
    1 + 2j, complex(math.inf, -0.0),
    [], [1, [2, [3]]], (), (1, (2,), [3]), set(), {1, "a", (2, 3)}, frozenset({1, 2}),
    {}, {"a": {"b": 1}}, {1: "int", "1": "str", (1, 2): "tuple", None: "none", 1.5: "float", b"k": "bytes"},
    {"$": "dict", "items": "a user's key that looks like a tag"}, {"$": {"$": 1}},
    OrderedDict([("b", 1), ("a", 2)]), OrderedDict(), Counter({30: 2, 80: 1}),
    Path("/a/b"), Path("rel"), PurePosixPath("x/y"), PureWindowsPath(r"C:\x"),
    datetime(2024, 2, 29, 12, 30, 1, 5), datetime(2024, 1, 1, tzinfo=UTC),
    datetime(2024, 1, 1, tzinfo=timezone(timedelta(hours=5, minutes=45))),
    datetime(2024, 10, 27, 2, 30, tzinfo=ZoneInfo("Europe/Berlin"), fold=1),
    date(2024, 2, 29), timedelta(days=-1, microseconds=7),
    torch.Size([2, 3]), torch.device("cuda", 1), torch.device("cpu"), torch.bfloat16, torch.float8_e4m3fn,
    {torch.float32: 1, torch.device("cpu"): 2},
]  # fmt: skip


@pytest.mark.parametrize("value", PLAIN_VALUES, ids=lambda value: type(value).__name__)
def test_plain_value_round_trips(value, there_and_back):
    back = there_and_back({"value": value})["value"]
    assert_same(back, value)


def test_nan_and_negative_zero_keep_their_nature(there_and_back):
    back = there_and_back({"nan": math.nan, "zero": -0.0, "complex": complex(math.nan, 1)})
    assert math.isnan(back["nan"])
    assert math.copysign(1, back["zero"]) == -1
    assert math.isnan(back["complex"].real)
    assert back["complex"].imag == 1


def test_datetime_keeps_zone_and_fold(there_and_back):
    value = datetime(2024, 10, 27, 2, 30, tzinfo=ZoneInfo("Europe/Berlin"), fold=1)
    back = there_and_back({"t": value})["t"]
    assert (back.tzinfo, back.fold, back.utcoffset()) == (value.tzinfo, 1, timedelta(hours=1))


def test_defaultdict_and_checkpoint_come_back_as_dict(there_and_back):
    back = there_and_back({"d": defaultdict(int, a=1), "c": Checkpoint({"b": 2}, path="x")})
    assert type(back["d"]) is type(back["c"]) is dict
    assert back == {"d": {"a": 1}, "c": {"b": 2}}


TORCH_DTYPES = [
    "bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float16", "bfloat16",
    "float32", "float64", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz",
    "float8_e8m0fnu",
]  # fmt: skip


@pytest.mark.parametrize("name", TORCH_DTYPES)
def test_tensor_round_trips_bit_for_bit(name, there_and_back):
    dtype = getattr(torch, name)
    raw = torch.randint(0, 2 if name == "bool" else 256, (6 * dtype.itemsize,), dtype=torch.uint8)
    state = {
        "matrix": raw.view(dtype).view(2, 3),
        "scalar": raw.view(dtype)[0],
        "empty": torch.empty(0, 4, dtype=dtype),
        "strided": raw.view(dtype).view(2, 3).t(),
    }
    back = there_and_back(state)
    for key, tensor in state.items():
        assert_same(back[key], tensor)
        assert back[key].is_contiguous()


@pytest.mark.parametrize(
    "dtype",
    [
        "?",
        "u1",
        "i1",
        "<u2",
        ">i2",
        "f2",
        "f4",
        "<f8",
        ">f8",
        "i8",
        "u8",
        "c8",
        "c16",
        "g",
        "S3",
        "U5",
        "V4",
        "M8[ns]",
        "m8[s]",
    ],
)
def test_numpy_array_and_scalar_keep_their_dtype(dtype, there_and_back):
    dtype = np.dtype(dtype)
    raw = np.random.default_rng(0).integers(0, 2 if dtype.kind == "b" else 100, 6 * dtype.itemsize, dtype=np.uint8)
    if dtype.kind == "U":
        array = np.array([["ab", "cdefg", ""], ["ü", "x", "y"]], dtype=dtype)
    else:
        array = np.frombuffer(raw.tobytes(), dtype).reshape(2, 3)
    state = {
        "array": array,
        "scalar": array[0, 0],
        "fortran": np.asfortranarray(array),
        "part": array[:, ::2],
    }
    state |= {"zero_dims": np.array(array[0, 1]), "none": array[:0]}
    back = there_and_back(state)
    for key, value in state.items():
        assert type(back[key]) is type(value)
        assert back[key].dtype == value.dtype
        assert back[key].dtype.byteorder == value.dtype.byteorder
        assert back[key].shape == value.shape
        assert back[key].tobytes() == value.tobytes()
    assert back["array"].flags.writeable


def test_structured_numpy_dtype(there_and_back):
    dtype = np.dtype([("x", "<f4"), ("nested", [("y", "i2", (2,))])], align=True)
    array = np.zeros(3, dtype)
    array["nested"]["y"] = [[1, 2], [3, 4], [5, 6]]
    back = there_and_back({"a": array, "s": array[1]})
    assert back["a"].dtype == dtype
    assert (back["a"] == array).all()
    assert back["s"] == array[1]


def test_optimizer_and_schedulers_and_generators_continue_exactly(there_and_back):
    def make():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
        adam = torch.optim.Adam(model.parameters(), lr=0.1, amsgrad=True)
        return model, adam, torch.optim.lr_scheduler.MultiStepLR(adam, [2, 4])

    def steps(model, optimizer, scheduler):
        for _ in range(3):
            noise = random.random() + np.random.rand() + torch.rand(8, 3)
            model(noise).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        return [tensor.clone() for tensor in model.state_dict().values()]

    parts = make()
    steps(*parts)
    saved = there_and_back(
        {
            "parts": [part.state_dict() for part in parts],
            "random": random.getstate(),
            "numpy": np.random.get_state(),
            "generator": np.random.default_rng(3).bit_generator.state,
            "torch": torch.get_rng_state(),
        }
    )
    expected = steps(*parts)

    resumed = make()
    for part, state in zip(resumed, saved["parts"], strict=True):
        part.load_state_dict(state)
    random.setstate(saved["random"])
    np.random.set_state(saved["numpy"])
    torch.set_rng_state(saved["torch"])
    assert saved["generator"] == np.random.default_rng(3).bit_generator.state
    assert all(torch.equal(a, b) for a, b in zip(steps(*resumed), expected, strict=True))


def schedulers():
    lr = torch.optim.lr_scheduler
    yield lambda o: lr.StepLR(o, 3)
    yield lambda o: lr.MultiStepLR(o, [1, 3, 3])
    yield lambda o: lr.ExponentialLR(o, 0.9)
    yield lambda o: lr.CosineAnnealingLR(o, 10)
    yield lambda o: lr.CosineAnnealingWarmRestarts(o, 5)
    yield lambda o: lr.ReduceLROnPlateau(o)
    yield lambda o: lr.OneCycleLR(o, 0.1, total_steps=20)
    yield lambda o: lr.CyclicLR(o, 0.01, 0.1)
    yield lambda o: lr.LambdaLR(o, lambda epoch: 0.9**epoch)
    yield lambda o: lr.SequentialLR(o, [lr.ConstantLR(o), lr.ExponentialLR(o, 0.9)], [2])


@pytest.mark.parametrize("make", list(schedulers()))
def test_state_of_every_scheduler(make):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1, momentum=0.9)
    optimizer.step()
    state = make(optimizer).state_dict()
    assert_same(copy_of({"s": state})["s"], state)


def test_tied_tensors_are_stored_once_and_come_back_as_one(tmp_path):
    weight = torch.nn.Parameter(torch.randn(1000))
    model = {"embed": weight, "head": weight.detach(), "half": weight[:500], "same": np.arange(9)}
    info = CheckpointStore(tmp_path).write(1, snapshot({"model": model, "again": model["same"]}))
    back = load(info.path)
    assert back["model"]["embed"] is back["model"]["head"]
    assert back["model"]["same"] is back["again"]
    assert back["model"]["half"] is not back["model"]["embed"]
    assert type(back["model"]["embed"]) is torch.Tensor
    with safetensors.safe_open(Path(info.path) / ARRAYS_FILE, "pt") as file:
        assert sorted(file.keys()) == ["model.embed", "model.half", "model.same"]


def test_empty_tensors_are_not_taken_for_tied():
    back = copy_of({"a": torch.empty(0), "b": torch.empty(0)})
    assert back["a"] is not back["b"]


def test_lazy_conjugate_and_negative_views():
    z = torch.tensor([1 + 2j, 3 - 4j])
    back = copy_of({"z": z, "conj": z.conj(), "imag": z.conj().imag})
    assert_same(back["z"], z)
    assert torch.equal(back["conj"], z.conj())
    assert torch.equal(back["imag"], z.conj().imag)


def test_the_safetensors_package_reads_our_file(tmp_path):
    tensors = {name: torch.ones(3, 2, dtype=getattr(torch, name)) for name in TORCH_DTYPES if "fnu" not in name}
    info = CheckpointStore(tmp_path).write(1, snapshot({"t": tensors, "odd": torch.ones(3, dtype=torch.int8)}))
    opened = safetensors.torch.load_file(Path(info.path) / ARRAYS_FILE)
    for name, tensor in tensors.items():
        if not tensor.is_complex():
            assert_same(opened[f"t.{name}"], tensor)
    raw = opened["t.complex128"]
    assert raw.dtype == torch.uint8
    assert torch.equal(raw.view(torch.complex128).view(3, 2), tensors["complex128"])


def test_keys_that_look_alike_stay_apart():
    state = {"a": {"b": torch.ones(1)}, "a.b": torch.zeros(1), "__metadata__": torch.full((1,), 2.0)}
    back = copy_of(state)
    assert (back["a"]["b"].item(), back["a.b"].item(), back["__metadata__"].item()) == (1, 0, 2)


def test_copy_shares_nothing():
    state = {"t": torch.zeros(3), "a": np.zeros(3), "l": [1]}
    back = copy_of(state)
    state["t"] += 1
    state["a"] += 1
    state["l"].append(2)
    assert back["t"].sum() == 0
    assert back["a"].sum() == 0
    assert back["l"] == [1]


def test_loaded_tensors_can_be_trained():
    weight = copy_of({"w": torch.ones(3)})["w"].requires_grad_()
    (weight * 2).sum().backward()
    torch.optim.SGD([weight], lr=0.1).step()
    assert weight.is_leaf
    assert torch.allclose(weight.detach(), torch.full((3,), 0.8))


def test_buffers_are_reused_for_the_next_snapshot():
    buffers = Buffers()
    first = snapshot({"x": torch.zeros(1000), "n": np.ones(7)}, buffers)
    place = torch.frombuffer(first.data, dtype=torch.uint8).data_ptr()
    second = snapshot({"x": torch.ones(1000), "n": np.zeros(7)}, buffers)
    assert torch.frombuffer(second.data, dtype=torch.uint8).data_ptr() == place
    smaller = snapshot({"x": torch.ones(10)}, buffers)
    assert torch.frombuffer(smaller.data, dtype=torch.uint8).data_ptr() == place
    assert len(smaller.data) == 40
    larger = snapshot({"x": torch.ones(5000)}, buffers)
    assert len(larger.data) == 20_000


def test_snapshot_inside_and_outside_inference_mode():
    buffers = Buffers()
    with torch.inference_mode():
        inside = copy_of({"x": torch.ones(3)})["x"]
        snapshot({"x": torch.ones(3)}, buffers)
    snapshot({"x": torch.zeros(3)}, buffers)
    assert not inside.is_inference()


class Opaque:
    pass


def sparse():
    return torch.eye(3).to_sparse()


REFUSED = [
    (lambda: torch.nn.Linear(2, 2), "save model.layers[2].state_dict()"),
    (lambda: torch.nn.DataParallel(torch.nn.Linear(2, 2)), "save .module.state_dict()"),
    (lambda: torch.optim.SGD([torch.ones(1)]), ".state_dict()"),
    (Settings, "dataclasses.asdict"),
    (lambda: Colour.RED, ".value"),
    (lambda: Point(1, 2), "._asdict()"),
    (lambda: print, "convert it"),
    (lambda: lambda: 0, "convert it"),
    (Opaque, "convert it"),
    (lambda: type("Sub", (dict,), {})(), "save dict(...)"),
    (lambda: type("Sub", (int,), {})(3), "save int(...)"),
    (sparse, ".to_dense()"),
    (lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]), ".unbind()"),
    (lambda: torch.ones(2, device="meta"), "meta device"),
    (lambda: type("Sub", (torch.Tensor,), {})(), "plain tensor"),
    (lambda: torch.ones(2, dtype=torch.uint8).view(torch.uint4), ".view(torch.uint8)"),
    (lambda: np.array([object()]), ".tolist()"),
    (lambda: np.ma.masked_array([1], [True]), "numpy.asarray"),
    (lambda: {torch.ones(1): 1}, "another key"),
]


@pytest.mark.parametrize(("make", "remedy"), REFUSED)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_what_cannot_be_held_is_refused_with_place_type_and_remedy(make, remedy):
    value = make()
    with pytest.raises(CheckpointValueError) as caught:
        encode({"epoch": 1, "model": {"layers": [0, 1, value]}})
    message = str(caught.value)
    assert remedy in message
    assert "save_checkpoint(directory=...)" in message
    if not isinstance(value, dict) or type(value) is not dict:
        assert "'model.layers[2]'" in message
        assert type(value).__qualname__ in message


def test_quantised_tensor_is_refused():
    with pytest.warns(UserWarning, match="deprecated"):
        value = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
    with pytest.raises(CheckpointValueError, match="dequantize"):
        encode({"q": value})


def test_structure_that_contains_itself_is_refused():
    loop = {"a": [1]}
    loop["a"].append(loop)
    with pytest.raises(CheckpointValueError, match=r"'x.a\[1\]' contains itself"):
        encode({"x": loop})


def test_the_same_list_twice_is_no_loop():
    shared = [1, 2]
    assert copy_of({"a": shared, "b": [shared, shared]}) == {"a": [1, 2], "b": [[1, 2], [1, 2]]}


def test_too_deep_a_structure_is_refused():
    deep = []
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(CheckpointValueError, match="deeper than 100 levels"):
        encode({"x": deep})


def test_key_that_cannot_be_printed():
    state = {"table": {10**5000: b"x" * 2000, (10**5000, 1): b"y" * 2000}, "number": 10**5000}
    assert copy_of(state) == state
    with pytest.raises(CheckpointValueError, match=r"'table\[a very large int\]' is a object"):
        encode({"table": {10**5000: object()}})


def state_dir(tmp_path, tree, blocks=None):
    """The two files as an attacker could write them, without an encoder."""
    (tmp_path / STATE_FILE).write_text(json.dumps(tree))
    entries = lay_out(blocks or {})
    (tmp_path / ARRAYS_FILE).write_bytes(header_bytes(entries) + bytes(sum(e.num_bytes for e in entries.values())))
    return tmp_path


BLOCK = {"a": Block("U8", (8,), 8, 1, lambda memory: None)}


@pytest.mark.parametrize(
    "node",
    [
        {"$": "ndarray", "array": "a", "dtype": "|O", "shape": [1]},
        {"$": "numpy", "dtype": "|O", "base64": "AAAAAAAAAAA="},
        {"$": "ndarray", "array": "a", "dtype": "<f8", "shape": [1000]},
        {"$": "tensor", "array": "a", "dtype": "load", "shape": [8]},
        {"$": "tensor", "array": "a", "dtype": "float64", "shape": [2]},
        {"$": "tensor", "array": "missing"},
        {"$": "eval", "value": "1+1"},
        {"$": "torch.load", "value": "x"},
        {"$": "set", "items": [[1]]},
        {"$": "dict", "items": [[1]]},
    ],
    ids=lambda node: f"{node['$']}",
)
def test_crafted_tree_is_damage_and_never_code(node, tmp_path):
    with pytest.raises(CheckpointDamagedError, match=STATE_FILE):
        read_state(state_dir(tmp_path, {"x": node}, BLOCK), "the path")


def test_crafted_header_cannot_claim_more_than_the_file(tmp_path):
    state_dir(tmp_path, {"x": {"$": "tensor", "array": "a"}})
    header = json.dumps({"a": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}}).encode()
    (tmp_path / ARRAYS_FILE).write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(CheckpointDamagedError, match="does not fit"):
        read_state(tmp_path, "the path")


def test_no_pickle_in_the_package():
    import paceline.checkpoints

    for source in Path(paceline.checkpoints.__file__).parent.glob("*.py"):
        assert "import pickle" not in source.read_text()
        assert "torch.load(" not in source.read_text()


def assert_same(back, value):
    """Equal in type, order and bits, all the way down."""
    assert type(back) is (torch.Tensor if isinstance(value, torch.nn.Parameter) else type(value))
    if isinstance(value, torch.Tensor):
        assert (back.dtype, back.shape) == (value.dtype, value.shape)
        assert torch.equal(bits(back), bits(value))
    elif isinstance(value, dict):
        assert list(back) == list(value)
        for key in value:
            assert_same(back[key], value[key])
    elif isinstance(value, (list, tuple)):
        assert len(back) == len(value)
        for one, other in zip(back, value, strict=True):
            assert_same(one, other)
    else:
        assert back == value


def bits(tensor):
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor).reshape(-1).view(torch.uint8)
