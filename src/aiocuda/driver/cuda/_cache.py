"""`ProgramCache`: compiled kernels on disk, for later processes.

A cubin from a cache runs on the device with the rights of this program. An entry is therefore used only if no other
user can have written it: its directory and file belong to this user and are writable for this user only, it is no
symbolic link, and its hash is right. Any other entry is ignored with a warning, and the kernel is compiled again.
``FileStreamProgramCache`` of cuda.core also stores bytes under a key, but makes no such checks.

A cache that cannot be written (a read-only home, a full disk) is no error; the next process compiles again. Entries
are written atomically, also if several processes write the same one.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import stat
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final, NamedTuple

from ...errors import InvalidArgumentError, InvalidTypeError

__all__ = ["LIMIT_BYTES", "CacheState", "ProgramCache"]

LIMIT_BYTES: Final = 256 << 20

_MAGIC: Final = b"aiocuda program 1\n"
_HEADER_BYTES: Final = len(_MAGIC) + hashlib.sha256().digest_size
_PART: Final = ".part"  # a file that is being written; if it is older than the next value, its writer was killed
_PART_SECONDS: Final = 3600.0
_OTHERS_MAY_WRITE: Final = stat.S_IWGRP | stat.S_IWOTH


class CacheState(NamedTuple):
    """The state of a cache's directory, as `ProgramCache.inspect` finds it."""

    exists: bool
    mode: int = 0  #: the permissions of the directory
    unused: str = ""  #: the reason why the cache is not used; "" if it is
    entries: int = 0
    nbytes: int = 0
    ignored: tuple[tuple[str, str], ...] = ()  #: file names of entries that are not used, and the reasons


