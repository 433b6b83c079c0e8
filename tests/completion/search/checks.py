"""Checks: what must hold in each state of the wake-up protocol."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiocuda.completion.operation import DONE

if TYPE_CHECKING:
    from tests.completion.search.wakes import Wakes
    from tests.completion.search.watch import Watch

__all__ = ["check", "check_order"]


def check(wakes: Wakes) -> None:
    """All that must hold whenever nobody is at work."""
    check_order(wakes)
    for watch in wakes.watches:
        _check_bells(wakes, watch)
    armed = [armed.token for armed in wakes.rack.armed.values() if armed.token is not None]
    if sorted(armed + wakes.hub.tokens) != list(range(wakes.setting.bells)):
        wakes.violations.append(f"tokens: {wakes.hub.tokens} idle and {armed} armed, of {wakes.setting.bells}")
    if not wakes.ended and wakes.is_quiet():
        for watch in wakes.watches:
            _check_woken(wakes, watch)


def check_order(wakes: Wakes) -> None:
    """V2 and V3: what is resolved is done, and all before it is resolved."""
    for watch in wakes.watches:
        for lane, items in zip(watch.lanes, watch.items, strict=True):
            resolved = 0
            for index, item in enumerate(items):
                if item.operation is None or item.operation._state != DONE:
                    continue
                resolved += 1
                if wakes.machine.done[lane.handle] < resolved:
                    wakes.violations.append(f"V2 {item.name} was resolved before the device was done with it")
                if resolved != index + 1:
                    wakes.violations.append(f"V3 {item.name} was resolved before its predecessor")


def _check_bells(wakes: Wakes, watch: Watch) -> None:
    """Each bell is in one place, and each lane knows its own."""
    rack = watch.reactor.rack
    if len(rack._free) + len(rack.armed) + rack.quarantined != len(rack._bells):
        wakes.violations.append(f"bells: {rack._free} free, {len(rack.armed)} armed, {rack.quarantined} put away")
    if watch.reactor.closed:
        return
    for lane in watch.lanes:
        armed = [armed for armed in rack.armed.values() if armed.lane is lane]
        if armed != ([] if lane.armed is None else [lane.armed]):
            wakes.violations.append(f"lane {lane.name} believes in other bells than are armed for it")


def _check_woken(wakes: Wakes, watch: Watch) -> None:
    """Nothing is left to come but timers: whoever still waits must have one, for a reason."""
    reactor = watch.reactor
    lost = [ring.tag for ring in wakes.machine.rings if ring.lost]
    for item in watch.waiting():
        lane = next(lane for lane, items in zip(watch.lanes, watch.items, strict=True) if item in items)
        deaf = any(reactor.rack.armed.get(tag) is lane.armed is not None for tag in lost)
        ticked = lane in reactor._ticked and reactor._tick is not None
        if reactor.closed or not (deaf or ticked):
            wakes.violations.append(f"lost wake: nobody is going to wake the waiter of {item.name}")
