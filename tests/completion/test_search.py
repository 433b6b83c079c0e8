"""The wake-up protocol, every schedule of it, for two producers of two items each.

Arm, notify, poll, drain, watchdog, cancel, close: in whatever order they come, nobody sleeps on, nothing is believed
that was not asked, no notifier is rung twice, and what is closed stays silent. See `search.wakes` for what is looked
at.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from aiocuda.completion._notifiers import INDEX_SHIFT, ArmedNotifier, NotifierPool
from aiocuda.completion._reactor import Reactor
from aiocuda.completion._stream_queue import StreamOperation, StreamQueue
from tests.completion.search.explore import Action, Space, explore, replay
from tests.completion.search.setting import POLLING, Setting
from tests.completion.search.wakes import Wakes

Plant = Callable[[pytest.MonkeyPatch], None]


def whole(setting: Setting) -> Space:
    """Every schedule; none of them may lead to what must not be."""
    space = explore(lambda trail: Wakes(setting, trail))
    print(f"{setting}: {space}")  # noqa: T201 - how large the space is
    assert space.found is None, str(space.found)
    return space


# The search itself


class Steps:
    """Two that go three steps each, where one place may be forbidden."""

    def __init__(self, forbidden: tuple[int, int] | None) -> None:
        self.violations: list[str] = []
        self._forbidden = forbidden
        self._at = [0, 0]

    def enabled(self) -> list[Action]:
        return [("{} steps", who, self._step, (who,)) for who in (0, 1) if self._at[who] < 3]

    def _step(self, who: int) -> None:
        self._at[who] += 1

    def state(self) -> tuple[int, ...]:
        return tuple(self._at)

    def check(self) -> None:
        if self.state() == self._forbidden:
            self.violations.append(f"at {self._forbidden}")

    def leave(self) -> None:
        """Nothing is left behind."""


def test_search_comes_everywhere() -> None:
    space = explore(lambda trail: Steps(None))
    assert (space.states, space.ends, space.longest, space.found) == (16, 1, 6, None)


@pytest.mark.parametrize("place", [(0, 1), (3, 0), (1, 2), (3, 3)])
def test_search_finds_the_one_place(place: tuple[int, int]) -> None:
    found = explore(lambda trail: Steps(place)).found
    assert found is not None
    assert found.violation == f"at {place}"
    assert sorted(found.schedule) == ["0 steps"] * place[0] + ["1 steps"] * place[1]
    assert replay(lambda trail: Steps(place), found.choices) == found


def test_search_that_does_not_end_says_so() -> None:
    with pytest.raises(AssertionError, match="more than 5 states"):
        explore(lambda trail: Steps(None), most=5)


# The whole space


#: States there are, so that a search that stops short is noticed. Fewer mean that the protocol has become simpler.
WHOLE = [
    pytest.param(Setting(), 3_626, id="as usual"),
    pytest.param(Setting(close="device"), 8_821, id="close=device"),
    pytest.param(Setting(lost=1), 8_085, id="lost=1", marks=pytest.mark.soak),
    pytest.param(Setting(begun=True, cancels=1), 11_989, id="begun=True cancels=1", marks=pytest.mark.soak),
]


@pytest.mark.slow
@pytest.mark.parametrize(("setting", "states"), WHOLE)
def test_two_producers_of_two_items(setting: Setting, states: int) -> None:
    assert whole(setting).states > states // 2


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
@pytest.mark.parametrize("setting", SMALL, ids=str)
def test_all_that_may_go_wrong_in_less(setting: Setting) -> None:
    whole(setting)


@pytest.mark.soak
@pytest.mark.parametrize(
    "setting",
    [
        Setting(cancels=1),
        Setting(cancels=1, close="device"),
        Setting(late=True, repeated=1),
        Setting(begun=True, cancels=1, lost=1, close="device"),
        Setting(begun=True, policy=POLLING),
        Setting(begun=True, close="loop"),
    ],
    ids=str,
)
def test_larger_spaces(setting: Setting) -> None:
    whole(setting)


# What the search finds


def late_rearm(patch: pytest.MonkeyPatch) -> None:
    """The queue forgets its notifier only after it has planned anew."""

    def on_port(reactor: Reactor) -> None:
        armed = [
            reactor.notifier_pool.disarm(tag, reactor.device_state.tokens) for tag in reactor.notifier_pool.port.drain()
        ]
        queues = {each.queue: None for each in armed if each is not None}
        reactor._look(queues)
        for queue in queues:
            queue.armed = None

    patch.setattr(Reactor, "_on_port", on_port)


def early_rearm(patch: pytest.MonkeyPatch) -> None:
    """A queue forgets its notifier before that notifier's own tag has been read."""
    original = Reactor._on_port

    def on_port(reactor: Reactor) -> None:
        for queue in reactor.attended:
            queue.armed = None
        original(reactor)

    patch.setattr(Reactor, "_on_port", on_port)


