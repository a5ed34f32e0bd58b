"""Collectives among ranks that are threads here: real sockets, no processes."""

import contextlib
import os
import selectors
import socket
import threading
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from paceline.core import DistributedContext, sockets
from paceline.core.arrivals import ANSWER_S, MOST_WAITING, Arrivals
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


@pytest.fixture
def hub():
    hub = Hub(Address("127.0.0.1", 0, "secret"), Place(world_size=2, local_world_size=2), timeout_s=20)
    yield hub
    hub.close()


def said_after_the_challenge(stranger):
    """What rank 0 has to say; nothing when the connection is closed without a word."""
    assert len(stranger.recv(32)) == 32
    with contextlib.suppress(ConnectionResetError):
        return stranger.recv(1)
    return b""


def test_strangers_are_not_listened_to(hub):
    host, port, _ = hub.address
    for said in (b"\0" * 48, b"GET / HTTP/1.1\r\nHost: example.org\r\nAccept: */*\r\n\r\n"):
        with socket.create_connection((host, port), timeout=10) as stranger:
            stranger.sendall(said)
            assert said_after_the_challenge(stranger) == b""
    link = Link(lambda left_s: hub.address, Place(1, 1, 0, 2, 2), timeout_s=20)
    with contextlib.closing(link), pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, port), timeout=10)  # all have come, and nobody else is expected


def test_crowd_of_silent_strangers_does_not_keep_a_rank_out(hub):
    with contextlib.ExitStack() as stack:
        crowd = [
            stack.enter_context(socket.create_connection(hub.address[:2], timeout=10)) for _ in range(MOST_WAITING + 5)
        ]
        for first in crowd[:5]:
            assert said_after_the_challenge(first) == b"", "they had to go"
        link = Link(lambda left_s: hub.address, Place(1, 1, 0, 2, 2), timeout_s=20)
        stack.callback(link.close)
        assert said_after_the_challenge(crowd[-1]) == b"", "the door is closed"


def test_stranger_who_says_nothing_has_to_go_after_a_while():
    now = 0.0
    with socket.create_server(("127.0.0.1", 0)) as server, selectors.DefaultSelector() as selector:
        arrivals = Arrivals(server, selector, "secret", clock=lambda: now)
        with socket.create_connection(server.getsockname(), timeout=10) as stranger:
            arrivals.accept()
            [arrival] = [key.data for key in selector.get_map().values() if key.data is not None]
            stranger.sendall(b"h")
            now = ANSWER_S - 1
            arrivals.dismiss_late()
            assert arrivals.hear(arrival) is None
            now = ANSWER_S
            arrivals.dismiss_late()
            assert said_after_the_challenge(stranger) == b""
            assert arrivals.hear(arrival) is None, "the selector may have seen it before"
        arrivals.close()


def test_rank_is_nobody_else_when_it_is_there_already():
    hub = Hub(Address("127.0.0.1", 0, "secret"), Place(world_size=3, local_world_size=3), timeout_s=20)
    answers = []
    try:
        with contextlib.ExitStack() as stack:
            for _ in range(2):
                comer = stack.enter_context(socket.create_connection(hub.address[:2], timeout=10))
                said = sockets.hello("secret", comer.recv(32), 1, 1, 0, 1)
                comer.sendall(said)
                answers.append(comer.recv(32) == sockets.welcome("secret", said))
    finally:
        hub.close()
    assert answers == [True, False]


def test_rank_does_not_believe_who_does_not_know_the_secret():
    """A program that has taken the port: what a rank hears from there, it would unpickle."""
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:

        def pretend():
            conn, _ = server.accept()
            with conn:
                conn.sendall(b"n" * 32)
                conn.recv(48)
                conn.sendall(b"w" * 32)
            server.close()

        pretending = pool.submit(pretend)
        address = Address(*server.getsockname(), "secret")
        with pytest.raises(WorkerStartError, match="cannot reach rank 0"):
            Link(lambda left_s: address, Place(1, 1, 0, 2, 2), timeout_s=0.3)
        pretending.result(20)


def test_answer_of_a_collective_that_was_given_up_is_not_that_of_the_next(hub):
    link = Link(lambda left_s: hub.address, Place(1, 1, 0, 2, 2), timeout_s=20)
    with contextlib.closing(link):
        link._serials["all"] = 1  # the first one took too long

        def answer_both(message):
            hub.post(1, ("collective", "all", 1, "late"))
            hub.post(1, ("collective", "all", 2, "mine"))

        link.send = answer_both
        assert link.exchange("all", "gather", b"") == "mine"


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


def test_secret_is_no_pipe_of_somebody_else(free_port, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    path = tmp_path / f"paceline-{os.getuid()}-{free_port}.secret"
    meeting = ExplicitMeeting(None, free_port)
    os.mkfifo(path)
    with pytest.raises(TimeoutError, match="does not listen"):
        meeting.find(Place(1, 1, 0, 2, 2), 0.0)
    path.unlink()
    path.mkdir()  # as good as a file that only its owner may remove
    with pytest.raises(WorkerStartError, match="chief_port"):
        meeting.tell(Address("127.0.0.1", free_port, "secret"), 20)


def test_secret_of_another_user_is_none(free_port, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(os, "getuid", lambda: os.stat(tmp_path).st_uid + 1)
    (tmp_path / f"paceline-{os.getuid()}-{free_port}.secret").write_text("theirs")
    with pytest.raises(TimeoutError, match="does not listen"):
        ExplicitMeeting(None, free_port).find(Place(1, 1, 0, 2, 2), 0.0)


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
