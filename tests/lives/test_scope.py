"""Scope: one end for everything that owns work, whatever calls it, cancels it or fails in it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any, Self

import anyio
import pytest

from aiocuda import BusyError, ClosedError, NoEventLoopError, WrongLoopError
from aiocuda._base._owner import Outcome, Owner
from aiocuda._base._scope import Scope
from aiocuda._base._shutdown import must_end_now
from aiocuda.device._device_scope import DeviceScope
from aiocuda.testing import SimulatedLoop
from tests.helpers import quickly, turns

#: Virtual seconds of a deadline.
DEADLINE = 5.0


class Thing(Owner):
    """An owner that notes what its scope calls. Its work ends when ``gate`` is set."""

    kind = Scope

    def __init__(self, name: str = "thing", *, seconds: float | None = None, log: list[str] | None = None) -> None:
        self.name = name
        self.log: list[str] = [] if log is None else log
        self.gate = asyncio.Event()
        self.failures: dict[str, BaseException] = {}
        self.unfinished: int | None = None
        drain_seconds: Callable[[], float] | None = None if seconds is None else lambda: seconds
        self.scope = self.kind("this thing", "make one here", "make another one", drain_seconds=drain_seconds)
        self.scope.bind()

    def _note(self, what: str) -> None:
        self.log.append(what if self.name == "thing" else f"{self.name} {what}")
        if what in self.failures:
            raise self.failures[what]

    def _refuse(self) -> None:
        self._note("refuse")

    def _withdraw(self) -> None:
        self._note("withdraw")

    def _unfinished(self) -> int | None:
        return self.unfinished

    async def _drain(self) -> None:
        self._note("drain")
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self._note("drain cancelled")
            raise
        self._note("drained")

    async def _release(self, outcome: Outcome) -> None:
        self._note(f"release {outcome}")

    async def __aenter__(self) -> Self:
        self.scope.enter()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, *exc: object) -> None:
        await self.scope.exit(self, kind, error)


class SharedThing(Thing):
    """An owner that any loop may end, as a device."""

    kind = DeviceScope


def run(main: Callable[[], Any]) -> None:
    """Run a test in virtual time."""
    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        runner.run(main())


def in_virtual_time(test: Callable[[], Any]) -> Callable[[], None]:
    def wrapped() -> None:
        run(test)

    wrapped.__name__, wrapped.__doc__ = test.__name__, test.__doc__
    return wrapped


def now() -> float:
    return asyncio.get_running_loop().time()


# -- the order -------------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_end_refuses_then_drains_then_releases() -> None:
    thing = Thing()
    end = asyncio.ensure_future(thing.scope.aclose(thing))
    await turns(3)
    assert thing.log == ["refuse", "drain"]
    assert (thing.scope.closing, thing.scope.closed) == (True, False)
    thing.gate.set()
    await quickly(end)
    assert thing.log == ["refuse", "drain", "drained", "release done"]
    assert thing.scope.closed
    await thing.scope.aclose(thing)
    await thing.scope.leave(thing)
    assert len(thing.log) == 4


@in_virtual_time
async def test_without_unfinished_work_the_end_does_not_suspend() -> None:
    thing = Thing()
    thing.unfinished = 0
    end = thing.scope.aclose(thing)
    with pytest.raises(StopIteration):
        end.send(None)
    assert thing.log == ["refuse", "release done"]


@pytest.mark.parametrize("seconds", [None, DEADLINE])
def test_block_with_an_exception_withdraws(seconds: float | None) -> None:
    async def main() -> None:
        thing = Thing(seconds=seconds)
        began = now()
        with pytest.raises(ZeroDivisionError):
            async with thing:
                asyncio.get_running_loop().call_later(1.0, thing.gate.set)
                raise ZeroDivisionError
        if seconds is None:
            assert thing.log == ["refuse", "withdraw", "release left"]
            assert now() - began < 0.01
        else:
            assert thing.log == ["refuse", "withdraw", "drain", "drained", "release done"]
            assert now() - began == pytest.approx(1.0, abs=0.01)

    run(main)


@in_virtual_time
async def test_deadline_ends_the_wait_of_an_object_that_is_left() -> None:
    thing = Thing(seconds=DEADLINE)
    began = now()
    with pytest.raises(ZeroDivisionError):
        async with thing:
            raise ZeroDivisionError
    assert thing.log == ["refuse", "withdraw", "drain", "drain cancelled", "release late"]
    assert now() - began == pytest.approx(DEADLINE, abs=0.01)


@in_virtual_time
async def test_a_limit_of_the_call_ends_its_wait() -> None:
    thing = Thing(seconds=DEADLINE)
    began = now()
    await thing.scope.aclose(thing, 1.0)
    assert thing.log == ["refuse", "drain", "drain cancelled", "release late"]
    assert now() - began == pytest.approx(1.0, abs=0.01)


# -- the table of states ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["open", "entered", "refusing", "closing", "leaving", "closed", "left"])
@pytest.mark.parametrize("call", ["check", "enter", "entering", "aclose", "leave"])
def test_each_state_answers_each_call(state: str, call: str) -> None:
    accepts, runs = state in ("open", "entered"), state in ("closing", "leaving")

    async def main() -> None:
        thing = Thing(seconds=DEADLINE)
        scope = thing.scope
        first: asyncio.Future[None] | None = None
        if state == "entered":
            with scope.entering():
                pass
        elif state == "refusing":
            scope.refuse(thing)
        elif state != "open":
            first = asyncio.ensure_future(scope.leave(thing) if state in ("leaving", "left") else scope.aclose(thing))
            await turns(3)
            if not runs:
                thing.gate.set()
                await quickly(first)
        before = list(thing.log)
        is_left, is_closed = state in ("leaving", "left"), state in ("closed", "left")
        assert (scope.entered, scope.closing) == (state != "open", not accepts)
        assert (scope.left, scope.closed) == (is_left, is_closed)
        if call in ("aclose", "leave"):
            thing.gate.clear()
            end = asyncio.ensure_future(getattr(scope, call)(thing))
            await turns(5)
            assert end.done() == scope.closed
            thing.gate.set()
            await quickly(end)
            assert first is None or first.done()
            assert scope.closed
            assert scope.left == (is_left or (call == "leave" and not is_closed))
            assert thing.log.count("release done") == 1
        else:
            error: type[Exception] | None = None if accepts else ClosedError
            if call == "entering" and state == "entered":
                error = BusyError
            with contextlib.ExitStack() as stack:
                if error is not None:
                    stack.enter_context(pytest.raises(error, match="make another one"))
                if call == "entering":
                    stack.enter_context(scope.entering())
                else:
                    getattr(scope, call)()
            assert thing.log == before
            thing.gate.set()
            await quickly(scope.aclose(thing))

    run(main)


# -- cancellation ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seconds", [None, DEADLINE])
@pytest.mark.parametrize("by", ["asyncio", "anyio"])
def test_cancelled_end_is_raised_after_the_release(seconds: float | None, by: str) -> None:
    async def main() -> None:
        thing = Thing(seconds=seconds)
        began = now()
        asyncio.get_running_loop().call_later(1.0, thing.gate.set)
        with pytest.raises(TimeoutError):
            if by == "asyncio":
                async with asyncio.timeout(0.1):
                    await thing.scope.aclose(thing)
            else:
                with anyio.fail_after(0.1):
                    await thing.scope.aclose(thing)
        left = ["refuse", "drain", "withdraw"]
        expected = [*left, "release left"] if seconds is None else [*left, "drained", "release done"]
        assert [each for each in thing.log if each != "drain cancelled"] == expected
        assert now() - began == pytest.approx(0.1 if seconds is None else 1.0, abs=0.01)
        assert thing.scope.closed

    run(main)


@in_virtual_time
async def test_a_second_cancellation_does_not_shorten_the_drain() -> None:
    thing = Thing(seconds=DEADLINE)
    end = asyncio.ensure_future(thing.scope.aclose(thing))
    await turns(2)
    for _ in range(3):
        end.cancel()
        await asyncio.sleep(0.5)
        assert not end.done()
    assert "release" not in " ".join(thing.log)
    thing.gate.set()
    with pytest.raises(asyncio.CancelledError):
        await quickly(end)
    assert thing.log == ["refuse", "drain", "withdraw", "drained", "release done"]


@in_virtual_time
async def test_the_end_of_the_loop_cancels_a_drain_with_a_deadline_and_nothing_fails() -> None:
    reported: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
    thing = Thing(seconds=DEADLINE)
    end = asyncio.ensure_future(thing.scope.aclose(thing))
    await turns(2)
    for task in sorted(asyncio.all_tasks() - {asyncio.current_task()}, key=lambda task: task is end):
        task.cancel()  # as `asyncio.run` does; the task of the end comes first here
    with pytest.raises(asyncio.CancelledError):
        await quickly(end)
    assert thing.log == ["refuse", "drain", "drain cancelled", "withdraw", "release interrupted"]
    assert reported == []


@in_virtual_time
async def test_a_cancelled_scope_of_anyio_does_not_spin_during_the_drain() -> None:
    thing = Thing(seconds=DEADLINE)
    steps = 0

    def count() -> None:
        nonlocal steps
        steps += 1
        if not thing.scope.closed:
            asyncio.get_running_loop().call_soon(count)

    with anyio.CancelScope() as scope:
        scope.cancel()
        end = thing.scope.aclose(thing)
        asyncio.get_running_loop().call_later(1.0, thing.gate.set)
        await end
    assert thing.log[-1] == "release done"


# -- several callers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seconds", [None, DEADLINE])
def test_a_second_call_waits_for_the_same_end(seconds: float | None) -> None:
    async def main() -> None:
        thing = Thing(seconds=seconds)
        ends = [asyncio.ensure_future(thing.scope.aclose(thing)) for _ in range(3)]
        await turns(5)
        assert not any(end.done() for end in ends)
        thing.gate.set()
        await quickly(asyncio.gather(*ends))
        assert thing.log == ["refuse", "drain", "drained", "release done"]

    run(main)


@in_virtual_time
async def test_only_the_first_call_gets_the_failure() -> None:
    thing = Thing(seconds=DEADLINE)
    thing.failures["drained"] = ValueError("lost")
    thing.gate.set()
    found = await asyncio.gather(*(thing.scope.aclose(thing) for _ in range(3)), return_exceptions=True)
    assert [type(each) for each in found] == [ValueError, type(None), type(None)]
    assert thing.log[-1] == "release failed"
    await thing.scope.aclose(thing)


@in_virtual_time
async def test_a_second_call_that_is_cancelled_ends_its_own_wait_alone() -> None:
    thing = Thing(seconds=DEADLINE)
    first = asyncio.ensure_future(thing.scope.aclose(thing))
    await turns(2)
    second = asyncio.ensure_future(thing.scope.aclose(thing))
    await turns(2)
    second.cancel()
    await asyncio.wait({second}, timeout=0.1)
    assert second.cancelled()
    assert not first.done()
    assert "withdraw" not in thing.log
    thing.gate.set()
    await quickly(first)


@pytest.mark.parametrize("seconds", [None, DEADLINE])
def test_a_block_that_is_left_hurries_the_end_of_another_task(seconds: float | None) -> None:
    async def main() -> None:
        thing = Thing(seconds=seconds)
        began = now()
        first = asyncio.ensure_future(thing.scope.aclose(thing))
        await turns(2)
        with pytest.raises(ZeroDivisionError):
            async with asyncio.timeout(100):
                await thing.scope.leave(thing)
                raise ZeroDivisionError
        assert first.done()
        assert "withdraw" in thing.log
        assert now() - began == pytest.approx(seconds or 0.0, abs=0.01)

    run(main)


@in_virtual_time
async def test_a_function_of_the_object_cannot_close_it() -> None:
    thing = Thing(seconds=DEADLINE)

    async def function() -> None:
        with thing.scope.inside():
            with pytest.raises(BusyError, match="this thing waits for its own functions when it closes"):
                await thing.scope.aclose(thing)
            await asyncio.sleep(0.1)
            with pytest.raises(BusyError, match="close it outside of them"):
                await thing.scope.leave(thing)

    running = asyncio.ensure_future(function())
    await turns(2)
    assert thing.log == []  # the first call has changed nothing
    end = asyncio.ensure_future(thing.scope.aclose(thing))
    await quickly(running)
    thing.gate.set()
    await quickly(end)


@pytest.mark.parametrize("seconds", [None, DEADLINE])
def test_an_end_goes_on_if_its_first_call_is_dropped(seconds: float | None) -> None:
    """As that of an asynchronous generator that the loop does not end any more."""

    async def main() -> None:
        thing = Thing(seconds=seconds)
        call = thing.scope.aclose(thing)
        call.send(None)
        call.close()
        await turns(2)
        second = asyncio.ensure_future(thing.scope.aclose(thing))
        await turns(2)
        assert not second.done()
        thing.gate.set()
        await quickly(second)
        assert thing.log == ["refuse", "drain", "drained", "release done"]

    run(main)


# -- failures --------------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_an_object_that_cannot_refuse_stays_open() -> None:
    thing = Thing()
    thing.failures["refuse"] = BusyError("lent")
    with pytest.raises(BusyError, match="lent"):
        await thing.scope.aclose(thing)
    assert (thing.scope.closing, thing.scope.closed) == (False, False)
    thing.scope.check()
    del thing.failures["refuse"]
    thing.gate.set()
    await quickly(thing.scope.aclose(thing))
    assert thing.scope.closed


@pytest.mark.parametrize("where", ["drained", "release done"])
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_failure_of_the_end_is_raised_once_and_the_object_is_closed(where: str, error: type[BaseException]) -> None:
    things: list[Thing] = []

    async def main() -> None:
        thing = Thing(seconds=DEADLINE)
        things.append(thing)
        thing.failures[where] = error("lost")
        thing.gate.set()
        await thing.scope.aclose(thing)

    with pytest.raises(error):
        run(main)
    assert things[0].scope.closed
    assert things[0].log[-1] == ("release done" if where == "release done" else "release failed")


@in_virtual_time
async def test_failure_of_a_cancelled_end_is_reported() -> None:
    reported: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: reported.append(context["exception"]))
    thing = Thing(seconds=DEADLINE)
    failure = thing.failures["drained"] = ValueError("lost")
    end = asyncio.ensure_future(thing.scope.aclose(thing))
    await turns(2)
    end.cancel()
    await turns(2)
    thing.gate.set()
    with pytest.raises(asyncio.CancelledError):
        await quickly(end)
    assert reported == [failure]


@in_virtual_time
async def test_a_failed_end_is_held_by_nothing() -> None:
    class LostError(Exception):
        pass

    thing = Thing(seconds=DEADLINE)
    thing.failures["drained"] = failure = LostError("lost")
    thing.gate.set()
    gc.collect()
    gc.disable()
    try:
        with pytest.raises(LostError):
            await thing.scope.aclose(thing)
        await turns(2)
        dropped = weakref.ref(failure)
        thing.failures.clear()
        del failure
        await turns(2)
        assert dropped() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("end", ["cancelled", "left", "joined"])
def test_a_withdrawal_that_fails_does_not_stop_the_end(end: str) -> None:
    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
        thing = Thing(seconds=DEADLINE)
        thing.failures["withdraw"] = ValueError("lost")
        if end == "left":
            with pytest.raises(ValueError, match="lost"):
                await thing.scope.leave(thing)
        else:
            first = asyncio.ensure_future(thing.scope.aclose(thing))
            await turns(3)
            if end == "cancelled":
                first.cancel()
            else:
                await thing.scope.leave(thing)
            await asyncio.wait({first})
            assert first.cancelled() or isinstance(first.exception(), ValueError)
        assert thing.log[-1] == "release late"

    run(main)


@in_virtual_time
async def test_a_withdrawal_that_fails_does_not_stop_an_end_without_a_deadline() -> None:
    thing = Thing()
    thing.failures["withdraw"] = ValueError("lost")
    with pytest.raises(ValueError, match="lost"):
        await thing.scope.leave(thing)
    assert thing.log == ["refuse", "withdraw", "release left"]
    assert thing.scope.closed


@in_virtual_time
async def test_a_drain_that_the_program_cancels_has_failed_and_the_task_keeps_its_time() -> None:
    thing = Thing(seconds=DEADLINE)
    end = asyncio.ensure_future(thing.scope.aclose(thing))
    await turns(3)
    assert thing.scope._end is not None
    assert thing.scope._end.task is not None
    thing.scope._end.task.cancel()  # as a source does that cancels the task that awaits it
    with pytest.raises(asyncio.CancelledError):
        await quickly(end)
    assert thing.log[-1] == "release failed"
    assert not must_end_now()


@pytest.mark.parametrize("seconds", [None, DEADLINE])
def test_a_cancelled_end_holds_nothing(seconds: float | None) -> None:
    async def main() -> None:
        thing = Thing(seconds=seconds)
        thing.gate.set()
        dropped = weakref.ref(thing), weakref.ref(thing.gate)
        end = asyncio.ensure_future(thing.scope.aclose(thing))
        await asyncio.sleep(0)
        end.cancel()
        await asyncio.wait({end})
        with contextlib.suppress(asyncio.CancelledError):
            end.result()
        await turns(2)
        del thing, end
        await turns(2)
        assert [each() for each in dropped] == [None, None]

    gc.collect()
    gc.disable()
    try:
        run(main)
    finally:
        gc.enable()


# -- children --------------------------------------------------------------------------------------------------------


def family(seconds: float | None = DEADLINE) -> tuple[Thing, list[Thing]]:
    parent = Thing("parent", seconds=DEADLINE)
    children = [Thing(name, seconds=seconds, log=parent.log) for name in ("first", "second")]
    for child in children:
        parent.scope.adopt(child, child.scope)
        child.gate.set()
    parent.gate.set()
    return parent, children


@in_virtual_time
async def test_children_refuse_first_to_last_and_end_last_to_first() -> None:
    parent, _ = family()
    await parent.scope.aclose(parent)
    assert [each for each in parent.log if "drained" not in each] == [
        "parent refuse", "first refuse", "second refuse",
        "second drain", "second release done", "first drain", "first release done",
        "parent drain", "parent release done",
    ]  # fmt: skip


@in_virtual_time
async def test_children_are_left_with_their_parent() -> None:
    parent, children = family(seconds=None)
    with pytest.raises(ZeroDivisionError):
        async with parent:
            children[0].gate.clear()
            raise ZeroDivisionError
    assert parent.log == [
        "parent refuse", "first refuse", "second refuse", "parent withdraw",
        "second withdraw", "second release left", "first withdraw", "first release left",
        "parent drain", "parent drained", "parent release done",
    ]  # fmt: skip


@in_virtual_time
async def test_a_child_whose_end_runs_is_hurried_if_its_parent_is_left() -> None:
    parent, children = family(seconds=1.0)
    children[1].gate.clear()
    end = asyncio.ensure_future(parent.scope.aclose(parent))
    await asyncio.sleep(100)
    began = now()
    end.cancel()
    with pytest.raises(asyncio.CancelledError):
        await quickly(end)
    assert now() - began == pytest.approx(1.0, abs=0.01)
    assert "second release late" in parent.log
    assert parent.log[-1] == "parent release done"


@in_virtual_time
async def test_failure_of_a_child_does_not_stop_the_other_ends() -> None:
    parent, children = family()
    children[1].failures["drained"] = ValueError("lost")
    with pytest.raises(ValueError, match="lost"):
        await parent.scope.aclose(parent)
    assert all(each.scope.closed for each in (parent, *children))


@in_virtual_time
async def test_a_function_of_a_child_cannot_close_the_parent() -> None:
    parent, (first, _) = family()
    with first.scope.inside(), pytest.raises(BusyError, match="waits for its own functions"):
        await parent.scope.aclose(parent)
    assert parent.log == []
    await parent.scope.aclose(parent)


@in_virtual_time
async def test_a_child_that_cannot_refuse_does_not_keep_the_others_open() -> None:
    parent, children = family()
    children[0].failures["refuse"] = BusyError("lent")
    with pytest.raises(BusyError, match="lent"):
        await parent.scope.aclose(parent)
    assert [each.scope.closed for each in (parent, *children)] == [True, False, True]


@in_virtual_time
async def test_refused_child_can_still_be_ended_by_itself() -> None:
    parent, (first, _) = family()
    parent.scope.refuse(parent)
    with pytest.raises(ClosedError, match="this thing has been closed: make another one"):
        first.scope.check()
    await first.scope.aclose(first)
    await parent.scope.aclose(parent)
    assert parent.log.count("first drain") == 1


# -- loops -----------------------------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_another_loop_changes_nothing() -> None:
    thing = Thing()
    found: list[BaseException] = []

    def close() -> None:
        for end in (thing.scope.aclose, thing.scope.leave):
            try:
                asyncio.run(end(thing))
            except BaseException as error:  # noqa: BLE001 - the test looks at it
                found.append(error)

    thread = threading.Thread(target=close)
    thread.start()
    await asyncio.to_thread(thread.join)
    assert [type(error) for error in found] == [WrongLoopError, WrongLoopError]
    assert "this thing belongs to another event loop: make one here" in str(found[0])
    assert thing.log == []
    thing.gate.set()
    await quickly(thing.scope.aclose(thing))


@pytest.mark.asyncio
async def test_an_end_belongs_to_the_loop_that_has_begun_it() -> None:
    thing = Thing(seconds=DEADLINE)
    thing.scope.unbind()
    first = asyncio.ensure_future(thing.scope.aclose(thing))
    await turns(3)
    with pytest.raises(WrongLoopError, match="this thing belongs to another event loop"):
        await asyncio.to_thread(lambda: asyncio.run(thing.scope.leave(thing)))
    assert thing.log == ["refuse", "drain"]
    thing.gate.set()
    await quickly(first)
    await asyncio.to_thread(lambda: asyncio.run(thing.scope.aclose(thing)))  # it has nothing that belongs to a loop


def test_without_a_loop_there_is_an_error() -> None:
    things: list[Thing] = []

    async def main() -> None:
        things.append(Thing())

    asyncio.run(main())
    with pytest.raises(ClosedError, match="the event loop of this thing has been closed"):
        things[0].scope.check()
    scope = Scope("this thing", "make one here", "make another one")
    with pytest.raises(NoEventLoopError, match="this thing needs its running event loop"):
        scope.check()


def test_after_its_loop_was_closed_it_is_abandoned() -> None:
    things: list[Thing] = []

    async def first() -> None:
        parent, children = family()
        things.extend((parent, *children))

    async def second() -> None:
        with pytest.raises(ClosedError, match="the event loop of this thing has been closed"):
            await things[0].scope.aclose(things[0])
        assert all(thing.scope.closed for thing in things)
        assert not any("drain" in each or "release" in each for each in things[0].log)
        await things[0].scope.aclose(things[0])

    asyncio.run(first())
    asyncio.run(second())


@pytest.mark.asyncio
async def test_a_device_ends_once_for_all_loops() -> None:
    thing = SharedThing(seconds=DEADLINE)
    thing.scope.unbind()
    first = asyncio.ensure_future(thing.scope.aclose(thing))
    await turns(2)
    begun, found = threading.Event(), list[float]()

    def close() -> None:
        async def main() -> None:
            begun.set()
            await thing.scope.aclose(thing)
            found.append(1.0)

        asyncio.run(main())

    thread = threading.Thread(target=close)
    thread.start()
    await asyncio.to_thread(begun.wait)
    assert not found
    thing.gate.set()
    await quickly(first)
    await asyncio.to_thread(thread.join)
    assert found
    assert thing.log.count("drain") == 1


@pytest.mark.parametrize("way", ["closed", "stopped"])
def test_an_end_whose_loop_has_stopped_is_taken_over(way: str) -> None:
    things: list[Thing] = []

    async def first() -> None:
        thing = SharedThing(seconds=DEADLINE)
        thing.scope.unbind()
        things.extend((thing, asyncio.ensure_future(thing.scope.aclose(thing))))  # type: ignore[arg-type]
        await turns(3)

    async def second() -> None:
        things[0].gate = asyncio.Event()
        things[0].gate.set()
        await quickly(things[0].scope.aclose(things[0]))

    loop = asyncio.new_event_loop()
    try:
        loop.run_until_complete(first())
        if way == "closed":
            loop.close()
        asyncio.run(second())
        assert things[0].scope.closed
        assert things[0].log.count("release done") == 1
    finally:
        if not loop.is_closed():
            things[1].cancel()  # type: ignore[attr-defined]
            loop.run_until_complete(asyncio.sleep(0))
            loop.run_until_complete(asyncio.sleep(0))
            loop.close()
        things.clear()


@pytest.mark.asyncio
async def test_a_block_that_is_left_in_another_loop_hurries_the_end() -> None:
    thing = SharedThing(seconds=0.05)
    thing.scope.unbind()
    first = asyncio.ensure_future(thing.scope.aclose(thing))
    await turns(3)
    await quickly(asyncio.to_thread(lambda: asyncio.run(thing.scope.leave(thing))))
    await quickly(first)
    assert thing.log.count("withdraw") == 1
    assert "release late" in thing.log


# -- entering --------------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_entered_again_after_the_end_it_is_closed() -> None:
    thing = Thing()
    thing.gate.set()
    async with thing:
        pass
    with pytest.raises(ClosedError, match="this thing has been closed: make another one"):
        async with thing:
            pass
    with pytest.raises(ClosedError), thing.scope.entering():
        pass


@in_virtual_time
async def test_entered_once() -> None:
    thing = Thing()
    with pytest.raises(ZeroDivisionError), thing.scope.entering():
        raise ZeroDivisionError
    with thing.scope.entering(), pytest.raises(BusyError, match="this thing is entered once"), thing.scope.entering():
        pass
    with pytest.raises(BusyError, match="make another one"), thing.scope.entering():
        pass


# -- the end of the program ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_child", [False, True])
def test_loop_that_ends_gives_the_drain_no_more_time(with_child: bool) -> None:
    """A second Ctrl-C ends the loop, which cancels all tasks, the drain included."""
    things: list[Thing] = []

    async def main() -> None:
        thing = Thing(seconds=1000.0)
        things.append(thing)
        if with_child:
            child = Thing("child", seconds=1000.0, log=thing.log)
            thing.scope.adopt(child, child.scope)
        task = asyncio.ensure_future(thing.scope.aclose(thing))
        await turns(3)
        things.append(task)  # type: ignore[arg-type]

    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        runner.run(main())
        began = runner.get_loop().time()
        assert "drain" in " ".join(things[0].log)
        loop = runner.get_loop()
    assert loop.time() - began < 1.0
    assert things[0].scope.closed
    assert "release interrupted" in " ".join(things[0].log)


@pytest.mark.parametrize("left", [False, True])
def test_loop_that_ends_before_the_first_step_of_an_end(left: bool) -> None:
    things: list[Thing] = []

    async def main() -> None:
        thing = Thing(seconds=1000.0)
        things.append(thing)
        asyncio.ensure_future(thing.scope.leave(thing) if left else thing.scope.aclose(thing))  # noqa: RUF006

    run(main)
    assert things[0].scope.closed
    assert things[0].log == ["refuse", "withdraw", "release interrupted"]
