"""Standard streams that take whatever is printed, wherever this program was started from."""

import codecs
import os
import sys

_ESCAPING = "paceline.escaping"


def suit() -> None:
    """A stream that is closed, as of `>&-`, is opened as one that nobody reads: its number would be that of the next
    file, and a worker's output would go there. What an encoding has not got comes as an escape, and raises nothing."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            stream = open(os.devnull, mode)  # noqa: SIM115 - it has the lowest number that is free, and stays
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)
    codecs.register_error(_ESCAPING, escaped)
    if getattr(sys.stdout, "errors", None) in ("strict", "surrogateescape"):  # the other one where the locale is C
        sys.stdout.reconfigure(errors=_ESCAPING)  # type: ignore[union-attr]


def escaped(error: UnicodeError) -> tuple[str | bytes, int]:
    """The first character that cannot be encoded: one that stands for a byte of a file's name as that byte, any other
    as JSON has it, so that JSON stays the same value."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    code = ord(error.object[error.start])
    if 0xDC80 <= code <= 0xDCFF:
        return bytes([code - 0xDC00]), error.start + 1
    units = [code] if code < 0x10000 else [0xD800 + (code - 0x10000 >> 10), 0xDC00 + (code - 0x10000 & 0x3FF)]
    return "".join(f"\\u{unit:04x}" for unit in units), error.start + 1


def mute() -> None:
    """What is still in the buffer of a stream that takes no more goes nowhere, and so nobody complains at the exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