def disarm_on_resolve(patch: pytest.MonkeyPatch) -> None:
    """What is resolved gives its notifier back."""
    original = StreamQueue._after_resolving

    def after(queue: StreamQueue, *sample: Any) -> None:
        notifier_pool, tokens = queue.reactor.notifier_pool, queue.device_state.tokens
        for tag in [tag for tag, armed in notifier_pool.armed.items() if armed is queue.armed]:
            notifier_pool.disarm(tag, tokens)
            queue.armed = None
        original(queue, *sample)

    patch.setattr(StreamQueue, "_after_resolving", after)


def no_watchdog(patch: pytest.MonkeyPatch) -> None:
    """It ticks once, and looks at nothing."""

    def watch(reactor: Reactor) -> None:
        reactor._watchdog = None

    patch.setattr(Reactor, "_watch", watch)


def old_tags(patch: pytest.MonkeyPatch) -> None:
    """A tag is known by its notifier alone."""
    original = NotifierPool.disarm

    def disarm(notifier_pool: NotifierPool, tag: int, tokens: list[int]) -> ArmedNotifier | None:
        same = next((known for known in notifier_pool.armed if known >> INDEX_SHIFT == tag >> INDEX_SHIFT), tag)
        return original(notifier_pool, same, tokens)

    patch.setattr(NotifierPool, "disarm", disarm)


def poll_without_plan(patch: pytest.MonkeyPatch) -> None:
    """A wake resolves what is done, and sees to nothing else."""

    def look(reactor: Reactor, queues: dict[StreamQueue, None]) -> None:
        for queue in queues:
            queue.poll()

    patch.setattr(Reactor, "_look", look)


def spin_without_park(patch: pytest.MonkeyPatch) -> None:
    """Polling ends, and nothing takes its place."""
    patch.setattr(Reactor, "_park", lambda reactor, queue: None)


def resolve_without_query(patch: pytest.MonkeyPatch) -> None:
    """A notification is believed."""

    def look(reactor: Reactor, queues: dict[StreamQueue, None]) -> None:
        for queue in queues:
            if queue.pending:
                queue._resolve(True, 256)
            reactor.plan(queue)

    patch.setattr(Reactor, "_look", look)


def oldest_forgotten(patch: pytest.MonkeyPatch) -> None:
    """The newest is done, so it is resolved: and nothing before it."""
    original = StreamQueue._resolve

    def backwards(queue: StreamQueue, everything: bool, budget: int) -> int:
        if everything:
            queue.pending.reverse()
        return original(queue, everything, 1)

    patch.setattr(StreamQueue, "_resolve", backwards)


def tokens_kept(patch: pytest.MonkeyPatch) -> None:
    """A notifier that is put away keeps its token."""
    original = NotifierPool.tick
    patch.setattr(NotifierPool, "tick", lambda notifier_pool, tokens: original(notifier_pool, []))


def silent_bells_reused(patch: pytest.MonkeyPatch) -> None:
    """A notifier that ought to have rung is taken for a free one."""
    original = NotifierPool.tick

    def tick(notifier_pool: NotifierPool, tokens: list[int]) -> list[ArmedNotifier]:
        lost = original(notifier_pool, tokens)
        notifier_pool.quarantined -= len(lost)
        notifier_pool._free += [armed.index for armed in lost]
        return lost

    patch.setattr(NotifierPool, "tick", tick)


