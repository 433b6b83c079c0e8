"""User code may raise anything: the waiter gets it, nothing hangs, and the failed object can be used again (P32).

Every place that calls a function of the user is tested with every kind of exception, on two drivers. The rules are
those of `aiocuda._base._user_code`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import pytest

import aiocuda
from aiocuda import (
    AsyncCoordinator,
    ClosedError,
    Device,
    DeviceFault,
    Kernel,
    ManagedContext,
    Pipeline,
    Slot,
    Stage,
    StepConfig,
    Stream,
    StreamGroup,
    StreamPool,
)
from aiocuda.data import DataLoader, to_device
from aiocuda.driver.host import HostDriver
from aiocuda.memory.adaptors import Adaptor
from aiocuda.pipeline import Launch, SlotBuffer
from aiocuda.testing import SimulatedDriver, SimulatedLoop
from tests.helpers import AFFINE, PATIENCE, Reports

pytestmark = pytest.mark.timeout(2 * PATIENCE, method="thread")


class OwnError(Exception):
    """An exception of the user."""


class OwnBaseError(BaseException):
    """An exception of the user that `except Exception` does not catch."""


ERRORS: dict[str, Callable[[], BaseException]] = {
    "Exception": OwnError,
    "AiocudaError": lambda: aiocuda.InvalidArgumentError("of the program"),
    "BaseException": OwnBaseError,
    "pytest.fail": lambda: pytest.fail.Exception("of the program"),
    "GeneratorExit": GeneratorExit,
    "CancelledError": asyncio.CancelledError,
    "KeyboardInterrupt": KeyboardInterrupt,
    "SystemExit": lambda: SystemExit(3),
    "StopIteration": StopIteration,
    "StopAsyncIteration": StopAsyncIteration,
}
SIGNALS = (asyncio.CancelledError, StopIteration, StopAsyncIteration)
LEAVES_LOOP = (KeyboardInterrupt, SystemExit)


class User:
    """A function of the user. It raises its error as long as it is broken."""

    def __init__(self, error: BaseException) -> None:
        self.error = error
        self.broken = True

    def __call__(self, *_: object) -> None:
        if self.broken:
            raise self.error

    async def coroutine(self, *_: object) -> None:
        await asyncio.sleep(0)
        self()

    # The exception that a waiter gets.

    def assert_raised(self, found: BaseException | None) -> None:
        """Check the exception that a waiter gets from a plain function."""
        if isinstance(self.error, SIGNALS):
            assert type(found) is RuntimeError, repr(found)
            assert found.__cause__ is self.error
        else:
            assert found is self.error, repr(found)

    def assert_raised_by_coroutine(self, found: BaseException | None, cancelled: type[BaseException]) -> None:
        """Check the exception from a coroutine function. If it is cancelled, the waiter gets ``cancelled``."""
        if isinstance(self.error, asyncio.CancelledError):
            assert type(found) is cancelled, repr(found)
        elif isinstance(self.error, StopIteration):  # converted by Python
            assert type(found) is RuntimeError, repr(found)
            assert found.__cause__ is self.error
        elif isinstance(self.error, StopAsyncIteration):  # an asynchronous generator converts it
            assert self.error in (found, found and found.__cause__)
        else:
            assert found is self.error, repr(found)


async def outcome(awaitable: Awaitable[Any]) -> BaseException | None:
    """Await something in a new task, and return the exception that the task gets."""

    async def waiter() -> None:
        await awaitable

    task = asyncio.get_running_loop().create_task(waiter())
    task.add_done_callback(lambda task: task.cancelled() or task.exception())  # marks it as retrieved
    await asyncio.wait({task})  # not `await task`: a GeneratorExit would close this coroutine
    return asyncio.CancelledError() if task.cancelled() else task.exception()


def fill(slot: Slot) -> Any:
    return slot.stream.fill(slot.buffer("x", 4), slot.item)


def down(slot: Slot) -> Any:
    return slot.stream.download(slot.buffer("x", 4))


async def consumed(pipeline: Pipeline, source: Any, overlap: bool | None = None) -> list[Any]:
    async with contextlib.aclosing(pipeline.run(source, overlap=overlap)) as results:
        return [None if result is None else float(np.sum(result)) async for result in results]


async def fails(user: User, pipeline: Pipeline, source: Callable[[], Any], overlap: bool | None = None) -> Any:
    """Return the exception that the consumer of a pipeline gets. Check that the pipeline works again after that."""
    found = await outcome(consumed(pipeline, source(), overlap))
    assert pipeline.ring.busy == 0
    user.broken = False
    assert len(await consumed(pipeline, source(), overlap)) == 3
    await pipeline.aclose()
    return found


def items() -> Any:
    return iter([1.0, 2.0, 3.0])


#: Runs user code that raises, and checks the exception and the state after it.
Place: TypeAlias = Callable[[Device, User], Coroutine[Any, Any, None]]
PLACES: dict[str, Place] = {}


def place(function: Place) -> Place:
    PLACES[function.__name__] = function
    return function


# Pipelines


@place
async def stage(device: Device, user: User) -> None:
    pipeline = Pipeline(device, [Stage("fill", fill), Stage("user", user), Stage("down", down)])
    user.assert_raised(await fails(user, pipeline, items))


@place
async def stage_one_after_the_other(device: Device, user: User) -> None:
    pipeline = Pipeline(device, [Stage("fill", fill), Stage("user", user), Stage("down", down)])
    user.assert_raised(await fails(user, pipeline, items, overlap=False))


@place
async def stage_after_one_that_awaits(device: Device, user: User) -> None:
    async def waits(slot: Slot) -> None:
        await asyncio.sleep(0)

    pipeline = Pipeline(device, [Stage("waits", waits), Stage("user", user), Stage("fill", fill)])
    user.assert_raised(await fails(user, pipeline, items))


@place
async def stage_that_awaits(device: Device, user: User) -> None:
    pipeline = Pipeline(device, [Stage("fill", fill), Stage("user", user.coroutine), Stage("down", down)])
    user.assert_raised_by_coroutine(await fails(user, pipeline, items), ClosedError)


@place
async def stage_of_a_fork(device: Device, user: User) -> None:
    async def waits(slot: Slot) -> None:
        await asyncio.sleep(0)

    stages = [Stage("fill", fill), Stage("waits", waits, after="fill"), Stage("user", user, after="fill")]
    pipeline = Pipeline(device, [*stages, Stage("down", down, after=("waits", "user"))])
    user.assert_raised(await fails(user, pipeline, items))


@place
async def prepare(device: Device, user: User) -> None:
    pipeline = Pipeline(device, [Stage("fill", fill, prepare=user)])
    user.assert_raised(await fails(user, pipeline, items))


@place
async def argument_of_a_launch(device: Device, user: User) -> None:
    def argument(slot: Slot) -> int:
        user()
        return 2

    launch = Launch(AFFINE, 1, 4, SlotBuffer("u", 4, "u4"), 4, argument, 1)
    pipeline = Pipeline(device, [Stage("fill", fill), Stage("user", launch), Stage("down", down)])
    user.assert_raised(await fails(user, pipeline, items))


@place
async def stage_to_be_replayed(device: Device, user: User) -> None:
    def function(slot: Slot) -> Any:
        user()
        return slot.stream.fill(slot.buffer("x", 4), 1.0)

    pipeline = Pipeline(device, [Stage("fill", fill), Stage("user", function)], replay=["user"])
    user.assert_raised(await fails(user, pipeline, items))


@place
async def stage_of_a_single_item(device: Device, user: User) -> None:
    pipeline = Pipeline(device, [Stage("user", user), Stage("fill", fill)])
    user.assert_raised(await outcome(pipeline.execute_iteration(1.0)))
    user.broken = False
    await pipeline.execute_iteration(1.0)
    await pipeline.aclose()


@place
async def stage_of_a_ticket(device: Device, user: User) -> None:
    pipeline = Pipeline(device, [Stage("user", user), Stage("fill", fill)])

    async def submit() -> None:
        await (await pipeline.submit(1.0))

    user.assert_raised(await outcome(submit()))
    user.broken = False
    await submit()
    await pipeline.aclose()


class Source:
    """An iterable of three items. It raises before the second item, or when the iteration begins."""

    def __init__(self, user: User, from_start: bool) -> None:
        self.user = user
        self.from_start = from_start
        self.left = 3

    def __iter__(self) -> Iterator[float]:
        if self.from_start:
            self.user()
        return self

    def __next__(self) -> float:
        if not self.left:
            raise StopIteration
        if self.left == 2:
            self.user()
        self.left -= 1
        return 1.0


@place
async def source(device: Device, user: User) -> None:
    pipeline = Pipeline(device, [Stage("fill", fill)])
    found = await fails(user, pipeline, lambda: Source(user, from_start=False))
    if isinstance(user.error, StopIteration):
        assert found is None  # the end of the iteration
    else:
        user.assert_raised(found)


@place
async def source_that_raises_from_the_start(device: Device, user: User) -> None:
    user.assert_raised(
        await fails(user, Pipeline(device, [Stage("fill", fill)]), lambda: Source(user, from_start=True))
    )


async def asynchronous(user: User) -> AsyncIterator[float]:
    yield 1.0
    await user.coroutine()
    yield 2.0
    yield 3.0


@place
async def asynchronous_source(device: Device, user: User) -> None:
    found = await fails(user, Pipeline(device, [Stage("fill", fill)]), lambda: asynchronous(user))
    user.assert_raised_by_coroutine(found, ClosedError)


@place
async def asynchronous_source_one_after_the_other(device: Device, user: User) -> None:
    found = await fails(user, Pipeline(device, [Stage("fill", fill)]), lambda: asynchronous(user), overlap=False)
    user.assert_raised_by_coroutine(found, ClosedError)


# Contexts, groups, coordinators


@place
async def context_step(device: Device, user: User) -> None:
    async with ManagedContext(driver=device.driver) as context:
        config = StepConfig(compute=user, download=())

        async def steps() -> None:
            for _ in range(4):
                await context.triple_buffered_step(config)

        found = await outcome(steps())
        if isinstance(found, BaseExceptionGroup):  # three steps have failed
            assert {id(error.__cause__ or error) for error in found.exceptions} == {id(user.error)}
        else:
            user.assert_raised(found)
        user.broken = False
        await context.reset_pipeline()
        await steps()


@place
async def function_of_a_group(device: Device, user: User) -> None:
    async with StreamGroup(device, ("one", "two")) as group:

        def function(stream: Stream) -> str:
            if stream.name == "one":
                user()
            return stream.name

        user.assert_raised(await outcome(group.run(function)))
        user.broken = False
        assert await group.run(function) == ["one", "two"]


@place
async def coroutine_of_a_group(device: Device, user: User) -> None:
    async with StreamGroup(device, ("one", "two")) as group:

        async def function(stream: Stream) -> str:
            if stream.name == "one":
                await user.coroutine()
            return stream.name

        user.assert_raised_by_coroutine(await outcome(group.run(function)), asyncio.CancelledError)
        user.broken = False
        assert await group.run(function) == ["one", "two"]


@place
async def host_function(device: Device, user: User) -> None:
    async with AsyncCoordinator(device) as coordinator:
        node = coordinator.host(user)
        behind = coordinator.host(int, after=node)
        user.assert_raised(await outcome(node))
        user.assert_raised(await outcome(node.wait()))
        assert node.state == "failed"
        skipped = await outcome(behind)
        assert isinstance(skipped, aiocuda.SkippedError)
        user.assert_raised(skipped.__cause__)
        user.broken = False
        await coordinator.host(user)


@place
async def host_coroutine(device: Device, user: User) -> None:
    async with AsyncCoordinator(device) as coordinator:
        node = coordinator.host(user.coroutine)
        user.assert_raised_by_coroutine(await outcome(node), ClosedError)
        user.assert_raised_by_coroutine(await outcome(node), ClosedError)
        user.broken = False
        await coordinator.host(user.coroutine)


@place
async def host_function_without_a_waiter(device: Device, user: User) -> None:
    async def use() -> None:
        async with AsyncCoordinator(device) as coordinator:
            coordinator.host(user)

    found = await outcome(use())
    if isinstance(user.error, LEAVES_LOOP):
        assert found is None  # the loop has reported it
    else:
        user.assert_raised(found)


@place
async def bracket(device: Device, user: User) -> None:
    async with AsyncCoordinator(device) as coordinator:
        node = coordinator.operation("kernel")

        async def block() -> None:
            async with node as entered:
                assert entered.stream is not None
                entered.stream.synchronize()
                await user.coroutine()

        user.assert_raised_by_coroutine(await outcome(block()), asyncio.CancelledError)
        user.assert_raised_by_coroutine(await outcome(node), ClosedError)
        async with coordinator.operation("kernel") as entered:
            entered.set_result(7)
        assert await entered == 7


@place
async def body_of_a_coordinator(device: Device, user: User) -> None:
    async def use() -> None:
        async with AsyncCoordinator(device) as coordinator:
            coordinator.host(int)
            await user.coroutine()

    user.assert_raised_by_coroutine(await outcome(use()), asyncio.CancelledError)


# Functions without a stream


@place
async def offloaded_function(device: Device, user: User) -> None:
    user.assert_raised(await outcome(device.offload(user)))
    user.broken = False
    assert await device.offload(user) is None


@place
async def strategy_of_a_pool(device: Device, user: User) -> None:
    async with StreamPool(device, strategy=_Strategy(user)) as pool:
        user.assert_raised(await outcome(_leased(pool)))
        user.broken = False
        await _leased(pool)


@place
async def strategy_for_a_lease_that_waits(device: Device, user: User) -> None:
    user.broken = False
    async with StreamPool(device, 1, 1, strategy=_Strategy(user)) as pool:
        held = await pool.stream(exclusive=True)
        waiting = asyncio.ensure_future(outcome(_leased(pool)))
        other = asyncio.ensure_future(outcome(_leased(pool)))
        while pool.statistics().waiting < 2:
            await asyncio.sleep(0)
        user.broken = True
        found = await outcome(_released(held))  # another task, which gets only an error that leaves the loop
        assert found is (user.error if isinstance(user.error, LEAVES_LOOP) else None)
        user.assert_raised(await waiting)
        user.broken = False
        await _leased(pool)
        await other


class _Strategy:
    name = "the program's"

    def __init__(self, user: User) -> None:
        self.user = user

    def choose(self, offer: Any) -> Any:
        self.user()
        return offer.free[0] if offer.free else None


async def _leased(pool: StreamPool) -> None:
    async with pool.stream(exclusive=True) as stream:
        await stream.synchronize()


async def _released(lease: Any) -> None:
    lease.release()


# Callbacks: no task waits for them


async def told_by_the_loop(user: User, work: Callable[[], Awaitable[Any]]) -> None:
    with Reports() as reports:
        assert await outcome(work()) in (None, *[user.error] * isinstance(user.error, LEAVES_LOOP))
        for _ in range(5):
            await asyncio.sleep(0)
    expected = [] if isinstance(user.error, LEAVES_LOOP) else [user.error]
    assert [context["exception"] for context in reports.contexts] == expected


@place
async def callback_of_an_operation(device: Device, user: User) -> None:
    async with device.stream() as stream:

        async def work() -> None:
            operation = stream.fill(stream.empty(4), 1)
            operation.add_done_callback(user)
            await operation

        await told_by_the_loop(user, work)


@place
async def callback_of_a_stream(device: Device, user: User) -> None:
    async with device.stream() as stream:
        await told_by_the_loop(user, lambda: stream.add_callback(user).wait())


@place
async def callback_of_a_node(device: Device, user: User) -> None:
    async with AsyncCoordinator(device) as coordinator:

        async def work() -> None:
            node = coordinator.upload(np.zeros(4, np.float32))
            node.add_done_callback(user)
            await node

        await told_by_the_loop(user, work)


class _Instrument:
    timing = False

    def __init__(self, user: User, hook: str) -> None:
        setattr(self, hook, user)

    def on_submit(self, operation: Any) -> None:
        pass

    def on_resolve(self, operation: Any, start: int, end: int) -> None:
        pass


async def listening(device: Device, user: User, hook: str) -> None:
    """The listener is removed, and the operation succeeds."""
    async with device.stream() as stream:
        buffer = stream.empty(4)
        await stream.synchronize()
        with device.listen(_Instrument(user, hook)):
            operations: list[Any] = []

            async def work() -> None:
                operations.append(stream.fill(buffer, 1))
                await operations[0]

            await told_by_the_loop(user, work)
            await stream.synchronize()  # calls no hook, which would raise again
        assert all(operation.exception() is None for operation in operations)


@place
async def instrument_at_submission(device: Device, user: User) -> None:
    await listening(device, user, "on_submit")


@place
async def instrument_at_the_end(device: Device, user: User) -> None:
    await listening(device, user, "on_resolve")


# Memory


class _Resource(Adaptor):
    def __init__(self, upstream: Any, user: User, verb: str) -> None:
        super().__init__(upstream)
        self.user, self.verb = user, verb
        self.freed: list[int] = []

    def allocate(self, nbytes: int, stream: int) -> int:
        if self.verb == "allocate":
            self.user()
        return super().allocate(nbytes, stream)

    def deallocate(self, address: int, nbytes: int, stream: int) -> None:
        if self.verb == "deallocate":
            self.user()
        self.freed.append(address)
        super().deallocate(address, nbytes, stream)

    def trim(self, keep: int = 0) -> None:
        if self.verb == "trim":
            self.user()
        super().trim(keep)

    def release(self, stream: int) -> None:
        if self.verb == "release":
            self.user()
        super().release(stream)


def direct(user: User, function: Callable[[], object]) -> None:
    """The function is called in the caller's frame, which gets its exception directly."""
    with pytest.raises(type(user.error)) as caught:
        function()
    assert caught.value is user.error


