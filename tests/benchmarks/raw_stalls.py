"""Rows about the calls of the driver that wait for running kernels, and hold the launches of other threads.

One thread makes the call beside a long kernel; another one launches an empty kernel every 2 ms.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from threading import Event
from time import perf_counter
from typing import Final

from .figures import Measured
from .peers.raw import Raw
from .setting import Setting

__all__ = ["FREE", "stalls_driver", "stalls_driver_peers"]

#: The calls that neither wait for a kernel nor hold launches. The library makes them at any time.
FREE: Final = frozenset({
    *("library_load", "library_kernel", "event_create", "pageable_copy_1kb", "graph_instantiate", "graph_launch"),
    *("pool_alloc_4gb", "pool_free", "pool_alloc_again", "pool_trim"),
    *("host_pool_alloc_256mb", "host_pool_free", "host_pool_alloc_again", "host_pool_trim"),
})  # fmt: skip

#: Seconds between two launches.
BEAT: Final = 2e-3


async def stalls_driver(setting: Setting) -> Measured:
    """Milliseconds of the longest launch of a thread, while another one makes a call that does not wait.

    Figures of each call: ``…_ms``, the time of the call, and ``…_launch_ms``, the longest launch meanwhile. Baseline:
    launches beside the kernel alone. ``free_launch_ms`` is the longest launch beside a call that neither waits nor
    holds launches. Bound: at most 5 ms.
    """
    return _measured(setting, setting.raw.waiting_calls(setting.sizes["scale"]), FREE)


async def stalls_driver_peers(setting: Setting) -> Measured:
    """The same for the calls that the first copy between two devices makes. No limit is set for them."""
    calls = setting.raw.peer_calls()
    return _measured(setting, calls, frozenset(calls))


def _measured(setting: Setting, calls: Mapping[str, Callable[[], object]], free: frozenset[str]) -> Measured:
    measured, seconds = Measured([]), setting.sizes["seconds"]
    with ThreadPoolExecutor(1) as threads:
        beside = _Beside(setting.raw, seconds, threads)
        measured.baseline.append(beside.made(lambda: Event().wait(seconds / 2))[1] * 1e3)
        for name, call in calls.items():
            try:
                took, launch = beside.made(call)
            except RuntimeError as error:  # an older driver, or too little memory
                measured.notes.append(f"{name}: {error}")
                continue
            measured.figures |= {f"{name}_ms": took * 1e3, f"{name}_launch_ms": launch * 1e3}
            if name in free:
                measured.samples.append(launch * 1e3)
    measured.figures["free_launch_ms"] = max(measured.samples)
    return measured


class _Beside:
    """Makes calls on another thread, beside a long kernel."""

    def __init__(self, raw: Raw, seconds: float, threads: ThreadPoolExecutor) -> None:
        self._raw = raw
        self._threads = threads
        self._stream, other = raw.stream(), raw.stream()
        self._long, self._short = raw.launcher(self._stream, seconds), raw.launcher(other, 0.0)
        for launch in (self._long, self._short):  # which loads the kernels
            launch()
        raw.synchronize(self._stream)
        raw.synchronize(other)

    def made(self, call: Callable[[], object]) -> tuple[float, float]:
        """Return the seconds of a call, and of the longest launch of this thread meanwhile."""

        def timed() -> float:
            began = perf_counter()
            call()
            return perf_counter() - began

        self._long()
        longest, future = 0.0, self._threads.submit(timed)
        while True:
            began = perf_counter()
            self._short()
            longest = max(longest, perf_counter() - began)
            if wait([future], BEAT).done:
                self._raw.synchronize(self._stream)
                return future.result(), longest
