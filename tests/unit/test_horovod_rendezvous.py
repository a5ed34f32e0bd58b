"""Where Horovod's ranks find each other, spoken to as they speak, and as nobody should."""

import socket
import threading

import pytest

from paceline.backends import horovod_rendezvous
from paceline.backends.horovod_rendezvous import Rendezvous
from paceline.backends.horovod_requests import MAX_HEAD_BYTES, Bounds, Refused, Request, Values, parse_head
from paceline.errors import WorkerStartError

NUM_RANKS = 2
BOUNDS = Bounds.of(NUM_RANKS)


@pytest.fixture
def rendezvous():
    server = Rendezvous("127.0.0.1", NUM_RANKS)
    yield server
    server.close()


def connect(server):
    return socket.create_connection(("127.0.0.1", server.port), timeout=60)


def answer(sock):
    """Status and body, read as Horovod's client does: until there is as much as the header says, in its spelling."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += received(sock)
    head, _, body = data.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    [length] = [int(line.removeprefix("Content-Length: ")) for line in lines if line.startswith("Content-Length: ")]
    while len(body) < length:
        body += received(sock)
    assert len(body) == length
    return int(first.split(" ")[1]), body


def received(sock):
    data = sock.recv(4096)
    assert data, "the connection was closed before the end of the answer"
    return data


def ask(server, method, path, body=b""):
    with connect(server) as sock:
        sock.sendall(f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n\r\n".encode())
        sock.sendall(body)
        return answer(sock)


def say(server, data):
    with connect(server) as sock:
        sock.sendall(data)
        return answer(sock)


# --- as Horovod does ------------------------------------------------------------------------------------------------


def test_value_is_there_from_put_to_delete(rendezvous):
    address = bytes(range(256))
    assert ask(rendezvous, "GET", "/global/0") == (404, b"")
    assert ask(rendezvous, "PUT", "/global/0", address) == (200, b"")
    assert ask(rendezvous, "GET", "/global/0") == (200, address)
    assert ask(rendezvous, "GET", "/global/1") == (404, b"")
    assert ask(rendezvous, "GET", "/local_node0/0") == (404, b""), "each scope has keys of its own"
    assert ask(rendezvous, "DELETE", "/global/0") == (200, b"")
    assert ask(rendezvous, "GET", "/global/0") == (404, b"")
    assert ask(rendezvous, "DELETE", "/global/0") == (200, b""), "also of what is not there"


def test_empty_value_is_a_value(rendezvous):
    """A rank that is alone has no addresses for others."""
    assert ask(rendezvous, "PUT", "/cross_0/0") == (200, b"")
    assert ask(rendezvous, "GET", "/cross_0/0") == (200, b"")


def test_last_value_counts(rendezvous):
    """A group that is shut down and made again meets in the same scopes."""
    for value in (b"one", b"another"):
        ask(rendezvous, "PUT", "/global/rank_0", value)
    assert ask(rendezvous, "GET", "/global/rank_0") == (200, b"another")


def test_ranks_meet_that_come_at_different_times(rendezvous):
    """Each asks again and again until the other's address is there."""
    found = {}

    def rank(number):
        ask(rendezvous, "PUT", f"/global/{number}", f"address of {number}".encode())
        status = 404
        while status == 404:
            status, found[number] = ask(rendezvous, "GET", f"/global/{1 - number}")

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {0: b"address of 1", 1: b"address of 0"}


def test_largest_value_of_a_rank_fits_in_pieces(rendezvous):
    value = b"x" * BOUNDS.max_value_bytes
    with connect(rendezvous) as sock:
        sock.sendall(b"PUT /global/0 HTTP/1.1\r\nContent-Le")
        sock.sendall(f"ngth: {len(value)}\r\n\r\n".encode() + value[:-1])
        sock.sendall(value[-1:])
        assert answer(sock) == (200, b"")
    assert ask(rendezvous, "GET", "/global/0") == (200, value)


def test_bounds_hold_what_many_ranks_need():
    """gloo writes 136 bytes for each other rank; three scopes, and three for a process set of all."""
    for num_ranks in (1, 2, 100, 10_000):
        bounds, needed = Bounds.of(num_ranks), 136 * (num_ranks - 1)
        assert bounds.max_value_bytes >= needed + 256
        assert bounds.max_total_bytes >= 6 * num_ranks * (needed + 256 + 2 * 100)
        assert bounds.max_connections > num_ranks


# --- as nobody should -----------------------------------------------------------------------------------------------