@place
async def resource_that_allocates(device: Device, user: User) -> None:
    device.memory.use(lambda upstream: _Resource(upstream, user, "allocate"))
    async with device.stream() as stream:
        direct(user, lambda: stream.empty(4))
        user.broken = False
        stream.empty(4).free()


@place
async def resource_that_frees(device: Device, user: User) -> None:
    resource = device.memory.use(lambda upstream: _Resource(upstream, user, "deallocate"))
    async with device.stream() as stream:
        buffer = stream.empty(4)
        direct(user, buffer.free)
        user.broken = False
        buffer.free()  # the buffer can be freed again
        assert len(resource.freed) == 1
        user.broken = True
        stream.empty(4)  # the finaliser did not free it, and the next allocation does
        kept: list[object] = []

        async def work() -> None:
            kept.append(stream.empty(8))
            await stream.synchronize()

        await told_by_the_loop(user, work)
        user.broken = False
        await work()
        assert len(resource.freed) == 2


@place
async def resource_that_is_trimmed(device: Device, user: User) -> None:
    device.memory.use(lambda upstream: _Resource(upstream, user, "trim"))
    user.assert_raised(await outcome(device.memory.trim()))
    user.broken = False
    await device.memory.trim()


@place
async def resource_at_the_end_of_a_stream(device: Device, user: User) -> None:
    device.memory.use(lambda upstream: _Resource(upstream, user, "release"))
    stream = device.stream()
    await told_by_the_loop(user, stream.aclose)
    assert stream.closed
    user.broken = False


