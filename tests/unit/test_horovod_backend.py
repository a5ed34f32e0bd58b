"""What workers are told before Horovod is asked, and what its errors mean. Without Horovod."""

import socket
import sys

import pytest

from paceline import HorovodConfig, Trainer
from paceline.backends import horovod as backend
from paceline.backends.horovod import horovod_environ
from paceline.errors import ArgumentError, MissingDependencyError, WorkerStartError
from paceline.testing import RecordingWire
from paceline.workers.base import Place, Raised

SHUT_DOWN = (
    "Horovod has been shut down. This was caused by an exception on one of the ranks or an attempt to allreduce, "
    "allgather or broadcast a tensor after one of the ranks finished execution."
)


def places_of(*local_sizes):
    """One machine after the other, with so many workers each."""
    size, places = sum(local_sizes), []
    for node_rank, local_size in enumerate(local_sizes):
        for local_rank in range(local_size):
            places.append(Place(len(places), local_rank, node_rank, size, local_size))
    return places


def environ_of(rank, places):
    return horovod_environ(places[rank], places, "10.0.0.1", 4242, "eth0", 90)


def told(places, *names):
    """The numbers that all ranks get under these names."""
    return [tuple(int(environ_of(rank, places)[f"HOROVOD_{name}"]) for name in names) for rank in range(len(places))]


def test_environment_is_whole():
    assert environ_of(1, places_of(2)) == {
        "HOROVOD_RANK": "1",
        "HOROVOD_SIZE": "2",
        "HOROVOD_LOCAL_RANK": "1",
        "HOROVOD_LOCAL_SIZE": "2",
        "HOROVOD_CROSS_RANK": "0",
        "HOROVOD_CROSS_SIZE": "1",
        "HOROVOD_HOSTNAME": "node0",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.1",
        "HOROVOD_GLOO_RENDEZVOUS_PORT": "4242",
        "HOROVOD_GLOO_IFACE": "eth0",
        "HOROVOD_GLOO_TIMEOUT_SECONDS": "90",
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
    }


def test_cross_ranks_count_the_machines_that_have_a_local_rank():
    """Machine 0 has one worker, so that the second ones of the others count from 0."""
    places = places_of(1, 2, 3)
    assert told(places, "LOCAL_RANK", "LOCAL_SIZE") == [(0, 1), (0, 2), (1, 2), (0, 3), (1, 3), (2, 3)]
    assert told(places, "CROSS_RANK", "CROSS_SIZE") == [(0, 3), (1, 3), (0, 2), (2, 3), (1, 2), (0, 1)]


def test_every_context_of_gloo_has_each_rank_once():
    """Those who meet under one name agree on their number, and each has a number of its own there."""
    for places in (places_of(1), places_of(3), places_of(2, 2), places_of(3, 1, 2)):
        met = {}
        for rank in range(len(places)):
            told = environ_of(rank, places)
            for scope, name in (
                ("global", ""),
                (f"local_{told['HOROVOD_HOSTNAME']}", "LOCAL_"),
                (f"cross_{told['HOROVOD_LOCAL_RANK']}", "CROSS_"),
            ):
                met.setdefault(scope, []).append((told[f"HOROVOD_{name}RANK"], told[f"HOROVOD_{name}SIZE"]))
        for scope, ranks in met.items():
            assert sorted(ranks) == [(str(rank), str(len(ranks))) for rank in range(len(ranks))], scope


def test_rank_0_serves_the_rendezvous_until_it_leaves():
    places = places_of(2)
    other = RecordingWire(places[1])
    assert backend._offer_rendezvous(other) == (places[1], None)
    wire = RecordingWire(places[0])
    place, (address, port) = backend._offer_rendezvous(wire)
    assert (place, address) == (places[0], wire.address)
    socket.create_connection((address, port)).close()
    wire.leaving.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((address, port))


def test_interface_is_the_one_that_has_the_address():
    names = {name for _, name in socket.if_nameindex()}
    assert backend._interface_of("127.0.0.1") in names
    with pytest.raises(WorkerStartError, match=r"203\.0\.113\.7"):
        backend._interface_of("203.0.113.7")


@pytest.mark.parametrize(
    ("type_name", "message", "is_echo"),
    [
        ("HorovodInternalError", SHUT_DOWN, True),
        ("HorovodInternalError", "[gloo/transport/tcp/pair.cc:589] Read error [127.0.0.1]:1: Connection reset", True),
        ("WorkersLostError", "rank 1 is gone", True),
        ("HorovodInternalError", "Mismatched data types: One rank had type int64, but another had float32.", False),
        ("HorovodInternalError", "Mismatched ALLREDUCE tensor shapes: One rank sent [2], but another sent [3]", False),
        ("HorovodInternalError", "Requested to allreduce, allgather, or broadcast a tensor with the same name", False),
        ("HorovodInternalError", "Allgather is not supported with Join at this time.", False),
        ("HorovodInternalError", "Reducescatter with prescale_factor == 2 is not possible", False),
        ("HorovodInternalError", "Process-set rank zero tried to allgather a rank-zero tensor.", False),
        ("RuntimeError", SHUT_DOWN, False),
        ("ValueError", "connection closed by peer", False),
    ],
)
def test_echo_of_another_ranks_end_is_told_from_a_mistake(type_name, message, is_echo):
    assert HorovodConfig().is_broken_collective(Raised(0, type_name, message, "")) is is_echo


@pytest.mark.parametrize("timeout_s", [0, -1, float("nan"), float("inf")])
def test_timeout_that_is_none(timeout_s):
    with pytest.raises(ArgumentError, match="positive number of seconds"):
        HorovodConfig(timeout_s=timeout_s)


def test_horovod_is_missing(monkeypatch, tmp_path):
    """The line that installs it, and where to read on, since it has to be compiled."""
    monkeypatch.setitem(sys.modules, "horovod", None)  # where it is not installed, this changes nothing
    trainer = Trainer(backend="horovod", num_workers=1, engine="local", logdir=tmp_path)
    line = r"backend='horovod' needs the package 'horovod'.*pip install 'paceline\[horovod\]'"
    with pytest.raises(MissingDependencyError, match=line) as raised:
        trainer.start()
    assert any("docs/horovod.md" in note for note in raised.value.__notes__)