JUNK = {
    "another method": (b"POST /global/0 HTTP/1.1\r\nContent-Length: 0\r\n\r\n", 405),
    "method in lower case": (b"get /global/0 HTTP/1.1\r\n\r\n", 405),
    "no length": (b"PUT /global/0 HTTP/1.1\r\n\r\n", 411),
    "negative length": (b"PUT /global/0 HTTP/1.1\r\nContent-Length: -1\r\n\r\n", 400),
    "length as in Python": (b"PUT /global/0 HTTP/1.1\r\nContent-Length: 1_0\r\n\r\n", 400),
    "length in other digits": (b"PUT /global/0 HTTP/1.1\r\nContent-Length: \xb2\r\n\r\n", 400),
    "two lengths": (b"PUT /global/0 HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", 400),
    "large": (b"PUT /global/0 HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % (BOUNDS.max_value_bytes + 1), 413),
    "larger than any number": (b"PUT /global/0 HTTP/1.1\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n", 413),
    "no key": (b"GET /global HTTP/1.1\r\n\r\n", 400),
    "empty key": (b"GET /global/ HTTP/1.1\r\n\r\n", 400),
    "empty scope": (b"GET //0 HTTP/1.1\r\n\r\n", 400),
    "three parts": (b"GET /global/0/1 HTTP/1.1\r\n\r\n", 400),
    "no path": (b"GET global/0 HTTP/1.1\r\n\r\n", 400),
    "no version": (b"GET /global/0\r\n\r\n", 400),
    "another protocol": (b"GET /global/0 SMTP/1.1\r\n\r\n", 400),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
    "nothing": (b"\r\n\r\n", 400),
    "long header": (b"GET /global/0 HTTP/1.1\r\nX: " + b"x" * MAX_HEAD_BYTES, 431),
    "no end": (b"x" * 100_000, 431),
}


@pytest.mark.parametrize("junk", JUNK)
def test_junk_is_refused_and_changes_nothing(rendezvous, junk):
    data, status = JUNK[junk]
    ask(rendezvous, "PUT", "/global/0", b"address")
    assert say(rendezvous, data)[0] == status
    assert ask(rendezvous, "GET", "/global/0") == (200, b"address")


def test_value_that_is_too_large_is_refused_though_it_is_sent(rendezvous):
    """Whoever sends it gets the answer, and not a connection that is reset."""
    with connect(rendezvous) as sock:
        sock.sendall(b"PUT /global/0 HTTP/1.1\r\nContent-Length: 3000000\r\n\r\n")
        sock.recv(1, socket.MSG_PEEK)  # it has been answered
        sock.sendall(b"x" * 3_000_000)
        assert answer(sock) == (413, b"")
    assert ask(rendezvous, "GET", "/global/0") == (404, b"")


def test_who_floods_it_with_values_fills_only_his_part():
    values = Values(max_total_bytes=1000)
    statuses = [values.answer("PUT", f"/flood/{number:02}", b"x" * 91)[0] for number in range(20)]
    assert statuses == [200] * 10 + [507] * 10, "each counts with its name"
    assert values.answer("GET", "/flood/09", b"") == (200, b"x" * 91)
    assert values.answer("GET", "/flood/10", b"") == (404, b"")
    values.answer("DELETE", "/flood/03", b"")
    assert values.answer("PUT", "/flood/10", b"x" * 91) == (200, b""), "what is deleted makes room"
    assert values.answer("PUT", "/flood/10", b"y" * 91) == (200, b""), "and so does what is replaced"


def test_value_that_does_not_fit_leaves_the_one_before():
    values = Values(max_total_bytes=100)
    assert values.answer("PUT", "/scope/key", b"before") == (200, b"")
    assert values.answer("PUT", "/scope/key", bytes(100)) == (507, b"")
    assert values.answer("GET", "/scope/key", b"") == (200, b"before")
    assert values.answer("PUT", "/scope/key", bytes(90)) == (200, b""), "the one before counts no more"


def test_slow_clients_hold_nobody_up(rendezvous):
    """Also when they are more than it has room for: the oldest of them goes."""
    begun = [connect(rendezvous) for _ in range(BOUNDS.max_connections + 10)]
    try:
        for sock in begun:
            sock.sendall(b"PUT /global/0 HTTP/1.1\r\n")
        assert ask(rendezvous, "PUT", "/global/1", b"address") == (200, b"")
        assert ask(rendezvous, "GET", "/global/1") == (200, b"address")
        assert is_closed(begun[0])
        begun[-1].sendall(b"Content-Length: 2\r\n\r\nok")
        assert answer(begun[-1]) == (200, b"")
        assert [thread.name for thread in threading.enumerate()].count("paceline-rendezvous") == 1
    finally:
        for sock in begun:
            sock.close()


def is_closed(sock):
    """By the other side: nothing comes, or that it has been reset."""
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True


def test_client_that_sends_nothing_is_dropped_in_time(monkeypatch):
    monkeypatch.setattr(horovod_rendezvous, "REQUEST_S", 0.05)
    server = Rendezvous("127.0.0.1", NUM_RANKS)
    try:
        with connect(server) as silent, connect(server) as slow:
            slow.sendall(b"GET /")
            assert is_closed(silent)
            assert is_closed(slow)
    finally:
        server.close()


def test_client_that_goes_in_the_middle_leaves_nothing(rendezvous):
    for beginning in (b"", b"PUT /global/0 HTTP/1.1\r\nContent-Length: 7\r\n\r\naddr"):
        with connect(rendezvous) as sock:
            sock.sendall(beginning)
    assert ask(rendezvous, "GET", "/global/0") == (404, b"")


def test_it_ends_while_clients_wait_and_is_gone():
    server = Rendezvous("127.0.0.1", NUM_RANKS)
    with connect(server) as sock:
        sock.sendall(b"GET /global/0 HTTP/1.1\r\n")
        server.close()
        server.close()
        assert is_closed(sock)
    with pytest.raises(ConnectionRefusedError):
        connect(server)


def test_it_listens_on_the_address_it_was_given_and_no_other(rendezvous):
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", rendezvous.port), timeout=60)


def test_address_that_cannot_be_used():
    with pytest.raises(WorkerStartError, match=r"cannot listen on 203\.0\.113\.7.*--node-ip-address"):
        Rendezvous("203.0.113.7", NUM_RANKS)  # of a block that is reserved for documentation
    with pytest.raises(WorkerStartError, match=r"::1.*IPv4 only"):
        Rendezvous("::1", NUM_RANKS)


def test_head_is_read_as_its_client_writes_it():
    head = b"PUT /local_node0/rank_1 HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 12"
    assert parse_head(head, 12) == Request("PUT", "/local_node0/rank_1", 12)
    assert parse_head(b"GET /global/0 HTTP/1.1", 12) == Request("GET", "/global/0", 0)
    with pytest.raises(Refused):
        parse_head(head, 11)