class ProgramCache:
    """A directory of entries. The key of an entry identifies its content.

    On systems other than POSIX it is always empty, because the owner of a file cannot be checked.

    Parameters
    ----------
    directory
        Created with mode 0700 at the first write.
    limit
        Bytes. The oldest entries beyond it are removed.
    """

    def __init__(self, directory: str | os.PathLike[str], limit: int = LIMIT_BYTES) -> None:
        self.directory: Final = os.fspath(directory)
        self.limit: Final = limit

    @classmethod
    def default(cls) -> ProgramCache | None:
        """Return the cache in ``AIOCUDA_CACHE_DIR``, ``XDG_CACHE_HOME/aiocuda`` or ``~/.cache/aiocuda``; or None."""
        chosen = os.environ.get("AIOCUDA_CACHE_DIR")
        if chosen:
            return cls(os.path.abspath(chosen))
        home = os.environ.get("XDG_CACHE_HOME", "")
        if not os.path.isabs(home):  # XDG's rule: a relative path is ignored
            home = os.path.expanduser(os.path.join("~", ".cache"))
        return cls(os.path.join(home, "aiocuda")) if os.path.isabs(home) else None

    def get(self, key: str) -> bytes | None:
        """Return the bytes stored under a key, or None."""
        _check_key(key)
        try:
            with self._open() as directory:
                return self._read(directory, key) if directory is not None else None
        except NotADirectoryError:
            _warn(f"the kernel cache {self.directory} is not used: it is no directory")
        except OSError:  # it does not exist, or is not readable
            return None
        return None

    def put(self, key: str, data: bytes) -> bool:
        """Store bytes under a key, and return whether that was possible."""
        _check_key(key)
        try:
            os.makedirs(self.directory, mode=0o700, exist_ok=True)
            with self._open() as directory:
                if directory is None:
                    return False
                self._write(directory, key, _header(key, data) + data)
                self._trim(directory)
        except OSError:  # a read-only home, a full disk
            return False
        return True

    def inspect(self) -> CacheState:
        """Read and check every entry, without a warning. **May block**: an entry is up to `limit` bytes."""
        if os.name != "posix":
            return CacheState(False, unused="the owner of a file cannot be checked on this system")
        try:
            directory = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            return CacheState(False)
        except OSError as error:
            return CacheState(not isinstance(error, NotADirectoryError), unused=error.strerror or str(error))
        try:
            status = os.fstat(directory)
            mode, unused = stat.S_IMODE(status.st_mode), _distrust(status)
            if unused:
                return CacheState(True, mode, unused)
            names = sorted(name for name in os.listdir(directory) if not name.endswith(_PART))
            found = [(name, *self._load(directory, name)) for name in names]
        finally:
            os.close(directory)
        ignored = tuple((name, reason) for name, _, reason in found if reason)
        sound = [len(data) for _, data, _ in found if data is not None]
        return CacheState(True, mode, "", len(sound), sum(sound), ignored)

    @contextmanager
    def _open(self) -> Iterator[int | None]:
        """Yield a descriptor of the directory that was checked; None if another user can write the directory."""
        if os.name != "posix":
            yield None
            return
        directory = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            reason = _distrust(os.fstat(directory))
            if reason:
                _warn(f"the kernel cache {self.directory} is not used: {reason}; it must be yours alone (chmod 700)")
            yield None if reason else directory
        finally:
            os.close(directory)

    def _read(self, directory: int, key: str) -> bytes | None:
        data, reason = self._load(directory, key)
        if reason:
            _warn(f"{self.directory}/{key} is ignored, and compiled again: {reason}")
        return data

    def _load(self, directory: int, key: str) -> tuple[bytes | None, str]:
        """Return the bytes of an entry, or None and the reason why it is ignored; "" if there is none."""
        # O_NONBLOCK: opening a named pipe would otherwise block.
        try:
            file = os.open(key, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory)
        except FileNotFoundError:
            return None, ""
        except OSError as error:
            return None, error.strerror or str(error)
        try:
            status = os.fstat(file)
            reason = _distrust(status) or ("" if stat.S_ISREG(status.st_mode) else "it is no regular file")
            content = b"" if reason else open(file, "rb", closefd=False).read(self.limit)
        finally:
            os.close(file)
        data = content[_HEADER_BYTES:]
        if not reason and content[:_HEADER_BYTES] != _header(key, data):
            reason = "its content is not what was stored"
        return (None, reason) if reason else (data, "")

    def _write(self, directory: int, key: str, content: bytes) -> None:
        part = f"{secrets.token_hex(8)}{_PART}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            with os.fdopen(os.open(part, flags, 0o600, dir_fd=directory), "wb") as stream:
                stream.write(content)
            os.replace(part, key, src_dir_fd=directory, dst_dir_fd=directory)
        except BaseException:
            with suppress(OSError):  # it may not exist
                os.unlink(part, dir_fd=directory)
            raise

    def _trim(self, directory: int) -> None:
        """Remove the oldest entries beyond the limit, and unfinished files of killed processes."""
        entries = []
        for name in os.listdir(directory):
            with suppress(FileNotFoundError):  # another process trims, too
                status = os.stat(name, dir_fd=directory, follow_symlinks=False)
                if name.endswith(_PART):
                    if status.st_mtime < time.time() - _PART_SECONDS:
                        os.unlink(name, dir_fd=directory)
                elif stat.S_ISREG(status.st_mode):
                    entries.append((status.st_mtime, status.st_size, name))
        total = sum(size for _, size, _ in entries)
        for _, size, name in sorted(entries):
            if total <= self.limit:
                return
            with suppress(FileNotFoundError):
                os.unlink(name, dir_fd=directory)
            total -= size


def _check_key(key: str) -> None:
    """Raise if a key is not the name of a file in the cache's directory."""
    if not isinstance(key, str):
        raise InvalidTypeError(f"a key of the kernel cache is a str, not {key!r}")
    if key in ("", ".", "..") or not {"/", "\\", "\0"}.isdisjoint(key):
        raise InvalidArgumentError(
            f"{key!r} is not a key of the kernel cache, which names a file: use a name without '/' and '\\', such as a "
            "hexadecimal hash"
        )


def _header(key: str, data: bytes) -> bytes:
    return _MAGIC + hashlib.sha256(key.encode() + data).digest()


def _distrust(status: os.stat_result) -> str:
    """Return the reason why another user may have written a file; "" if there is none."""
    if status.st_uid != os.geteuid():
        return f"user {status.st_uid} owns it"
    if status.st_mode & _OTHERS_MAY_WRITE:
        return f"others may write it (mode {stat.S_IMODE(status.st_mode):04o})"
    return ""


def _warn(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=2)
