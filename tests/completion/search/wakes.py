"""Wakes: the wake-up protocol as a system to be explored. The reactor, its rack and its queues are the real ones.

Time has no length here. A timer may fire whenever it is set, the watchdog before a notifier or long after it; a
notification may come whenever its event is done. What holds in all these orders holds in those that clocks allow.
`Setting.late` alone is a matter of clocks: it lets the watchdog give up a notifier that is only slow.

Orders are left out where they decide nothing:

- A device's progress shows in a query or in a notification, and nowhere else. So it is a choice of each query, and
  part of each notification, and no action of its own.
- An item's first step, a timer's callback and the port's reader run when they are called for: before that they do
  nothing, and who calls for them may choose the moment.
- A waiter's step whose operation has finished touches no queue: it runs at once.
- Producers are alike, the first one to begin is A; notifiers are alike, unless queues compete for them.

Where queues are polled, plans have clock times. Of these the order is kept, and how far apart they are is not: a queue
that has been watched for longer is the same as one that has not, though the next look at it may come later.
"""

from __future__ import annotations

import asyncio
from collections.abc import Hashable
from typing import Any, cast

from aiocuda.completion._device_state import DeviceState
from aiocuda.completion._stream_queue import StreamQueue
from aiocuda.driver.protocol import Driver
from aiocuda.errors import ClosedError
from tests.completion.search import canonical, checks
from tests.completion.search.explore import Action, Trail
from tests.completion.search.machine import Machine, Ring, ScriptedLoop
from tests.completion.search.setting import Setting
from tests.completion.search.watch import Item, Watch, name_of, task_of

__all__ = ["Wakes"]

#: The watchdog resolves in its first tick, and gives a notifier up in the third after that; one more finds nothing to
#: do.
MOST_TICKS = 5


