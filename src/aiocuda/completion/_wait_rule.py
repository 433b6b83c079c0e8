"""The rule of waits: a host callback ends a wait, and a poll only makes it quicker.

A wait begins when a task awaits an operation that its first query has found unfinished. It concerns one stream: its
oldest operation with a waiter, or the last one that `gather` awaits. To *arm* a notifier is to enqueue a host callback
of CUDA behind that operation; a *check* is a single query that a timer makes.

1. *Arm.* A host callback (a notifier) is armed at once if the end is predicted more than 0.5 ms ahead. A wait whose end
   is nearer is polled until 150 µs after its predicted end, and one whose end is unknown or overdue for 150 µs; then it
   is armed. With `efficient` it is armed at once, too. `first_poll`.
2. *Poll.* Around the predicted end, the loop also polls, so that it is quicker than the callback, which takes 0.1 to
   0.7 ms to wake a sleeping thread. `balanced` polls only where the last durations have repeated, and for at most a
   tenth of a core (`PollAllowance`). `latency` always polls. Without an armed callback there is no such poll.
3. *Check.* A callback can be late: after copies by 2.8 ms (measured), and behind a Python host function of another
   library by any time, since the driver runs host functions one after another. So each armed wait is queried in
   between, with every policy: from a millisecond after it was armed, or after its predicted end where durations repeat,
   more and more rarely, at most 10 ms apart. While the callbacks of other streams come, the driver is not held up, and
   there are only the queries at 10 ms. At most four waits are queried at a time, in turn: each millisecond, and with 16
   or more waits every second one. After a callback that has come 2 ms later than such a query has found the
   end, all are queried each millisecond, and neither predictions nor other callbacks count here, for ten seconds.
4. *Without a notifier.* Only 24 waits of a device can be armed at a time. The others are queried by the same timer.

A `CompletionPolicy` sets the times of the polls. Times are in seconds, by the driver's clock.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Literal, TypeAlias

from ..errors import InvalidArgumentError, InvalidTypeError

if TYPE_CHECKING:
    from .._core import Watch

__all__ = ["HELD_UP_SECONDS", "OVERDUE", "SHORTEST", "CompletionPolicy", "PolicyName", "first_poll", "next_look",
           "step"]  # fmt: skip

#: The longest poll of a wait of unknown length before a host callback is armed. To arm one takes about 2 µs, and to
#: wake a sleeping loop 100 µs or more, so a shorter wait is better polled.
FIRST_POLL = 150e-6

#: A wait whose end is predicted within this time is polled until then, and for `GRACE` after it: by a callback, the end
#: of a kernel of 200 µs would come 100 µs later, half of its time. To arm one and to handle its tag takes the loop 20
#: to 30 µs, as long as a stage of a pipeline that fills the device: items that are late by that stay late.
SHORT_WAIT = 500e-6
GRACE = 150e-6

#: The times between two checks of a wait. The shorter one is also the grid on which they lie: one wake-up of the loop
#: costs as much as ten queries. So many waits or more have a grid of twice as much.
SHORTEST = 0.001
LONGEST = 0.010
MANY_WAITS = 16

#: A check beside an armed callback is made if no callback of any stream has come for a step of the grid, or if the wait
#: was not queried for `OVERDUE`. Else it is put off, by steps.
OVERDUE = LONGEST - SHORTEST

#: The most armed waits that are queried at one time, while callbacks do not count as held up: a query and what belongs
#: to it take 8 µs. Those that have taken longer are due rarely, and all at the same time.
MOST_CHECKED = 4
MOST_CHECKED_SECONDS = 0.05

#: A check is late by at most this part of the time that the wait has taken, and `SHORTEST`.
LATENESS = 1 / 12

#: A callback that comes so long after a check has found the end is late, and callbacks count as held up for some time.
LATE_SECONDS = 0.002
HELD_UP_SECONDS = 10.0

#: As `LATENESS`, without a notifier, of a wait that has taken less than `LONG_WAIT`.
LATENESS_UNARMED = 1 / 20
LONG_WAIT = 0.5

#: The more waits there are without a notifier, the more rarely each is queried: a query takes 1.5 to 5 µs, so that all
#: of them take at most 2 % of a core. (Queried every millisecond, 232 idle streams took 30 %.)
SECONDS_PER_WAIT = 500e-6

PolicyName: TypeAlias = Literal["latency", "balanced", "efficient"]


@dataclasses.dataclass(frozen=True, slots=True)
class CompletionPolicy:
    """How much the loop polls to find out earlier that an operation is done.

    A native host function of CUDA wakes the loop through a descriptor; the loop sleeps meanwhile. This is 30 to 700 µs
    late, because the operating system takes that long to wake a sleeping thread. *Polling* queries the event in each
    turn of the loop: at most 10-12 µs late, but a core is busy. `aiocuda.completion._wait_rule` says when the loop does
    which; a policy sets the times.

    Parameters
    ----------
    name
        The name in ``repr`` and reports.
    unknown
        Seconds of polling for an operation whose duration is unknown. After 150 µs a host function is armed, too.
    lead
        Seconds before the predicted end at which polling starts. The usual lateness of timers, up to a millisecond, is
        measured and added.
    grace
        Seconds of polling after the predicted end.
    linger
        Seconds for which an await queries repeatedly, if the end is predicted within as many; half of it while other
        streams have waiters. To suspend and resume a task takes the loop about 8 µs, so a short wait is cheaper.
    share
        The part of each second in which the loop polls beside armed host functions, for all streams of a device
        together. 1.0 has no limit; below it, the loop polls only where the last durations have repeated.
    cost
        A description of the costs.
    """

    name: str
    unknown: float
    lead: float
    grace: float
    linger: float = 0.0
    cost: str = ""
    share: float = 0.1

    @classmethod
    def named(cls, policy: PolicyName | CompletionPolicy) -> CompletionPolicy:
        """Return the policy of a name: ``"latency"``, ``"balanced"`` or ``"efficient"``; or a policy itself."""
        if isinstance(policy, CompletionPolicy):
            return policy
        if not isinstance(policy, str):
            raise InvalidTypeError(f"policy must be a name or a CompletionPolicy, not {type(policy).__name__}")
        try:
            return _NAMED[policy]
        except KeyError:
            raise InvalidArgumentError(
                f"no policy is called {policy!r}; there are {', '.join(sorted(_NAMED))}", policy=policy
            ) from None

    def parking(self) -> CompletionPolicy:
        """Return this policy without polling, for a driver whose device a query slows down: `Driver.polls_freely`."""
        return dataclasses.replace(self, unknown=0.0, lead=0.0, grace=0.0, linger=0.0, share=0.0)


_NAMED = {
    policy.name: policy
    for policy in (
        CompletionPolicy(
            "latency",
            unknown=0.050,
            lead=3.0e-3,
            grace=0.050,
            linger=50e-6,
            share=1.0,
            cost="0.01-0.3 ms late; a core is busy for the last 3 ms of every wait, and for 50 ms of an unexpected one",
        ),
        CompletionPolicy(
            "balanced",
            unknown=150e-6,
            lead=0.05e-3,
            grace=0.15e-3,
            linger=40e-6,
            cost="0.01-0.2 ms late where durations repeat, else 0.03-0.7 ms; polls for 150 µs of a short or unexpected "
            "wait, and around predicted ends for a tenth of a core",
        ),
        CompletionPolicy(
            "efficient",
            unknown=0.0,
            lead=0.0,
            grace=0.0,
            share=0.0,
            cost="0.03-0.7 ms late; no polling beyond one query per await",
        ),
    )
}


def first_poll(policy: CompletionPolicy, now: float, predicted: float | None) -> float:
    """Return the time until which a new wait is polled before it is armed; ``now`` if it is armed at once.

    ``predicted``: the time of its predicted end, or None.
    """
    if not policy.unknown or (predicted is not None and predicted - now > SHORT_WAIT):  # `efficient`, or a far end
        return now
    until = now + min(policy.unknown, FIRST_POLL)
    return until if predicted is None else max(until, predicted + GRACE)


def next_look(
    policy: CompletionPolicy, watch: Watch, now: float, *, polls: bool, held_up: bool, waits: int
) -> tuple[float, float]:
    """Return when to query a stream next, for a wait that is not polled now.

    It is (time, 0.0) for a check, a single query, and (begin, end) for a poll.

    Parameters
    ----------
    watch
        The state of the wait: ``armed``, ``since``, ``predicted`` (0.0: unknown) and ``repeats`` are read.
    polls
        False if the policy's share of a core is used up.
    held_up
        True if callbacks have been late.
    waits
        The number of waits of the loop.
    """
    if watch.armed is None:  # without a notifier, the checks alone find the end
        taken = now - watch.since  # late by 1/20 of it, 1/12 if it is long; or so that all waits take 2 % of a core
        part = LATENESS if taken > LONG_WAIT else LATENESS_UNARMED
        return _on_grid(now, min(SECONDS_PER_WAIT * waits, part * taken), SHORTEST), 0.0
    predicted = watch.predicted
    repeats = watch.repeats and not held_up  # for checks only: while callbacks are late, predictions still place polls
    shortest = SHORTEST if held_up else step(waits)
    if repeats and now < predicted:
        latest = now + LONGEST  # a poll that begins by then needs no check before it
        # Just after the predicted end, on the grid, and at most `LONGEST` from now.
        check = math.ceil(min(predicted + shortest, latest - shortest) / shortest) * shortest
    else:
        wait = LATENESS * (now - (predicted if repeats else watch.since))  # more and more rarely
        if wait < LONGEST:
            latest = check = _on_grid(now, wait, shortest)
        else:  # all long waits at once
            latest = check = (math.floor(now / LONGEST) + 1.0) * LONGEST
    if polls and (watch.repeats or policy.share >= 1.0):  # a poll around the predicted end, if it begins by ``latest``
        begin, end = predicted - policy.lead, predicted + policy.grace
        if not predicted:
            begin, end = now, watch.since + policy.unknown
        if now < end and begin < latest:
            return max(begin, now), end
    return check, 0.0


def step(waits: int) -> float:
    """Return the shortest time between two checks of armed waits, in seconds, where there are so many waits."""
    return SHORTEST if waits < MANY_WAITS else 2.0 * SHORTEST


def _on_grid(now: float, wait: float, shortest: float) -> float:
    """Return a time about ``wait`` from now, on a common grid, so that one wake-up of the loop queries many streams.

    The grid has the multiples of a period: the largest of 1, 2, 4, 8 … times ``shortest`` that is at most ``wait``, or
    ``shortest``. The time is 0.25 to 1.25 periods away.
    """
    period = shortest
    while 2.0 * period <= wait:
        period *= 2.0
    at = (math.floor(now / period) + 1.0) * period
    return at if at - now >= period / 4.0 else at + period