# Data loaders


class _Part(Mapping[str, Any]):
    """A sample that calls the user's function where a loader takes its array, or its parts."""

    def __init__(self, user: User, where: str) -> None:
        self.user, self.where = user, where

    def __array__(self, *_: object, **__: object) -> Any:
        if self.where == "array":
            self.user()
        return np.array(3)

    def __getitem__(self, name: str) -> Any:
        if self.where == "parts":
            self.user()
        return 3

    def __iter__(self) -> Iterator[str]:
        return iter(["y"])

    def __len__(self) -> int:
        return 1


class _Numbers:
    """0 to 4, as an iterable. It calls the user's function before 3, or when the iteration begins."""

    def __init__(self, user: User, where: str) -> None:
        self.user, self.where = user, where

    def call(self, where: str) -> None:
        if self.where == where:
            self.user()

    def __iter__(self) -> Iterator[int]:
        self.call("start")
        return self.numbers()

    def numbers(self) -> Iterator[int]:
        yield from range(3)
        self.call("middle")
        yield from range(3, 5)


class _AsyncNumbers(_Numbers):
    """The same as an asynchronous iterable."""

    def __aiter__(self) -> _AsyncNumbers:
        self.call("start")
        self.iterator = self.anumbers()
        return self

    async def __anext__(self) -> int:
        return await anext(self.iterator)

    async def anumbers(self) -> AsyncIterator[int]:
        for number in range(5):
            if number == 3 and self.where == "middle":
                await self.user.coroutine()
            yield number


