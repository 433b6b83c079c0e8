"""HostUse: the processor time of the process, and the share of the time for which the GIL is taken."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from aiocuda._base import _host_use
from aiocuda._base._host_use import HostLoad, HostUse, _sampler, thread_clock
from tests.helpers import block_until, in_a_child

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the GIL is sampled on Linux only")

#: It sleeps with the GIL, so no busy processor changes the result.
_keep_gil = ctypes.PyDLL(None).usleep


def samplers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "aiocuda-gil-samples"]


@contextlib.contextmanager
def thread(work: Callable[[], object]) -> Iterator[None]:
    """A thread that calls a function again and again."""
    stop = threading.Event()

    def run() -> None:
        while not stop.is_set():
            work()

    running = threading.Thread(target=run)
    running.start()
    try:
        yield
    finally:
        stop.set()
        running.join()


def measured(samples: int = 8) -> HostLoad:
    """What a few samples show."""
    use = HostUse()
    use.start(with_gil=True)
    before = _sampler.counts[0]
    block_until(lambda: _sampler.counts[0] >= before + samples)
    use.stop()
    return use.load()


@pytest.mark.slow
def test_gil_that_a_thread_keeps_is_taken() -> None:
    with thread(lambda: _keep_gil(20_000)):  # a sample at the end of one, which finds the GIL free, is rare
        assert (measured(12).gil_share or 0.0) >= 0.6


@pytest.mark.slow
def test_gil_is_free_while_a_thread_waits() -> None:
    with thread(lambda: time.sleep(0.003)):  # noqa: TID251 - it waits without the GIL
        measurements = [measured(12).gil_share for _ in range(3)]
    shares = [share for share in measurements if share is not None]
    assert len(shares) == 3
    assert min(shares) <= 0.4  # other processes delay this one


@pytest.mark.slow
def test_processor_time_is_that_of_all_threads_and_of_the_own_one() -> None:
    use = HostUse()
    use.start(with_gil=False)
    with thread(lambda: sum(range(1000))):
        until = time.thread_time() + 0.05
        while time.thread_time() < until:
            pass
    use.stop()
    first = use.load()
    assert first.own_seconds >= 0.05
    assert first.cpu_seconds >= first.own_seconds
    assert first.wall_seconds >= 0.05
    assert first.gil_share is None  # it was not asked for
    assert use.load() == first  # it has stopped
    use.start(with_gil=False)
    use.stop()
    assert use.load().own_seconds >= first.own_seconds  # several periods add up
    use.reset()
    assert use.load() == HostLoad(0.0, 0.0, 0.0, None)


def test_a_few_samples_say_nothing() -> None:
    use = HostUse()
    use.start(with_gil=True)
    assert use.load().gil_share is None
    use.stop()
    use.stop()


@pytest.mark.slow
def test_samples_end_with_the_last_user_and_the_thread_a_moment_later() -> None:
    first, second = HostUse(), HostUse()
    first.start(with_gil=True)
    second.start(with_gil=True)
    (thread,) = samplers()
    first.stop()
    before = _sampler.counts[0]
    block_until(lambda: _sampler.counts[0] >= before + 2)
    second.stop()
    block_until(lambda: not _sampler.is_at_work)
    first.start(with_gil=True)
    block_until(lambda: _sampler.is_at_work)
    assert samplers() == [thread]  # it has waited for another use
    del first
    gc.collect()
    block_until(lambda: not _sampler.is_at_work)  # the user was dropped
    block_until(lambda: not samplers())
    second.start(with_gil=True)  # another thread
    block_until(lambda: _sampler.is_at_work)
    assert samplers() != [thread]
    second.stop()


@pytest.mark.slow
def test_forked_child_has_a_thread_of_its_own() -> None:
    use = HostUse()
    use.start(with_gil=True)

    def tell() -> str:
        before = len(samplers())
        return f"{before} {measured(6).gil_share is not None}"

    try:
        assert in_a_child(tell) == "0 True"
    finally:
        use.stop()


@pytest.mark.slow
def test_system_without_timers_measures_no_gil(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_host_use, "_create", None)
    block_until(lambda: not samplers())
    use = HostUse()
    use.start(with_gil=True)
    assert not samplers()
    use.stop()
    assert use.load().gil_share is None


@pytest.mark.slow
def test_system_without_descriptors_measures_no_gil(monkeypatch: pytest.MonkeyPatch) -> None:
    block_until(lambda: not samplers())
    monkeypatch.setattr(_host_use, "_create", lambda clock, flags: -1)
    use = HostUse()
    use.start(with_gil=True)
    block_until(lambda: not samplers())
    use.stop()
    assert use.load().gil_share is None


@pytest.mark.slow
def test_system_without_threads_measures_no_gil(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    block_until(lambda: not samplers())
    use = HostUse()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        use.start(with_gil=True)
    use.stop()
    assert use.load().gil_share is None
    other = HostUse()
    other.start(with_gil=True)
    assert len(samplers()) == 1
    other.stop()


@pytest.mark.parametrize(
    ("load", "seconds", "share"),
    [
        (HostLoad(1.0, 1.0, 0.1, 0.95), 0.9, 0.85),  # Python code, and little else
        (HostLoad(1.0, 3.0, 0.1, 0.1), 2.9, 0.0),  # native code on three processors
        (HostLoad(1.0, 2.0, 1.0, 1.0), 1.0, 0.0),  # the other threads have had it
        (HostLoad(1.0, 0.5, 0.05, 0.9), 0.45, 0.81),  # busy processors: it is shared as the processor time is
        (HostLoad(1.0, 0.1, 0.1, 0.9), 0.0, 0.0),
        (HostLoad(1.0, 1.0, 0.1, None), 0.9, 0.0),
    ],
)
def test_share_of_the_gil_of_some_threads(load: HostLoad, seconds: float, share: float) -> None:
    assert load.gil_share_of(seconds) == pytest.approx(share)


def test_virtual_time_is_its_own_processor_time() -> None:
    def virtual() -> float:
        return 1.0

    assert thread_clock(virtual) is virtual
    assert thread_clock(time.monotonic) is time.thread_time
