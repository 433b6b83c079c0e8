"""The bare driver: NVIDIA's own bindings, by hand. The baselines of every row that runs on a GPU.

Memory goes through `cuda.bindings.driver`, the rest through `cuda.core`, the fastest documented way from Python (3.3 µs
for a launch, 0.24 for recording an event): a slower baseline would flatter us. It joins the primary context that
aiocuda has opened, so that both use the same hardware queues.
"""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..kernels import nanoseconds
from ..sources import EMPTY, SPIN
from .raw_calls import peer_calls, waiting_calls

_HOST_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Raw(Protocol):
    """The primitives of the baselines. `raw_host.RawHost` has the same for the host driver."""

    def stream(self) -> Any: ...

    def launcher(self, stream: Any, seconds: float) -> Callable[[], None]:
        """A function that launches the kernel once, with no code of the library between it and the driver."""

    def synchronize(self, stream: Any) -> None:
        """Block, and spin where the driver can, until the stream is done."""

    def event(self, timing: bool = False) -> Any: ...

    def record(self, event: Any, stream: Any) -> None: ...

    def done(self, event: Any) -> bool: ...

    def wait(self, stream: Any, event: Any) -> None: ...

    def callback(self, stream: Any, descriptor: int) -> Callable[[], None]:
        """A function that enqueues a host callback, in C on a GPU, which writes the eventfd ``descriptor``."""

    def host_function(self, stream: Any, function: Callable[[], object]) -> Callable[[], None]:
        """A function that enqueues a host callback in Python, as other libraries do."""

    def elapsed(self, start: Any, end: Any) -> float:
        """Seconds of device time between two timing events."""

    def device_memory(self, nbytes: int) -> int: ...

    def keep_freed(self) -> None:
        """What `free` takes back stays with the pool, as with ours; by default each synchronisation lets go of it."""

    def allocate(self, stream: Any, nbytes: int) -> int:
        """Device memory in the stream's order."""

    def free(self, stream: Any, address: int) -> None:
        """Give it back in the stream's order."""

    def fill(self, stream: Any, address: int, nbytes: int) -> None:
        """Set every byte to 1."""

    def pinned(self, nbytes: int) -> int: ...

    def upload(self, stream: Any, target: int, source: int, nbytes: int) -> None: ...

    def download(self, stream: Any, target: int, source: int, nbytes: int) -> None: ...

    def pageable(self, direction: str, device: int, array: NDArray[np.uint8], stream: Any) -> None:
        """Copy pageable memory, and return when it is done."""

    def waiting_calls(self, scale: float) -> Mapping[str, Callable[[], object]]:
        """Return calls that may wait for running kernels, and some that do not, by name, for any thread.

        Each is made once, in this order. ``scale`` is a factor for their sizes.
        """

    def peer_calls(self) -> Mapping[str, Callable[[], object]]:
        """Return the calls that the first copy between two devices makes, for any thread."""


def own_time(raw: Raw, seconds: float) -> float:
    """Seconds that a kernel of ``seconds`` takes on the device, by timing events; median of 9."""
    stream = raw.stream()
    start, end = raw.event(timing=True), raw.event(timing=True)
    launch = raw.launcher(stream, seconds)
    times = []
    for _ in range(10):
        raw.record(start, stream)
        launch()
        raw.record(end, stream)
        raw.synchronize(stream)
        times.append(raw.elapsed(start, end))
    return median(times[1:])  # the first one may load the kernel


@cache
def ring_library() -> ctypes.CDLL:
    """Compile `ring.c` and load it."""
    from ..c_bound import build

    compiler = shutil.which("cc")
    if compiler is None:
        raise RuntimeError("the raw callback is written in C, and there is no C compiler (`cc`)")
    return build(compiler, Path(__file__).parents[1] / "ring.c")


def _checked_host_function(error: int) -> None:
    if error:
        raise RuntimeError(f"cuLaunchHostFunc answered {error}")


def _nothing_of(function: Callable[[], object]) -> None:
    function()


