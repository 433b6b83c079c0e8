"""One device with several loops: in several threads, one after another, and closed while they work."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import aiocuda
from aiocuda import ClosedError, Device, Stream, UnsupportedError, WrongLoopError
from aiocuda.cluster import open_cluster
from aiocuda.device._resources import resources_of
from tests.helpers import AFFINE, PATIENCE, UVLOOP, Latch, Peer, in_thread, open_peer, quickly, turns, until

FACTORIES = [factory for factory in (asyncio.new_event_loop, UVLOOP) if factory]


def run(main: Any, factory: Callable[[], Any] = asyncio.new_event_loop) -> Any:
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(main)


async def chain(device: Device, length: int) -> int:
    """Return the result of a chain of kernels. It depends on their order."""
    async with device.stream() as stream:
        buffer = await stream.upload(np.zeros(1, np.uint32))
        for index in range(length):
            operation = stream.launch(AFFINE, 1, 1, buffer, 1, 3, index)
            if index % 7 == 0:
                await operation
        return int((await stream.download(buffer))[0])


def expected(length: int) -> int:
    value = 0
    for index in range(length):
        value = (value * 3 + index) % 2**32
    return value


@pytest.mark.parametrize("driver", ["host", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("factory", FACTORIES, ids=["asyncio", "uvloop"][: len(FACTORIES)])
def test_several_loops_share_a_device(driver: Any, factory: Callable[[], Any]) -> None:
    async def main() -> None:
        async with aiocuda.open_device(driver=driver) as device:
            threads = [asyncio.to_thread(run, chain(device, 200), factory) for _ in range(4)]
            results = await asyncio.wait_for(asyncio.gather(chain(device, 200), *threads), PATIENCE)
            assert results == [expected(200)] * 5
            statistics = device.statistics()
            assert statistics.in_flight == 0
            assert statistics.failed == statistics.abandoned == 0

    run(main(), factory)


@pytest.mark.parametrize("factory", FACTORIES, ids=["asyncio", "uvloop"][: len(FACTORIES)])
def test_one_loop_after_another_on_one_device(factory: Callable[[], Any]) -> None:
    with Peer() as peer:
        device = run(_opened(peer), factory)
        for _ in range(10):
            assert run(chain(device, 20), factory) == expected(20)
        run(device.aclose(), factory)
        assert device.statistics().in_flight == 0


async def _opened(peer: Peer) -> Device:
    return await aiocuda.open_device(driver=peer.driver)


def test_resources_do_not_grow_with_closed_loops() -> None:
    """A script calls `asyncio.run` for each request.

    Pinned memory, ports and notifiers are used again by the next loop.
    """
    with Peer() as peer:
        device = run(_opened(peer))
        large = np.zeros(10 << 20, np.uint8)

        async def request() -> None:
            async with device.stream() as stream:
                await stream.download(await stream.upload(large))

        for _ in range(3):
            run(request())
        pins, ports, streams = peer.calls["pin"], peer.calls["open_port"], device.statistics().streams
        events, notifiers = device.statistics().events, peer.calls["notifier"]
        for _ in range(20):
            run(request())
        assert peer.calls["pin"] <= pins + 4
        assert peer.calls["open_port"] == ports
        assert peer.calls["notifier"] <= notifiers + 1
        assert device.statistics().streams == streams
        assert device.statistics().events <= events + 4
        run(device.aclose())
        assert peer.calls["pin"] == peer.calls["unpin"]


@pytest.mark.filterwarnings("ignore:unclosed <Stream:ResourceWarning")
@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("factory", FACTORIES, ids=["asyncio", "uvloop"][: len(FACTORIES)])
def test_loop_closed_with_work_in_flight(factory: Callable[[], Any], staged: bool) -> None:
    """No other thread raises an error, and all memory is released when the device has finished."""
    with Peer() as peer:
        kept: list[Any] = []

        async def close_loop_early() -> None:
            device = await aiocuda.open_device(driver=peer.driver, max_in_flight=8)
            stream = device.stream()
            latch = Latch(device)
            latch.hold(stream)
            await latch.held()
            buffer = stream.empty(1 << 20, np.uint8)
            if staged:
                stream.copy(buffer, np.ones(1 << 20, np.uint8))
                stream.download(buffer)
            for value in range(20):
                last = stream.fill(buffer, value)
            waiter = asyncio.create_task(last.wait())
            await asyncio.sleep(0)
            waiter.cancel()
            kept.extend((device, latch, last))

        run(close_loop_early(), factory)
        device, latch, last = kept

        async def resume() -> None:
            async with device.stream() as stream:
                assert await quickly(stream.fill(stream.empty(4), 1)) is None
                assert last.state == "abandoned"
                with pytest.raises(ClosedError):
                    last.result()
                assert device.statistics().in_flight == 0
                assert device.driver.fault is None
                latch.release()
                await quickly(device.drain())
                await until(
                    lambda: device.memory.statistics().live_bytes == 0 or _collect_and_sweep(stream), "the memory"
                )
            assert device.statistics().streams <= 1  # an internal stream of the device
            await device.aclose()

        run(resume(), factory)
        assert peer.calls["pin"] == peer.calls["unpin"]


def _collect_and_sweep(stream: Stream) -> bool:
    """Collect the reference cycles of the closed loop, and let the watchdog sweep."""
    gc.collect()
    stream.synchronize()
    stream.empty(1).free()
    return False


@pytest.mark.filterwarnings("ignore:unclosed <Stream:ResourceWarning")
def test_notifier_of_a_closed_loop_does_not_count_as_a_lost_wake() -> None:
    with Peer() as peer:
        kept: list[Any] = []

        async def close_loop_early() -> None:
            device = await aiocuda.open_device(driver=peer.driver)
            stream = device.stream()
            latch = Latch(device)
            hold = latch.hold(stream)
            waiter = asyncio.create_task(hold.wait())
            await latch.held()
            await until(lambda: device.statistics().armed, "the notifier")
            waiter.cancel()
            kept.extend((device, latch))

        run(close_loop_early())
        device, latch = kept

        async def resume() -> None:
            async with device.stream() as stream:
                with Latch(device) as other_latch:
                    other_latch.hold(stream)
                    await other_latch.held()
                    ticks = device.statistics().watchdog_wakes
                    await until(lambda: device.statistics().watchdog_wakes > ticks + 4, "the watchdog")
                    assert device.statistics().lost_wakes == 0
                    latch.release()
                    other_latch.release()
                await quickly(stream.synchronize())
            await quickly(device.drain())
            await device.aclose()

        run(resume())


def test_stream_in_another_loop_makes_no_driver_call() -> None:
    async def main() -> None:
        async with open_peer() as (peer, device):
            stream, other = device.stream(), device.stream()
            x, y = await stream.upload(np.zeros(4, np.uint32)), await stream.upload(np.zeros(4, np.uint32))
            await stream.launch(AFFINE, 1, 4, x, 4, 1, 1)  # now the kernel is loaded and its arguments are bound
            event = stream.record()
            with Latch(device) as latch:
                latch.hold(other)
                await latch.held()
                fresh = other.empty(4, np.uint32)  # its first use on `stream` would wait for its allocation

                async def in_other_loop() -> None:
                    array = np.zeros(4, np.uint32)
                    for method in (
                        lambda: stream.launch(AFFINE, 1, 4, x, 4, 1, 1),
                        lambda: stream.launch(AFFINE, 1, 4, fresh, 4, 1, 1),
                        lambda: stream.empty(4),
                        lambda: stream.upload(array),
                        lambda: stream.copy(x, array),
                        lambda: stream.copy(x, y),
                        lambda: stream.download(x),
                        lambda: stream.fill(fresh, 1),
                        lambda: stream.record(),
                        lambda: stream.wait(event),
                        lambda: stream.synchronize(),
                        lambda: stream.add_callback(print),
                        lambda: stream.__cuda_stream__(),
                        lambda: x.free(),
                        lambda: x.free(stream),
                    ):
                        with pytest.raises(WrongLoopError, match="belongs to another event loop"):
                            method()
                    with pytest.raises(WrongLoopError):
                        await stream.aclose()
                    with pytest.raises(WrongLoopError):
                        async with stream.lend():
                            pass

                await until(lambda: not resources_of(device).loop_states.here().reactor.jobs.running, "quiet")
                calls = peer.calls.copy()
                await asyncio.to_thread(in_thread, in_other_loop)
                made = peer.calls - calls
                # The watchdog of this loop makes these calls.
                queries = {"event_query", "now", "begin_queries", "end_queries"}
                assert set(made) <= queries, made
                latch.release()
            await stream.synchronize()
            assert not x.freed

    run(main())


def test_device_is_closed_while_another_loop_still_works() -> None:
    """The close waits for submitted operations of that loop. Later operations get a `ClosedError`."""
    entered, ended = threading.Event(), threading.Event()
    outcome: list[Any] = []

    async def work(device: Device) -> None:
        stream = device.stream()
        buffer = stream.empty(4)
        entered.set()
        try:
            while True:
                outcome.append(await stream.fill(buffer, 1))
        except ClosedError as error:
            outcome.append(error)
        finally:
            ended.set()

    async def main() -> None:
        async with open_peer() as (peer, device):
            thread = threading.Thread(target=asyncio.run, args=(work(device),))
            thread.start()
            await asyncio.to_thread(entered.wait, PATIENCE)
            await until(lambda: len(outcome) > 5, "some work there")
            await quickly(device.aclose())
            await asyncio.to_thread(thread.join, PATIENCE)
            assert ended.is_set(), "the other loop hangs"
            assert isinstance(outcome[-1], ClosedError)
            assert peer.calls["stream_create"] == peer.calls["stream_destroy"]
            assert device.statistics().in_flight == 0

    run(main())


def test_close_waits_for_a_submitted_operation_of_another_loop() -> None:
    async def main() -> None:
        async with open_peer() as (_, device):
            latch = Latch(device)
            results: list[Any] = []
            entered = threading.Event()

            async def work() -> None:
                stream = device.stream()
                buffer = await stream.upload(np.full(4, 3, np.float32))
                latch.hold(stream)
                await latch.held()
                download = stream.download(buffer)
                entered.set()
                results.append(await download)

            thread = threading.Thread(target=in_thread, args=(work,))
            thread.start()
            await asyncio.to_thread(entered.wait, PATIENCE)
            closing = asyncio.create_task(device.aclose())
            await turns()
            assert not closing.done()
            latch.release()
            await quickly(closing)
            await asyncio.to_thread(thread.join, PATIENCE)
            assert (results[0] == 3).all()

    run(main())


def test_task_that_continues_to_enqueue_after_the_device_was_closed() -> None:
    """It gets a `ClosedError` and does not wait forever: no reactor watches the queue any more."""

    async def main() -> None:
        with Peer() as peer:
            async with aiocuda.open_device(driver=peer.driver) as device:
                stream = device.stream()
                buffer = stream.empty(4)

                async def work() -> None:
                    while True:
                        await stream.fill(buffer, 1)

                task = asyncio.create_task(work())
                await until(lambda: device.statistics().resolved > 3)
            with pytest.raises(ClosedError):
                await quickly(task)
            assert device.statistics().in_flight == 0

    run(main())


def test_task_that_continues_to_enqueue_after_the_device_was_left_by_an_exception() -> None:
    async def main() -> None:
        with Peer() as peer:
            tasks: list[asyncio.Task[None]] = []
            with pytest.raises(ZeroDivisionError):
                async with aiocuda.open_device(driver=peer.driver) as device:
                    stream = device.stream()
                    buffer = stream.empty(4)

                    async def work() -> None:
                        while True:
                            await stream.fill(buffer, 1)

                    tasks.append(asyncio.create_task(work()))
                    await until(lambda: device.statistics().resolved > 3)
                    raise ZeroDivisionError
            with pytest.raises(ClosedError):
                await quickly(tasks[0])

    run(main())


@pytest.mark.slow
def test_forked_child_gets_an_error_and_does_not_hang() -> None:
    program = """
        import asyncio, os, sys
        import aiocuda

        async def use(device):
            async with device.stream() as stream:
                await stream.synchronize()

        async def main():
            async with aiocuda.open_device(driver="host") as device:
                await use(device)
                pid = os.fork()
                if pid == 0:
                    os._exit(child(device))
                _, status = os.waitpid(pid, 0)
                await use(device)
                return os.waitstatus_to_exitcode(status)

        def child(device):
            asyncio._set_running_loop(None)
            try:
                asyncio.run(use(device))
            except aiocuda.ForkedProcessError:
                pass
            else:
                return 1
            async def open_again():
                async with aiocuda.open_device(driver="host") as device:
                    await use(device)
            asyncio.run(open_again())
            return 0

        sys.exit(asyncio.run(main()))
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


