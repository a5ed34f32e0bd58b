"""One suite for every framework that Paceline knows, with real values: what `Framework` promises holds for each."""

import os
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from paceline import frameworks, registry
from paceline.checkpoints import CheckpointStore, copy_of, load, snapshot
from paceline.errors import CheckpointValueError
from paceline.frameworks import Framework, generators, numpy_arrays
from paceline.workers import parcel
from paceline.workers.base import Place, Preload
from paceline.workers.local import LocalEngine, worker_environ
from paceline.workers.reports import plain


@dataclass
class Samples:
    """Values of one framework, and what checkpoints that exist call them. A new framework adds its own to `SAMPLES`."""

    tags: tuple[str, set[str]]
    arrays: list[Any]
    small_values: list[Any]
    plain_forms: list[tuple[Any, Any]]
    refused: list[Any]
    draw: Callable[[], float] | None = None
    """From its global generator, if it has one."""
    stand_ins: list[tuple[Any, Any]] = field(default_factory=list)
    base: type | None = None
    """What a class of the user's may derive from, if that is not the class of the arrays."""


def jax_samples():
    import jax
    import optax
    from flax import nnx
    from jax import numpy as jnp

    dtypes = ("uint8", "int32", "float16", "bfloat16", "float32", "float8_e4m3fn", "int4", "complex64")
    donated = jnp.ones(2)
    jax.jit(lambda x: x + 1, donate_argnums=0)(donated)
    params = {"w": jnp.arange(3.0), "b": jnp.ones((), jnp.bfloat16)}
    return Samples(
        tags=("jax", {"optax"}),
        arrays=[jnp.arange(6).astype(dtype).reshape(2, 3) for dtype in dtypes]
        + [jnp.array([True, False]), jnp.zeros((0, 3)), jnp.array(2.5), jnp.array([0.1, jnp.nan])]
        + [jax.random.PRNGKey(1), jax.random.key(2), jax.random.split(jax.random.key(3, impl="rbg"), (2, 2))],
        small_values=[optax.EmptyState(), optax.adam(1e-3).init(params)[0], optax.sgd(0.1, 0.9).init(params)[0]],
        plain_forms=[
            (jnp.float32(1.5), 1.5),
            (jnp.int32(3), 3),
            (jnp.array([1, 2]), np.array([1, 2], dtype="i4")),
            (jnp.array([[1.5]], jnp.bfloat16), np.array([[1.5]], dtype="f4")),
            (jnp.array([1.5], jnp.float8_e5m2), np.array([1.5], dtype="f4")),
        ],
        refused=[donated, optax.sgd(0.1), nnx.state(nnx.Linear(2, 2, rngs=nnx.Rngs(0))), jax.devices()[0]],
        base=jax.Array,
    )


def numpy_samples():
    structured = np.array([(1, b"abc"), (-1, b"")], dtype=[("a", "<i4"), ("b", "S3")])
    return Samples(
        tags=("ndarray", {"numpy"}),
        arrays=[
            np.arange(6).astype(dtype).reshape(2, 3) for dtype in ("u1", "<i8", "<f2", "<f4", ">f8", "<c16", "<M8[s]")
        ]
        + [np.array([True, False]), np.zeros((0, 3)), np.array(2.5), np.arange(9.0).reshape(3, 3).T, structured],
        small_values=[np.float32(0.1), np.int8(-3), np.bool_(True), np.float64("nan"), np.datetime64("2024-02-29")],
        plain_forms=[],
        refused=[np.array([object()]), np.ma.masked_array([1], [True]), np.dtype("f4")],
        draw=lambda: float(np.random.rand()),
    )


