"""What Horovod's ranks may ask of their rendezvous, and what they get. Pure: no socket in sight.

    PUT /scope/key      keeps the body                     GET /scope/key     the body, or 404 as long as there is none
    DELETE /scope/key   the rank has met all the others, and nobody will ask for what it has put there

What may be kept is bounded by the number of ranks.
"""

from typing import NamedTuple

MAX_HEAD_BYTES = 8192

REASONS = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    411: "Length Required",
    413: "Content Too Large",
    431: "Request Header Fields Too Large",
    507: "Insufficient Storage",
}


class Bounds(NamedTuple):
    """A rank puts an address of less than 200 bytes for each other rank into a scope, and its host's name. There are
    three scopes, and three more for each process set of the user's."""

    max_connections: int
    max_value_bytes: int
    max_total_bytes: int

    @classmethod
    def of(cls, num_ranks: int) -> "Bounds":
        value = 4096 + 512 * num_ranks
        return cls(64 + 4 * num_ranks, value, 64 * num_ranks * value)


class Request(NamedTuple):
    method: str
    path: str
    num_bytes: int
    """Of the body."""


class Refused(Exception):
    """A request that gets no other answer than this status."""

    def __init__(self, status: int):
        super().__init__(status)
        self.status = status


def parse_head(head: bytes, max_bytes: int) -> Request:
    """What stands before the body. Raises Refused."""
    first, *lines = head.decode("latin-1").split("\r\n")
    match first.split(" "):
        case [method, path, version] if path.startswith("/") and version.startswith("HTTP/1."):
            pass
        case _:
            raise Refused(400)
    if method not in ("GET", "PUT", "DELETE"):
        raise Refused(405)
    lengths = {value.strip() for name, _, value in (line.partition(":") for line in lines) if _is_length(name)}
    if not lengths:
        if method == "PUT":
            raise Refused(411)
        return Request(method, path, 0)
    length = lengths.pop()
    if lengths or not (length.isascii() and length.isdecimal()):
        raise Refused(400)
    if len(length) > 18 or int(length) > max_bytes:
        raise Refused(413)
    return Request(method, path, int(length))


def _is_length(name: str) -> bool:
    return name.strip().lower() == "content-length"


class Values:
    """What the ranks have put where. For one thread."""

    def __init__(self, max_total_bytes: int) -> None:
        self._values: dict[str, bytes] = {}
        self._max_bytes = max_total_bytes
        self._num_bytes = 0

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, bytes]:
        """The status and the body for it."""
        if path.count("/") != 2 or path.endswith("/") or path.startswith("//"):
            return 400, b""
        if method == "GET":
            found = self._values.get(path)
            return (404, b"") if found is None else (200, found)
        num_bytes = self._num_bytes - self._size_of(path)
        if method == "PUT":
            num_bytes += len(path) + len(body)
            if num_bytes > self._max_bytes:
                return 507, b""  # and what was there before stays
            self._values[path] = body
        else:
            self._values.pop(path, None)
        self._num_bytes = num_bytes
        return 200, b""

    def _size_of(self, path: str) -> int:
        return len(path) + len(self._values[path]) if path in self._values else 0
