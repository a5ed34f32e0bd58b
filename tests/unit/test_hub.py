"""Collectives among ranks that are threads here: real sockets, no processes."""

import contextlib
import os
import socket
import threading
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from paceline.core import DistributedContext, sockets
from paceline.core.exchange import Exchange, scopes_of
from paceline.core.hub import Hub
from paceline.core.link import Link
from paceline.core.meeting import Address, ExplicitMeeting
from paceline.errors import ArgumentError, TrainerStateError, WorkerError, WorkersLostError, WorkerStartError
from paceline.workers.base import Place


class Here:
    """Threads meet without anybody's help."""

    def __init__(self):
        self.address = Future()

    def wanted(self, place):
        return Address("127.0.0.1", 0, "secret")

    def tell(self, address, timeout_s):
        self.address.set_result(address)

    def find(self, place, timeout_s):
        return self.address.result(timeout_s)

    def forget(self):
        pass


def everywhere(fn, size=2, machines=1, timeout_s=20.0):
    """What `fn(context)` gives on each rank, or raises."""
    meeting, per_machine = Here(), size // machines

    def one(rank):
        place = Place(rank, rank % per_machine, rank // per_machine, size, per_machine)
        with DistributedContext._at(place, meeting, None, timeout_s) as context:
            try:
                return fn(context)
            except Exception as error:
                return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, range(size)))


def test_every_collective_gives_what_its_name_says():
    def work(context):
        rank = context.rank
        return [
            (context.gather(rank), context.allgather({"rank": rank}), context.broadcast(f"of {rank}")),
            (context.gather_local(rank), context.allgather_local(rank), context.broadcast_local(f"of {rank}")),
            context.allgather(b"x" * 3_000_000 if rank else b"")[1][:1],
        ]

    everybody = [{"rank": rank} for rank in range(4)]
    first, second, third, fourth = everywhere(work, size=4, machines=2)
    assert first == [([0, 1, 2, 3], everybody, "of 0"), ([0, 1], [0, 1], "of 0"), b"x"]
    assert second == [(None, everybody, "of 0"), (None, [0, 1], "of 0"), b"x"]
    assert third == [(None, everybody, "of 0"), ([2, 3], [2, 3], "of 2"), b"x"]
    assert fourth == [(None, everybody, "of 0"), (None, [2, 3], "of 2"), b"x"]


def test_a_single_process_needs_nobody():
    threads = threading.active_count()
    with DistributedContext() as context:
        assert (context.rank, context.size, context.is_chief, context.local_size) == (0, 1, True, 1)
        assert (context.gather("a"), context.allgather("a"), context.broadcast("a")) == (["a"], ["a"], "a")
        assert (context.gather_local(1), context.allgather_local(1), context.broadcast_local(1)) == ([1], [1], 1)
    assert threading.active_count() == threads


def test_ranks_out_of_step_are_told_so():
    calls = [lambda context: context.gather(1), lambda context: context.broadcast(1)]
    for error in everywhere(lambda context: calls[context.rank](context)):
        assert isinstance(error, WorkerError)
        assert "rank 0 in gather, its call 1, rank 1 in broadcast, its call 1" in str(error)


def test_ranks_that_wait_in_different_scopes_are_told_so():
    calls = [
        DistributedContext.gather,
        DistributedContext.gather,
        DistributedContext.gather,
        DistributedContext.gather_local,
    ]
    for error in everywhere(lambda context: calls[context.rank](context, 1), size=4, machines=2):
        assert "rank 3 in gather_local, its call 1" in str(error)


@pytest.mark.parametrize("lost", [0, 1])
def test_who_waits_for_a_rank_that_is_gone_is_told_so(lost):
    def work(context):
        context.allgather(1)
        if context.rank == lost:
            channel = context.channel()
            if lost:
                channel._sock.shutdown(socket.SHUT_RDWR)
            else:
                channel.close()
            return None
        return context.allgather(2)

    results = everywhere(work, size=3)
    for rank in {0, 1, 2} - {lost}:
        assert isinstance(results[rank], WorkersLostError), results
        assert f"ank {lost}" in str(results[rank])


def test_rank_that_was_lost_is_named_though_rank_0_has_left_since():
    has_left = threading.Event()

    def work(context):
        context.allgather(1)
        if context.rank == 1:
            context.channel()._sock.shutdown(socket.SHUT_RDWR)
            return None
        if context.rank == 2:
            assert has_left.wait(20)
            return context.allgather(2)
        try:
            return context.allgather(2)
        finally:
            context.close()
            has_left.set()

    for error in everywhere(work, size=3)[::2]:
        assert isinstance(error, WorkersLostError)
        assert "ank 1" in str(error)


def test_a_rank_that_does_not_come_is_named():
    done = threading.Event()

    def work(context):
        context.allgather(1)
        if context.rank == 1:
            done.wait(20)
            return None
        try:
            return context.gather(2)
        finally:
            if context.rank == 0:
                done.set()

    error = everywhere(work, size=3, timeout_s=1.0)[0]
    assert isinstance(error, WorkerError)
    assert "gather(): rank 1" in str(error)
    assert "has not come within 1 s" in str(error)


def test_rank_0_names_those_that_never_connect():
    hub = Hub(Address("127.0.0.1", 0, "secret"), Place(world_size=3, local_world_size=3), timeout_s=0.2)
    try:
        with pytest.raises(WorkerStartError, match="Rank 1, 2 has not come"):
            hub.wait_for_all()
    finally:
        hub.close()


