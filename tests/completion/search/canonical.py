"""Canonical: the state of the wake-up protocol, without what decides nothing."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Hashable, Iterable
from typing import TYPE_CHECKING, Any

from aiocuda._wakeups import Waiters
from aiocuda.completion._reactor import TICK_SECONDS
from tests.completion.search.watch import name_of

if TYPE_CHECKING:
    from tests.completion.search.wakes import Wakes
    from tests.completion.search.watch import Item, Watch

__all__ = ["state"]


def state(wakes: Wakes) -> Hashable:
    """All that decides what may come."""
    machine, notifier_pool = wakes.machine, wakes.notifier_pool
    # Notifiers are alike: what matters is which rings are of one notifier.
    notifiers = {notifier: number for number, notifier in enumerate(_notifiers(wakes))}
    rings = [
        (notifiers[ring.notifier], ring.event, ring.tag in notifier_pool.armed, ring.posted, ring.lost, ring.heard)
        for ring in machine.rings
        if not ring.heard or (wakes.repeated and ring.posted == 1)
    ]
    armed = [
        (notifiers[a.index], wakes.names.get(a.operation.id), a.silent_ticks, a.token is None)
        for a in notifier_pool.armed.values()
    ]
    return (
        wakes.cancels,
        wakes.lost,
        wakes.repeated,
        wakes.ended,
        machine.deserted,
        machine.nudged,
        tuple(machine.done.values()),
        tuple(machine.given.values()),
        _ordered(wakes, ((notifiers[ring.notifier], ring.tag in notifier_pool.armed) for ring in machine.port)),
        _ordered(wakes, rings),
        len(wakes.device_state.tokens),
        len(notifier_pool._free),
        frozenset(notifiers[notifier] for notifier in notifier_pool._free if notifier in notifiers),
        notifier_pool.quarantined,
        _ordered(wakes, armed),
        tuple(_of_watch(wakes, watch) for watch in wakes.watches),
    )


def _notifiers(wakes: Wakes) -> dict[int, None]:
    """Those that have anything to say yet, in an order that follows from what they ring for."""
    port = wakes.machine.port
    rings = [r for r in wakes.machine.rings if not r.heard or r in port or (wakes.repeated and r.posted == 1)]
    notifiers = {ring.notifier: None for ring in sorted(rings, key=lambda ring: (ring.event, ring.posted, ring.lost))}
    return notifiers | {armed.index: None for armed in wakes.notifier_pool.armed.values()}


def _ordered(wakes: Wakes, things: Iterable[Any]) -> Hashable:
    """Where queues do not compete for notifiers, the order in which one pass goes through them decides nothing."""
    if wakes.setting.notifiers >= wakes.setting.producers + 1:
        return tuple(sorted(things))
    return tuple(things)


def _of_watch(wakes: Wakes, watch: Watch) -> Hashable:
    loop, reactor = watch.loop, watch.reactor
    if loop.is_closed():
        return tuple((queue in watch.loop_state.queues, len(queue.pending)) for queue in watch.queues)
    now = wakes.machine.clock
    # When a queue is looked at next; the rest of its plan decides nothing.
    looks = [
        0.0 if not queue.attended else queue.poll_until if queue.polling else queue.poll_from for queue in watch.queues
    ]
    ticks = reactor._ticked
    times = {now, now + TICK_SECONDS, reactor.alarm.at, *looks, *ticks.values()}
    rank = {time: index for index, time in enumerate(sorted(times))}
    return (
        reactor.closed,
        _ordered(wakes, (queue.name for queue in reactor.queues)),
        _ordered(wakes, (queue.name for queue in reactor.attended)),
        _ordered(wakes, ((queue.name, rank[at]) for queue, at in ticks.items())),
        reactor._spinning,
        reactor.turn.immediate > 0,
        reactor.turn.inlined > 0,
        tuple(sorted(map(name_of, loop.timers))),
        tuple(name_of(handle) for handle in loop.ready),
        rank[now],
        rank[now + TICK_SECONDS],
        -1 if reactor.alarm.at == math.inf else rank[reactor.alarm.at],
        reactor.alarm.early > 0.0,
        tuple(
            (
                queue.active,
                queue.attended,
                queue.polling,
                None if queue.armed is None else wakes.names.get(queue.armed.operation.id),
                len(queue.pending),
                len(queue.host_queue.entries),
                rank[look] if queue.attended else -1,
                tuple(map(_of_item, items)),
            )
            for queue, items, look in zip(watch.queues, watch.items, looks, strict=True)
        ),
    )


def _of_item(item: Item) -> Hashable:
    if item.task is None:
        return None
    operation = item.operation
    if operation is None:
        return item.outcome, item.task.cancelling()
    waiters = operation.waiters
    each = waiters if type(waiters) is Waiters else [] if waiters is None else [waiters]
    return (
        item.outcome,
        item.told,
        item.task.cancelling(),
        operation.status,
        operation.detached,
        operation.lease is None,
        tuple(isinstance(waiter, asyncio.Future) and waiter.done() for waiter in each),
    )