def torch_samples():
    model = torch.nn.Linear(2, 2)
    floats = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64]
    return Samples(
        tags=("tensor", {"torch.Size", "torch.device", "torch.dtype"}),
        arrays=[torch.linspace(-1, 1, 6).to(dtype).reshape(2, 3) for dtype in floats]
        + [torch.arange(3), torch.tensor(1.5), torch.empty(0, 2), torch.arange(9.0).reshape(3, 3).T]
        + [torch.tensor([True, False]), torch.tensor([0.1, float("nan")])],
        small_values=[torch.Size([2, 3]), torch.device("cuda", 1), torch.bfloat16],
        plain_forms=[
            (torch.tensor(1.5, requires_grad=True), 1.5),
            (torch.tensor(3), 3),
            (torch.tensor([1, 2]), np.array([1, 2])),
            (torch.tensor([1.0, 2.0], requires_grad=True), np.array([1.0, 2.0], dtype="f4")),
            (torch.tensor([[1.5]], dtype=torch.bfloat16), np.array([[1.5]], dtype="f4")),
            (torch.tensor([1 + 2j]).conj(), np.array([1 - 2j], dtype="c8")),
        ],
        refused=[torch.eye(2).to_sparse(), torch.ones(1, device="meta"), model, torch.nn.DataParallel(model)],
        draw=lambda: torch.rand(1).item(),
        stand_ins=[(wrapped_by_hand(model), model)],
    )


def wrapped_by_hand(model):
    """A DDP model as pickling sees it; making a real one takes a process group (see tests/procs/test_trainer.py)."""
    wrapper = torch.nn.parallel.DistributedDataParallel.__new__(torch.nn.parallel.DistributedDataParallel)
    torch.nn.Module.__init__(wrapper)
    wrapper.module = model
    return wrapper


WITH_GENERATOR = ["numpy", "torch"]


def tensorflow_samples():
    import tensorflow as tf

    dtypes = [tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.int8, tf.uint64, tf.complex64]
    return Samples(
        tags=("tensorflow.tensor", set()),
        arrays=[tf.cast(tf.reshape(tf.range(6), (2, 3)), dtype) for dtype in dtypes]
        + [tf.constant([True, False]), tf.constant(1.5), tf.zeros((0, 2)), tf.constant([0.1, float("nan")])],
        small_values=[],
        plain_forms=[
            (tf.constant(1.5), 1.5),
            (tf.Variable(3), 3),
            (tf.constant([1, 2]), np.array([1, 2], dtype="i4")),
            (tf.Variable([[1.5]], dtype=tf.bfloat16), np.array([[1.5]], dtype="f4")),
        ],
        refused=[tf.constant("text"), tf.sparse.eye(2), tf.ragged.constant([[1], [2, 3]])],
        base=tf.Tensor,
    )


SAMPLES = {"jax": jax_samples, "numpy": numpy_samples, "tensorflow": tensorflow_samples, "torch": torch_samples}


@pytest.fixture(params=registry.names("framework"))
def framework(request):
    [one] = [one for one in frameworks.every() if one.name == request.param]
    return one


@pytest.fixture
def samples(framework):
    return SAMPLES[framework.name]()


@pytest.fixture
def there_and_back(tmp_path):
    return lambda state: load(CheckpointStore(tmp_path).write(1, snapshot(state)).path)


def test_registry_and_classes_agree():
    assert set(SAMPLES) == set(registry.names("framework"))
    assert [one.name for one in frameworks.every()] == registry.names("framework")
    tags = [tag for one in frameworks.every() for tag in (one.array_tag, *one.value_tags)]
    assert len(set(tags)) == len(tags)


