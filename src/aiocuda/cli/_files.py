"""Files: what there is below a path, and what of it can be read."""

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

#: More pieces than this, and a sparse file is read as if it had no holes.
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
    """A regular file, as it was when it was found."""

    path: str  #: absolute; bytes that are no UTF-8 are surrogate-escaped
    size: int
    changed_ns: int  #: time of the last change
    pieces: tuple[tuple[int, int], ...]  #: (offset, length) of what is not a hole

    @property
    def streamed(self) -> int:
        """Bytes that are not holes."""
        return sum(length for _, length in self.pieces)


@dataclasses.dataclass(frozen=True, slots=True)
class Skipped:
    """What is not read, and why."""

    path: str
    reason: str


def standard_library() -> tuple[str, frozenset[str]]:
    """The running Python's standard library, and the folders in it that belong to others."""
    return sysconfig.get_paths()["stdlib"], frozenset({"site-packages", "dist-packages", "__pycache__"})


def find_files(
    root: str, without: frozenset[str] = frozenset(), given_up: Callable[[], bool] = lambda: False
) -> tuple[list[File], list[Skipped]]:
    """All regular files at or below a path, sorted by folder and name. It blocks, and stops early once given up.

    Links to files are followed, links to folders are not: what they lead to is either found anyhow, or not below the
    path. So no loop of links is entered.
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
    """(path, is it a link) of all that is no folder."""
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
    """What of a file is data. Fewer blocks than bytes give a sparse file away; only those are asked."""
    if getattr(found, "st_blocks", found.st_size) * 512 >= found.st_size:
        return ((0, found.st_size),) if found.st_size else ()
    descriptor = open_file(path)
    try:
        return pieces(descriptor, found.st_size)
    finally:
        os.close(descriptor)


def open_file(path: str) -> int:
    """A descriptor to read from. It waits for no writer, should a FIFO have taken the file's place meanwhile."""
    return os.open(path, _FLAGS)


def pieces(descriptor: int, size: int) -> tuple[tuple[int, int], ...]:
    """(offset, length) of what is data, in an open file's first bytes. Where the system does not tell, all of it."""
    whole = ((0, size),) if size else ()
    if sys.platform == "win32":
        return whole
    found: list[tuple[int, int]] = []
    end = 0
    while end < size:
        try:
            start = os.lseek(descriptor, end, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # nothing but a hole from here on
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
    """Why something could not be read, in words."""
    if error.errno == errno.ELOOP:
        return "a loop of links"
    if error.errno == errno.ENOENT:
        return "a link that leads nowhere" if is_link else "vanished"
    if error.errno in (errno.EACCES, errno.EPERM):
        return "not readable: permission denied"
    if error.errno in (errno.ESPIPE, errno.EISDIR):
        return "no regular file any more"
    if error.errno == errno.ESTALE and error.filename is None:  # said by `reading`, of what it found
        return str(error.strerror)
    return f"not readable: {error.strerror or type(error).__name__}"
