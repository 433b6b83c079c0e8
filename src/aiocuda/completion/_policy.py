"""Policies: when the loop polls, sleeps or parks while it waits for the device."""

from __future__ import annotations

import dataclasses
from typing import Literal, NamedTuple, TypeAlias

from ..errors import InvalidArgumentError, InvalidTypeError

__all__ = ["CompletionPolicy", "Plan", "PolicyName"]

PolicyName: TypeAlias = Literal["latency", "balanced", "efficient"]


class Plan(NamedTuple):
    """Poll between two moments, sleep before, park after. In seconds by the driver's clock."""

    poll_from: float
    poll_until: float


@dataclasses.dataclass(frozen=True, slots=True)
class CompletionPolicy:
    """How the loop finds out that an operation is done.

    There are three ways. *Polling* queries the event in each turn of the loop: at most 10-12 µs late, but a core is
    busy. *Sleeping* until shortly before the predicted end costs nothing; then the loop polls. *Parking* arms a native
    host function that wakes the loop through a descriptor: no cost during the wait, and 30-700 µs late, because the
    operating system takes that long to wake a sleeping thread.

    Parameters
    ----------
    name
        The name in ``repr`` and reports.
    unknown
        Seconds of polling for an operation whose duration is unknown.
    lead
        Seconds before the predicted end at which polling starts. The usual lateness of timers, up to a millisecond, is
        measured and added.
    grace
        Seconds of polling after the predicted end.
    linger
        Seconds for which an await queries repeatedly, if the end is predicted within as many; half of it while other
        streams have waiters. To suspend and resume a task takes the loop about 8 µs, so a short wait is cheaper.
    cost
        A description of the costs.
    """

    name: str
    unknown: float
    lead: float
    grace: float
    linger: float = 0.0
    cost: str = ""

    @classmethod
    def named(cls, policy: PolicyName | CompletionPolicy) -> CompletionPolicy:
        """Return the policy of a name: ``"latency"``, ``"balanced"`` or ``"efficient"``."""
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
        """Return this policy without polling."""
        return dataclasses.replace(self, unknown=0.0, lead=0.0, grace=0.0, linger=0.0)

    def plan(self, now: float, predicted_end: float | None, spread: float = 0.0) -> Plan:
        """Return the plan for an operation that is unfinished at ``now``, by its prediction and the spread of that."""
        if predicted_end is None or self.lead <= 0.0:
            return Plan(now, now + self.unknown)
        margin = min(4.0 * spread, MOST_MARGIN)
        poll_from = predicted_end - self.lead - margin / 2
        if poll_from - now < SHORTEST_SLEEP:
            poll_from = now
        return Plan(poll_from, max(predicted_end, now) + self.grace + margin)


#: The most seconds of polling that the variation of durations adds to ``grace``.
MOST_MARGIN = 0.003

#: A shorter sleep is replaced by polling: sleeping and waking take as long.
SHORTEST_SLEEP = 0.0005

_NAMED = {
    policy.name: policy
    for policy in (
        CompletionPolicy(
            "latency",
            unknown=0.050,
            lead=3.0e-3,
            grace=0.050,
            linger=50e-6,
            cost="10-30 µs late; a core is busy for the last 3 ms of every wait, and for 50 ms of an unexpected one",
        ),
        CompletionPolicy(
            "balanced",
            unknown=200e-6,
            lead=0.5e-3,
            grace=500e-6,
            linger=40e-6,
            cost="10-60 µs late where durations repeat, else up to a millisecond or an eighth of the wait; a core is "
            "busy for the last 0.5 ms, 2 ms where durations vary, and up to 3.5 ms past an end that does not come",
        ),
        CompletionPolicy(
            "efficient",
            unknown=0.0,
            lead=0.0,
            grace=0.0,
            cost="0.03-0.7 ms late; no polling beyond one query per await",
        ),
    )
}
