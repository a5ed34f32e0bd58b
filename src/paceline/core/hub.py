"""Rank 0's end of the connections among ranks that somebody else has started: one thread listens to all others.

It carries the collectives of `DistributedContext`, and, from `begin` to `finish`, the sessions of one run. Nothing here
waits for a rank that does not read: what it should get is kept until it does.
"""

import contextlib
import logging
import os
import pickle
import selectors
import socket
import threading
import time
from concurrent.futures import Future
from typing import Any, Protocol

from paceline.core import sockets
from paceline.core.arrivals import MOST_WAITING, Arrival, Arrivals
from paceline.core.exchange import Answer, Exchange, scopes_of
from paceline.core.meeting import Address
from paceline.core.peer import Peer
from paceline.errors import PacelineError, WorkerError, WorkersLostError, WorkerStartError
from paceline.rank_session import Task
from paceline.workers import parcel
from paceline.workers.base import Asked, Place
from paceline.workers.outcome import Error
from paceline.workers.reports import unpack

logger = logging.getLogger(__name__)

_TICK_S = 0.05
_LAST_WORD_S = 5.0
_MARGIN_S = 10.0
"""By so much longer than the thread, who waits for it is patient."""


class Listener(Protocol):
    """Who hosts the run."""

    def take(self, rank: int, kind: str, value: Any) -> None: ...

    def ask(self, question: Asked) -> None: ...

    def request_stop(self, kind: str) -> None: ...

    def end(self, rank: int, error: Error | None, is_stop: bool) -> None: ...

    def lose(self, rank: int, reason: str) -> None: ...

    def tick(self) -> None: ...