def named(sample: Any) -> dict[str, Any]:
    return {"y": sample}


async def loads(
    device: Device, source: Any, user: User, *, first: Sequence[int] = (0, 1), **options: Any
) -> BaseException | None:
    """Return the exception that the consumer of a loader gets after the first samples. Check the epoch after that."""
    delivered: list[int] = []

    async def epoch() -> None:
        async for batch in loader:
            delivered.extend((await batch.stream.download(batch["y"])).tolist())

    async with DataLoader(device, source, batch_size=2, **options) as loader:
        found = await outcome(epoch())
        assert delivered == list(first)
        user.broken = False
        delivered.clear()
        await epoch()
        assert delivered == [number for number in range(5) if number != 3 or "on_error" not in options]
    return found


@place
async def decoder_of_a_loader(device: Device, user: User) -> None:
    def decode(sample: int, out: Any) -> None:
        if sample == 3:
            user()
        out["y"][...] = sample

    fields = {"y": ((), np.int64)}
    user.assert_raised(await loads(device, range(5), user, fields=fields, decode=decode, workers=2))


@place
async def item_of_a_source(device: Device, user: User) -> None:
    class Items:
        def __len__(self) -> int:
            return 5

        def __getitem__(self, index: int) -> int:
            if index == 3:
                user()
            return index

    user.assert_raised(await loads(device, Items(), user, decode=named))


