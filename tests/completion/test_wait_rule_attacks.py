"""Programs that wait in unusual ways: each wait stays covered, and each question gets an answer."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import aiocuda
from aiocuda import AsyncCoordinator, Device, Operation
from aiocuda.completion import _reactor
from aiocuda.driver.simulated import SimulatedDriver, Upset
from aiocuda.testing import SimulatedLoop
from tests.helpers import SPIN, Latch, quickly

MS = 1_000_000  # nanoseconds, as the kernel takes them

LOST = tuple(Upset("lose", nth) for nth in range(1, 200))


def simulated(
    main: Callable[[Device, Any], Awaitable[None]],
    *,
    policy: Any = "balanced",
    driver: SimulatedDriver | None = None,
    upsets: tuple[Upset, ...] = (),
) -> None:
    """Run ``main`` in virtual time."""
    used = driver or SimulatedDriver(None, upsets=upsets)

    async def opened() -> None:
        async with aiocuda.open_device(driver=used, policy=policy) as device:
            await device.load(SPIN)
            await main(device, used)

    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        runner.run(opened())
    assert used.violations == []


# Waits


@pytest.mark.parametrize("policy", ["latency", "balanced"])
def test_wait_stays_covered_when_an_earlier_operation_ends_in_its_poll(
    monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    """No notification comes, and no watchdog."""
    monkeypatch.setattr(_reactor, "WATCHDOG_SECONDS", 1000.0)

    async def main(device: Device, driver: SimulatedDriver) -> None:
        async with device.stream() as stream:
            for milliseconds in (0.06, 1, 4):
                first, second = (stream.launch(SPIN, 1, 1, int(milliseconds * MS)) for _ in range(2))
                began = driver.now()
                later = asyncio.create_task(second.wait())
                await asyncio.sleep(0.5e-3 if milliseconds >= 1 else 0)  # the loop polls for the second
                await first
                await later
                late = driver.now() - began - 2 * milliseconds * 1e-3
                assert late < (0.0001 if policy == "latency" else 0.003)

    simulated(main, policy=policy, upsets=LOST)


def test_other_awaits_do_not_put_off_the_queries_of_a_stream_without_a_notifier(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_reactor, "WATCHDOG_SECONDS", 1000.0)

    async def main(device: Device, driver: SimulatedDriver) -> None:
        names = [f"s{number}" for number in range(25)]
        async with aiocuda.StreamGroup(device, names) as streams:
            armed = [asyncio.create_task(streams[name].launch(SPIN, 1, 1, 100 * MS).wait()) for name in names[:24]]
            await asyncio.sleep(0.002)
            began = driver.now()
            first, second = (streams["s24"].launch(SPIN, 1, 1, 10 * MS) for _ in range(2))
            waiting = asyncio.create_task(first.wait())
            for _ in range(40):
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.0003):
                        await second
                if waiting.done():
                    break
            assert waiting.done()
            assert driver.now() - began < 0.010 + 25 * 250e-6 + 0.001
            await asyncio.gather(second.wait(), *armed)

    simulated(main)


def test_callbacks_that_are_given_up_count_as_held_up() -> None:
    """A callback that is 0.2 s late is given up before it comes. All waits are queried then, not four at a time."""
    late: list[list[float]] = []

    async def main(device: Device, driver: SimulatedDriver) -> None:
        chance = random.Random(3)
        names = [f"s{number}" for number in range(24)]

        async def one(name: str) -> None:
            seconds = chance.uniform(0.005, 0.008)
            began = driver.now()
            await streams[name].launch(SPIN, 1, 1, int(seconds * 1e9))
            late[-1].append(driver.now() - began - seconds)

        async with aiocuda.StreamGroup(device, names) as streams:
            for _ in range(5):
                late.append([])
                await asyncio.gather(*[one(name) for name in names])
                await asyncio.sleep(0.15)

    simulated(main, upsets=tuple(Upset("delay", nth, seconds=0.2) for nth in range(1, 200)))
    assert max(late[-1]) < 0.0025


def test_waits_end_soon_whatever_is_cancelled_lost_or_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random waits, without a watchdog: each ends at most 10 ms after its operation."""
    monkeypatch.setattr(_reactor, "WATCHDOG_SECONDS", 1000.0)
    for seed in (2, 8, 14, 23, 36, 41, 47, 63, 66, 70, 73, 91):
        chance = random.Random(seed)
        upsets = [
            Upset(chance.choice(("delay", "repeat", "lose")), nth, seconds=chance.uniform(0, 0.05))
            for nth in range(1, 300)
            if chance.random() < 0.5
        ]
        driver = SimulatedDriver(seed, upsets=upsets)
        simulated(RandomWaits(chance).run, driver=driver, policy=chance.choice(("balanced", "latency", "efficient")))


