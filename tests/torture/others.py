"""The other libraries in the process: calls of CUDA's driver that keep the GIL, and Python functions on CUDA's threads.

A call through ``PyDLL`` keeps the GIL, a call through ``CDLL`` releases it.
"""

from __future__ import annotations

import ctypes
import random
import threading
import time
from collections.abc import Callable
from typing import Any, TypeAlias

_HostFunction = ctypes.CFUNCTYPE(None, ctypes.c_void_p)

#: One step of another library.
Step: TypeAlias = Callable[[random.Random], None]


class Cuda:
    """A library with its own streams, events, memory and kernels. All its calls keep the GIL, or none."""

    def __init__(self, image: bytes, symbol: str, *, keeps_gil: bool, streams: int = 4) -> None:
        loader: Any = ctypes.PyDLL if keeps_gil else ctypes.CDLL
        self._cuda = loader("libcuda.so.1")
        self._image, self._symbol = ctypes.create_string_buffer(image, len(image)), symbol.encode()
        self._context = ctypes.c_void_p()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), 0)
        self.enter()
        self._streams = [self._made("cuStreamCreate", 1) for _ in range(streams)]
        self._events = [self._made("cuEventCreate", 2) for _ in range(streams)]
        self._memory = self._made("cuMemAlloc_v2", ctypes.c_size_t(1 << 20))
        self._function = self._load()[1]
        self.called = 0  # calls of the host function
        self._on_cuda = _HostFunction(self._count)

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._cuda, name)(*arguments)
        if code not in (0, 600):
            raise RuntimeError(f"{name} answered {code}")

    def _made(self, name: str, *arguments: Any) -> ctypes.c_void_p:
        made = ctypes.c_void_p()
        self._call(name, ctypes.byref(made), *arguments)
        return made

    def enter(self) -> None:
        """Make the context current on this thread."""
        self._call("cuCtxSetCurrent", self._context)

    def _load(self) -> tuple[ctypes.c_void_p, ctypes.c_void_p]:
        module = self._made("cuModuleLoadData", self._image)
        return module, self._made("cuModuleGetFunction", module, self._symbol)

    def _count(self, _: int | None) -> None:
        self.called += 1
        sum(range(100))  # holds the GIL for a short time

    def _launch(self, function: ctypes.c_void_p, stream: ctypes.c_void_p) -> None:
        nanoseconds = ctypes.c_ulonglong(2000)
        parameters = (ctypes.c_void_p * 1)(ctypes.addressof(nanoseconds))
        self._call("cuLaunchKernel", function, 1, 1, 1, 1, 1, 1, 0, stream, parameters, None)

    # Steps

    def work(self, chance: random.Random) -> None:
        """Launch a kernel, record, query and wait."""
        at = chance.randrange(len(self._streams))
        stream, event = self._streams[at], self._events[at]
        self._launch(self._function, stream)
        self._call("cuMemsetD8Async", self._memory, ctypes.c_ubyte(1), ctypes.c_size_t(4096), stream)
        self._call("cuEventRecord", event, stream)
        self._call("cuEventQuery", event)
        self._call("cuStreamWaitEvent", chance.choice(self._streams), event, 0)
        if chance.random() < 0.3:
            self._call("cuStreamSynchronize", stream)

    def allocate(self, chance: random.Random) -> None:
        """Allocate and free memory by `cuMemFree`, which waits until the device is idle."""
        self._call("cuMemFree_v2", self._made("cuMemAlloc_v2", ctypes.c_size_t(chance.randrange(1, 1 << 20))))

    def load(self, chance: random.Random) -> None:
        """Load, launch and unload a kernel."""
        module, function = self._load()
        stream = chance.choice(self._streams)
        self._launch(function, stream)
        self._call("cuStreamSynchronize", stream)
        self._call("cuModuleUnload", module)

    def host_function(self, chance: random.Random) -> None:
        """Enqueue a kernel, a Python function and a kernel; sometimes wait for them."""
        stream = chance.choice(self._streams)
        self._launch(self._function, stream)
        self._call("cuLaunchHostFunc", stream, self._on_cuda, None)
        self._launch(self._function, stream)
        if chance.random() < 0.1:
            self._call("cuStreamSynchronize", stream)

    def synchronize(self, chance: random.Random) -> None:
        """Wait for one stream."""
        self._call("cuStreamSynchronize", chance.choice(self._streams))


class NoCuda:
    """The same without CUDA: calls of C functions that keep the GIL for a while, or release it."""

    def __init__(self, *, keeps_gil: bool) -> None:
        loader: Any = ctypes.PyDLL if keeps_gil else ctypes.CDLL
        self._libc = loader(None)
        self.called = 0

    def enter(self) -> None: ...

    def work(self, chance: random.Random) -> None:
        self._libc.usleep(chance.randrange(200))

    def synchronize(self, chance: random.Random) -> None:
        self._libc.usleep(3_000_000)


class Others:
    """Threads that call a step again and again, with a pause after each call."""

    def __init__(self) -> None:
        self.steps = 0
        self.errors: list[str] = []
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self, library: Cuda | NoCuda, step: Step, pause: float) -> None:
        """Start a thread."""

        def run() -> None:
            chance = random.Random(len(self._threads))
            library.enter()
            try:
                while not self._stop.is_set():
                    step(chance)
                    self.steps += 1
                    if pause:
                        time.sleep(pause)  # noqa: TID251 - the pace of the library
            except RuntimeError as error:
                self.errors.append(str(error))

        self._threads.append(threading.Thread(target=run, daemon=True))
        self._threads[-1].start()

    def end(self) -> None:
        """Stop all threads."""
        self._stop.set()
        for thread in self._threads:
            thread.join(10)
