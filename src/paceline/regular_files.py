"""Files of a folder that somebody else may have written: opened only if they are what they seem to be.

A pipe or a device in the place of a file would block or never end, and a link can lead anywhere on this machine.
"""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress

DOCUMENT_BYTES = 256 * 2**20
"""More than any document of ours that is read as a whole."""

_Path = str | os.PathLike[str]


class UnreadableFileError(OSError):
    """There is something in the place of a file, and it is not to be read as one; `strerror` says why."""


def open_regular(path: _Path, root: _Path | None = None) -> int:
    """A descriptor to read from; never blocks. A link is followed if it stays in `root`, which is the file's own
    folder unless it is given. FileNotFoundError if nothing is there, UnreadableFileError for anything but a file.
    """
    with _explained(path):
        real = os.path.realpath(path)
        if not is_inside(real, os.path.dirname(path) if root is None else root):
            raise OSError(errno.ELOOP, "it is a link that leads out of its folder")
        fd = os.open(real, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise OSError(errno.EINVAL, "it is not a regular file")
        except BaseException:
            os.close(fd)
            raise
        return fd


def read_regular(path: _Path, most_bytes: int, root: _Path | None = None) -> bytes:
    """The content of a file, which is opened as above. UnreadableFileError, too, if it has more than `most_bytes`."""
    with _explained(path), open(open_regular(path, root), "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most_bytes:
            raise OSError(errno.EFBIG, f"it has {size:,} bytes, and is read up to {most_bytes:,} only")
        return file.readall()


def is_inside(path: _Path, root: _Path) -> bool:
    """Whether a path lies in a folder, wherever links lead that are on the way to either."""
    real, folder = os.path.realpath(path), os.path.realpath(root)
    return os.path.commonpath([real, folder]) == folder


def walk(path: _Path) -> Iterator[tuple[str, list[str], list[str]]]:
    """Each folder, with the names of those in it and of all else; a link is followed nowhere. As `os.walk`, which in
    Python 3.11 fails for what is deeper than its stack."""
    waiting = [os.fspath(path)]
    while waiting:
        folder = waiting.pop()
        folders: list[str] = []
        names: list[str] = []
        with suppress(OSError), os.scandir(folder) as entries:
            for entry in entries:
                (folders if entry.is_dir() else names).append(entry.name)
        yield folder, folders, names
        inner = (os.path.join(folder, name) for name in sorted(folders, reverse=True))
        waiting += [one for one in inner if not os.path.islink(one)]


@contextmanager
def _explained(path: _Path) -> Iterator[None]:
    try:
        yield
    except (FileNotFoundError, NotADirectoryError, ValueError) as error:
        # ValueError: there is a NUL in the name, or half a character, and so no file can have it
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path)) from error
    except UnreadableFileError:
        raise
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise FileNotFoundError(errno.ENOENT, error.strerror, str(path)) from error
        raise UnreadableFileError(error.errno, error.strerror, str(path)) from error
