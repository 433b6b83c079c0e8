"""Checks: what must hold in each state of the wake-up protocol."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiocuda.completion._state import DONE

if TYPE_CHECKING:
    from tests.completion.search.wakes import Wakes
    from tests.completion.search.watch import Watch

__all__ = ["check", "check_order"]


def check(wakes: Wakes) -> None:
    """All that must hold whenever nobody is at work."""
    check_order(wakes)
    for watch in wakes.watches:
        _check_bells(wakes, watch)
    armed = [armed.token for armed in wakes.notifier_pool.armed.values() if armed.token is not None]
    if sorted(armed + wakes.device_state.tokens) != list(range(wakes.setting.notifiers)):
        wakes.violations.append(
            f"tokens: {wakes.device_state.tokens} idle and {armed} armed, of {wakes.setting.notifiers}"
        )
    if not wakes.ended and wakes.is_quiet():
        for watch in wakes.watches:
            _check_woken(wakes, watch)


def check_order(wakes: Wakes) -> None:
    """V2 and V3: what is resolved is done, and all before it is resolved."""
    for watch in wakes.watches:
        for queue, items in zip(watch.queues, watch.items, strict=True):
            resolved = 0
            for index, item in enumerate(items):
                if item.operation is None or item.operation.status != DONE:
                    continue
                resolved += 1
                if wakes.machine.done[queue.handle] < resolved:
                    wakes.violations.append(f"V2 {item.name} was resolved before the device was done with it")
                if resolved != index + 1:
                    wakes.violations.append(f"V3 {item.name} was resolved before its predecessor")


def _check_bells(wakes: Wakes, watch: Watch) -> None:
    """Each notifier is in one place, and each queue knows its own."""
    notifier_pool = watch.reactor.notifier_pool
    if len(notifier_pool._free) + len(notifier_pool.armed) + notifier_pool.quarantined != len(notifier_pool._notifiers):
        wakes.violations.append(
            f"notifiers: {notifier_pool._free} free, {len(notifier_pool.armed)} armed, "
            f"{notifier_pool.quarantined} put away"
        )
    if watch.reactor.closed:
        return
    for queue in watch.queues:
        armed = [armed for armed in notifier_pool.armed.values() if armed.queue is queue]
        if armed != ([] if queue.armed is None else [queue.armed]):
            wakes.violations.append(f"queue {queue.name} believes in other notifiers than are armed for it")


def _check_woken(wakes: Wakes, watch: Watch) -> None:
    """Nothing is left to come but timers: whoever still waits must have one, for a reason."""
    reactor = watch.reactor
    lost = [ring.tag for ring in wakes.machine.rings if ring.lost]
    for item in watch.waiting():
        queue = next(queue for queue, items in zip(watch.queues, watch.items, strict=True) if item in items)
        deaf = any(reactor.notifier_pool.armed.get(tag) is queue.armed is not None for tag in lost)
        ticked = queue in reactor._ticked and reactor._tick is not None
        if reactor.closed or not (deaf or ticked):
            wakes.violations.append(f"lost wake: nobody is going to wake the waiter of {item.name}")
