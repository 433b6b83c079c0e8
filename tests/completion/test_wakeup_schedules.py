"""Every schedule of the wake-up protocol, for two producers of two items each.

Notifiers are armed and notify, queues are polled, ports are drained, the watchdog ticks, awaits are cancelled and loops
are closed, in every order. In all of them each waiter is woken, no operation is resolved without a query, no notifier
is armed twice, and nothing happens after the close. `search.wakeup_system` describes what is explored.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from aiocuda._core import Ring, StreamOperation
from aiocuda.completion._notifiers import INDEX_SHIFT, ArmedNotifier, NotifierPool
from aiocuda.completion._reactor import Reactor
from aiocuda.completion._stream_queue import StreamQueue
from tests.budget import spread
from tests.completion.search.explore import Action, Exploration, explore, replay
from tests.completion.search.setting import POLLING, Setting
from tests.completion.search.wakeup_system import WakeupSystem

Plant = Callable[[pytest.MonkeyPatch], None]


@pytest.fixture(autouse=True)
def silent() -> Iterator[None]:
    """Write no log events: pytest's handlers would get one in each of many thousand schedules."""
    logger = logging.getLogger("aiocuda")
    logger.setLevel(logging.CRITICAL + 1)
    yield
    logger.setLevel(logging.NOTSET)


def explore_all(setting: Setting) -> Exploration:
    """Explore every schedule. Fail if one leads to a violation."""
    exploration = explore(lambda trail: WakeupSystem(setting, trail))
    print(f"{setting}: {exploration}")  # noqa: T201 - the size of the search
    assert exploration.found is None, str(exploration.found)
    return exploration


# The search itself


class TwoCounters:
    """Two counters that go to 3. One of their states may be forbidden."""

    def __init__(self, forbidden: tuple[int, int] | None) -> None:
        self.violations: list[str] = []
        self._forbidden = forbidden
        self._counts = [0, 0]

    def enabled(self) -> list[Action]:
        return [("{} steps", counter, self._step, (counter,)) for counter in (0, 1) if self._counts[counter] < 3]

    def _step(self, counter: int) -> None:
        self._counts[counter] += 1

    def state(self) -> tuple[int, ...]:
        return tuple(self._counts)

    def check(self) -> None:
        if self.state() == self._forbidden:
            self.violations.append(f"at {self._forbidden}")

    def release(self) -> None:
        """Do nothing: there is nothing to release."""


def test_search_reaches_every_state() -> None:
    exploration = explore(lambda trail: TwoCounters(None))
    assert (exploration.states, exploration.ends, exploration.longest, exploration.found) == (16, 1, 6, None)


@pytest.mark.parametrize("forbidden", [(0, 1), (3, 0), (1, 2), (3, 3)])
def test_search_finds_one_forbidden_state(forbidden: tuple[int, int]) -> None:
    found = explore(lambda trail: TwoCounters(forbidden)).found
    assert found is not None
    assert found.violation == f"at {forbidden}"
    assert sorted(found.schedule) == ["0 steps"] * forbidden[0] + ["1 steps"] * forbidden[1]
    assert replay(lambda trail: TwoCounters(forbidden), found.choices) == found


def test_search_fails_beyond_max_states() -> None:
    with pytest.raises(AssertionError, match="more than 5 states"):
        explore(lambda trail: TwoCounters(None), max_states=5)


# The wake-up protocol


