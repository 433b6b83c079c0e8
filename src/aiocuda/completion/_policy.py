"""Policy: when to poll, when to sleep, when to park."""

from __future__ import annotations

import dataclasses
from typing import Literal, NamedTuple, TypeAlias

from ..errors import InvalidArgumentError, InvalidTypeError

__all__ = ["CompletionPolicy", "Plan", "PolicyName"]

PolicyName: TypeAlias = Literal["latency", "balanced", "efficient"]


class Plan(NamedTuple):
    """Poll from one moment to another; sleep before, park after. Seconds by the driver's clock."""

    poll_from: float
    poll_until: float


@dataclasses.dataclass(frozen=True, slots=True)
class CompletionPolicy:
    """How the loop learns that an operation is done.

    Three ways exist. *Polling* asks the event in every turn of the loop: 10-12 µs late at most, and it keeps a core
    busy. *Sleeping* to shortly before the predicted end costs nothing, and then polls. *Parking* arms a native host
    function that wakes the loop through a descriptor: no cost while waiting, 30-700 µs late, as the operating
    system takes that long to wake a sleeping thread.

    Parameters
    ----------
    name
        How it shows in ``repr`` and reports.
    unknown
        Seconds to poll for an operation whose duration is not known yet.
    lead
        Seconds before the predicted end at which polling starts. It need not allow for a timer that comes late: how
        late that usually is, up to a millisecond, is learned and added.
    grace
        Seconds after the predicted end for which polling goes on.
    linger
        Seconds that an await itself keeps asking, when the end is predicted within twice as many. To suspend a task
        and to resume it costs the loop some 8 µs, so waiting that long is the cheaper way for everybody.
    cost
        What it costs, in words.
    """

    name: str
    unknown: float
    lead: float
    grace: float
    linger: float = 0.0
    cost: str = ""

    @classmethod
    def named(cls, policy: PolicyName | CompletionPolicy) -> CompletionPolicy:
        """A setting by its name: ``"latency"``, ``"balanced"`` or ``"efficient"``."""
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
        """The same, without polling."""
        return dataclasses.replace(self, unknown=0.0, lead=0.0, grace=0.0, linger=0.0)

    def plan(self, now: float, predicted_end: float | None, spread: float = 0.0) -> Plan:
        """When to poll for an operation that is not done at ``now``; the prediction may be ``spread`` off."""
        if predicted_end is None or self.lead <= 0.0:
            return Plan(now, now + self.unknown)
        margin = min(4.0 * spread, MOST_MARGIN)
        poll_from = predicted_end - self.lead - margin / 2
        if poll_from - now < SHORTEST_SLEEP:
            poll_from = now
        return Plan(poll_from, max(predicted_end, now) + self.grace + margin)


#: However much durations vary, a core is not kept busy for longer than this beyond ``grace``.
MOST_MARGIN = 0.003

#: What is shorter is polled through: to sleep and to wake takes as long as polling on.
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
            linger=20e-6,
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