class Hub:
    """See `Channel` and `Peers`. Open from the start; `close` is due."""

    def __init__(self, wanted: Address, place: Place, timeout_s: float):
        self._place, self._size, self._timeout_s = place, place.world_size, timeout_s
        server = _listening(wanted, self._size)
        self.address = Address(wanted.host, server.getsockname()[1], wanted.token)
        self._owner_pid = os.getpid()
        self._lock = threading.RLock()
        self._news = threading.Condition(self._lock)
        self._connections: set[Peer] = set()
        self._ranks: dict[int, Peer] = {}
        self._lost: dict[int, str] = {}
        self._exchange: Exchange | None = None
        self._serials: dict[str, int] = {}
        self._mine: Future[Any] | None = None
        self._listener: Listener | None = None
        self._is_closing = False
        self._selector = selectors.DefaultSelector()
        self._ear, self._bell = socket.socketpair()
        for sock in (server, self._ear, self._bell):
            sock.setblocking(False)
            sockets.guard(sock)
        self._selector.register(self._ear, selectors.EVENT_READ, None)
        self._arrivals = Arrivals(server, self._selector, wanted.token, max(MOST_WAITING, place.world_size))
        self._thread = threading.Thread(target=self._serve, name="paceline-hub", daemon=True)
        self._thread.start()

    @property
    def pids(self) -> list[int]:
        """Of the other ranks."""
        return [self._ranks[rank].known.pid for rank in range(1, self._size)]

    def wait_for_all(self) -> None:
        """Until every rank is connected. WorkerStartError names those that have not come in time."""
        with self._news:
            self._news.wait_for(lambda: self._lost or len(self._ranks) == self._size - 1, self._timeout_s)
            missing = [str(rank) for rank in range(1, self._size) if rank not in self._ranks or rank in self._lost]
        if missing:
            raise WorkerStartError(
                f"Rank {', '.join(missing)} has not come within {self._timeout_s:g} s, or has gone again. All ranks "
                "have to call core.init(), record_run() or the first collective together."
            )

    def exchange(self, scope: str, op: str, payload: bytes) -> Any:
        with self._lock:
            serial = self._serials[scope] = self._serials.get(scope, 0) + 1
            mine = self._mine = Future[Any]()
            self._give(self._meeting().enter(0, scope, serial, op, payload, time.monotonic()))
        try:
            return mine.result(self._timeout_s + _MARGIN_S)
        except TimeoutError:
            raise WorkerError(f"{op}(): no answer within {self._timeout_s:g} s.") from None

    def begin(self, listener: Listener, task: Task) -> None:
        """A run begins, of which each rank gets its task."""
        packed = parcel.dumps(task)
        with self._lock:
            self._listener = listener
            for rank in self._ranks:
                self.post(rank, ("begin", packed))
            lost = dict(self._lost)
        for rank, reason in lost.items():
            listener.lose(rank, reason)

    def post(self, rank: int, message: tuple[Any, ...]) -> None:
        body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        with self._lock:
            peer = self._ranks.get(rank)
            if peer is not None and rank not in self._lost:
                peer.put(body)
                self._push(peer)

    def fail(self, error: PacelineError) -> None:
        with self._lock:
            self._give(self._meeting().fail(error))
            for rank in self._ranks:
                self.post(rank, ("failed", error))

    def finish(self, error: PacelineError | None, wished: str | None = None) -> None:
        """The run is over, because of this error or signal: the ranks are told, as far as they listen."""
        if os.getpid() != self._owner_pid:
            return
        with self._news:
            for rank in self._ranks:
                self.post(rank, ("over", error, wished))
            self._listener = None
            self._news.wait_for(lambda: not any(peer.has_more for peer in self._connections), _LAST_WORD_S)

    def close(self) -> None:
        if os.getpid() != self._owner_pid or self._is_closing:
            return
        with self._news:
            self._news.wait_for(lambda: not any(peer.has_more for peer in self._connections), _LAST_WORD_S)
            self._listener = None
            for peer in self._connections:
                with contextlib.suppress(OSError):
                    peer.sock.shutdown(socket.SHUT_WR)
            # To close it while something is unread would take back what was sent: they close it when they have read.
            self._news.wait_for(lambda: not self._connections, _LAST_WORD_S)
            self._is_closing = True
        self._wake()
        self._thread.join(_LAST_WORD_S)

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            while not self._is_closing:
                for key, mask in self._selector.select(_TICK_S):
                    self._attend(key.fileobj, key.data, mask)
                self._go_round()
        except BaseException as error:  # a mistake of ours: nobody may wait for this thread
            logger.exception("The connection among the ranks has failed")
            self._give_up(f"rank 0 cannot listen any more ({type(error).__name__}: {error})")
        finally:
            self._arrivals.close()
            for sock in (self._ear, self._bell, *(peer.sock for peer in self._connections)):
                sock.close()
            self._selector.close()

    def _give_up(self, reason: str) -> None:
        with self._lock:
            if self._exchange is not None:
                self._give(self._exchange.fail(WorkerError(f"The ranks cannot meet any more: {reason}.")))
            listener = self._listener
        if listener is not None:
            for rank in self._ranks:
                listener.lose(rank, reason)

    def _attend(self, sock: Any, who: Peer | Arrival | None, mask: int) -> None:
        if sock is self._ear:
            with contextlib.suppress(BlockingIOError):
                self._ear.recv(4096)
        elif who is None:
            self._arrivals.accept()
        elif isinstance(who, Arrival):
            self._meet(who)
        elif mask & selectors.EVENT_READ:
            self._read(who)

    def _go_round(self) -> None:
        self._arrivals.dismiss_late()
        with self._lock:
            for peer in list(self._connections):
                self._push(peer)
                events = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.has_more else 0)
                if peer in self._connections and self._selector.get_key(peer.sock).events != events:
                    self._selector.modify(peer.sock, events, peer)
            if self._exchange is not None:
                self._give(self._exchange.overdue(time.monotonic()))
            self._news.notify_all()
            listener = self._listener
        if listener is not None:
            listener.tick()

    def _meet(self, arrival: Arrival) -> None:
        known = self._arrivals.hear(arrival)
        if known is None:
            return
        with self._lock:
            if not 0 < known.rank < self._size or known.rank in self._ranks:
                self._arrivals.dismiss(arrival)
                return
            sock = self._arrivals.admit(arrival)
            peer = self._ranks[known.rank] = Peer(sock, known)
            self._connections.add(peer)
            self._selector.register(sock, selectors.EVENT_READ, peer)
            peer.put(sockets.welcome(self.address.token, arrival.said), is_framed=False)
            self._push(peer)
            if len(self._ranks) == self._size - 1:
                self._arrivals.close()
                for rank in self._ranks:
                    self.post(rank, ("ready",))
            self._news.notify_all()

    def _read(self, peer: Peer) -> None:
        try:
            for body in peer.reader.bodies():
                self._handle(peer, peer.known.rank, pickle.loads(body))
        except Exception as error:
            self._drop(peer, f"sent something that makes no sense ({type(error).__name__}: {error})")
            return
        if peer.reader.closed:
            self._drop(peer, f"its process {peer.known.pid} has ended, or cannot be reached any more")

    def _handle(self, peer: Peer, rank: int, message: tuple[Any, ...]) -> None:
        listener = self._listener
        match message:
            case ("collective", scope, serial, op, payload):
                with self._lock:
                    self._give(self._meeting().enter(rank, scope, serial, op, payload, time.monotonic()))
            case ("bye",):
                peer.has_left = True
            case _ if listener is None:
                pass  # of a run that is over
            case ("report", packed):
                with contextlib.suppress(BaseException):  # it is noted, and raised where somebody can act on it
                    listener.take(rank, "report", unpack(packed))
            case ("sent", kind, value):
                with contextlib.suppress(BaseException):
                    listener.take(rank, kind, value)
            case ("asked", number, topic, value):
                listener.ask(Asked(rank, number, topic, value))
            case ("stopping", kind):
                listener.request_stop(kind)
            case ("ended", error, is_stop):
                peer.has_left = True
                with contextlib.suppress(BaseException):
                    listener.end(rank, error, is_stop)
                with self._lock:
                    self._give(self._meeting().lose(rank, "has left the block of the run"))

    def _drop(self, peer: Peer, reason: str) -> None:
        with self._lock:
            if peer not in self._connections:
                return
            self._connections.discard(peer)
            self._selector.unregister(peer.sock)
            peer.close()
            rank, listener = peer.known.rank, self._listener
            if self._exchange is not None:
                self._give(self._exchange.lose(rank, f"is gone: {reason}"))
            if not peer.has_left:
                self._lost[rank] = reason
                if listener is None and self._exchange is not None:  # else that one tells everybody
                    self.fail(WorkersLostError(f"Rank {rank} is gone: {reason}."))
            self._news.notify_all()
        if listener is not None and not peer.has_left:
            listener.lose(rank, reason)

    # --- with the lock ------------------------------------------------------------------------------------------------

    def _meeting(self) -> Exchange:
        if self._exchange is None:
            others = [peer.known for peer in self._ranks.values()]
            here = (0, self._place.node_rank, self._place.local_rank)
            everybody = [here, *((one.rank, one.machine, one.local_rank) for one in others)]
            self._exchange = Exchange(scopes_of(everybody), self._timeout_s)
            for rank, reason in self._lost.items():
                self._exchange.lose(rank, f"is gone: {reason}")
        return self._exchange

    def _give(self, answers: list[Answer]) -> None:
        for answer in answers:
            if answer.rank:
                self.post(answer.rank, ("collective", answer.scope, answer.serial, answer.value))
            elif self._mine is not None and not self._mine.done():
                if isinstance(answer.value, BaseException):
                    self._mine.set_exception(answer.value)
                else:
                    self._mine.set_result(answer.value)

    def _push(self, peer: Peer) -> None:
        """The thread does the rest; it would wake itself for ever."""
        peer.push()
        if peer.has_more and threading.current_thread() is not self._thread:
            self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            self._bell.send(b".")


def _listening(wanted: Address, size: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in wanted.host else socket.AF_INET
        return socket.create_server((wanted.host, wanted.port), family=family, backlog=max(128, size))
    except OSError as error:
        raise WorkerStartError(
            f"Rank 0 cannot listen at {wanted.host}, port {wanted.port or 'any'}, where the other ranks are to "
            f"reach it: {error}. Give an address of this machine as chief_ip."
        ) from error