@place
async def function_that_skips_a_sample(device: Device, user: User) -> None:
    def decode(sample: int) -> dict[str, Any]:
        if sample == 3:
            raise OwnError
        return named(sample)

    user.assert_raised(await loads(device, range(5), user, decode=decode, on_error=user))


@place
async def collate(device: Device, user: User) -> None:
    def function(samples: list[int]) -> dict[str, Any]:
        if 3 in samples:
            user()
        return named(samples)

    user.assert_raised(await loads(device, range(5), user, collate=function))


@place
async def field_of_a_sample(device: Device, user: User) -> None:
    samples = [0, 1, 2, _Part(user, "parts"), 4]
    user.assert_raised(await loads(device, samples, user, fields={"y": ((), np.int64)}))


@place
async def array_of_a_sample(device: Device, user: User) -> None:
    user.assert_raised(await loads(device, [0, 1, 2, _Part(user, "array"), 4], user, decode=named))


@place
async def parts_of_a_sample(device: Device, user: User) -> None:
    samples = [named(0), named(1), named(2), _Part(user, "parts"), named(4)]
    user.assert_raised(await loads(device, samples, user))


@place
async def iterable_of_samples(device: Device, user: User) -> None:
    found = await loads(device, _Numbers(user, "middle"), user, decode=named)
    if isinstance(user.error, StopIteration):  # converted by Python, in a generator
        assert isinstance(found, RuntimeError)
        assert found.__cause__ is user.error
    else:
        user.assert_raised(found)


