"""The wake-up protocol as a system to explore. The reactor, its notifier pool and its stream queues are the real ones.

Time has no length here. A timer may fire at any moment after it was set: the watchdog may run before a notifier or long
after it. A notification may come at any moment after its event is done. A condition that holds in all these orders
holds in every order that real clocks allow. Only `Setting.late` depends on clocks: it allows the watchdog to quarantine
a notifier that is only slow.

Orders that make no difference are not explored:

- The progress of a device shows only in a query or in a notification. So it is a choice of each query and a part of
  each notification, not an action.
- The first step of an item, the callback of a timer and the reader of the port run when they are due. Earlier they
  have no effect, and the search chooses that moment.
- A step of a waiter whose operation has finished touches no queue, so it runs immediately.
- Producers are interchangeable: the first one to begin is A. Notifiers are interchangeable, unless queues compete for
  them.

Polled queues have plans with clock times. The canonical state keeps the order of these times, not their differences. So
a queue that has been polled for longer equals one that has not, although its next query may come later.
"""

from __future__ import annotations

import asyncio
from collections.abc import Hashable
from typing import Any, cast

from aiocuda._core import Ring
from aiocuda.completion._device_state import DeviceState
from aiocuda.driver.protocol import Driver
from aiocuda.errors import ClosedError
from tests.completion.search import canonical, checks
from tests.completion.search.client import Client, Item, name_of, task_of
from tests.completion.search.explore import Action, Trail
from tests.completion.search.scripted import Notification, ScriptedDriver, ScriptedLoop
from tests.completion.search.setting import PARKING, Setting

__all__ = ["WakeupSystem"]

#: The watchdog resolves operations in its first tick, quarantines a notifier in the third tick after that, and finds
#: nothing to do in one more.
MOST_TICKS = 5


