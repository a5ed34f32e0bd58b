"""A folder removed with all that is in it: however deep it is, whoever removes it too, and nothing behind a link."""

import os
import stat
from contextlib import suppress

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_MOST_DEPTH = 100


def remove_folder(name: str | os.PathLike[str], dir_fd: int | None = None) -> None:
    """Walked by descriptors, which links cannot turn elsewhere. What somebody else removes meanwhile is as good as
    removed. OSError for what cannot be.

    Not `shutil.rmtree`: it fails for a tree that is deeper than Python's stack, and for what is gone already."""
    with suppress(FileNotFoundError):
        top = os.open(name, _FOLDER, dir_fd=dir_fd)
        try:
            while os.listdir(top):
                _empty(top, top, 0)
        finally:
            os.close(top)
        os.rmdir(name, dir_fd=dir_fd)


def _empty(fd: int, top: int, depth: int) -> None:
    for name in os.listdir(fd):
        with suppress(FileNotFoundError):
            if not stat.S_ISDIR(os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode):
                os.unlink(name, dir_fd=fd)
            elif depth == _MOST_DEPTH:
                _lift(name, fd, top)
            else:
                inner = os.open(name, _FOLDER, dir_fd=fd)
                try:
                    _empty(inner, top, depth + 1)
                finally:
                    os.close(inner)
                os.rmdir(name, dir_fd=fd)


def _lift(name: str, fd: int, top: int) -> None:
    """What is too deep comes up to the top, and is removed from there: neither stack nor descriptors run out."""
    os.rename(name, f".deep_{os.getpid()}_{os.urandom(6).hex()}", src_dir_fd=fd, dst_dir_fd=top)