@place
async def iterable_of_samples_that_raises_from_the_start(device: Device, user: User) -> None:
    user.assert_raised(await loads(device, _Numbers(user, "start"), user, first=(), decode=named))


@place
async def asynchronous_samples(device: Device, user: User) -> None:
    found = await loads(device, _AsyncNumbers(user, "middle"), user, decode=named)
    user.assert_raised_by_coroutine(found, ClosedError)


@place
async def asynchronous_samples_that_raise_from_the_start(device: Device, user: User) -> None:
    user.assert_raised(await loads(device, _AsyncNumbers(user, "start"), user, first=(), decode=named))


@place
async def memory_of_a_batch(device: Device, user: User) -> None:
    device.memory.use(lambda upstream: _Resource(upstream, user, "allocate"))
    user.assert_raised(await loads(device, range(5), user, first=(), decode=named))


async def arrives(device: Device, source: Any, user: User) -> None:
    """Check the exception of the second batch of a source, and the next iteration."""
    delivered: list[int] = []

    async def iteration() -> None:
        async for batch in batches:
            delivered.extend((await batch.stream.download(batch["y"])).reshape(1).tolist())

    async with to_device(source, device) as batches:
        user.assert_raised(await outcome(iteration()))
        assert delivered == [0]
        user.broken = False
        delivered.clear()
        await iteration()
        assert delivered == [0, 3]