class WithoutReaders(asyncio.SelectorEventLoop):
    """A loop without `add_reader`, as a program may have written it."""

    def add_reader(self, *arguments: object) -> None:
        raise NotImplementedError

    def remove_reader(self, *arguments: object) -> bool:
        raise NotImplementedError


def test_loop_without_add_reader_is_refused_with_the_cure() -> None:
    """Both calls are refused: opening a device, and using a device that another loop has opened. None stays open."""
    cure = r"WithoutReaders has no add_reader, .*asyncio\.run\(main\(\)\)"
    with Peer() as peer:
        for _ in range(2):
            with pytest.raises(UnsupportedError, match=cure):
                run(_opened(peer), WithoutReaders)
        device = run(_opened(peer))
        ports = peer.calls["open_port"]
        for _ in range(3):
            with pytest.raises(UnsupportedError, match=cure):
                run(chain(device, 1), WithoutReaders)
        assert peer.calls["open_port"] == ports
        assert run(chain(device, 20)) == expected(20)
        run(device.aclose())


async def _cluster() -> None:
    async with open_cluster("local", replicas=1):
        raise AssertionError


@pytest.mark.slow
def test_cluster_in_a_loop_without_add_reader() -> None:
    with pytest.raises(UnsupportedError, match="WithoutReaders has no add_reader"):
        run(_cluster(), WithoutReaders)
