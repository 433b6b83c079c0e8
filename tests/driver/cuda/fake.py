"""Drives the recording libcuda of ``fake.c``. It is built when the tests run: they need a C compiler.

Its tests are skipped on free-threaded Python, where CUDA is refused.
"""

from __future__ import annotations

import ctypes
import dataclasses
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from aiocuda._base._checks import has_gil

_SOURCE = Path(__file__).with_name("fake.c")
_WORD = 2**64 - 1


class _Call(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char * 48),
        ("argument", ctypes.c_uint64 * 8),
        ("code", ctypes.c_int),
        ("gil", ctypes.c_int),
        ("context", ctypes.c_uint64),
    ]


class _State(ctypes.Structure):
    _fields_ = [("log", _Call * 4096), ("calls", ctypes.c_int)]


@dataclasses.dataclass(frozen=True)
class Call:
    """One call that arrived. Arguments are whole registers: mask what is narrower."""

    name: str
    arguments: tuple[int, ...]
    code: int
    kept_gil: bool
    context: int  #: current on the calling thread, 0 if none

    def starts(self, *arguments: int) -> bool:
        """Were these its first arguments?"""
        return self.arguments[: len(arguments)] == tuple(argument & _WORD for argument in arguments)


def build(folder: Path) -> Path:
    """Compile the library. Without the GIL, skip the test that asks for it."""
    if not has_gil():
        pytest.skip("CUDA is refused on free-threaded Python")
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise RuntimeError("these tests build a small C library: install a C compiler, or name one in CC")
    target = folder / "libcuda_fake.so"
    command = [compiler, "-shared", "-fPIC", "-O1", "-o", str(target), str(_SOURCE), "-lpthread", "-ldl"]
    subprocess.run(command, check=True)
    return target


class Fake:
    """The library as a test sees it."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self._library = ctypes.CDLL(self.path)
        self._library.fake_state.restype = ctypes.c_void_p
        self.reset()
        self._state = _State.from_address(self._library.fake_state())

    def reset(self) -> None:
        """As new. Waits for host functions that still run."""
        self._library.fake_reset()

    def calls(self, name: str | None = None) -> list[Call]:
        """What arrived, in order; of one function only, if named."""
        found = []
        for raw in self._state.log[: self._state.calls]:
            call = Call(raw.name.decode(), tuple(raw.argument), raw.code, raw.gil == 1, raw.context)
            assert raw.gil in (0, 1), "PyGILState_Check was not found"
            if name is None or call.name == name:
                found.append(call)
        return found

    def names(self) -> list[str]:
        return [call.name for call in self.calls()]

    def only(self, name: str) -> Call:
        """The one call of this function."""
        (call,) = self.calls(name)
        return call

    def forget(self) -> None:
        """Empty the record."""
        self._library.fake_forget()

    def answer(self, name: str, code: int, times: int = -1) -> None:
        """Answer ``code`` so many times, or from now on."""
        self._library.fake_answer(name.encode(), code, times)

    def value(self, name: str, value: int) -> None:
        """Write this into the function's out argument."""
        self._library.fake_value(name.encode(), ctypes.c_uint64(value))

    def version(self, version: int) -> None:
        self._library.fake_version(version)

    def lacks(self, name: str) -> None:
        """``cuGetProcAddress`` does not find it."""
        self._library.fake_missing(name.encode())

    def asked_version(self, name: str) -> int:
        return int(self._library.fake_asked(name.encode()))

    def asked_flags(self) -> int:
        return int(self._library.fake_flags())

    def push(self, context: int) -> None:
        """Make a context of another library current on this thread."""
        self._library.fake_push(ctypes.c_uint64(context))

    def current(self) -> int:
        """The context that is current on this thread, 0 if none."""
        self._library.fake_current.restype = ctypes.c_uint64
        return int(self._library.fake_current())

    def capture_mode(self, mode: int = -1) -> int:
        """This thread's capture mode, set first unless -1."""
        return int(self._library.fake_capture_mode(mode))

    def parameters(self, *places: tuple[int, int]) -> None:
        """(offset, size) of each parameter of every kernel."""
        for at, (offset, size) in enumerate(places):
            self._library.fake_parameter(at, ctypes.c_uint64(offset), ctypes.c_uint64(size))

    def launched(self) -> tuple[bytes, bytes]:
        """(configuration, parameters at their offsets, 0xEE between) of the last launch."""
        config, packed = ctypes.create_string_buffer(56), ctypes.create_string_buffer(512)
        self._library.fake_launch(config, packed)
        return config.raw, packed.raw

    def bytes(self, count: int) -> bytes:
        """The last structure that was passed by address."""
        out = ctypes.create_string_buffer(count)
        self._library.fake_bytes(out, count)
        return out.raw

    def waits(self, count: int) -> tuple[int, ...]:
        """Return the nodes that the last node of a graph waits for."""
        out = (ctypes.c_uint64 * count)()
        self._library.fake_waits(out, count)
        return tuple(out)

    def hold(self) -> None:
        """Host functions wait, until `release`."""
        self._library.fake_hold(1)

    def release(self) -> None:
        self._library.fake_hold(0)