class _AsyncBatches:
    def __init__(self, batches: Sequence[Any]) -> None:
        self.batches = batches

    async def __aiter__(self) -> AsyncIterator[Any]:
        for batch in self.batches:
            yield batch


@place
async def parts_of_a_batch_for_a_device(device: Device, user: User) -> None:
    await arrives(device, [named(np.array(0)), _Part(user, "parts")], user)


@place
async def parts_of_an_asynchronous_batch_for_a_device(device: Device, user: User) -> None:
    await arrives(device, _AsyncBatches([named(np.array(0)), _Part(user, "parts")]), user)


# Functions that are called in the caller's frame


class _Foreign:
    def __init__(self, user: User) -> None:
        self.user = user

    def __dlpack__(self, **_: object) -> object:
        return self.user()

    def __dlpack_device__(self) -> object:
        self.user()
        return (0, 0)


class _ForeignInterface:
    def __init__(self, user: User) -> None:
        self.user = user

    @property
    def __cuda_array_interface__(self) -> object:
        self.user()
        return {}


@place
async def foreign_array(device: Device, user: User) -> None:
    async with device.stream() as stream:
        direct(user, lambda: stream.adopt(_Foreign(user)))
        direct(user, lambda: stream.adopt(_ForeignInterface(user)))
        await stream.synchronize()


@place
async def capture(device: Device, user: User) -> None:
    async with device.stream() as stream:
        buffer = stream.empty(4)

        def captured() -> None:
            with stream.capture():
                stream.fill(buffer, 1)
                user()

        direct(user, captured)
        await stream.fill(buffer, 2)
        assert (await stream.download(buffer)).tolist() == [2] * 4


# Host implementations of kernels


async def faults(device: Device, user: User, twin: Callable[..., Any]) -> None:
    async with device.stream() as stream, device.stream() as other:
        launch = stream.launch(Kernel("user", source='extern "C" __global__ void user(int x) {}', host=twin), 1, 1, 1)
        for operation in (launch, stream.synchronize()):
            found = await outcome(operation)
            assert isinstance(found, DeviceFault), repr(found)
            assert found.__cause__ is user.error
        with pytest.raises(DeviceFault) as latched:
            other.synchronize()
        assert latched.value.__cause__ is user.error


@place
async def twin(device: Device, user: User) -> None:
    await faults(device, user, lambda x: user())


