"""Measures waits for the GIL, and how late timers are."""

from __future__ import annotations

import asyncio
import itertools
import os
import statistics
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Final, NamedTuple

from ..._base._checks import has_gil
from ..._base._off_loop import off_loop
from ._finding import Problem, Result
from ._machine import Machine

__all__ = ["Lateness", "check_gil", "check_timers", "gil_waits", "timer_lateness"]

#: Seconds of one measurement. A measurement over its bound is repeated once: other programs may have had the processor.
SECONDS: Final = 0.4

#: The longest mean wait for the GIL beside one thread that computes, in seconds. It is 5 ms with Python's default
#: interval, and 12 ms on a machine with much other work. Among several threads that compute, some waits are short and
#: others very long, so the median shows little.
MOST_GIL_WAIT: Final = 0.020

#: Bounds of the lateness of a timer, in seconds. asyncio rounds up to whole milliseconds.
MOST_MEDIAN_LATENESS: Final = 0.002
MOST_P99_LATENESS: Final = 0.030

#: The time of each timer, in seconds.
TIMER: Final = 0.002

#: Seconds without the GIL, before each wait for it.
AWAY: Final = 0.001

#: Python's default of ``sys.getswitchinterval()``, in seconds.
SWITCH_INTERVAL: Final = 0.005


class Lateness(NamedTuple):
    """Figures of some delays, in seconds, and their number."""

    median: float
    p99: float
    mean: float
    samples: int

    @classmethod
    def of(cls, delays: list[float]) -> Lateness:
        ordered = sorted(delays)
        p99 = ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)]
        return cls(statistics.median(ordered), p99, statistics.fmean(ordered), len(ordered))

    def __str__(self) -> str:
        return (
            f"median {self.median * 1e3:.2f}, mean {self.mean * 1e3:.2f}, p99 {self.p99 * 1e3:.2f} ms of {self.samples}"
        )


async def check_gil(machine: Machine) -> Result:
    """Measure how long a thread waits for the GIL while another one computes."""
    if not has_gil():
        return Result(
            [], [Problem("free-threaded Python runs the host driver, and is refused with CUDA", "set PYTHON_GIL=1")]
        )
    waits = await _best(lambda: off_loop(gil_waits), lambda found: found.mean <= MOST_GIL_WAIT)
    interval = sys.getswitchinterval()
    form = os.environ.get("AIOCUDA_GIL", "keep")
    facts = [f"waits for the GIL beside one thread that computes: {waits}", f"AIOCUDA_GIL is {form!r}"]
    facts.append(f"sys.getswitchinterval() is {interval * 1e3:g} ms")
    if waits.mean <= MOST_GIL_WAIT:
        return Result(facts)
    problem = f"the event loop waits {waits.mean * 1e3:.1f} ms for the GIL, more than {MOST_GIL_WAIT * 1e3:g} ms"
    if interval > SWITCH_INTERVAL:
        cure = f"sys.setswitchinterval({SWITCH_INTERVAL:g})"
    else:
        cure = "move threads that compute in Python to processes (aiocuda.cluster), or `renice` other programs"
    return Result(facts, [Problem(problem, cure)])


def gil_waits() -> Lateness:
    """Start a thread that computes, and return how long it takes to get the GIL back after each of some short sleeps.

    The sleep gives the other thread time to take the GIL, as the wait of an event loop for its next event does.
    """
    started, stop = threading.Event(), threading.Event()
    thread = threading.Thread(target=_compute, args=(started, stop), name="aiocuda-doctor", daemon=True)
    waits = []
    thread.start()
    try:
        started.wait()
        end = time.perf_counter() + SECONDS
        while time.perf_counter() < end:
            start = time.perf_counter()
            time.sleep(AWAY)  # noqa: TID251 - it waits for nothing: it releases the GIL and acquires it
            waits.append(time.perf_counter() - start - AWAY)
    finally:
        stop.set()
        thread.join()
    return Lateness.of(waits)


def _compute(started: threading.Event, stop: threading.Event) -> None:
    started.set()
    for _ in itertools.takewhile(lambda _: not stop.is_set(), itertools.count()):
        sum(range(100))


async def check_timers(machine: Machine) -> Result:
    """Measure how late the timers of the event loop are."""
    late = await _best(timer_lateness, _is_on_time)
    facts = [f"a timer of {TIMER * 1e3:g} ms is late by: {late}"]
    if _is_on_time(late):
        return Result(facts)
    bounds = f"a median of {MOST_MEDIAN_LATENESS * 1e3:g} ms, and a p99 of {MOST_P99_LATENESS * 1e3:g} ms"
    cure = (
        "keep a processor free for the event loop: end or `renice` the programs that `top` lists; in a container, "
        "raise its share (docker run --cpus)"
    )
    return Result(facts, [Problem(f"timers are later than the bounds, which are {bounds}", cure)])


async def timer_lateness() -> Lateness:
    """Return how late timers of the running event loop are."""
    delays: list[float] = []
    end = time.perf_counter() + SECONDS
    while time.perf_counter() < end or len(delays) < 3:
        start = time.perf_counter()
        await asyncio.sleep(TIMER)
        delays.append(time.perf_counter() - start - TIMER)
    return Lateness.of(delays)


def _is_on_time(late: Lateness) -> bool:
    return late.median <= MOST_MEDIAN_LATENESS and late.p99 <= MOST_P99_LATENESS


async def _best(measure: Callable[[], Awaitable[Lateness]], is_good: Callable[[Lateness], bool]) -> Lateness:
    """Measure, and once more if the result is not good; return the better result."""
    first = await measure()
    return first if is_good(first) else min(first, await measure(), key=lambda found: found.mean)