class WakeupSystem:
    """The system that the module describes."""

    def __init__(self, setting: Setting, trail: Trail) -> None:
        self.setting = setting
        self.violations: list[str] = []
        self.trail = trail
        self.driver = ScriptedDriver(
            self._choose, self.violations, notifiers=setting.notifiers, descriptor=setting.descriptor
        )
        self.driver.on_query = self._check_order
        properties = cast("Any", _Properties)
        driver = cast("Driver", self.driver)
        self.device_state = DeviceState(driver, 0, properties, setting.policy, setting.in_flight)
        self.names: dict[int, str] = {}  # by the id of an operation
        self.cancels, self.lost, self.repeated = setting.cancels, setting.lost, setting.repeated
        self.ended = False
        self.clients = [Client(self, 0, setting.producers, setting.items)]

    def _choose(self, width: int) -> int:
        return 0 if self.ended else self.trail.choose(width)

    def release(self) -> None:
        self._close_waiters()
        self.driver.forget()

    def _close_waiters(self) -> None:
        for item in self.items():
            task = item.task
            if task is not None and not task.done():
                task._log_destroy_pending = False  # type: ignore[attr-defined]
                cast("Any", task.get_coro()).close()

    def items(self) -> list[Item]:
        """Return the items of all loops."""
        return [item for client in self.clients for items in client.items for item in items]

    # -- possible actions

    def enabled(self) -> list[Action]:
        if self.ended:
            return []
        driver = self.driver
        actions: list[Action] = []
        if self.is_quiet():
            actions.append(("only timers", None, self._end, ()))
        for client in self.clients:
            actions += self._loop_actions(client)
        for notification in driver.notifications:
            if not notification.posted and not notification.lost:
                actions.append(("notifier {} notifies", notification.notifier, self._post, (notification,)))
                if self.lost:
                    actions.append(("notifier {} is lost", notification.notifier, self._lose, (notification,)))
            elif notification.posted == 1 and self.repeated:
                actions.append(("notifier {} notifies again", notification.notifier, self._repeat, (notification,)))
        return actions

    def _loop_actions(self, client: Client) -> list[Action]:
        loop = client.loop
        if loop.is_closed():
            return []
        actions: list[Action] = []
        if loop.ready:
            actions.append(("{} runs", name_of(loop.ready[0]), loop.run_next, ()))
        reader = loop.reader
        if reader is not None and self.driver.port:
            actions.append(("the port is read", None, loop.run, (reader,)))
        for queue, items in zip(client.queues, client.items, strict=True):
            for item in items:
                if item.task is None:
                    # Producers are interchangeable: the first one to begin is called A.
                    if queue is client.queues[0] or client.items[0][0].task is not None:
                        actions.append(("{} is enqueued", item.name, self._produce, (item, queue)))
                    if self.setting.enqueued_first and client is self.clients[0]:
                        return actions[-1:]
                    break
            for item in items:
                task = item.task
                if self.cancels and task is not None and not task.done() and not task.cancelling():
                    actions.append(("{} is cancelled", item.name, self._cancel, (item,)))
        for timer in loop.timers:
            name = name_of(timer)
            if name == "_watch" and not self.setting.late and self._would_be_late(client):
                continue
            if name == "_rang" and self.setting.policy is PARKING and not self.is_quiet():
                continue  # otherwise each notification has a check before it and after it: ten times the states
            actions.append(("{} fires", name, self._expire, (timer,)))
        if any(queue.watch.polling and queue.watch.poll_until > self.driver.clock for queue in client.queues):
            actions.append(("polling time passes", None, self._pass, ()))
        if self.setting.close and client is self.clients[0] and not client.reactor.closed:
            actions.append(("the {} is closed", self.setting.close, self._close, ()))
        return actions

    def _would_be_late(self, client: Client) -> bool:
        """True if another tick would quarantine a notifier while its notification can still come."""
        armed = client.reactor.notifier_pool.armed
        return any(
            notification.tag in armed
            and armed[notification.tag].silent_ticks == 2
            and not notification.lost
            and not notification.posted
            for notification in self.driver.notifications
        )

    def _produce(self, item: Item, queue: Ring) -> None:
        loop = cast("ScriptedLoop", queue.loop)
        item.task = loop.create_task(self._consume(item, queue), name=item.name)
        loop.run(loop.ready.pop())

    async def _consume(self, item: Item, queue: Ring) -> None:
        closed = queue.closed
        try:
            operation = item.operation = queue.enqueue("launch", None, self.driver.work, (queue.handle,))
            self.names[operation.id] = item.name
            if self.setting.callbacks:
                item.has_callback = True
                operation.add_done_callback(lambda _: self._count_callback(item))
            await operation
        except ClosedError:
            item.outcome = "closed"
            if not queue.closed:
                self.violations.append(f"{item.name} got a ClosedError, but its stream is open")
        except asyncio.CancelledError:
            item.outcome = "cancelled"
        else:
            item.outcome = "done"
            if closed or not operation.done():
                self.violations.append(f"V1 {item.name} woke its waiter before it was done")

    def _count_callback(self, item: Item) -> None:
        item.notified += 1
        if item.notified > 1:
            self.violations.append(f"V1 {item.name} ran its callback twice")

    def _cancel(self, item: Item) -> None:
        self.cancels -= 1
        assert item.task is not None
        item.task.cancel()

    def _post(self, notification: Notification) -> None:
        closed = [client.loop for client in self.clients if client.reactor.closed]
        before = [len(loop.ready) for loop in closed]
        self.driver.post(notification)
        if [len(loop.ready) for loop in closed] != before or any(loop.reader is not None for loop in closed):
            self.violations.append(f"notifier {notification.notifier} woke the loop of a reactor that is closed")

    def _lose(self, notification: Notification) -> None:
        self.lost -= 1
        notification.lost = True

    def _repeat(self, notification: Notification) -> None:
        self.repeated -= 1
        self._post(notification)

    def _expire(self, timer: asyncio.TimerHandle) -> None:
        if name_of(timer) == "_rang":
            # All parked queues are due then: their order makes no difference, and would multiply the states.
            queues = [queue for client in self.clients for queue in client.queues]
            due = [queue.watch.poll_from for queue in queues if queue.watch.attended and not queue.watch.polling]
            self.driver.clock = max(self.driver.clock, timer.when(), *due)
        loop = cast("ScriptedLoop", timer._loop)  # type: ignore[attr-defined]
        loop.timers.remove(timer)
        loop.run(timer)

    def _pass(self) -> None:
        queues = [queue for client in self.clients for queue in client.queues]
        self.driver.clock = max(queue.watch.poll_until for queue in queues if queue.watch.polling)

    def _close(self) -> None:
        """Close the device or the loop, as `aiocuda.device._loop_state` does it."""
        client = self.clients[0]
        if self.setting.close == "device":
            client.loop.inside(client.loop_state.close)
            self.driver.device_closed = True
            return
        self._close_waiters()
        client.loop.close()
        client.loop_state.close()
        successor = Client(self, self.setting.producers, 1, self.setting.successors)
        self.clients.append(successor)
        successor.reactor.sweeps = (self._reclaim,)

    def _reclaim(self) -> None:
        loop_state = self.clients[0].loop_state
        for queue in list(loop_state.queues):
            if queue.rare.has_device_finished():
                del loop_state.queues[queue]
                queue.rare.reclaim()

    # -- conditions

    def is_quiet(self) -> bool:
        """True if only timersrs can happen."""
        driver = self.driver
        return (
            not any(client.loop.ready for client in self.clients)
            and not (driver.port and any(client.loop.reader is not None for client in self.clients))
            and all(notification.posted or notification.lost for notification in driver.notifications)
        )

    def check(self) -> None:
        for client in self.clients:
            while client.loop.ready and self._is_harmless(client.loop.ready[0]):
                client.loop.run_next()
        if self.trail.is_new:  # a known state has been checked before
            checks.check(self)

    def state(self) -> Hashable:
        return canonical.state(self)

    def _check_order(self) -> None:
        if self.trail.is_new:
            checks.check_order(self)

    @property
    def notifier_pool(self) -> Any:
        """The only notifier pool. The next loop takes it over."""
        return self.clients[-1].reactor.notifier_pool

    def _is_harmless(self, handle: asyncio.Handle) -> bool:
        """True if the callback only delivers a result that no other action can change."""
        task = task_of(handle)
        if task is None:
            return name_of(handle) in ("_turned", "nothing", "<lambda>")
        return any(item.task is task and item.operation is not None and item.operation.done() for item in self.items())

    # -- the end of a schedule

    def _end(self) -> None:
        """Let only timers fire, then check that nothing is unfinished."""
        self.ended = True
        driver, client = self.driver, self.clients[-1]
        if len(self.clients) > 1:  # orphans are reclaimed when their device is used again
            for item in client.items[0]:
                if item.task is None:
                    self._produce(item, client.queues[0])
        self._settle()
        for tick in range(MOST_TICKS + 1):
            timers = [timer for each in self.clients for timer in each.loop.timers]
            for timer in timers:
                self._expire(timer)
            self._settle()
            waiting = [item.name for each in self.clients for item in each.waiting()]
            if waiting:
                self.violations.append(f"lost wake: the watchdog does not wake the waiters of {', '.join(waiting)}")
                return
            if not timers:
                break
            if tick == MOST_TICKS:
                self.violations.append(f"timers never end: {[name_of(timer) for timer in timers]}")
        notifier_pool, reactor = client.reactor.notifier_pool, client.reactor
        if reactor.closed:
            return
        if len(self.clients) > 1:
            self._reclaim()  # each use and the close of the device does this
        unfinished = [i.name for i in self.items() if i.operation is not None and not i.operation.is_settled]
        if unfinished:
            self.violations.append(f"unresolved operations: {unfinished}")
        if notifier_pool.armed or len(self.device_state.tokens) != self.setting.notifiers:
            self.violations.append(
                f"notifiers that were not returned: {len(notifier_pool.armed)}, tokens {self.device_state.tokens}"
            )
        quarantined = len(notifier_pool.quarantined)
        lost = sum(notification.lost for notification in driver.notifications)
        if lost != quarantined:  # those whose tags have come, late, are free again
            self.violations.append(f"{quarantined} notifiers are quarantined, and {lost} are lost")
        leases = self.device_state.leases
        if len(leases.plain) != leases.created:
            self.violations.append(f"{leases.created} events were created, {len(leases.plain)} were returned")

    def _settle(self) -> None:
        """Let the device and the loops finish everything that they have to do."""
        driver = self.driver
        while True:
            moved = False
            for client in self.clients:
                loop = client.loop
                if loop.reader is not None and driver.port:
                    loop.ready.append(loop.reader)
                for queue in client.queues:
                    if queue.watch.polling:
                        driver.clock = max(driver.clock, queue.watch.poll_until)
                while loop.ready:
                    moved = True
                    loop.run_next()
            driver.done.update(driver.submitted)
            for notification in driver.notifications:
                if not notification.posted and not notification.lost:
                    moved = True
                    driver.post(notification)
            self._check_order()
            if not moved or self.violations:
                return


class _Properties:
    name = "scripted"
    hardware_queues = 32
