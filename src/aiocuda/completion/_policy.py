"""Policies: how much a loop polls while it waits for the device."""

from __future__ import annotations

import dataclasses
from typing import Literal, TypeAlias

from ..errors import InvalidArgumentError, InvalidTypeError

__all__ = ["CompletionPolicy", "PolicyName"]

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