@pytest.mark.parametrize("name", registry.names("framework"))
def test_what_needs_no_framework_imports_none(name):
    code = (
        "import sys; from paceline import frameworks, registry; from paceline.workers import parcel\n"
        "frameworks.every(), frameworks.of(3), frameworks.plain(print), frameworks.by_tag('ndarray')\n"
        "frameworks.thread_variables(2), frameworks.interface_variables('lo'), frameworks.may_be_forked('torch.nn')\n"
        "parcel.dumps({'a': lambda: 1})\n"
        "print(*sys.modules)"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "paceline.frameworks.torch" in printed.split()
    assert name not in printed.split()


class Opaque:
    pass


def test_framework_that_another_thread_is_importing_is_not_looked_into(framework, monkeypatch):
    monkeypatch.setitem(sys.modules, framework.name, ModuleType(framework.name))
    assert frameworks.of(Opaque()) is None
    assert isinstance(parcel.loads(parcel.dumps(Opaque())), Opaque)
    with pytest.raises(CheckpointValueError):
        snapshot({"x": Opaque()})


def test_values_are_known_by_their_class_and_by_what_it_derives_from(framework, samples):
    for value in [*samples.arrays, *samples.small_values]:
        assert frameworks.of(value) is framework
    base = samples.base or type(samples.arrays[0])
    mine = type("Mine", (base,), {"__module__": "a.module.of.the.user"})
    assert frameworks._owner_of(mine) is framework
    made_at_run_time = type("Made", (base,), {"__module__": framework.name})
    assert frameworks._owner_of(made_at_run_time) is framework
    assert {mine, made_at_run_time}.isdisjoint(frameworks._owners), "nothing keeps them alive"
    assert frameworks._owner_of(type("Mine", (), {"__module__": None})) is None


def test_values_are_plain_for_the_driver(framework, samples):
    for value, expected in samples.plain_forms:
        seen = plain({"nested": [value]})["nested"][0]
        assert type(seen) is type(expected)
        np.testing.assert_array_equal(seen, expected, strict=True)
    for value in samples.small_values:
        assert framework.plain(value) is value


def test_values_travel(framework, samples):
    for array in samples.arrays:
        assert_same_bits(framework, parcel.loads(parcel.dumps([array]))[0], array)
    for value, stand_in in samples.stand_ins:
        assert framework.pack_as(value) is stand_in
        assert type(parcel.loads(parcel.dumps([value]))[0]) is type(stand_in)


def test_values_come_back_from_a_checkpoint_bit_for_bit(framework, samples, there_and_back):
    for copy in (copy_of, there_and_back):
        back = copy({"arrays": samples.arrays, "values": samples.small_values, "again": samples.arrays})
        for index, array in enumerate(samples.arrays):
            assert_same_bits(framework, back["arrays"][index], array)
            assert back["again"][index] is back["arrays"][index] or memory_says_nothing(framework, array)
        for value, expected in zip(back["values"], samples.small_values, strict=True):
            assert type(value) is type(expected)
            assert repr(value) == repr(expected)


def test_tags_are_those_of_the_checkpoints_that_exist(framework, samples):
    tree = snapshot({"arrays": samples.arrays, "values": samples.small_values}).tree
    array_tag, value_tags = samples.tags
    assert {node["$"] for node in tree["arrays"]} == {framework.array_tag} == {array_tag}
    assert {node["$"] for node in tree["values"]} == set(framework.value_tags) == value_tags
    assert {frameworks.by_tag(tag) for tag in (array_tag, *value_tags)} == {framework}


def test_what_a_checkpoint_cannot_hold_is_refused(samples):
    for value in samples.refused:
        with pytest.raises(CheckpointValueError, match=r"'x' is a .*, which a checkpoint cannot hold: "):
            snapshot({"x": value})


def assert_same_bits(framework, one, other):
    assert type(one) is type(other)
    assert one.dtype == other.dtype
    assert raw(framework, one) == raw(framework, other)


def raw(framework, array):
    block, extra = framework.codec().block_of(array)
    memory = bytearray(block.num_bytes)
    if memory:
        block.copy_into(memoryview(memory))
    return block.dtype, block.shape, extra, bytes(memory)


def memory_says_nothing(framework, array):
    return framework.codec().identity(array) is None


def drawn_in_a_fork(draw, first):
    """A number from a forked process, in which `first` was called before."""
    read_fd, write_fd = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            first()
            os.write(write_fd, struct.pack("d", draw()))
        finally:
            os._exit(0)
    os.close(write_fd)
    with os.fdopen(read_fd, "rb") as pipe:
        data = pipe.read()
    os.waitpid(pid, 0)
    return struct.unpack("d", data)[0]


with_generator = pytest.mark.parametrize("framework", WITH_GENERATOR, indirect=True)


def test_framework_has_a_generator_or_no_state_of_one(framework, samples):
    assert (samples.draw is not None) == (framework.name in WITH_GENERATOR)
    assert (framework.rng_state() is not None) == (framework.name in WITH_GENERATOR)


@with_generator
@pytest.mark.filterwarnings("ignore:os.fork")  # jax has threads here, but the fork does not use it
def test_fork_draws_numbers_of_its_own_once_reseeded(framework, samples):
    state = framework.rng_state()
    own = samples.draw()
    framework.set_rng_state(state)
    assert [drawn_in_a_fork(samples.draw, lambda: None) for _ in range(2)] == [own, own], "a fork repeats its parent"
    assert len({own, *(drawn_in_a_fork(samples.draw, framework.reseed) for _ in range(2))}) == 3
    assert len({own, *(drawn_in_a_fork(samples.draw, generators.reseed) for _ in range(2))}) == 3


@with_generator
def test_generator_goes_on_where_its_state_was_taken(framework, samples):
    state = framework.rng_state()
    expected = [samples.draw() for _ in range(3)]
    kept = copy_of({"rng": list(state) if isinstance(state, tuple) else state})["rng"]
    framework.set_rng_state(kept)
    assert [samples.draw() for _ in range(3)] == expected


@with_generator
@pytest.mark.parametrize("seed", [0, 7, 2**63 - 1])
def test_same_seed_gives_the_same_numbers(framework, samples, seed):
    before = generators.states()
    framework.seed(seed)
    first = samples.draw()
    framework.seed(seed)
    assert samples.draw() == first
    framework.seed(seed ^ 1)
    assert samples.draw() != first
    generators.restore(before)


def test_all_generators_go_on_where_their_states_were_taken():
    draws = [SAMPLES[name]().draw for name in WITH_GENERATOR]
    states = generators.states()
    assert set(states) >= {"python", *WITH_GENERATOR}
    expected = [draw() for draw in draws]
    generators.restore(states)
    assert [draw() for draw in draws] == expected


def test_variable_of_tensorflow_is_kept_and_travels_as_what_it_holds(there_and_back):
    import tensorflow as tf

    variable = tf.Variable([1.0, 2.0])
    assert there_and_back({"x": variable})["x"].numpy().tolist() == [1, 2]
    assert type(parcel.loads(parcel.dumps([variable]))[0]) is np.ndarray


class Toy(Framework):
    """A framework that consists of this module."""

    name = "toy"
    packages = (__name__.partition(".")[0],)
    may_be_forked = False
    array_tag = "toy"

    def plain(self, value):
        return value.numbers if isinstance(value, ToyArray) else value

    def pack_as(self, value):
        return value.numbers if isinstance(value, ToyArray) else value

    def codec(self):
        return ToyCodec()

    def thread_variables(self, num_threads):
        return {"TOY_THREADS": str(num_threads)}

    def interface_variables(self, interface):
        return {"TOY_INTERFACE": interface}


@dataclass
class ToyArray:
    numbers: np.ndarray


class ToyCodec:
    """Keeps a toy array as the numpy array inside it."""

    def is_array(self, value):
        return isinstance(value, ToyArray)

    def problem(self, value):
        return None

    def identity(self, array):
        return None

    def block_of(self, array):
        return numpy_arrays.block_of(array.numbers)

    def array_of(self, extra, stored, fill):
        return ToyArray(numpy_arrays.array_of(extra, stored, fill))

    def value_node(self, value):
        return None


@pytest.fixture
def toy(monkeypatch):
    """One line in the registry."""
    monkeypatch.setitem(registry.KINDS["framework"], "toy", f"{__name__}:Toy")
    monkeypatch.setattr(frameworks, "_owners", {})
    for resolved in (frameworks.every, frameworks._by_package):
        resolved.cache_clear()
    yield ToyArray(np.arange(3.0))
    for resolved in (frameworks.every, frameworks._by_package):
        resolved.cache_clear()


def test_one_line_in_the_registry_is_enough(toy, there_and_back):
    assert plain(toy) is toy.numbers
    assert type(parcel.loads(parcel.dumps({"x": toy}))["x"]) is np.ndarray
    back = there_and_back({"x": toy})["x"]
    assert isinstance(back, ToyArray)
    assert back.numbers.tolist() == [0, 1, 2]
    environ = worker_environ(Place(), None, 3)
    assert (environ["TOY_THREADS"], environ["TOY_INTERFACE"]) == ("3", "lo")


def test_nursery_does_not_import_what_may_not_be_forked(toy):
    modules = LocalEngine(preload=["torch.nn", f"{__name__}.anything", "json"])._all_of(Preload())
    assert [name for name in modules if not name.startswith("paceline.")] == ["torch.nn", "json"]


def test_what_the_user_has_set_wins(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    environ = worker_environ(Place(), None, 3)
    found = [environ[name] for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "GLOO_SOCKET_IFNAME")]
    assert found == ["7", "3", "eth7"]