class Wakes:
    """See the module."""

    def __init__(self, setting: Setting, trail: Trail) -> None:
        self.setting = setting
        self.violations: list[str] = []
        self.trail = trail
        self.machine = Machine(
            self._choose, self.violations, notifiers=setting.notifiers, descriptor=setting.descriptor
        )
        self.machine.on_query = self._check_order
        properties = cast("Any", _Properties)
        driver = cast("Driver", self.machine)
        self.device_state = DeviceState(driver, 0, properties, setting.policy, setting.in_flight)
        self.names: dict[int, str] = {}  # of operations
        self.cancels, self.lost, self.repeated = setting.cancels, setting.lost, setting.repeated
        self.ended = False
        self.watches = [Watch(self, 0, setting.producers, setting.items)]

    def _choose(self, width: int) -> int:
        return 0 if self.ended else self.trail.choose(width)

    def leave(self) -> None:
        self._leave_waiters()
        self.machine.forget()

    def _leave_waiters(self) -> None:
        for item in self.items():
            task = item.task
            if task is not None and not task.done():
                task._log_destroy_pending = False  # type: ignore[attr-defined]
                cast("Any", task.get_coro()).close()

    def items(self) -> list[Item]:
        """Of all loops."""
        return [item for watch in self.watches for items in watch.items for item in items]

    # -- what may happen -----------------------------------------------------------------------------------------

    def enabled(self) -> list[Action]:
        if self.ended:
            return []
        machine = self.machine
        actions: list[Action] = []
        if self.is_quiet():
            actions.append(("nothing but time", None, self._end, ()))
        for watch in self.watches:
            actions += self._of_loop(watch)
        for ring in machine.rings:
            if not ring.posted and not ring.lost:
                actions.append(("notifier {} rings", ring.notifier, self._post, (ring,)))
                if self.lost:
                    actions.append(("notifier {} is lost", ring.notifier, self._lose, (ring,)))
            elif ring.posted == 1 and self.repeated:
                actions.append(("notifier {} rings again", ring.notifier, self._repeat, (ring,)))
        return actions

    def _of_loop(self, watch: Watch) -> list[Action]:
        loop = watch.loop
        if loop.is_closed():
            return []
        actions: list[Action] = []
        if loop.ready:
            actions.append(("{} runs", name_of(loop.ready[0]), loop.run_next, ()))
        reader = loop.reader
        if reader is not None and self.machine.port:
            actions.append(("the port is read", None, loop.run, (reader,)))
        for queue, items in zip(watch.queues, watch.items, strict=True):
            for item in items:
                if item.task is None:
                    # The producers are alike: the first to begin is called A.
                    if queue is watch.queues[0] or watch.items[0][0].task is not None:
                        actions.append(("{} is produced", item.name, self._produce, (item, queue)))
                    if self.setting.begun and watch is self.watches[0]:
                        return actions[-1:]
                    break
            for item in items:
                task = item.task
                if self.cancels and task is not None and not task.done() and not task.cancelling():
                    actions.append(("{} is cancelled", item.name, self._cancel, (item,)))
        for timer in loop.timers:
            name = name_of(timer)
            if name == "_watch" and not self.setting.late and self._would_be_late(watch):
                continue
            actions.append(("{} fires", name, self._expire, (timer,)))
        if any(queue.polling and queue.poll_until > self.machine.clock for queue in watch.queues):
            actions.append(("polling takes long", None, self._pass, ()))
        if self.setting.close and watch is self.watches[0] and not watch.reactor.closed:
            actions.append(("the {} is closed", self.setting.close, self._close, ()))
        return actions

    def _would_be_late(self, watch: Watch) -> bool:
        """Would another tick give up a notifier whose notification is still on its way?"""
        armed = watch.reactor.notifier_pool.armed
        return any(
            ring.tag in armed and armed[ring.tag].silent_ticks == 2 and not ring.lost and not ring.posted
            for ring in self.machine.rings
        )

    def _produce(self, item: Item, queue: StreamQueue) -> None:
        loop = cast("ScriptedLoop", queue.loop)
        item.task = loop.create_task(self._consume(item, queue), name=item.name)
        loop.run(loop.ready.pop())

    async def _consume(self, item: Item, queue: StreamQueue) -> None:
        closed = queue.closed
        try:
            operation = item.operation = queue.enqueue("launch", None, self.machine.work, (queue.handle,))
            self.names[operation.id] = item.name
            if self.setting.callbacks:
                item.calls = True
                operation.add_done_callback(lambda _: self._tell(item))
            await operation
        except ClosedError:
            item.outcome = "closed"
            if not queue.closed:
                self.violations.append(f"{item.name} was told that its stream is closed, and it is not")
        except asyncio.CancelledError:
            item.outcome = "cancelled"
        else:
            item.outcome = "done"
            if closed or not operation.done():
                self.violations.append(f"V1 {item.name} woke its waiter before it was done")

    def _tell(self, item: Item) -> None:
        item.told += 1
        if item.told > 1:
            self.violations.append(f"V1 {item.name} was told twice")

    def _cancel(self, item: Item) -> None:
        self.cancels -= 1
        assert item.task is not None
        item.task.cancel()

    def _post(self, ring: Ring) -> None:
        closed = [watch.loop for watch in self.watches if watch.reactor.closed]
        before = [len(loop.ready) for loop in closed]
        self.machine.post(ring)
        if [len(loop.ready) for loop in closed] != before or any(loop.reader is not None for loop in closed):
            self.violations.append(f"notifier {ring.notifier} woke the loop of a reactor that is closed")

    def _lose(self, ring: Ring) -> None:
        self.lost -= 1
        ring.lost = True

    def _repeat(self, ring: Ring) -> None:
        self.repeated -= 1
        self._post(ring)

    def _expire(self, timer: asyncio.TimerHandle) -> None:
        if name_of(timer) == "_rang":
            self.machine.clock = max(self.machine.clock, timer.when())
        loop = cast("ScriptedLoop", timer._loop)  # type: ignore[attr-defined]
        loop.timers.remove(timer)
        loop.run(timer)

    def _pass(self) -> None:
        queues = [queue for watch in self.watches for queue in watch.queues]
        self.machine.clock = max(queue.poll_until for queue in queues if queue.polling)

    def _close(self) -> None:
        """As `aiocuda._loop_state` does it."""
        watch = self.watches[0]
        if self.setting.close == "device":
            watch.loop.inside(watch.loop_state.close)
            self.machine.deserted = True
            return
        self._leave_waiters()
        watch.loop.close()
        watch.loop_state.close()
        successor = Watch(self, self.setting.producers, 1, self.setting.successors)
        self.watches.append(successor)
        successor.reactor.sweeps = (self._reclaim,)

    def _reclaim(self) -> None:
        loop_state = self.watches[0].loop_state
        for queue in list(loop_state.queues):
            if queue.has_device_finished():
                del loop_state.queues[queue]
                queue.reclaim()

    # -- what must not be ----------------------------------------------------------------------------------------

    def is_quiet(self) -> bool:
        """Is there nothing to come but what timers do?"""
        machine = self.machine
        return (
            not any(watch.loop.ready for watch in self.watches)
            and not (machine.port and any(watch.loop.reader is not None for watch in self.watches))
            and all(ring.posted or ring.lost for ring in machine.rings)
        )

    def check(self) -> None:
        for watch in self.watches:
            while watch.loop.ready and self._is_harmless(watch.loop.ready[0]):
                watch.loop.run_next()
        if self.trail.is_new:  # else it has been looked at
            checks.check(self)

    def state(self) -> Hashable:
        return canonical.state(self)

    def _check_order(self) -> None:
        if self.trail.is_new:
            checks.check_order(self)

    @property
    def notifier_pool(self) -> Any:
        """The one rack: the next loop takes it over."""
        return self.watches[-1].reactor.notifier_pool

    def _is_harmless(self, handle: asyncio.Handle) -> bool:
        """Does it only tell somebody, whom nothing that may happen meanwhile can tell anything else?"""
        task = task_of(handle)
        if task is None:
            return name_of(handle) in ("_turned", "nothing", "<lambda>")
        return any(item.task is task and item.operation is not None and item.operation.done() for item in self.items())

    # -- the end -------------------------------------------------------------------------------------------------

    def _end(self) -> None:
        """Nothing but time: timers fire, and what they leave behind is looked at."""
        self.ended = True
        machine, watch = self.machine, self.watches[-1]
        if len(self.watches) > 1:  # as orphans are taken back when their device is used again
            for item in watch.items[0]:
                if item.task is None:
                    self._produce(item, watch.queues[0])
        self._settle()
        for tick in range(MOST_TICKS + 1):
            timers = [timer for each in self.watches for timer in each.loop.timers]
            for timer in timers:
                self._expire(timer)
            self._settle()
            waiting = [item.name for each in self.watches for item in each.waiting()]
            if waiting:
                self.violations.append(f"lost wake: the watchdog does not wake the waiters of {', '.join(waiting)}")
                return
            if not timers:
                break
            if tick == MOST_TICKS:
                self.violations.append(f"timers go on for ever: {[name_of(timer) for timer in timers]}")
        notifier_pool, reactor = watch.reactor.notifier_pool, watch.reactor
        if reactor.closed:
            return
        if len(self.watches) > 1:
            self._reclaim()  # as whoever uses or closes the device does
        unfinished = [i.name for i in self.items() if i.operation is not None and not i.operation.is_settled]
        if unfinished:
            self.violations.append(f"left unresolved: {unfinished}")
        if notifier_pool.armed or len(self.device_state.tokens) != self.setting.notifiers:
            self.violations.append(
                f"notifiers that nobody gave back: {len(notifier_pool.armed)}, tokens {self.device_state.tokens}"
            )
        if (
            reactor.lost_wakes > notifier_pool.quarantined
            or any(r.lost for r in machine.rings) > notifier_pool.quarantined
        ):
            self.violations.append(
                f"{notifier_pool.quarantined} notifiers were put away, {reactor.lost_wakes} counted as lost"
            )
        if len(self.device_state.leases.plain) != self.device_state.leases.created:
            self.violations.append(
                f"{self.device_state.leases.created} events, {len(self.device_state.leases.plain)} given back"
            )

    def _settle(self) -> None:
        """The device and the loops do what they have to do."""
        machine = self.machine
        while True:
            moved = False
            for watch in self.watches:
                loop = watch.loop
                if loop.reader is not None and machine.port:
                    loop.ready.append(loop.reader)
                for queue in watch.queues:
                    if queue.polling:
                        machine.clock = max(machine.clock, queue.poll_until)
                while loop.ready:
                    moved = True
                    loop.run_next()
            machine.done.update(machine.given)
            for ring in machine.rings:
                if not ring.posted and not ring.lost:
                    moved = True
                    machine.post(ring)
            self._check_order()
            if not moved or self.violations:
                return


class _Properties:
    hardware_queues = 32
