"""Lower bounds in C: `c_bound.c`, built when a row first needs it."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .kernels import nanoseconds
from .peers.raw import Raw, RawCuda

__all__ = ["NO_COMPILER", "NO_GPU", "CBound", "c_bound"]

#: Notes of a row whose bound in C could not be measured.
NO_GPU = "no bound in C: it needs a GPU"
NO_COMPILER = "no bound in C: there is no C compiler (`cc`)"

_SOURCE = Path(__file__).with_name("c_bound.c")


def c_bound(raw: Raw) -> CBound | str:
    """Return the bounds in C of this machine, or the note that says why there are none."""
    if not isinstance(raw, RawCuda):
        return NO_GPU
    compiler = shutil.which("cc")
    return NO_COMPILER if compiler is None else CBound(raw, build(compiler))


def build(compiler: str, source: Path = _SOURCE) -> ctypes.CDLL:
    """Compile a file in C, `c_bound.c` unless another is given, and load it."""
    with tempfile.TemporaryDirectory(prefix="aiocuda-benchmark-") as folder:
        library = Path(folder, f"{source.stem}.so")
        command = [compiler, "-std=c99", "-O2", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"]
        subprocess.run(command, check=True, capture_output=True, timeout=60)
        return ctypes.CDLL(str(library))


class CBound:
    """The driver calls of a row in a loop of C, on new streams of the bare driver."""

    def __init__(self, raw: RawCuda, library: ctypes.CDLL) -> None:
        if not library.bound_open():
            raise RuntimeError("libcuda.so.1 does not have the functions of c_bound.c")
        self._raw = raw
        for function in (library.bound_launch, library.bound_streams, library.bound_stages):
            function.restype = ctypes.c_double
        self._library = library

    def launches(self, count: int) -> float:
        """Return the seconds of ``count`` launches of an empty kernel, each with an event after it."""
        raw, stream, event = self._raw, self._raw.stream(), self._raw.event()
        seconds = self._library.bound_launch(_pointer(raw.function(0.0)), _of(raw, stream), _of(raw, event), count)
        raw.synchronize(stream)
        return _checked(seconds)

    def streams(self, streams: int, in_flight: int, rounds: int) -> float:
        """Return the seconds of ``rounds`` times ``in_flight`` empty kernels on each stream, all waited for."""
        raw, owned = self._raw, [self._raw.stream() for _ in range(streams)]
        events = [raw.event() for _ in range(streams * in_flight)]  # as `owned`, alive until the call has returned
        function, handles, marks = _pointer(raw.function(0.0)), _array(raw, owned), _array(raw, events)
        return _checked(self._library.bound_streams(function, handles, marks, streams, in_flight, rounds))

    def stages(self, seconds: float, depth: int, items: int) -> float:
        """Return the seconds of ``items`` of three stages, each a kernel of ``seconds`` on a stream of its own."""
        raw, owned = self._raw, [self._raw.stream() for _ in range(3)]
        events = [raw.event() for _ in range(3 * depth)]  # as `owned`, alive until the call has returned
        function, handles, marks = _pointer(raw.function(seconds)), _array(raw, owned), _array(raw, events)
        duration = ctypes.c_ulonglong(nanoseconds(seconds))
        return _checked(self._library.bound_stages(function, handles, marks, depth, items, duration))


def _checked(seconds: float) -> float:
    if seconds < 0:
        raise RuntimeError("a driver call of c_bound.c failed")
    return seconds


def _pointer(handle: int) -> ctypes.c_void_p:
    return ctypes.c_void_p(handle)


def _of(raw: RawCuda, owned: Any) -> ctypes.c_void_p:
    return _pointer(raw.handle(owned))


def _array(raw: RawCuda, owned: Sequence[Any]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(owned))(*(raw.handle(one) for one in owned))
