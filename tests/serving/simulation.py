"""Random programs that use a micro-batcher, in virtual time.

``python -m tests.serving.simulation [--seeds N] [--first S]``: exit 1 and a line ``seed S: B2 …`` at the first
violation.

====  ==========================================================================================================
B1    each request has one outcome, and it is its own: the result of its item, or the error that belongs to it
B2    no request waits forever, no task is left, nothing is left in flight on the device, no callback fails
B3    limits: waiting requests, weight of a batch, batches at a time, bucket
B4    requests of one priority begin in the order of their calls; at most 256 later ones overtake a request, and none
      of a lower priority does until it was overtaken 64 times
B5    a batch has no request that was cancelled or has expired before it; a deadline passes on time
B6    a batch begins when it is full or its earliest request has waited long enough, as soon as there is a place
B7    after a fault every request gets the fault
B8    statistics
B9    closing refuses requests and completes those that were accepted; leaving fails those that wait
====  ==========================================================================================================
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

import aiocuda
from aiocuda import ClosedError, Device, DeviceFault, InvalidArgumentError, Kernel
from aiocuda.coordination import PRIORITIES
from aiocuda.coordination._ready_queue import RISES_AFTER
from aiocuda.serving import Batch, BatchError, DeadlineError, MicroBatcher, OverloadedError
from aiocuda.testing import SimulatedDriver
from tests.random_programs import Violation, check, command, run_in_virtual_time

__all__ = ["run"]

#: Ten turns of the simulated loop: between an event and the step of the task that notes it.
EPSILON = 30e-6

DOUBLE = Kernel("twice", source='extern "C" __global__ void twice(float* x, int n) {}', host=lambda x, n: x.__imul__(2))


class BadItem(Exception):  # noqa: N818 - raised on purpose
    pass


class Failed(Exception):  # noqa: N818 - raised on purpose
    pass


class Uncopyable(Exception):  # noqa: N818 - raised on purpose
    def __init__(self, one: int, *, two: int) -> None:
        super().__init__("cannot be made from its arguments")


@dataclasses.dataclass(eq=False)
class Call:
    """One call of submit, and what the program knows about it."""

    number: int
    weight: int
    rank: int
    deadline: float | None
    called: float = 0.0
    accepted: bool = False
    begun: float | None = None
    cancelled: float | None = None
    outcome: Any = None
    ended: float | None = None
    batch: int | None = None
    overtaken: int = 0

    @property
    def expires(self) -> float:
        return float("inf") if self.deadline is None else self.called + self.deadline

    @property
    def waits(self) -> bool:
        return self.accepted and self.begun is None and self.ended is None and self.cancelled is None


class Program:
    """One random program."""

    def __init__(self, seed: int) -> None:
        chance = self.chance = random.Random(f"aiocuda batcher {seed}")
        self.seed = seed
        crowded = chance.random() < 0.05
        self.count = 500 if crowded else chance.choice([1, 5, 20, 60])
        self.limit = chance.choice([1, 2, 5, 16])
        self.wait = chance.choice([0.0, 0.0, 1e-3, 2e-3, 2e-2])
        self.places = chance.choice([1, 1, 2, 3])
        self.most_queued = 1000 if crowded else chance.choice([1, 4, 30, 1024])
        self.weighs = chance.random() < 0.4
        self.buckets = None
        if chance.random() < 0.4:
            self.buckets = tuple({chance.randint(1, self.limit), self.limit + chance.randint(0, 3)})
        self.spread = chance.choice([1e-6, 1e-3, 2e-2])  # of the calls
        self.seconds = chance.choice([0.0, 1e-3, 1e-2])  # of a batch
        self.failing = chance.choice([0.0, 0.0, 0.2])  # batches that fail
        self.fault = chance.random() < 0.15
        self.uses_device = chance.random() < 0.2 and not crowded
        self.ending = chance.choice(["close", "close", "close early", "leave early", "leave"])
        self.patience = chance.choice([0.0, 0.3])  # calls that are cancelled
        self.hurried = chance.choice([0.0, 0.5])  # calls with a deadline
        self.calls: list[Call] = []
        self.running = self.begun = 0
        self.faulted, self.faulted_at = False, 0.0
        self.closing = False
        self.place_since = 0.0  # the time since which a place is free
        self.failures: dict[int, BaseException] = {}

    # -- the function --------------------------------------------------------------------------------------------

    async def function(self, batch: Batch[Call]) -> Any:
        """Check what a batch may have, then compute it, or fail."""
        chance, now = self.chance, self.now()
        self.check_batch(batch, now)
        self.running += 1
        size = batch.size
        for call in batch.items:
            call.batch = batch.number
        try:
            if self.fault and chance.random() < 0.2:
                raise await self.device_fault()
            if chance.random() < self.failing:
                await asyncio.sleep(self.seconds * chance.random())
                return self.fail(batch)
            if self.uses_device:
                doubled = await self.on_device(batch)
            else:
                await asyncio.sleep(self.seconds * chance.random())
                doubled = [2 * call.number for call in batch.items]
            results: list[Any] = list(doubled)
            for position, call in enumerate(batch.items):
                if chance.random() < 0.05:
                    results[position] = BadItem(call.number)
            return results if chance.random() < 0.5 else tuple(results)
        finally:
            check("B3", batch.size == size, "a batch has changed")
            self.running -= 1
            self.place_since = self.now()

    def fail(self, batch: Batch[Call]) -> Any:
        how = self.chance.randrange(4)
        error: BaseException = (Failed(batch.number), Uncopyable(1, two=2), asyncio.CancelledError(), Failed())[how]
        if how == 3:
            return [0] * (batch.size + self.chance.choice([-1, 1]))
        self.failures[batch.number] = error
        raise error

    async def device_fault(self) -> BaseException:
        self.faulted, self.faulted_at = True, self.now()
        fault = DeviceFault("the device has faulted", code=700, device=0, operation=None)
        return ExceptionGroup("several", [ValueError(), fault]) if self.chance.random() < 0.3 else fault

    async def on_device(self, batch: Batch[Call]) -> list[int]:
        x = batch.slot.pinned("x", 64)
        await x
        array = np.asarray(x)
        array[: batch.size] = [call.number for call in batch.items]
        y = batch.slot.buffer("y", 64)
        batch.stream.copy(y, x)
        batch.stream.launch(DOUBLE, 1, 64, y, batch.size)
        done = await batch.stream.download(y)
        if self.chance.random() < 0.3:
            batch.stream.copy(y, x)  # not awaited: the batch ends after it
        return [int(number) for number in done[: batch.size]]

    def check_batch(self, batch: Batch[Call], now: float) -> None:
        weight = sum(call.weight for call in batch.items)
        check("B3", 0 < weight <= self.limit, f"a batch weighs {weight} of {self.limit}")
        check("B3", batch.weight == weight, f"batch.weight is {batch.weight}, the items weigh {weight}")
        padded = weight if self.buckets is None else min(one for one in self.buckets if one >= weight)
        check("B3", batch.padded == padded, f"batch.padded is {batch.padded}, not {padded}")
        check("B3", self.running < self.places, f"{self.running + 1} batches run, of {self.places}")
        check("B7", not self.faulted, "a batch begins after a fault")
        for call in batch.items:
            check("B1", call.begun is None, f"call {call.number} is in two batches")
            check("B5", call.cancelled is None, f"call {call.number} was cancelled before its batch")
            check("B5", now < call.expires, f"call {call.number} has expired before its batch")
            check("B4", call.accepted, f"call {call.number} was refused")
        waiting = [call for call in self.calls if call.waits]
        for call in batch.items:
            self.check_order(call, now)
            call.begun = now
        earliest = min(waiting, key=lambda call: call.called)
        if weight < self.limit and not self.closing:
            # Some that were in the batch may have been cancelled, or have expired, just now.
            just = now - EPSILON
            gone = (call for call in self.calls if (call.cancelled or -1.0) >= just or just <= call.expires <= now)
            formed = list({*waiting, *gone})
            least = min((call.weight for call in formed if call not in batch.items), default=self.limit)
            full = weight + least > self.limit or sum(call.weight for call in formed) >= self.limit
            if not full:
                due = earliest.called + self.wait
                check(
                    "B6", now >= due - EPSILON, f"a batch begins at {now}, and its earliest request waits until {due}"
                )
                late = max(due, self.place_since)
                # With a device, the batch before this one has ended some time after its function.
                check(
                    "B6",
                    self.uses_device or now <= late + EPSILON,
                    f"a batch begins at {now}, and could have begun at {late}",
                )
        self.begun += 1

    def check_order(self, call: Call, now: float) -> None:
        for other in self.calls:
            if not other.waits or other is call or other.expires <= now:
                continue
            if other.number < call.number:
                check("B4", other.rank != call.rank, f"call {call.number} begins before {other.number}")
                other.overtaken += 1
                check("B4", other.overtaken <= 4 * RISES_AFTER, f"call {other.number} was overtaken too often")
            # A call that is cancelled, or expires, when its batch has just been formed has overtaken others, too.
            certain = RISES_AFTER // 2 if self.patience or self.hurried else RISES_AFTER
            if call.overtaken < certain and other.called < now - EPSILON:
                rank = max(0, other.rank - other.overtaken // RISES_AFTER)
                check("B4", rank >= call.rank, f"call {call.number} begins before one of a higher priority")

    # -- the calls -----------------------------------------------------------------------------------------------

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    async def call(self, batcher: MicroBatcher[Call, int]) -> None:
        """Call submit after some time, and perhaps cancel it."""
        chance = self.chance
        rank = chance.choices(range(5), (8, 4, 4, 2, 1))[0] if self.count > 100 else chance.randrange(5)
        deadline = chance.choice([0.0, 1e-4, 5e-3, 5e-2, 1.0]) if chance.random() < self.hurried else None
        call = Call(-1, chance.randint(1, self.limit) if self.weighs else 1, rank, deadline)
        await asyncio.sleep(chance.random() * self.spread)
        try:
            if chance.random() < 0.5:
                future: Any = asyncio.ensure_future(self.submit(batcher, call))
            else:
                future = self.submit_nowait(batcher, call)
            future.add_done_callback(lambda _: setattr(call, "ended", self.now()))
            if chance.random() < self.patience:
                await asyncio.sleep(chance.choice([0.0, chance.random() * 5e-3]))
                if not future.done():
                    call.cancelled = self.now()
                    future.cancel()
            call.outcome = await future
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - checked by `check_outcome`
            call.outcome = error

    def submit_nowait(self, batcher: MicroBatcher[Call, int], call: Call) -> asyncio.Future[int]:
        with self.refusing(batcher, call):
            return batcher.submit_nowait(call, priority=PRIORITIES[call.rank], deadline_s=call.deadline)
        raise AssertionError

    async def submit(self, batcher: MicroBatcher[Call, int], call: Call) -> int:
        with self.refusing(batcher, call):
            return await batcher.submit(call, priority=PRIORITIES[call.rank], deadline_s=call.deadline)
        raise AssertionError

    @contextlib.contextmanager
    def refusing(self, batcher: MicroBatcher[Call, int], call: Call) -> Iterator[None]:
        """Note the call, and whether it is refused."""
        call.number, call.called = len(self.calls), self.now()
        self.calls.append(call)
        call.accepted = batcher.healthy and not self.closing
        most = self.most_queued + self.places * self.limit  # of batches that have been formed
        waiting = sum(other.waits and other.expires > call.called for other in self.calls)
        check("B3", waiting <= most + 1, "too many requests wait")
        try:
            yield
        except OverloadedError as error:
            call.accepted = False
            self.check_refusal(call, error)
            raise
        except DeadlineError as error:
            call.accepted = call.accepted and error.predicted_s is None
            if not call.accepted:
                self.check_refusal(call, error)
            raise
        except Exception as error:
            if not call.accepted:
                self.check_refusal(call, error)
            raise

    def check_refusal(self, call: Call, error: Exception) -> None:
        if isinstance(error, OverloadedError):
            check("B3", error.queued >= self.most_queued, f"refused with {error.queued} of {self.most_queued} waiting")
            queued = sum(other.waits or (other.cancelled or 0.0) >= call.called - EPSILON for other in self.calls)
            check("B3", queued >= self.most_queued, f"refused, and {queued} of {self.most_queued} calls wait")
            check("B8", 0.0 < error.retry_after_s < float("inf"), f"retry_after_s is {error.retry_after_s}")
        elif isinstance(error, DeadlineError):
            check("B5", call.deadline is not None, "a request without a deadline was refused for it")
            check("B5", error.predicted_s is not None and error.predicted_s > (call.deadline or 0.0), f"{error}")
        elif isinstance(error, ClosedError):
            check("B9", self.closing, "refused by a batcher that is open")
        else:
            check("B7", isinstance(error, DeviceFault) and self.faulted, f"refused by {error!r}")

    def check_outcome(self, call: Call) -> None:
        """The outcome of an accepted request is its own."""
        outcome, where = call.outcome, f"call {call.number} ended with {call.outcome!r}"
        check("B2", call.ended is not None, f"call {call.number} has no outcome")
        assert call.ended is not None
        if isinstance(outcome, int):
            check("B1", outcome == 2 * call.number and call.begun is not None, where)
        elif isinstance(outcome, BadItem):
            check("B1", outcome.args == (call.number,), where)
        elif isinstance(outcome, Failed):
            assert call.batch is not None
            check("B1", outcome.args == (call.batch,) and outcome.__cause__ is self.failures[call.batch], where)
        elif isinstance(outcome, Violation):
            raise outcome
        elif isinstance(outcome, BatchError):
            check("B1", call.begun is not None, where)
        elif isinstance(outcome, DeadlineError):
            assert call.deadline is not None
            late = call.ended - call.called - call.deadline
            check("B5", -EPSILON <= late <= EPSILON, f"call {call.number} expired {late} s after its deadline")
        elif isinstance(outcome, asyncio.CancelledError):
            check("B1", call.cancelled is not None, where)
        elif isinstance(outcome, ClosedError):
            check("B9", self.ending.startswith("leave"), where)
        elif isinstance(outcome, DeviceFault):
            check("B7", self.faulted, where)
            if call.begun is None:
                check(
                    "B7",
                    call.ended <= self.faulted_at + EPSILON,
                    f"{where}, and waited {call.ended - self.faulted_at} s",
                )
        elif isinstance(outcome, ExceptionGroup):
            check("B7", self.faulted and call.begun is not None, where)
        else:
            check("B1", False, where)
        if call.deadline is not None and call.ended is not None and call.cancelled is None:
            check("B5", call.ended <= call.called + call.deadline + EPSILON, f"{where} after its deadline")

    # -- the whole program ---------------------------------------------------------------------------------------

    async def main(self) -> None:
        reports: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: reports.append(context))
        await self.main_with_device()
        check("B2", not reports, f"the loop's exception handler got {reports[:1]}")

    async def main_with_device(self) -> None:
        if not self.uses_device:
            await self.serve(None)
            return
        driver = SimulatedDriver(self.seed)
        async with aiocuda.open_device(driver=driver, policy="efficient") as device:
            await self.serve(device)
            check("B2", not device.statistics().in_flight, "operations are in flight after the end")
            check("B2", not device.statistics().streams, "streams are open after the end")
        check("B2", not driver.violations, f"{driver.violations[:1]}")
        driver.close()

    async def serve(self, device: Device | None) -> None:
        tasks_before = asyncio.all_tasks()
        batcher: MicroBatcher[Call, int] = MicroBatcher(
            self.function,
            max_batch_size=self.limit,
            batch_wait_timeout_s=self.wait,
            max_concurrent_batches=self.places,
            max_queued_requests=self.most_queued,
            buckets=self.buckets,
            weight=(lambda call: call.weight) if self.weighs else None,
            device=device,
        )
        early = self.ending.endswith("early")
        async with asyncio.TaskGroup() as group:
            try:
                async with batcher:
                    await self.refused(batcher)
                    calls = [group.create_task(self.call(batcher)) for _ in range(self.count)]
                    if early:
                        await asyncio.sleep(self.spread * self.chance.random())
                    else:
                        await asyncio.wait(calls)
                    self.closing = True
                    if self.ending.startswith("leave"):
                        raise ZeroDivisionError
            except ZeroDivisionError:
                pass
            ended = self.now()
        for call in self.calls:
            if call.accepted:
                self.check_outcome(call)
                assert call.ended is not None
                check("B9", call.ended <= ended + EPSILON, f"call {call.number} ended after the batcher")
        await asyncio.sleep(0)
        check("B2", not self.running, "a function runs after the end")
        check("B2", asyncio.all_tasks() == tasks_before, "a task is left")
        self.check_statistics(batcher)

    async def refused(self, batcher: MicroBatcher[Call, int]) -> None:
        """An item that is too heavy is refused, and its weight function alone fails."""
        if not self.weighs:
            return
        for weight in (self.limit + 1, 0):
            try:
                batcher.submit_nowait(Call(-1, weight, 0, None))
            except InvalidArgumentError as error:
                check("B3", str(weight) in str(error), str(error))
            else:
                check("B3", False, f"an item of weight {weight} is accepted")

    def check_statistics(self, batcher: MicroBatcher[Call, int]) -> None:
        found = batcher.statistics()
        accepted = [call for call in self.calls if call.accepted]
        outcomes = [call.outcome for call in accepted]
        refused = [call.outcome for call in self.calls if not call.accepted]
        cancelled = sum(isinstance(one, asyncio.CancelledError) for one in outcomes)
        missed = sum(isinstance(one, DeadlineError) for one in outcomes)
        answered = sum(isinstance(one, int) for one in outcomes)
        for name, value in {
            "accepted": len(accepted),
            "queued": 0,
            "running": 0,
            "overloaded": sum(isinstance(one, OverloadedError) for one in refused),
            "refused": sum(isinstance(one, DeadlineError) for one in refused),
        }.items():
            check("B8", getattr(found, name) == value, f"statistics().{name} is {getattr(found, name)}, not {value}")
        # A caller that is cancelled after its request has got an outcome, and before it runs, does not see the outcome.
        unseen = cancelled - found.cancelled
        more = {
            "answered": found.answered - answered,
            "missed_deadlines": found.missed_deadlines - missed,
            "failed": found.failed - (len(accepted) - answered - cancelled - missed),
        }
        check("B8", min(more.values()) >= 0 and sum(more.values()) == unseen, f"{more} more, {unseen} unseen")
        check("B8", found.batches >= self.begun, f"{self.begun} batches have begun, {found.batches} have ended")
        check("B8", 0.0 <= found.fill <= 1.0, f"fill is {found.fill}")
        check("B7", batcher.healthy is not self.faulted, f"healthy is {batcher.healthy}")


def run(seed: int) -> None:
    """Run a program. `Violation` if it breaks a rule."""
    run_in_virtual_time(Program(seed).main(), "B0")


if __name__ == "__main__":
    sys.exit(command(run, "tests.serving.simulation", __doc__))
