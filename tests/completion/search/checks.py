"""The conditions that hold in each state of the wake-up protocol."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiocuda._core import DONE

if TYPE_CHECKING:
    from tests.completion.search.client import Client
    from tests.completion.search.wakeup_system import WakeupSystem

__all__ = ["check", "check_order"]


def check(system: WakeupSystem) -> None:
    """Check every condition that holds between two actions."""
    check_order(system)
    for client in system.clients:
        _check_notifiers(system, client)
    armed = [armed.token for armed in system.notifier_pool.armed.values() if armed.token is not None]
    if sorted(armed + system.device_state.tokens) != list(range(system.setting.notifiers)):
        system.violations.append(
            f"tokens: {system.device_state.tokens} idle and {armed} armed, of {system.setting.notifiers}"
        )
    if not system.ended and system.is_quiet():
        for client in system.clients:
            _check_waiters(system, client)


def check_order(system: WakeupSystem) -> None:
    """V2 and V3: resolved operations are done, and all earlier ones are resolved."""
    for client in system.clients:
        for queue, items in zip(client.queues, client.items, strict=True):
            resolved = 0
            for index, item in enumerate(items):
                if item.operation is None or item.operation.status != DONE:
                    continue
                resolved += 1
                if system.driver.done[queue.handle] < resolved:
                    system.violations.append(f"V2 {item.name} was resolved before the device was done with it")
                if resolved != index + 1:
                    system.violations.append(f"V3 {item.name} was resolved before its predecessor")


def _check_notifiers(system: WakeupSystem, client: Client) -> None:
    """Check that each notifier is free, armed or quarantined, and that each queue refers to its own notifier."""
    notifier_pool = client.reactor.notifier_pool
    free, armed, quarantined = notifier_pool._free, notifier_pool.armed, notifier_pool.quarantined
    if len(free) + len(armed) + len(quarantined) != len(notifier_pool._notifiers):
        system.violations.append(f"notifiers: {free} free, {len(armed)} armed, {len(quarantined)} quarantined")
    if client.reactor.closed:
        return
    for queue in client.queues:
        own = [each for each in armed.values() if each.queue is queue]
        if queue.watch.armed is None if own else queue.watch.armed is not None:
            system.violations.append(f"queue {queue.name} refers to other notifiers than those that are armed for it")


def _check_waiters(system: WakeupSystem, client: Client) -> None:
    """Check that a timer will wake each task that still waits, and for a reason. Only timers can fire now."""
    reactor = client.reactor
    lost = [notification.tag for notification in system.driver.notifications if notification.lost]
    for item in client.waiting():
        queue = next(queue for queue, items in zip(client.queues, client.items, strict=True) if item in items)
        notification_lost = any(reactor.notifier_pool.armed.get(tag) is queue.watch.armed is not None for tag in lost)
        watch = queue.watch
        checked = watch.attended and not watch.polling and reactor.alarm.at <= watch.poll_from
        enough = system.setting.notifiers > system.setting.producers  # else a wait is armed at its next check
        if enough and watch.parked and watch.armed is None and reactor.device_state.tokens:
            system.violations.append(f"lost wake: {item.name} has no notifier, although one is left")
        if reactor.closed or not (notification_lost or checked):
            system.violations.append(f"lost wake: nothing will wake the waiter of {item.name}")