class RawCuda:
    def __init__(self) -> None:
        from cuda.bindings import driver
        from cuda.core import Device, EventOptions, LaunchConfig, Program, ProgramOptions, launch

        self.driver: Any = driver
        self._device: Any = Device(0)
        self._device.set_current()
        self._event_options: Any = EventOptions
        self._launch: Any = launch
        self._once: Any = LaunchConfig(grid=1, block=1)
        options = ProgramOptions(arch=f"sm_{self._device.arch}")
        self._compile: Any = lambda source: Program(source, "c++", options).compile("cubin")
        self._kernels: dict[str, Any] = {
            name: self._compile(source).get_kernel(name) for name, source in (("empty", EMPTY), ("spin", SPIN))
        }
        self._functions: list[object] = []

    def ask(self, call: str, *arguments: Any) -> Any:
        """The call's value; its error, raised."""
        error, *values = getattr(self.driver, call)(*arguments)
        if error != self.driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"{call} answered {error.name}")
        return values[0] if values else None

    def stream(self) -> Any:
        return self._device.create_stream()

    def launcher(self, stream: Any, seconds: float) -> Callable[[], None]:
        if seconds:
            return partial(self._launch, stream, self._once, self._kernels["spin"], nanoseconds(seconds))
        return partial(self._launch, stream, self._once, self._kernels["empty"])

    def handle(self, owned: Any) -> int:
        """Return the handle of a stream or an event."""
        return int(owned.handle)

    def function(self, seconds: float) -> int:
        """Return the handle of the kernel that `launcher` launches."""
        return int(self._kernels["spin" if seconds else "empty"].handle)

    def synchronize(self, stream: Any) -> None:
        stream.sync()

    def event(self, timing: bool = False) -> Any:
        return self._device.create_event(self._event_options(timing_enabled=timing))

    def record(self, event: Any, stream: Any) -> None:
        stream.record(event)

    def done(self, event: Any) -> bool:
        return bool(event.is_done)

    def wait(self, stream: Any, event: Any) -> None:
        stream.wait(event)

    def callback(self, stream: Any, descriptor: int) -> Callable[[], None]:
        ring = ctypes.cast(ring_library().ring, ctypes.c_void_p)
        return partial(self._launch_host_function(), self.handle(stream), ring, descriptor)

    def host_function(self, stream: Any, function: Callable[[], object]) -> Callable[[], None]:
        call = _HOST_FUNCTION(lambda _: _nothing_of(function))
        self._functions.append(call)  # the driver calls it later
        return partial(self._launch_host_function(), self.handle(stream), ctypes.cast(call, ctypes.c_void_p), None)

    def _launch_host_function(self) -> Callable[..., None]:
        """Return ``cuLaunchHostFunc`` by `ctypes`, which gives the GIL away: the callback in Python needs it."""
        call = ctypes.CDLL("libcuda.so.1").cuLaunchHostFunc
        call.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
        call.restype = _checked_host_function
        launch: Callable[..., None] = call
        return launch

    def elapsed(self, start: Any, end: Any) -> float:
        return float(end - start) / 1e3

    def device_memory(self, nbytes: int) -> int:
        return int(self.ask("cuMemAlloc", nbytes))

    def keep_freed(self) -> None:
        pool = self.ask("cuDeviceGetDefaultMemPool", self.ask("cuDeviceGet", 0))
        threshold = self.driver.CUmemPool_attribute.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD
        self.ask("cuMemPoolSetAttribute", pool, threshold, self.driver.cuuint64_t(2**64 - 1))

    def allocate(self, stream: Any, nbytes: int) -> int:
        return int(self.ask("cuMemAllocAsync", nbytes, stream.handle))

    def free(self, stream: Any, address: int) -> None:
        self.ask("cuMemFreeAsync", address, stream.handle)

    def fill(self, stream: Any, address: int, nbytes: int) -> None:
        self.ask("cuMemsetD8Async", address, 1, nbytes, stream.handle)

    def pinned(self, nbytes: int) -> int:
        return int(self.ask("cuMemHostAlloc", nbytes, 0))

    def upload(self, stream: Any, target: int, source: int, nbytes: int) -> None:
        self.ask("cuMemcpyHtoDAsync", target, source, nbytes, stream.handle)

    def download(self, stream: Any, target: int, source: int, nbytes: int) -> None:
        self.ask("cuMemcpyDtoHAsync", target, source, nbytes, stream.handle)

    def pageable(self, direction: str, device: int, array: NDArray[np.uint8], stream: Any) -> None:
        if direction == "up":
            self.upload(stream, device, array.ctypes.data, array.nbytes)
        else:
            self.download(stream, array.ctypes.data, device, array.nbytes)
        self.synchronize(stream)

    def cubin(self, source: str) -> bytes:
        """Compile CUDA C++ for the device."""
        code: bytes = self._compile(source).code
        return code

    def waiting_calls(self, scale: float) -> Mapping[str, Callable[[], object]]:
        return waiting_calls(self, scale)

    def peer_calls(self) -> Mapping[str, Callable[[], object]]:
        return peer_calls(self)