#: Settings and their numbers of states, so that a search that stops too early is noticed. Fewer states mean that the
#: protocol has become simpler.
WHOLE = [
    pytest.param(Setting(), 12_591, id="defaults", marks=pytest.mark.heavy),
    pytest.param(Setting(close="device"), 26_939, id="close=device", marks=pytest.mark.heavy),
    pytest.param(Setting(lost=1), 25_624, id="lost=1", marks=pytest.mark.soak),
    pytest.param(
        Setting(enqueued_first=True, cancels=1), 22_084, id="enqueued_first=True cancels=1", marks=pytest.mark.soak
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("setting", "states"), WHOLE)
def test_two_producers_of_two_items(setting: Setting, states: int) -> None:
    assert explore_all(setting).states > states // 2


SMALL = [
    Setting(producers=1, items=3, cancels=1),
    Setting(producers=1, cancels=1, lost=1, repeated=1, late=True),
    Setting(producers=1, close="device", cancels=2, lost=1),
    Setting(producers=1, close="loop", lost=1),
    Setting(producers=1, close="loop", late=True),
    Setting(producers=1, policy=POLLING, cancels=1, lost=1),
    Setting(producers=1, policy=POLLING, close="device"),
    Setting(producers=1, in_flight=1, cancels=1, close="device"),
    Setting(producers=1, descriptor=False, cancels=1, lost=1),
    Setting(items=1, cancels=2, close="device"),
    Setting(items=1, notifiers=1, lost=1, late=True),
    Setting(items=1, notifiers=0, cancels=1, close="device"),
    Setting(items=1, callbacks=True, repeated=1),
    Setting(items=1, policy=POLLING),
]


@pytest.mark.slow
@pytest.mark.parametrize("setting", spread(SMALL), ids=str)
def test_disturbances_of_small_systems(setting: Setting) -> None:
    explore_all(setting)


@pytest.mark.soak
@pytest.mark.parametrize(
    "setting",
    [
        Setting(cancels=1),
        Setting(cancels=1, close="device"),
        Setting(late=True, repeated=1),
        Setting(enqueued_first=True, cancels=1, lost=1, close="device"),
        Setting(enqueued_first=True, policy=POLLING),
        Setting(enqueued_first=True, close="loop"),
    ],
    ids=str,
)
def test_larger_systems(setting: Setting) -> None:
    explore_all(setting)


# Planted bugs


def late_rearm(patch: pytest.MonkeyPatch) -> None:
    """A queue disarms its notifier only after it has made its next plan."""

    def on_port(reactor: Reactor) -> None:
        armed = [
            reactor.notifier_pool.disarm(tag, reactor.device_state.tokens) for tag in reactor.notifier_pool.port.drain()
        ]
        queues = {each.queue: None for each in armed if each is not None}
        reactor._look(queues)
        for queue in queues:
            queue.watch.armed = None

    patch.setattr(Reactor, "_on_port", on_port)


def early_rearm(patch: pytest.MonkeyPatch) -> None:
    """A queue disarms its notifier before the notifier's own tag has been read."""
    original = Reactor._on_port

    def on_port(reactor: Reactor) -> None:
        for queue in reactor.hot.attended:
            queue.watch.armed = None
        original(reactor)

    patch.setattr(Reactor, "_on_port", on_port)


def disarm_on_resolve(patch: pytest.MonkeyPatch) -> None:
    """A queue disarms its notifier when it resolves operations."""
    original = Ring._after_resolving

    def after(queue: Ring, *sample: Any) -> None:
        notifier_pool, tokens = queue.reactor.notifier_pool, queue.device_state.tokens
        for tag in [tag for tag, armed in notifier_pool.armed.items() if armed is queue.watch.armed]:
            notifier_pool.disarm(tag, tokens)
            queue.watch.armed = None
        original(queue, *sample)

    patch.setattr(Ring, "_after_resolving", after)


def no_watchdog(patch: pytest.MonkeyPatch) -> None:
    """The watchdog ticks once, and looks at nothing."""

    def watch(reactor: Reactor) -> None:
        reactor._watchdog = None

    patch.setattr(Reactor, "_watch", watch)


def tags_without_generation(patch: pytest.MonkeyPatch) -> None:
    """A tag identifies its notifier, not one use of it."""
    original = NotifierPool.disarm

    def disarm(notifier_pool: NotifierPool, tag: int, tokens: list[int]) -> ArmedNotifier | None:
        same = next((known for known in notifier_pool.armed if known >> INDEX_SHIFT == tag >> INDEX_SHIFT), tag)
        return original(notifier_pool, same, tokens)

    patch.setattr(NotifierPool, "disarm", disarm)


def poll_without_plan(patch: pytest.MonkeyPatch) -> None:
    """A wake-up resolves operations, and makes no new plan."""

    def look(reactor: Reactor, queues: dict[Ring, None]) -> None:
        for queue in queues:
            queue.poll()

    patch.setattr(Reactor, "_look", look)


def spin_without_park(patch: pytest.MonkeyPatch) -> None:
    """Polling ends, and the queue is not parked."""
    patch.setattr(Reactor, "_park", lambda reactor, queue, operation: None)


def resolve_without_query(patch: pytest.MonkeyPatch) -> None:
    """A notification resolves operations without a query."""

    def look(reactor: Reactor, queues: dict[Ring, None]) -> None:
        for queue in queues:
            if queue.pending:
                queue._resolve(len(queue.pending), 256)
            reactor.plan(queue)

    patch.setattr(Reactor, "_look", look)


def only_newest_resolved(patch: pytest.MonkeyPatch) -> None:
    """If the newest operation is done, only that one is resolved."""
    original = Ring._resolve

    def backwards(queue: Ring, known: int, most: int) -> int:
        if known == len(queue.pending):
            queue.pending.reverse()
        return original(queue, known, 1)

    patch.setattr(Ring, "_resolve", backwards)


def tokens_kept(patch: pytest.MonkeyPatch) -> None:
    """A quarantined notifier keeps its token."""
    original = NotifierPool.tick
    patch.setattr(NotifierPool, "tick", lambda notifier_pool, tokens: original(notifier_pool, []))


def silent_notifiers_reused(patch: pytest.MonkeyPatch) -> None:
    """A silent notifier counts as free instead of quarantined."""
    original = NotifierPool.tick

    def tick(notifier_pool: NotifierPool, tokens: list[int]) -> list[ArmedNotifier]:
        lost = original(notifier_pool, tokens)
        notifier_pool._free += notifier_pool.quarantined.values()
        notifier_pool.quarantined.clear()
        return lost

    patch.setattr(NotifierPool, "tick", tick)


def close_wakes_no_waiter(patch: pytest.MonkeyPatch) -> None:
    """The close of a device wakes no waiters."""

    def orphan(rare: StreamQueue) -> None:
        queue = rare._ring()
        queue.closed = True
        queue.reactor.retire(queue)

    patch.setattr(StreamQueue, "orphan", orphan)


def close_keeps_watching(patch: pytest.MonkeyPatch) -> None:
    """The close of a device keeps the port's reader and the timers."""

    def close(reactor: Reactor) -> None:
        reactor.notifier_pool.give(reactor.device_state.driver, reactor.device_state.tokens)

    patch.setattr(Reactor, "close", close)


def closed_port_calls(patch: pytest.MonkeyPatch) -> None:
    """A port without a descriptor still calls the loop after its close."""
    original = NotifierPool.give

    def give(notifier_pool: NotifierPool, *arguments: Any) -> None:
        wake = notifier_pool._wake
        original(notifier_pool, *arguments)
        notifier_pool._wake = wake

    def woken(reactor: Reactor) -> None:
        reactor.loop.call_soon_threadsafe(reactor._on_port)

    patch.setattr(NotifierPool, "give", give)
    patch.setattr(Reactor, "_wake_from_thread", woken)


def successor_uses_armed_notifiers(patch: pytest.MonkeyPatch) -> None:
    """A loop that takes over a port uses the notifiers that its predecessor has armed."""
    original = NotifierPool.take

    def take(*arguments: Any) -> NotifierPool:
        notifier_pool = original(*arguments)
        notifier_pool._free += [armed.index for armed in notifier_pool.armed.values()]
        notifier_pool.armed.clear()
        return notifier_pool

    patch.setattr(NotifierPool, "take", take)


def cancel_removes_all_waiters(patch: pytest.MonkeyPatch) -> None:
    """A waiter that is removed removes all waiters of its operation."""

    def drop(operation: StreamOperation[Any], waiter: object) -> None:
        operation.waiters = None

    patch.setattr(StreamOperation, "remove_waiter", drop)


def waiters_woken_twice(patch: pytest.MonkeyPatch) -> None:
    """Waiters that have been woken stay in the list."""
    original = StreamOperation.wake_waiters

    def wake(operation: StreamOperation[Any]) -> None:
        waiters = operation.waiters
        original(operation)
        operation.waiters = waiters
        original(operation)

    patch.setattr(StreamOperation, "wake_waiters", wake)


PLANTED: list[tuple[Plant, Setting, str]] = [
    (late_rearm, Setting(), "lost wake: .. has no notifier"),
    (early_rearm, Setting(), "queue . refers to other notifiers"),
    (disarm_on_resolve, Setting(), "was armed again before its tag was read"),
    (no_watchdog, Setting(lost=1), "notifiers that were not returned: 1"),
    (tags_without_generation, Setting(repeated=1), "was armed again before its tag was read"),
    (poll_without_plan, Setting(), "lost wake: .. has no notifier"),
    (spin_without_park, Setting(policy=POLLING), "lost wake: nothing will wake"),
    (resolve_without_query, Setting(), "V2 .. was resolved before the device was done"),
    (only_newest_resolved, Setting(), "V3 .. was resolved before its predecessor"),
    (tokens_kept, Setting(lost=1), "tokens: "),
    (silent_notifiers_reused, Setting(lost=1), "0 notifiers are quarantined, and 1 are lost"),
    (close_wakes_no_waiter, Setting(close="device"), "lost wake: nothing will wake"),
    (close_keeps_watching, Setting(close="device"), "event_query after close"),
    (closed_port_calls, Setting(close="device", descriptor=False), "woke the loop of a reactor that is closed"),
    (successor_uses_armed_notifiers, Setting(close="loop"), "was armed again before its tag was read"),
    (cancel_removes_all_waiters, Setting(callbacks=True, cancels=1), "lost wake: "),
    (waiters_woken_twice, Setting(callbacks=True), "V1 .. ran its callback twice"),
]


@pytest.mark.python_core
@pytest.mark.slow
@pytest.mark.parametrize(("plant", "setting", "violation"), PLANTED, ids=[plant.__name__ for plant, _, _ in PLANTED])
def test_planted_bug_is_found(plant: Plant, setting: Setting, violation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    found = explore(lambda trail: WakeupSystem(setting, trail)).found
    assert found is not None
    print(found)  # noqa: T201 - the schedule
    assert re.search(violation, found.violation), str(found)
    again = replay(lambda trail: WakeupSystem(setting, trail), found.choices)
    assert again == found  # the schedule of a failure can be run again