def close_tells_nobody(patch: pytest.MonkeyPatch) -> None:
    """Who waits is left waiting."""

    def orphan(queue: StreamQueue) -> None:
        queue.closed = True
        queue.reactor.retire(queue)

    patch.setattr(StreamQueue, "orphan", orphan)


def close_goes_on_watching(patch: pytest.MonkeyPatch) -> None:
    """The port's reader and the timers stay."""

    def close(reactor: Reactor) -> None:
        reactor.notifier_pool.give(reactor.device_state.driver, reactor.device_state.tokens)

    patch.setattr(Reactor, "close", close)


def closed_port_calls(patch: pytest.MonkeyPatch) -> None:
    """A port goes on calling whom it served, where it has no descriptor."""
    original = NotifierPool.give

    def give(notifier_pool: NotifierPool, *arguments: Any) -> None:
        wake = notifier_pool._wake
        original(notifier_pool, *arguments)
        notifier_pool._wake = wake

    def woken(reactor: Reactor) -> None:
        reactor.loop.call_soon_threadsafe(reactor._on_port)

    patch.setattr(NotifierPool, "give", give)
    patch.setattr(Reactor, "_woken_elsewhere", woken)


def heirs_believe(patch: pytest.MonkeyPatch) -> None:
    """The loop that takes a port over takes the notifiers of the one before for its own queues'."""
    original = NotifierPool.take

    def take(*arguments: Any) -> NotifierPool:
        notifier_pool = original(*arguments)
        notifier_pool._free += [armed.index for armed in notifier_pool.armed.values()]
        notifier_pool.armed.clear()
        return notifier_pool

    patch.setattr(NotifierPool, "take", take)


def one_cancels_all(patch: pytest.MonkeyPatch) -> None:
    """A waiter that leaves takes the others of its operation along."""

    def drop(operation: StreamOperation[Any], waiter: object) -> None:
        operation.waiters = None

    patch.setattr(StreamOperation, "remove_waiter", drop)


def told_twice(patch: pytest.MonkeyPatch) -> None:
    """Whoever was told stays on the list."""
    original = StreamOperation.wake_waiters

    def tell(operation: StreamOperation[Any]) -> None:
        waiters = operation.waiters
        original(operation)
        operation.waiters = waiters
        original(operation)

    patch.setattr(StreamOperation, "wake_waiters", tell)


PLANTED: list[tuple[Plant, Setting, str]] = [
    (late_rearm, Setting(), "lost wake: nobody is going to wake"),
    (early_rearm, Setting(), "queue . believes in other notifiers"),
    (disarm_on_resolve, Setting(), "was rung again before its tag was read"),
    (no_watchdog, Setting(lost=1), "lost wake: the watchdog does not wake"),
    (old_tags, Setting(repeated=1), "was rung again before its tag was read"),
    (poll_without_plan, Setting(), "lost wake: nobody is going to wake"),
    (spin_without_park, Setting(policy=POLLING), "lost wake: nobody is going to wake"),
    (resolve_without_query, Setting(), "V2 .. was resolved before the device was done"),
    (oldest_forgotten, Setting(), "V3 .. was resolved before its predecessor"),
    (tokens_kept, Setting(lost=1), "tokens: "),
    (silent_bells_reused, Setting(lost=1), "0 notifiers were put away, 1 counted as lost"),
    (close_tells_nobody, Setting(close="device"), "lost wake: nobody is going to wake"),
    (close_goes_on_watching, Setting(close="device"), "event_query after close"),
    (closed_port_calls, Setting(close="device", descriptor=False), "woke the loop of a reactor that is closed"),
    (heirs_believe, Setting(close="loop"), "was rung again before its tag was read"),
    (one_cancels_all, Setting(callbacks=True, cancels=1), "lost wake: "),
    (told_twice, Setting(callbacks=True), "V1 .. was told twice"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("plant", "setting", "violation"), PLANTED, ids=[plant.__name__ for plant, _, _ in PLANTED])
def test_planted_bug_is_found(plant: Plant, setting: Setting, violation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    found = explore(lambda trail: Wakes(setting, trail)).found
    assert found is not None
    print(found)  # noqa: T201 - the schedule
    assert re.search(violation, found.violation), str(found)
    again = replay(lambda trail: Wakes(setting, trail), found.choices)
    assert again == found  # so that the schedule of a failure can be looked into