def test_who_does_not_know_the_secret_is_no_rank():
    hub = Hub(Address("127.0.0.1", 0, "secret"), Place(world_size=2, local_world_size=2), timeout_s=20)
    try:
        with socket.create_connection(hub.address[:2], timeout=10) as stranger:
            nonce = stranger.recv(32)
            stranger.sendall(sockets.hello("guessed", nonce, 1, 1, 0, 1))
            assert stranger.recv(32) == b""
        with pytest.raises(WorkerStartError, match="port"):
            Link(lambda left_s: hub.address._replace(token="guessed"), Place(1, 1, 0, 2, 2), timeout_s=0.3)
        link = Link(lambda left_s: hub.address, Place(1, 1, 0, 2, 2), timeout_s=20)
        link.close()
    finally:
        hub.close()


def test_strangers_are_not_listened_to():
    def work(context):
        result = context.allgather(context.rank)
        if context.rank == 0:
            host, port, _ = context.channel().address
            for said in (b"\0" * 48, b"GET / HTTP/1.1\r\nHost: example.org\r\nAccept: */*\r\n\r\n"):
                with socket.create_connection((host, port), timeout=10) as stranger:
                    stranger.sendall(said)
                    nonce = stranger.recv(32)
                    assert len(nonce) == 32
                    rest = b""
                    with contextlib.suppress(ConnectionResetError):
                        rest = stranger.recv(1)
                    assert rest == b"", "the connection is closed without a word"
        return result, context.allgather(context.rank)

    assert everywhere(work) == [([0, 1], [0, 1])] * 2


def test_strangers_who_say_nothing_give_way_to_others():
    hub = Hub(Address("127.0.0.1", 0, "secret"), Place(0, 0, 0, 2, 2), 20.0)
    with contextlib.ExitStack() as stack:
        stack.callback(hub.close)
        where = ("127.0.0.1", hub.address.port)
        silent = [stack.enter_context(socket.create_connection(where, timeout=20)) for _ in range(65)]
        heard = b""
        while said := silent[0].recv(100):
            heard += said
        assert len(heard) == sockets.NONCE_BYTES
        link = Link(lambda _: hub.address, Place(1, 1, 0, 2, 2), 20.0)
        link.close()


@pytest.fixture
def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def test_ranks_meet_at_a_port_that_all_know(free_port, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / f"paceline-{os.getuid()}-{free_port}.secret").write_text("of a run that was killed")

    def one(rank):
        numbers = dict(rank=rank, size=2, local_rank=rank, local_size=2, cross_rank=0, cross_size=1)
        with DistributedContext(**numbers, chief_port=free_port, timeout_s=20) as context:
            return context.allgather(rank)

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(one, [1, 0])) == [[0, 1]] * 2
    assert list(tmp_path.iterdir()) == []


class Hvd:
    """What is used of horovod, for ranks that are threads: it is not installed here."""

    def __init__(self, rank, told):
        self._rank, self._told = rank, told

    def rank(self):
        return self._rank

    local_rank = rank

    def cross_rank(self):
        return 0

    def size(self):
        return 2

    local_size = size

    def cross_size(self):
        return 1

    def broadcast_object(self, value, root_rank, name):
        if self._rank == root_rank:
            self._told.set_result(value)
        return self._told.result(20)


def test_ranks_of_horovod_meet_by_its_broadcast():
    told = Future()

    def one(rank):
        with DistributedContext.from_horovod(Hvd(rank, told)) as context:
            return context.allgather(context.local_rank)

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(one, range(2))) == [[0, 1]] * 2


def test_other_machines_need_a_secret(monkeypatch):
    monkeypatch.delenv("PACELINE_TOKEN", raising=False)
    with pytest.raises(ArgumentError, match="PACELINE_TOKEN"):
        ExplicitMeeting("10.0.0.1", 4000).wanted(Place(world_size=2))
    monkeypatch.setenv("PACELINE_TOKEN", "ours")
    assert ExplicitMeeting("10.0.0.1", 4000).wanted(Place(world_size=2)) == ("10.0.0.1", 4000, "ours")


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        (dict(rank=0, size=2), "lacks local_rank, local_size, cross_rank, cross_size"),
        (dict(rank=2, size=2, local_rank=0, local_size=1, cross_rank=0, cross_size=1), "ranks count from 0"),
        (dict(rank=0, size=2.5, local_rank=0, local_size=1, cross_rank=0, cross_size=1), "whole number"),
    ],
)
def test_numbers_that_cannot_be(numbers, words):
    with pytest.raises(ArgumentError, match=words):
        DistributedContext(**numbers)


def test_several_ranks_need_a_way_to_meet():
    numbers = dict(rank=0, size=2, local_rank=0, local_size=2, cross_rank=0, cross_size=1)
    with DistributedContext(**numbers) as context, pytest.raises(ArgumentError, match="needs chief_port"):
        context.gather(1)
    with pytest.raises(TrainerStateError, match="is closed"):
        context.gather(1)


def test_scopes_put_the_first_rank_of_a_machine_first():
    assert scopes_of([(0, 1, 1), (1, 1, 0), (2, 0, 0)]) == {"all": (0, 1, 2), "machine 0": (2,), "machine 1": (1, 0)}


def test_exchange_forgets_who_has_given_up():
    exchange = Exchange({"all": (0, 1)}, timeout_s=5)
    assert exchange.enter(0, "all", 1, "gather", b"a", now=0) == []
    [late] = exchange.overdue(now=5)
    assert (late.rank, late.serial) == (0, 1)
    assert exchange.enter(1, "all", 1, "gather", b"b", now=6) == []
    refused = exchange.enter(0, "all", 2, "gather", b"c", now=6)
    assert {answer.rank for answer in refused} == {0, 1}, "rank 0 is a call ahead: nothing is mixed"
    assert all("out of step" in str(answer.value) for answer in refused)
