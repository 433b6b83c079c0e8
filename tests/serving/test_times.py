"""Times of a `MicroBatcher`, in virtual time: waits, deadlines, the end beside functions that never end."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest

import aiocuda
from aiocuda import ClosedError, DrainTimeoutWarning
from aiocuda.serving import Batch, DeadlineError, MicroBatcher, OverloadedError
from aiocuda.serving._admission import Admission, BatchTimes
from aiocuda.testing import SimulatedLoop
from tests.helpers import UVLOOP


def in_virtual_time(main: Callable[[], Any]) -> Any:
    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        return runner.run(main())


def test_wait_and_duration_are_two_settings() -> None:
    """BentoML 4265: one setting was the time that a request waits and the time that it may take."""

    async def slow(batch: Batch[int]) -> list[int]:
        await asyncio.sleep(10)
        return batch.items

    async def main() -> None:
        loop = asyncio.get_running_loop()
        async with MicroBatcher(slow, max_batch_size=8, batch_wait_timeout_s=0.002) as batcher:
            began = loop.time()
            assert await batcher.submit(1) == 1
            assert loop.time() - began == pytest.approx(10.002, abs=1e-4)

    in_virtual_time(main)


def test_batch_begins_when_it_is_full_or_its_first_request_has_waited() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        begun: list[tuple[float, list[int]]] = []

        async def note(batch: Batch[int]) -> list[int]:
            begun.append((loop.time() - start, batch.items))
            return batch.items

        async with MicroBatcher(note, max_batch_size=3, batch_wait_timeout_s=0.1) as batcher:
            start = loop.time()
            requests = [batcher.submit_nowait(1)]
            await asyncio.sleep(0.06)
            requests.append(batcher.submit_nowait(2))
            await asyncio.sleep(0.06)
            requests += [batcher.submit_nowait(item) for item in (3, 4, 5)]
            await asyncio.sleep(0.01)
            requests.append(batcher.submit_nowait(6))
            await asyncio.gather(*requests)
        assert [items for _, items in begun] == [[1, 2], [3, 4, 5], [6]]
        assert [time for time, _ in begun] == pytest.approx([0.1, 0.12, 0.23], abs=1e-4)

    in_virtual_time(main)


def test_two_batches_at_a_time_answer_later_at_half_load() -> None:
    """The table of `docs/how-to/service.md`: two batches that share a device each take the time of both."""

    def median(concurrent: int) -> float:
        chance = random.Random(1)
        took: list[float] = []

        async def main() -> None:
            loop, device = asyncio.get_running_loop(), asyncio.Lock()

            async def compute(batch: Batch[int]) -> list[int]:
                async with device:  # one batch at a time
                    await asyncio.sleep(0.01 + 0.0001 * batch.size)
                return batch.items

            async with MicroBatcher(
                compute, max_batch_size=16, max_concurrent_batches=concurrent, max_queued_requests=4096
            ) as batcher:

                async def request(item: int) -> None:
                    began = loop.time()
                    await batcher.submit(item)
                    took.append(loop.time() - began)

                async with asyncio.TaskGroup() as group:
                    for item in range(1000):
                        group.create_task(request(item))
                        await asyncio.sleep(chance.expovariate(690))  # half of what full batches serve

        in_virtual_time(main)
        return sorted(took)[len(took) // 2]

    one, two = median(1), median(2)
    assert 1.3 * one < two < 2 * one


def test_ctrl_c_in_the_function_leaves_the_loop_and_fails_its_batch() -> None:
    async def interrupt(batch: Batch[int]) -> list[int]:
        raise KeyboardInterrupt

    async def main() -> None:
        async with MicroBatcher(interrupt, max_batch_size=2) as batcher:
            requests.extend(batcher.submit_nowait(item) for item in range(2))
            await asyncio.wait(requests)

    requests: list[asyncio.Future[int]] = []
    with pytest.raises(KeyboardInterrupt):
        asyncio.run(main())
    assert [type(request.exception()) for request in requests] == [KeyboardInterrupt] * 2


def test_request_that_cannot_meet_its_deadline_is_refused() -> None:
    async def slow(batch: Batch[int]) -> list[int]:
        await asyncio.sleep(seconds[0])
        return batch.items

    async def main() -> None:
        loop = asyncio.get_running_loop()
        async with MicroBatcher(slow, max_batch_size=2, batch_wait_timeout_s=0.0) as batcher:
            # The first call of a bucket does not count, and without an estimate everything is accepted.
            for _ in range(2):
                with pytest.raises(DeadlineError, match="has passed"):
                    await batcher.submit(1, deadline_s=0.01)
                await asyncio.sleep(0.1)
            before = loop.time()
            with pytest.raises(DeadlineError, match=r"would be ready after 0\.05 s") as caught:
                batcher.submit_nowait(1, deadline_s=0.01)
            assert caught.value.predicted_s == pytest.approx(0.05, rel=0.1)
            assert caught.value.deadline_s == 0.01
            assert loop.time() == before
            assert await batcher.submit(1, deadline_s=0.06) == 1
            # Behind two full batches it is refused, too.
            waiting = [batcher.submit_nowait(item) for item in range(4)]
            with pytest.raises(DeadlineError, match="would be ready after"):
                batcher.submit_nowait(1, deadline_s=0.12)
            batcher.submit_nowait(1, deadline_s=0.12, priority="high").cancel()  # served before those
            await asyncio.gather(*waiting)
            # After a second of refusals one request is let through, and its batch is measured.
            seconds[0] = 0.001
            refused = 0
            for _ in range(150):
                try:
                    assert await batcher.submit(1, deadline_s=0.01) == 1
                    break
                except DeadlineError:
                    refused += 1
                await asyncio.sleep(0.01)
            assert 95 <= refused <= 101
            assert batcher.statistics().refused == refused + 2
            for _ in range(3):  # the old estimate is forgotten
                assert await batcher.submit(1, deadline_s=0.01) == 1

    seconds = [0.05]
    in_virtual_time(main)


@pytest.mark.parametrize("answered", [0, 700])
def test_requests_of_one_deadline_expire_256_in_an_iteration(answered: int) -> None:
    """Each had a timer of its own: 20 000 held the loop for 294 ms."""

    async def main() -> list[int]:
        loop = asyncio.get_running_loop()
        call_at, timers = loop.call_at, []

        def noted(when: float, *args: Any, **kwargs: Any) -> asyncio.TimerHandle:
            timers.append(when)
            return call_at(when, *args, **kwargs)

        async def slow(batch: Batch[int]) -> list[int]:
            await asyncio.sleep(0.5 if batch.items[0] < 0 else 1e3)
            return batch.items

        async with MicroBatcher(slow, max_batch_size=max(1, answered), max_queued_requests=5000) as batcher:
            first = [batcher.submit_nowait(-1, deadline_s=1.0) for _ in range(answered)]
            second = batcher.submit_nowait(0)
            loop.call_at = noted  # type: ignore[method-assign, assignment]
            requests = [batcher.submit_nowait(item, deadline_s=1.0) for item in range(2000)]
            loop.call_at = call_at  # type: ignore[method-assign]
            assert len(timers) <= 1
            await asyncio.sleep(0.9999)
            assert all(request.done() for request in first)
            expired = [0]
            while expired[-1] < len(requests):
                await asyncio.sleep(0)
                count = sum(request.done() for request in requests)
                if count:
                    expired.append(count)
            assert all(isinstance(request.exception(), DeadlineError) for request in requests)
            assert batcher.statistics().missed_deadlines == len(requests)
            assert await second == 0
        return expired

    expired = in_virtual_time(main)
    assert len(expired) > 8
    assert all(after - before <= 256 for before, after in itertools.pairwise(expired))


def test_earlier_deadline_of_a_later_request_passes_first() -> None:
    async def slow(batch: Batch[int]) -> list[int]:
        await asyncio.sleep(100)
        return batch.items

    async def main() -> dict[float, float]:
        loop = asyncio.get_running_loop()
        ended: dict[float, float] = {}

        async def request(deadline: float) -> None:
            with pytest.raises(DeadlineError):
                await batcher.submit(0, deadline_s=deadline)
            ended[deadline] = loop.time() - began

        async with MicroBatcher(slow, max_batch_size=1) as batcher:
            began = loop.time()
            tasks = {deadline: asyncio.create_task(request(deadline)) for deadline in (5.0, 3.0, 1.0, 0.5, 4.0)}
            await asyncio.sleep(0.1)
            tasks[0.5].cancel()
            await asyncio.wait(tasks.values())
        return ended

    ended = in_virtual_time(main)
    assert list(ended) == [1.0, 3.0, 4.0, 5.0]
    assert list(ended.values()) == pytest.approx(list(ended), abs=1e-3)


def test_one_slow_batch_does_not_lower_the_rate_for_long() -> None:
    """The bucket of full batches was predicted to miss the deadline, so no full batch was formed and measured again."""

    async def slow(batch: Batch[int]) -> list[int]:
        await asyncio.sleep(stall.pop() if stall else 0.01)
        return batch.items

    async def main() -> float:
        async with MicroBatcher(slow, max_batch_size=16, batch_wait_timeout_s=0.0) as batcher:

            async def load(seconds: float) -> None:
                """1 500 requests per second: somewhat less than the 1 600 that full batches serve."""
                requests = []
                for _ in range(round(seconds * 500)):
                    for item in range(3):
                        with contextlib.suppress(DeadlineError):
                            requests.append(batcher.submit_nowait(item, deadline_s=0.085))
                    await asyncio.sleep(0.002)
                await asyncio.gather(*requests, return_exceptions=True)

            await load(2)
            before = batcher.statistics()
            stall.append(0.5)
            await load(2)
            stalled = batcher.statistics()
            await load(2)
            after = batcher.statistics()
            assert (before.refused, before.missed_deadlines) == (0, 0)
            assert stalled.answered > 2500  # of 3 000, with half a second of standstill
            return (after.answered - stalled.answered) / 3000

    stall: list[float] = []
    assert in_virtual_time(main) > 0.98


def test_retry_after_is_the_time_of_the_queue_in_full_batches() -> None:
    async def slow(batch: Batch[int]) -> list[int]:
        await asyncio.sleep(0.1)
        return batch.items

    async def retry_after(queued: int) -> float:
        async with MicroBatcher(slow, max_batch_size=5, max_queued_requests=queued) as batcher:
            for _ in range(20):
                await asyncio.gather(*[batcher.submit(item) for item in range(5)])
            requests = [batcher.submit_nowait(item) for item in range(queued + 5)]
            with pytest.raises(OverloadedError) as caught:
                batcher.submit_nowait(0)
            await asyncio.gather(*requests)
            return caught.value.retry_after_s

    one, two = in_virtual_time(lambda: retry_after(100)), in_virtual_time(lambda: retry_after(200))
    assert one == pytest.approx(2.1, rel=0.01)  # the batch that runs, and 100 requests, 50 in a second
    assert two == pytest.approx(4.1, rel=0.01)


@pytest.mark.parametrize(("lonely", "predicted"), [(0, 0.2), (2, 0.6)])
def test_retry_after_lonely_requests_is_the_time_of_full_batches(lonely: int, predicted: float) -> None:
    """It was the time of 64 batches of one request each: 12.8 s."""

    async def slow(batch: Batch[int]) -> list[int]:
        await asyncio.sleep(0.2)
        return batch.items

    async def main() -> None:
        async with MicroBatcher(slow, max_batch_size=32, max_queued_requests=64) as batcher:
            assert batcher.statistics().rate == 0
            for item in range(lonely):
                await batcher.submit(item)
            requests = [batcher.submit_nowait(item) for item in range(96)]
            with pytest.raises(OverloadedError) as caught:
                batcher.submit_nowait(0)
            began = asyncio.get_running_loop().time()
            await asyncio.gather(*requests)
            assert caught.value.retry_after_s == pytest.approx(predicted, rel=0.01)
            assert asyncio.get_running_loop().time() - began == pytest.approx(0.6, rel=0.01)

    in_virtual_time(main)


def test_refusal_names_the_wait_that_is_longer_than_the_deadline() -> None:
    async def answer(batch: Batch[int]) -> list[int]:
        return batch.items

    async def main() -> None:
        async with MicroBatcher(answer, max_batch_size=4, batch_wait_timeout_s=1) as batcher:
            for item in range(2):
                await batcher.submit(item)
            with pytest.raises(
                DeadlineError, match=r"after 1 s, later .* 0\.5 s: a request waits up to 1 s for others"
            ):
                await batcher.submit(2, deadline_s=0.5)

    in_virtual_time(main)


def test_leaving_beside_a_function_that_never_ends_takes_the_drain_timeout() -> None:
    async def hang(batch: Batch[int]) -> list[int]:
        await asyncio.Event().wait()
        return []

    async def stubborn(batch: Batch[int]) -> list[int]:
        while True:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                if stop:
                    raise

    async def main(function: Any) -> float:
        loop = asyncio.get_running_loop()
        batcher: MicroBatcher[int, int]
        with pytest.raises(ZeroDivisionError):
            async with MicroBatcher(function, max_batch_size=1) as batcher:
                request = batcher.submit_nowait(1)
                await asyncio.sleep(0.001)
                began = loop.time()
                raise ZeroDivisionError
        with pytest.raises(ClosedError, match="left while it computed"):
            await request
        stop.append(True)
        return loop.time() - began

    stop: list[bool] = []
    assert in_virtual_time(lambda: main(hang)) == pytest.approx(5.0, abs=0.01)
    stop.clear()
    with pytest.warns(aiocuda.DrainTimeoutWarning, match="1 batches of a batcher have not ended"):
        assert in_virtual_time(lambda: main(stubborn)) == pytest.approx(5.1, abs=0.01)


def test_closing_waits_the_drain_timeout_for_a_batch_without_requests() -> None:
    async def hang(batch: Batch[int]) -> list[int]:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(asyncio.get_running_loop().time())
        return []

    async def main() -> tuple[float, float]:
        loop = asyncio.get_running_loop()
        async with MicroBatcher(hang, max_batch_size=2) as batcher:
            cancelled = batcher.submit_nowait(1)
            expired = batcher.submit_nowait(2, deadline_s=1.0)
            await asyncio.sleep(0.01)
            loop.call_later(0.5, cancelled.cancel)
            began = loop.time()
        assert isinstance(expired.exception(), DeadlineError)
        assert cancelled.cancelled()
        return ended[0] - began, loop.time() - began

    ended: list[float] = []
    # The request that has not expired is waited for; then the batch has 5 s.
    assert in_virtual_time(main) == pytest.approx((5.99, 5.99), abs=0.01)


def test_closing_waits_as_long_as_a_request_does() -> None:
    async def slow(batch: Batch[int]) -> list[int]:
        await asyncio.sleep(60)
        return batch.items

    async def main() -> list[int]:
        async with MicroBatcher(slow, max_batch_size=1) as batcher:
            requests = [batcher.submit_nowait(item) for item in range(3)]
        return [request.result() for request in requests]

    assert in_virtual_time(main) == [0, 1, 2]


def test_statistics() -> None:
    async def slow(batch: Batch[int]) -> list[int]:
        await asyncio.sleep(0.01 * batch.size)
        return batch.items

    async def main() -> None:
        async with MicroBatcher(slow, max_batch_size=4, buckets=(1, 4), batch_wait_timeout_s=0) as batcher:
            for _ in range(3):
                await asyncio.gather(*[batcher.submit(item) for item in range(4)])
                await batcher.submit(0)
            found = batcher.statistics()
        assert (found.accepted, found.answered, found.batches, found.sizes) == (15, 15, 6, {1: 3, 4: 3})
        assert found.fill == pytest.approx((4 + 1) / 8)
        assert found.predicted_s == pytest.approx({1: 0.01, 4: 0.04}, rel=0.01)
        assert found.actual_s == pytest.approx({1: 0.01, 4: 0.04}, rel=0.01)
        assert found.rate == pytest.approx(5 / 0.05, rel=0.1)
        assert (found.queued, found.running, found.failed, found.cancelled, found.refused) == (0, 0, 0, 0, 0)
        assert 0 <= found.wait_p50_s <= found.wait_p99_s < 1e-3

    in_virtual_time(main)


def test_waits_of_the_statistics_are_those_in_the_queue() -> None:
    """One request of a hundred waits for 10 s, and each of the others for none or for 1 s."""

    async def slow(batch: Batch[float]) -> list[float]:
        await asyncio.sleep(batch.items[0])
        return batch.items

    async def main() -> None:
        async with MicroBatcher(slow, max_batch_size=1, batch_wait_timeout_s=0) as batcher:
            assert (batcher.statistics().wait_p50_s, batcher.statistics().wait_p99_s) == (0.0, 0.0)
            for pause, times in ((1.0, 49), (10.0, 1)):
                for _ in range(times):
                    first, second = batcher.submit_nowait(pause), batcher.submit_nowait(0.0)
                    await asyncio.gather(first, second)
            found = batcher.statistics()
            # 50 of 100 requests waited for a place. Percentiles are between two waits, as those of NumPy.
            assert (found.wait_p50_s, found.wait_p99_s) == pytest.approx((0.5, 1.09), abs=1e-3)
            for _ in range(30):
                await batcher.submit(0.0)
            assert batcher.statistics().wait_p50_s == pytest.approx(0.0, abs=1e-3)
            for _ in range(1024):  # only the last 1 024 requests count
                await batcher.submit(0.0)
            assert batcher.statistics().wait_p99_s == pytest.approx(0.0, abs=1e-3)

    in_virtual_time(main)


def test_requests_get_an_outcome_if_the_warning_of_the_end_is_an_error() -> None:
    async def never(batch: Batch[int]) -> list[int]:
        while not stop.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await stop.wait()
        return batch.items

    stop = asyncio.Event()

    async def main() -> None:
        requests: list[asyncio.Future[int]] = []
        with pytest.raises(DrainTimeoutWarning):
            async with MicroBatcher(never, max_batch_size=1) as batcher:
                requests = [batcher.submit_nowait(item) for item in range(2)]
                await asyncio.sleep(0)
                raise ZeroDivisionError
        found = await asyncio.wait_for(asyncio.gather(*requests, return_exceptions=True), 1)
        assert [type(each) for each in found] == [ClosedError, ClosedError]
        stop.set()
        await asyncio.sleep(0.01)

    in_virtual_time(main)


def test_begin_of_a_batch_is_that_of_the_first_free_place() -> None:
    """The places were taken in turn: the second batch waited for the second place, also if that is busy for long."""
    chance = random.Random(0)
    times = BatchTimes(1, None, 3)
    for seconds in (0.0, 0.5, 0.5):
        times.add(1, 1, seconds)
    for _ in range(200):
        running = [chance.choice([0.0, 0.2, 30.0]) * chance.random() for _ in range(chance.randrange(4))]
        before = chance.randrange(50)
        free = sorted([0.0] * (3 - len(running)) + running)
        for _ in range(before):
            heapq.heapreplace(free, free[0] + 0.5)
        _, predicted = Admission(times, 1, 3).predict(1, before, running, 0.0)
        assert predicted == pytest.approx(free[0] + 0.5)


def test_rate_of_batches_that_are_too_short_for_the_clock() -> None:
    """uvloop counts milliseconds. The rate was that of a batcher without any batch."""
    times = BatchTimes(32, None, 1)
    assert times.rate == 0
    for _ in range(40):
        times.add(32, 32, 0.0)
    assert times.rate == pytest.approx(32_000, rel=0.01)


@pytest.mark.skipif(UVLOOP is None, reason="needs uvloop")
@pytest.mark.parametrize("seconds", [1e-4, 4e-4, 2.4e-3])
def test_wait_below_the_resolution_of_timers_is_no_busy_loop(seconds: float) -> None:
    """uvloop rounds timers to milliseconds. A timer that fired early was set again, for 0 s, in each iteration."""

    async def answer(batch: Batch[int]) -> list[int]:
        return batch.items

    async def main() -> list[float]:
        loop = asyncio.get_running_loop()
        call_at = loop.call_at
        timers: list[float] = []

        def noted(when: float, *args: Any, **kwargs: Any) -> asyncio.TimerHandle:
            timers.append(when)
            return call_at(when, *args, **kwargs)

        loop.call_at = noted  # type: ignore[method-assign, assignment]
        async with MicroBatcher(answer, max_batch_size=8, batch_wait_timeout_s=seconds) as batcher:
            for item in range(20):
                await batcher.submit(item)
        return timers

    with asyncio.Runner(loop_factory=UVLOOP) as runner:
        timers = runner.run(main())
    assert 20 <= len(timers) <= 22  # one for each request


def test_overload_does_not_lower_the_goodput_when_fuller_batches_take_longer() -> None:
    """A request is predicted to be in a full batch, also if its batch has few requests when it arrives."""

    async def compute(batch: Batch[int]) -> list[int]:
        await asyncio.sleep(0.005 + 0.001 * batch.size)  # a full batch of 16 in 21 ms
        return batch.items

    async def main() -> None:
        loop = asyncio.get_running_loop()
        capacity = 16 / 0.021
        async with MicroBatcher(compute, max_batch_size=16) as batcher:
            for _ in range(20):  # the times of full batches are known
                await asyncio.gather(*[batcher.submit(item) for item in range(16)])
            before, began = batcher.statistics(), loop.time()
            while loop.time() < began + 2:
                with contextlib.suppress(DeadlineError):
                    batcher.submit_nowait(0, deadline_s=0.05).add_done_callback(lambda request: request.exception())
                await asyncio.sleep(1 / (1.5 * capacity))
            found, seconds = batcher.statistics(), loop.time() - began
        assert found.answered - before.answered >= 0.95 * capacity * seconds
        assert found.missed_deadlines <= 0.02 * found.accepted
        assert found.refused > 0

    in_virtual_time(main)


def test_request_is_not_refused_for_the_weight_of_past_batches_when_a_place_is_free() -> None:
    async def compute(batch: Batch[int]) -> list[int]:
        await asyncio.sleep(0.001 * batch.size)
        return batch.items

    async def main() -> None:
        async with MicroBatcher(compute, max_batch_size=16) as batcher:
            for count in (1, 1, *[16] * 20):
                await asyncio.gather(*[batcher.submit(item) for item in range(count)])
            assert await batcher.submit(1, deadline_s=0.01) == 1

    in_virtual_time(main)


def test_batches_that_the_clock_has_measured_as_no_time_do_not_fix_the_prediction() -> None:
    """The clock of uvloop counts milliseconds: a shorter batch takes 0 s, and twice 0 s is no bound for later ones."""

    async def compute(batch: Batch[int]) -> list[int]:
        if batch.number >= 3:
            await asyncio.sleep(0.03)
        return batch.items

    async def main() -> None:
        async with MicroBatcher(compute, max_batch_size=1, batch_wait_timeout_s=0) as batcher:
            for item in range(60):
                await batcher.submit(item)
            assert batcher.statistics().predicted_s[1] == pytest.approx(0.03, rel=0.3)

    in_virtual_time(main)
