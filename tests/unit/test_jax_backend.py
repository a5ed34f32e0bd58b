"""What the jax backend and its codec decide without a group."""

import gc
import os
import socket
from tempfile import TemporaryFile

import jax
import numpy as np
import optax
import pytest
from jax import numpy as jnp

from paceline import JaxConfig
from paceline.backends.jax import _open_service
from paceline.backends.jax_links import hang_up, listening
from paceline.checkpoints import copy_of, snapshot
from paceline.checkpoints.content.tree import Decoder
from paceline.errors import ArgumentError, CheckpointValueError, WorkerStartError
from paceline.frameworks.jax import Jax
from paceline.testing import RecordingWire
from paceline.workers.base import Place, Raised


@pytest.mark.parametrize(
    "wrong",
    [{"timeout_s": 0}, {"timeout_s": float("inf")}, {"heartbeat_timeout_s": float("nan")}, {"num_cpu_devices": 0}],
    ids=str,
)
def test_wrong_option_is_named(wrong):
    [(name, value)] = wrong.items()
    with pytest.raises(ArgumentError, match=rf"JaxConfig\({name}={value}\): expected"):
        JaxConfig(**wrong)


GLOO = "UNKNOWN: Gloo all-reduce failed: [external/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer"


@pytest.mark.parametrize(
    ("type_name", "message", "expected"),
    [
        ("JaxRuntimeError", GLOO, True),
        ("ValueError", GLOO, True),
        ("XlaRuntimeError", GLOO, True),
        ("RuntimeError", GLOO, True),
        ("JaxRuntimeError", "INTERNAL: while running replica 0:\nNCCL operation failed", True),
        ("JaxRuntimeError", "UNAVAILABLE: Failed to send RPC to coordination service", True),
        ("JaxRuntimeError", "FAILED_PRECONDITION: Buffer Definition Event: Gloo all-gather failed", True),
        ("JaxRuntimeError", "RESOURCE_EXHAUSTED: Out of memory allocating 800000000000 bytes.", False),
        ("JaxRuntimeError", "INTERNAL: CpuCallback error calling callback: ValueError: mine", False),
        ("ValueError", "gloo: connection closed by peer", False),
        ("ValueError", f"no number in this line of the log: {GLOO}", False),
        ("RuntimeError", f"rank 1 gave up, since\n{GLOO}", False),
        ("KeyError", GLOO, False),
    ],
)
def test_what_is_only_the_echo_of_another_ranks_end(type_name, message, expected):
    assert JaxConfig().is_broken_collective(Raised(0, type_name, message, "")) is expected


@pytest.mark.parametrize(
    "code",
    ["UNKNOWN", "UNAVAILABLE", "INTERNAL", "ABORTED", "CANCELLED", "DEADLINE_EXCEEDED", "FAILED_PRECONDITION"],
)
@pytest.mark.parametrize(
    "words",
    [
        "Gloo all-gather failed",
        "NCCL operation failed",
        "Connection closed by peer",
        "Connection reset by peer",
        "Connection refused",
        "Broken pipe",
        "Socket closed",
        "the coordination service is gone",
        "no heartbeat",
        "Barrier timed out",
        "Deadline Exceeded",
    ],
)
def test_echo_may_have_any_of_the_codes_and_words(code, words):
    assert JaxConfig().is_broken_collective(Raised(0, "JaxRuntimeError", f"{code}: {words}", ""))
    assert not JaxConfig().is_broken_collective(Raised(0, "JaxRuntimeError", f"INVALID_ARGUMENT: {words}", ""))


def test_address_that_rank_0_does_not_have():
    wire = RecordingWire(Place(world_size=2))
    wire.address = "203.0.113.7"  # of a block that is reserved for documentation
    with pytest.raises(WorkerStartError, match=r"cannot listen on 203\.0\.113\.7.*--node-ip-address"):
        _open_service(wire, JaxConfig())
    assert wire.shared == {}


def test_hanging_up_ends_connections_on_either_side_and_no_others():
    before = listening()
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_server(("127.0.0.1", 0)) as other:
        link = server.getsockname()
        assert listening() - before == {link, other.getsockname()}
        with (
            socket.create_connection(link) as out,
            server.accept()[0] as into,
            socket.create_connection(other.getsockname()) as mine,
            other.accept()[0] as theirs,
        ):
            assert hang_up({link}) == 2
            assert (out.recv(1), into.recv(1)) == (b"", b"")
            mine.sendall(b"x")
            assert theirs.recv(1) == b"x"


def test_looking_at_what_is_open_opens_nothing():
    """Neither of what is a socket, nor of what is none."""
    with (
        TemporaryFile(),
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM),
    ):
        gc.collect()  # what other tests have dropped
        before = os.listdir("/proc/self/fd")
        assert server.getsockname() in listening()
        assert hang_up({("203.0.113.7", 1)}) == 0
        assert os.listdir("/proc/self/fd") == before


