"""Finds the regular files below a path, and their holes."""

from __future__ import annotations

import dataclasses
import errno
import os
import stat
import sys
import sysconfig
from collections.abc import Callable, Iterator
from typing import Final

__all__ = ["File", "Skipped", "find_files", "open_file", "pieces", "reason_of", "standard_library"]

#: A sparse file with more pieces than this is read as if it had no holes.
MOST_PIECES: Final = 4096

_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)

_KINDS = (
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a character device"),
    (stat.S_ISBLK, "a block device"),
)


@dataclasses.dataclass(frozen=True, slots=True)
class File:
    """A regular file, with its state when it was found."""

    path: str  #: absolute; bytes that are not UTF-8 are surrogate-escaped
    size: int
    changed_ns: int  #: time of the last change
    pieces: tuple[tuple[int, int], ...]  #: (offset, length) of the parts that are not holes

    @property
    def streamed(self) -> int:
        """Bytes that are not holes."""
        return sum(length for _, length in self.pieces)


@dataclasses.dataclass(frozen=True, slots=True)
class Skipped:
    """A path that is not read, and the reason."""

    path: str
    reason: str


def standard_library() -> tuple[str, frozenset[str]]:
    """Return the folder of Python's standard library, and the names of folders in it that belong to other packages."""
    return sysconfig.get_paths()["stdlib"], frozenset({"site-packages", "dist-packages", "__pycache__"})


def find_files(
    root: str, without: frozenset[str] = frozenset(), given_up: Callable[[], bool] = lambda: False
) -> tuple[list[File], list[Skipped]]:
    """Return all regular files at or below a path, sorted by folder and name, and the skipped paths. It blocks.

    It stops early when ``given_up()`` returns True. Links to files are followed. Links to folders are not,
    because they may form a loop. Such a folder is found without the link, or is not below the path.
    """
    files: list[File] = []
    skipped: list[Skipped] = []
    for path, is_link in _walk(os.path.abspath(root), without, skipped):
        if given_up():
            break
        try:
            found = os.stat(path)
            if stat.S_ISDIR(found.st_mode):
                skipped.append(Skipped(path, "a link to a folder, which is not followed"))
            elif not stat.S_ISREG(found.st_mode):
                kind = next((name for test, name in _KINDS if test(found.st_mode)), "no regular file")
                skipped.append(Skipped(path, kind))
            else:
                files.append(File(path, found.st_size, found.st_mtime_ns, _pieces_of(path, found)))
        except OSError as error:
            skipped.append(Skipped(path, reason_of(error, is_link=is_link)))
    return files, skipped


def _walk(root: str, without: frozenset[str], skipped: list[Skipped]) -> Iterator[tuple[str, bool]]:
    """Yield (path, is a link) for everything that is no folder."""
    if not os.path.isdir(root):
        yield root, os.path.islink(root)
        return
    folders = [root]
    while folders:
        folder = folders.pop()
        try:
            with os.scandir(folder) as entries:
                children = sorted(entries, key=lambda entry: entry.name)
        except OSError as error:
            skipped.append(Skipped(folder, reason_of(error)))
            continue
        below = []
        for entry in children:
            if entry.is_dir(follow_symlinks=False):
                if entry.name not in without:
                    below.append(entry.path)
            else:
                yield entry.path, entry.is_symlink()
        folders.extend(reversed(below))


def _pieces_of(path: str, found: os.stat_result) -> tuple[tuple[int, int], ...]:
    """Return the pieces of a file. Only a file with fewer blocks than bytes can be sparse, and is opened for this."""
    if getattr(found, "st_blocks", found.st_size) * 512 >= found.st_size:
        return ((0, found.st_size),) if found.st_size else ()
    descriptor = open_file(path)
    try:
        return pieces(descriptor, found.st_size)
    finally:
        os.close(descriptor)


def open_file(path: str) -> int:
    """Open a file for reading, without blocking if the path has become a FIFO. Return the descriptor."""
    return os.open(path, _FLAGS)


def pieces(descriptor: int, size: int) -> tuple[tuple[int, int], ...]:
    """Return (offset, length) of the data in the first bytes of an open file; one piece if holes are unknown."""
    whole = ((0, size),) if size else ()
    if sys.platform == "win32":
        return whole
    found: list[tuple[int, int]] = []
    end = 0
    while end < size:
        try:
            start = os.lseek(descriptor, end, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # the rest is a hole
                break
            if error.errno == errno.EINVAL:
                return whole
            raise
        if start >= size:
            break
        end = min(os.lseek(descriptor, start, os.SEEK_HOLE), size)
        found.append((start, end - start))
        if len(found) > MOST_PIECES:
            return whole
    return tuple(found)


def reason_of(error: OSError, *, is_link: bool = False) -> str:
    """Return the reason why a path could not be read, as text."""
    if error.errno == errno.ELOOP:
        return "a loop of links"
    if error.errno == errno.ENOENT:
        return "a link that leads nowhere" if is_link else "vanished"
    if error.errno in (errno.EACCES, errno.EPERM):
        return "not readable: permission denied"
    if error.errno in (errno.ESPIPE, errno.EISDIR):
        return "no regular file any more"
    if error.errno == errno.ESTALE and error.filename is None:  # raised by `_batches`, with a text of its own
        return str(error.strerror)
    return f"not readable: {error.strerror or type(error).__name__}"
