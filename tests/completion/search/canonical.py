"""The canonical state of the wake-up protocol: everything that can influence what happens next, and nothing else."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Hashable, Iterable
from typing import TYPE_CHECKING, Any

from aiocuda._base._wakeups import Waiters
from tests.completion.search.client import name_of

if TYPE_CHECKING:
    from tests.completion.search.client import Client, Item
    from tests.completion.search.wakeup_system import WakeupSystem

__all__ = ["state"]


def state(system: WakeupSystem) -> Hashable:
    """Return the canonical state of ``system``."""
    driver, notifier_pool = system.driver, system.notifier_pool
    # Notifiers are interchangeable: only which notifications belong to the same notifier matters.
    notifiers = {notifier: number for number, notifier in enumerate(_notifiers(system))}
    notifications = [
        (
            notifiers[each.notifier],
            each.event,
            each.tag in notifier_pool.armed,
            each.posted,
            each.lost,
            each.drained,
        )
        for each in driver.notifications
        if not each.drained or (system.repeated and each.posted == 1)
    ]
    armed = [
        (notifiers[a.index], system.names.get(a.id), a.silent_ticks, a.token is None)
        for a in notifier_pool.armed.values()
    ]
    return (
        system.cancels,
        system.lost,
        system.repeated,
        system.ended,
        driver.device_closed,
        driver.wake_pending,
        tuple(driver.done.values()),
        tuple(driver.submitted.values()),
        _ordered(
            system,
            ((notifiers[each.notifier], each.tag in notifier_pool.armed) for each in driver.port),
        ),
        _ordered(system, notifications),
        len(system.device_state.tokens),
        len(notifier_pool._free),
        frozenset(notifiers[notifier] for notifier in notifier_pool._free if notifier in notifiers),
        frozenset(notifiers[index] for index in notifier_pool.quarantined.values() if index in notifiers),
        len(notifier_pool.quarantined),
        _ordered(system, armed),
        tuple(_client_state(system, client) for client in system.clients),
    )


def _notifiers(system: WakeupSystem) -> dict[int, None]:
    """Return the notifiers with notifications that can still come or be read, ordered by their events."""
    port = system.driver.port
    notifications = [
        each
        for each in system.driver.notifications
        if not each.drained or each in port or (system.repeated and each.posted == 1)
    ]
    notifiers = {
        each.notifier: None for each in sorted(notifications, key=lambda each: (each.event, each.posted, each.lost))
    }
    return notifiers | {armed.index: None for armed in system.notifier_pool.armed.values()}


def _ordered(system: WakeupSystem, things: Iterable[Any]) -> Hashable:
    """Return ``things`` sorted, or in their order if the queues compete for notifiers.

    Without competition, the order in which one pass visits the queues makes no difference.
    """
    if system.setting.notifiers >= system.setting.producers + 1:
        return tuple(sorted(things))
    return tuple(things)


def _client_state(system: WakeupSystem, client: Client) -> Hashable:
    loop, reactor = client.loop, client.reactor
    if loop.is_closed():
        return tuple((queue in client.loop_state.queues, len(queue.pending)) for queue in client.queues)
    now = system.driver.clock
    return (
        reactor.closed,
        _ordered(system, (queue.name for queue in reactor.queues)),
        _ordered(system, (queue.name for queue in reactor.hot.attended)),
        reactor._spinning,
        reactor.hot.turn.immediate > 0,
        reactor.hot.turn.inlined > 0,
        tuple(sorted(map(name_of, loop.timers))),
        tuple(name_of(handle) for handle in loop.ready),
        reactor.alarm.at == math.inf,  # when it comes, all parked queues are due
        reactor.alarm.early > 0.0,
        tuple(
            (
                queue.active,
                queue.watch.attended,
                queue.watch.polling and (now < queue.watch.poll_until, queue.watch.poll_until > 0.0),
                queue.watch.parked,
                system.names.get(queue.watch.target),
                None if queue.watch.armed is None else system.names.get(queue.watch.armed.id),
                len(queue.pending),
                len(queue.rare.host_queue.entries),
                tuple(map(_item_state, items)),
            )
            for queue, items in zip(client.queues, client.items, strict=True)
        ),
    )


def _item_state(item: Item) -> Hashable:
    if item.task is None:
        return None
    operation = item.operation
    if operation is None:
        return item.outcome, item.task.cancelling()
    waiters = operation.waiters
    each = waiters if type(waiters) is Waiters else [] if waiters is None else [waiters]
    return (
        item.outcome,
        item.notified,
        item.task.cancelling(),
        operation.status,
        operation.detached,
        operation.lease is None,
        tuple(isinstance(waiter, asyncio.Future) and waiter.done() for waiter in each),
    )
