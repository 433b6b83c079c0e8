"""Canonical: the state of the wake-up protocol, without what decides nothing."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Hashable, Iterable
from typing import TYPE_CHECKING, Any

from aiocuda.completion.reactor import TICK_SECONDS
from aiocuda.waking import Waiters
from tests.completion.search.watch import name_of

if TYPE_CHECKING:
    from tests.completion.search.wakes import Wakes
    from tests.completion.search.watch import Item, Watch

__all__ = ["state"]


def state(wakes: Wakes) -> Hashable:
    """All that decides what may come."""
    machine, rack = wakes.machine, wakes.rack
    # Bells are alike: what matters is which rings are of one bell.
    bells = {bell: number for number, bell in enumerate(_bells(wakes))}
    rings = [
        (bells[ring.bell], ring.event, ring.tag in rack.armed, ring.posted, ring.lost, ring.heard)
        for ring in machine.rings
        if not ring.heard or (wakes.repeated and ring.posted == 1)
    ]
    armed = [
        (bells[a.index], wakes.names.get(a.operation.id), a.silent_ticks, a.token is None) for a in rack.armed.values()
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
        _ordered(wakes, ((bells[ring.bell], ring.tag in rack.armed) for ring in machine.port)),
        _ordered(wakes, rings),
        len(wakes.hub.tokens),
        len(rack._free),
        frozenset(bells[bell] for bell in rack._free if bell in bells),
        rack.quarantined,
        _ordered(wakes, armed),
        tuple(_of_watch(wakes, watch) for watch in wakes.watches),
    )


def _bells(wakes: Wakes) -> dict[int, None]:
    """Those that have anything to say yet, in an order that follows from what they ring for."""
    port = wakes.machine.port
    rings = [r for r in wakes.machine.rings if not r.heard or r in port or (wakes.repeated and r.posted == 1)]
    bells = {ring.bell: None for ring in sorted(rings, key=lambda ring: (ring.event, ring.posted, ring.lost))}
    return bells | {armed.index: None for armed in wakes.rack.armed.values()}


def _ordered(wakes: Wakes, things: Iterable[Any]) -> Hashable:
    """Where lanes do not compete for bells, the order in which one pass goes through them decides nothing."""
    if wakes.setting.bells >= wakes.setting.producers + 1:
        return tuple(sorted(things))
    return tuple(things)


def _of_watch(wakes: Wakes, watch: Watch) -> Hashable:
    loop, reactor = watch.loop, watch.reactor
    if loop.is_closed():
        return tuple((lane in watch.site.lanes, len(lane.pending)) for lane in watch.lanes)
    now = wakes.machine.clock
    # When a lane is looked at next; the rest of its plan decides nothing.
    looks = [0.0 if not lane.attended else lane.poll_until if lane.polling else lane.poll_from for lane in watch.lanes]
    ticks = reactor._ticked
    times = {now, now + TICK_SECONDS, reactor.alarm.at, *looks, *ticks.values()}
    rank = {time: index for index, time in enumerate(sorted(times))}
    return (
        reactor.closed,
        _ordered(wakes, (lane.name for lane in reactor.lanes)),
        _ordered(wakes, (lane.name for lane in reactor.attended)),
        _ordered(wakes, ((lane.name, rank[at]) for lane, at in ticks.items())),
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
                lane.active,
                lane.attended,
                lane.polling,
                None if lane.armed is None else wakes.names.get(lane.armed.operation.id),
                len(lane.pending),
                len(lane.queue.entries),
                rank[look] if lane.attended else -1,
                tuple(map(_of_item, items)),
            )
            for lane, items, look in zip(watch.lanes, watch.items, looks, strict=True)
        ),
    )


def _of_item(item: Item) -> Hashable:
    if item.task is None:
        return None
    operation = item.operation
    if operation is None:
        return item.outcome, item.task.cancelling()
    waiters = operation._waiters
    each = waiters if type(waiters) is Waiters else [] if waiters is None else [waiters]
    return (
        item.outcome,
        item.told,
        item.task.cancelling(),
        operation._state,
        operation._abandoned,
        operation._lease is None,
        tuple(isinstance(waiter, asyncio.Future) and waiter.done() for waiter in each),
    )