class RandomWaits:
    """Tasks that wait for kernels of a few streams in several ways, some of them for a limited time."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.ends: dict[int, float] = {}

    async def run(self, device: Device, driver: SimulatedDriver) -> None:
        chance = self.chance
        kernels = [
            aiocuda.Kernel(
                "k",
                source="__global__ void k(int n) {}",
                host=lambda n: self.ends.setdefault(int(n), driver.now()),
                host_seconds=seconds,
            )
            for seconds in (5e-5, 3e-4, 2e-3, 1e-2)
        ]
        names = [f"s{number}" for number in range(chance.choice((1, 2, 5)))]
        async with aiocuda.StreamGroup(device, names) as streams:
            work: list[Operation[None]] = []
            tasks = []
            for number in range(40):
                work.append(streams[chance.choice(names)].launch(chance.choice(kernels), 1, 1, number))
                for _ in range(chance.choice((0, 0, 1, 2))):
                    which = max(0, number - chance.randrange(6))
                    tasks.append(asyncio.create_task(self.wait(work[which], which, driver)))
                if chance.random() < 0.3:
                    await asyncio.sleep(chance.choice((0, 1e-4, 1e-3, 5e-3)))
            await asyncio.gather(*tasks)
            await aiocuda.gather(*work)

    async def wait(self, operation: Operation[None], number: int, driver: SimulatedDriver) -> None:
        began = driver.now()
        way = self.chance.randrange(5)
        if way == 0:
            await operation
        elif way == 1:
            await aiocuda.gather(operation)
        elif way == 2:
            called = asyncio.Event()
            operation.add_done_callback(lambda _: called.set())
            await called.wait()
        elif way == 3:
            while not operation.done():
                await asyncio.sleep(0.0005)
        else:
            try:
                async with asyncio.timeout(self.chance.uniform(0, 0.02)):
                    await operation
            except TimeoutError:
                return
        assert driver.now() - max(began, self.ends[number]) <= 0.0105


class Interrupted(SimulatedDriver):
    """Its query raises `KeyboardInterrupt` once, at a time."""

    __slots__ = ("at",)

    def __init__(self, at: float) -> None:
        super().__init__(None, upsets=LOST)
        self.at = at

    def event_query(self, event: int) -> bool:
        if self.now() > self.at:
            self.at = float("inf")
            raise KeyboardInterrupt
        return super().event_query(event)


@pytest.mark.parametrize("policy", ["latency", "efficient"])
def test_waits_stay_covered_after_ctrl_c(monkeypatch: pytest.MonkeyPatch, policy: Any) -> None:
    """It comes in a poll, or in a query of the timer. The program runs its loop again."""
    monkeypatch.setattr(_reactor, "WATCHDOG_SECONDS", 1000.0)
    driver = Interrupted(0.007)
    ends: list[float] = []

    async def wait(device: Device, milliseconds: int) -> None:
        async with device.stream() as stream:
            await stream.launch(SPIN, 1, 1, milliseconds * MS)
            ends.append(driver.now())

    async def begin() -> tuple[Device, list[asyncio.Task[None]]]:
        device = await aiocuda.open_device(driver=driver, policy=policy)
        await device.load(SPIN)
        return device, [asyncio.create_task(wait(device, 20 + number)) for number in range(3)]

    async def end(device: Device, tasks: list[asyncio.Task[None]]) -> None:
        await asyncio.gather(*tasks)
        await device.aclose()

    loop = SimulatedLoop()
    device, tasks = loop.run_until_complete(begin())
    with pytest.raises(KeyboardInterrupt):
        loop.run_forever()
    loop.run_until_complete(end(device, tasks))
    loop.close()
    assert sorted(ends) == pytest.approx([0.020, 0.021, 0.022], abs=0.0035)


# Questions without an await


def test_program_that_only_asks_sees_the_end_in_virtual_time() -> None:
    async def main(device: Device, driver: SimulatedDriver) -> None:
        async with device.stream() as stream, AsyncCoordinator(device) as coordinator:
            asked: list[Any] = [stream.launch(SPIN, 1, 1, MS)]
            asked.append(coordinator.compute(SPIN, 1, 1, MS))
            for each in asked:
                began = driver.now()
                for _ in range(10_000):
                    if each.done():
                        break
                assert each.done()
                assert driver.now() - began < 0.003

    simulated(main)


def test_question_about_an_earlier_operation_is_answered_while_a_later_one_is_polled() -> None:
    async def main(device: Device, driver: SimulatedDriver) -> None:
        async with device.stream() as stream:
            first, second = (stream.launch(SPIN, 1, 1, 10 * MS) for _ in range(2))
            began = driver.now()
            waiting = asyncio.create_task(second.wait())
            while not first.done():
                await asyncio.sleep(50e-6)
            assert driver.now() - began < 0.0102
            await waiting

    simulated(main, policy="latency")


class Asking(SimulatedDriver):
    """Its queries run code of the program, as a finaliser or a signal handler does: before or after they look."""

    __slots__ = ("ask", "when")

    def __init__(self, seed: int, when: str) -> None:
        super().__init__(seed)
        self.ask: Callable[[], object] | None = None
        self.when = when

    def event_query(self, event: int) -> bool:
        if self.when == "before":
            self._run()
        done = super().event_query(event)
        if self.when == "after":
            self._run()
        return done

    def now(self) -> float:
        now = super().now()
        if self.when == "time":
            self._run()
        return now

    def _run(self) -> None:
        ask, self.ask = self.ask, None
        if ask is not None:
            try:
                ask()
            finally:
                self.ask = ask


@pytest.mark.parametrize("nodes", [False, True])
@pytest.mark.parametrize("when", ["before", "after", "time"])
def test_code_that_asks_in_the_middle_of_a_query_ends_nothing_early(when: str, nodes: bool) -> None:
    """The code asks for operations and nodes, and so resolves them while another pass has counted them."""
    for seed in range(24 if when == "time" else 8):
        ask_in_the_middle(seed, when, nodes)


def ask_in_the_middle(seed: int, when: str, nodes: bool) -> None:
    chance = random.Random(seed)
    ended: set[int] = set()
    errors: list[object] = []

    def kernel(number: int) -> aiocuda.Kernel:
        return aiocuda.Kernel(
            f"k{number}",
            source=f"__global__ void k{number}() {{}}",
            host=lambda: ended.add(number),
            host_seconds=chance.uniform(5e-6, 300e-6),
        )

    async def main(device: Device, driver: Asking) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: errors.append(context))
        kernels = [kernel(number) for number in range(24)]
        for each in kernels:
            await device.load(each)
        work: list[Any] = []

        def ask() -> None:
            often = chance.random()
            for number, each in enumerate(work):
                if chance.random() < often and each.done() and number not in ended:
                    errors.append(f"{each!r} has not ended")

        async with device.stream() as one, device.stream() as two:
            async with AsyncCoordinator(device, max_in_flight=4) as coordinator:
                driver.ask = ask
                for number, each in enumerate(kernels):
                    way = chance.randrange(4 if nodes else 2)
                    work.append(coordinator.compute(each, 1, 1) if way > 1 else (one, two)[way].launch(each, 1, 1))
                    if chance.random() < 0.3:
                        at = chance.randrange(number + 1)
                        await work[at]
                        assert at in ended
                await aiocuda.gather(*work)
                assert len(ended) == 24
                driver.ask = None

    simulated(main, driver=Asking(seed, when))
    assert errors == []


@pytest.mark.asyncio
async def test_gathering_is_not_ended_by_another_thread(device: Device) -> None:
    """A future of the loop belongs to its thread, so the other one does not wake the waiting task."""
    async with AsyncCoordinator(device, max_in_flight=1) as coordinator:
        await device.load(SPIN)
        async with device.stream() as stream:
            with Latch(device) as latch:
                held = latch.hold(stream)
                await latch.held()
                mixed = aiocuda.gather(coordinator.host(lambda: None), held)
                waiting = asyncio.create_task(mixed.wait())
                await asyncio.sleep(0.01)  # the host node has ended, and was noted
                latch.release()
                while not held.done():
                    pass
                asyncio.get_running_loop().set_debug(True)
                found: list[object] = []

                def ask() -> None:
                    try:
                        found.append(mixed.done())
                    except RuntimeError as error:
                        found.append(error)

                other = threading.Thread(target=ask)
                other.start()
                other.join()
                asyncio.get_running_loop().set_debug(False)
                assert found in ([False], [True])
                assert not waiting.done()
                await quickly(waiting)