def test_settings_are_carried_over_and_go_back():
    jax_framework, before = Jax(), jax.config.jax_enable_x64
    assert jax_framework.settings() == {}
    try:
        jax_framework.adopt({"jax_enable_x64": True, "jax_default_matmul_precision": "highest"})
        assert jax_framework.settings() == {"jax_enable_x64": True, "jax_default_matmul_precision": "highest"}
        assert jnp.ones(1).dtype == "float64"
    finally:
        jax_framework.adopt({})
    assert jax.config.jax_enable_x64 is before
    assert jax_framework.settings() == {}


# --- checkpoints ----------------------------------------------------------------------------------------------------


def test_64_bits_stay_64_bits_where_jax_has_32():
    with jax.enable_x64(True):
        value = jnp.array([1 / 3, 2.0**60])
    back = copy_of({"x": value})["x"]
    assert back.dtype == "float64"
    np.testing.assert_array_equal(np.asarray(back), np.asarray(value))
    assert not jax.config.jax_enable_x64


def test_training_goes_on_from_the_state_of_an_optimizer_as_if_nothing_was():
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.cosine_decay_schedule(0.1, 10)))
    params = {"layer": {"w": jnp.arange(3.0), "b": jnp.ones((), jnp.bfloat16)}}
    state = {"params": params, "optimizer": optimizer.init(params), "key": jax.random.key(7)}

    @jax.jit
    def advance(state):
        key, own = jax.random.split(state["key"])
        noise = jax.tree.map(lambda leaf: jax.random.normal(own, leaf.shape, leaf.dtype), state["params"])
        updates, optimizer_state = optimizer.update(noise, state["optimizer"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "optimizer": optimizer_state, "key": key}

    state = advance(state)
    back = copy_of(state)
    assert jax.tree.structure(back) == jax.tree.structure(state)
    for ours, theirs in zip(jax.tree.leaves(advance(back)), jax.tree.leaves(advance(state)), strict=True):
        assert repr(ours) == repr(theirs)


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.inject_hyperparams(optax.adam)(learning_rate=optax.cosine_decay_schedule(0.1, 10)),
        optax.optimistic_gradient_descent(0.1),
        optax.adamw(0.1, weight_decay=optax.constant_schedule(0.01)),
        optax.multi_transform({"a": optax.adam(0.1), "b": optax.set_to_zero()}, {"w": "a", "b": "b"}),
        optax.MultiSteps(optax.lion(0.1), 2),
        optax.lbfgs(),
        optax.contrib.schedule_free_sgd(0.1),
    ],
    ids=["injected", "optimistic", "decay by schedule", "several", "accumulated", "line search", "contrib"],
)
def test_states_of_optax_come_back_as_they_are(optimizer):
    """Also those whose class optax has given no public name."""
    state = optimizer.init({"w": jnp.arange(3.0), "b": jnp.ones(())})
    back = copy_of({"state": state})["state"]
    assert jax.tree.structure(back) == jax.tree.structure(state)
    for ours, theirs in zip(jax.tree.leaves(back), jax.tree.leaves(state), strict=True):
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(ours, theirs)


def test_names_of_arrays_say_where_they_are():
    state = optax.sgd(0.1, momentum=0.9).init({"w": jnp.ones(2)})
    assert [*snapshot({"optimizer": state}).entries] == ["optimizer[0].fields.trace.w"]


def test_traced_value_is_refused():
    @jax.jit
    def save(x):
        snapshot({"x": x})

    with pytest.raises(CheckpointValueError, match="being traced and has no value yet: save what the jitted function"):
        save(jnp.ones(1))


class Arrays:
    """One block, whatever it is called."""

    def __init__(self, dtype, data):
        self.dtype, self.shape, self.data = dtype, (len(data),), data
        self.num_bytes = len(data)

    def entry(self, key):
        return self

    def read_into(self, key, memory):
        memory[:] = self.data


@pytest.mark.parametrize(
    ("node", "complaint"),
    [
        ({"$": "optax", "class": "sgd", "fields": {"learning_rate": 1}}, "optax has no state 'sgd'"),
        ({"$": "optax", "class": "contrib", "fields": {}}, "optax has no state 'contrib'"),
        ({"$": "optax", "class": "partial", "fields": {"func": 1}}, "optax has no state 'partial'"),
        ({"$": "optax", "class": "__builtins__", "fields": {}}, "optax has no state"),
        ({"$": "jax", "array": "x", "dtype": "linalg", "shape": [8]}, "jax has no dtype 'linalg'"),
        ({"$": "jax", "array": "x", "dtype": "object", "shape": [1]}, "jax has no dtype 'object'"),
        ({"$": "jax", "array": "x", "dtype": "f4,O", "shape": [1]}, "jax has no dtype 'f4,O'"),
        ({"$": "jax", "array": "x", "dtype": "complex64", "shape": [8]}, "does not fill 8 bytes"),
    ],
    ids=str,
)
def test_what_no_writer_of_ours_has_made_runs_nothing(node, complaint):
    with pytest.raises(ValueError, match=complaint):
        Decoder(Arrays("U8", b"12345678")).decode(node)