@place
async def twin_that_naps(device: Device, user: User) -> None:
    def function(x: Any) -> Iterator[float]:
        yield 1e-6
        user()

    error = user.error
    if isinstance(error, StopIteration):  # a generator converts it
        user.error = OwnError()
    await faults(device, user, function)
    user.error = error


@place
async def twin_that_naps_and_raises_first(device: Device, user: User) -> None:
    def function(x: Any) -> Iterator[float]:
        if not isinstance(user.error, StopIteration):
            user()
        user.error = OwnError()
        user()
        yield 1e-6

    await faults(device, user, function)


@place
async def nap_that_is_no_time(device: Device, user: User) -> None:
    class Nap:
        def __float__(self) -> float:
            raise user.error

    def function(x: Any) -> Iterator[Any]:
        yield Nap()

    await faults(device, user, function)


# The matrix


async def in_each_way(device: Device, where: str, left: list[BaseException]) -> None:
    """Run one place with every kind of exception."""
    for kind, make in ERRORS.items():
        left.clear()
        user = User(make())
        error = user.error
        try:
            await PLACES[where](device, user)
            await usable(device)
            if isinstance(error, LEAVES_LOOP) and where not in DIRECT:
                assert {id(each) for each in left} == {id(error)}
            else:
                assert left == []
        except BaseException as failure:
            failure.add_note(f"in {where}, with {kind}")
            raise


async def in_each_way_with_devices_of_their_own(driver: type[Any], where: str) -> None:
    """The error of a host implementation is a fault: each test needs a new device."""

    async def loses(kind: str) -> None:
        own = driver()
        async with aiocuda.open_device(driver=own) as device:
            await PLACES[where](device, User(ERRORS[kind]()))
        own.close()

    async with asyncio.TaskGroup() as group:
        for kind in ERRORS:
            group.create_task(loses(kind), name=kind)


async def usable(device: Device) -> None:
    async with device.stream() as stream:
        buffer = stream.empty(4)
        stream.fill(buffer, 3)
        assert (await stream.download(buffer)).tolist() == [3] * 4


#: Here the test itself catches what leaves the caller's frame.
DIRECT = ("resource_that_allocates", "foreign_array", "capture")

#: These lose the device.
TWINS = ("twin", "twin_that_naps", "twin_that_naps_and_raises_first", "nap_that_is_no_time")


@pytest.mark.parametrize("driver", [HostDriver, SimulatedDriver])
@pytest.mark.parametrize("where", PLACES)
def test_whatever_user_code_raises(where: str, driver: type[Any]) -> None:
    left: list[BaseException] = []  # errors that have left the loop

    async def main() -> None:
        async with asyncio.timeout(PATIENCE):
            if where in TWINS:
                await in_each_way_with_devices_of_their_own(driver, where)
                return
            own = driver()
            async with aiocuda.open_device(driver=own) as device:
                await in_each_way(device, where, left)
            own.close()

    with asyncio.Runner(loop_factory=SimulatedLoop if driver is SimulatedDriver else None) as runner:
        loop = runner.get_loop()
        task = loop.create_task(main())
        while not task.done():  # run again after an error has left the loop, as a notebook does
            try:
                loop.run_until_complete(task)
            except LEAVES_LOOP as error:
                left.append(error)
        task.result()
        assert left == [] or where not in TWINS


@pytest.mark.parametrize("kind", ["KeyboardInterrupt", "SystemExit"])
@pytest.mark.parametrize(
    "where", ["stage", "stage_that_awaits", "host_function", "host_coroutine", "offloaded_function"]
)
def test_what_leaves_the_loop_comes_out_of_asyncio_run(where: str, kind: str) -> None:
    user = User(ERRORS[kind]())

    async def main() -> None:
        async with aiocuda.open_device(driver="host") as device:
            await PLACES[where](device, user)

    with pytest.raises(type(user.error)) as caught:
        asyncio.run(main())
    assert caught.value is user.error
