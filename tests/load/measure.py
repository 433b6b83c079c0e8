"""Measures one server: its capacity, its latency at several loads, and its ``Retry-After``."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

from .client import Client
from .outcomes import Figures, Outcome, summarise
from .schedule import Phase, poisson
from .setting import Setting, is_right, request

__all__ = ["LOADS", "Plan", "Retries", "capacity", "figures_at", "retries"]

#: Offered loads, as parts of the server's own capacity.
LOADS = (0.5, 0.8, 0.95, 1.0, 1.5)

#: Seconds of busy waiting before each arrival; the client has a core of its own.
SPIN_S = 2e-3


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """Seconds of the measurements.

    Attributes
    ----------
    repetitions
        Of all measurements, alternating between the servers.
    capacity_s
        Length of the measurement of the capacity.
    load_s
        Length of the measurement at each load.
    warm_up_s
        Of each of them; the requests of that time are sent and not counted.
    retry_s
        Length of the overload, and of the load after it.
    setting
        The times of the servers, and the deadline.
    """

    repetitions: int = 3
    capacity_s: float = 2.5
    load_s: float = 4.0
    warm_up_s: float = 0.5
    retry_s: tuple[float, float] = (2.0, 3.5)
    setting: Setting = dataclasses.field(default_factory=Setting)


@dataclasses.dataclass(frozen=True, slots=True)
class Retries:
    """The end of the requests that were refused in an overload and sent again after their ``Retry-After``.

    Attributes
    ----------
    sent
        Retries after the end of the overload.
    held
        Share of them that got the right result within the deadline; None without a retry.
    """

    sent: int
    held: float | None


async def capacity(port: int, connections: int, plan: Plan) -> float:
    """Return the right results per second while each connection sends a request as soon as the previous one ended."""
    end = plan.warm_up_s + plan.capacity_s
    async with Client(port, request, is_right) as client:
        outcomes = await client.closed_loop(connections, end)
    answered = [one.answered for one in outcomes if one.is_accepted and one.answered is not None]
    return sum(plan.warm_up_s <= at < end for at in answered) / plan.capacity_s


async def figures_at(port: int, rate: float, plan: Plan, seed: int, spin_s: float = SPIN_S) -> Figures:
    """Return the statistics at a rate of Poisson arrivals."""
    end = plan.warm_up_s + plan.load_s
    async with Client(port, request, is_right) as client:
        outcomes = await client.open_loop(poisson([Phase(rate, end)], seed), drain_s=2.0, spin_s=spin_s)
    return summarise(outcomes, plan.setting.client_deadline_s, plan.warm_up_s, end)


async def retries(port: int, of_capacity: float, plan: Plan, seed: int, spin_s: float = SPIN_S) -> Retries:
    """Return what becomes of refused requests that are sent again after their ``Retry-After``.

    The load is 150 % of the capacity, and then 80 %: new requests are 60 %, retries the rest. Only some of the refused
    clients try again, since all of them together would be another overload. Retries before the end of the overload are
    not counted.
    """
    overload_s, after_s = plan.retry_s
    draw = random.Random(seed)

    def again(outcome: Outcome) -> float | None:
        if outcome.attempt or not outcome.is_refused or outcome.retry_after is None or outcome.answered is None:
            return None
        # Half of the capacity is refused, and a fifth of it tries again.
        return outcome.answered + outcome.retry_after if draw.random() < 0.4 else None

    phases = [Phase(1.5 * of_capacity, overload_s), Phase(0.6 * of_capacity, after_s)]
    async with Client(port, request, is_right) as client:
        outcomes = await client.open_loop(poisson(phases, seed), drain_s=2.0, retry=again, spin_s=spin_s)
    return held(outcomes, overload_s, plan.setting.client_deadline_s)


def held(outcomes: Sequence[Outcome], begin: float, deadline_s: float) -> Retries:
    """Return the end of the retries that were sent after ``begin``."""
    sent = [outcome for outcome in outcomes if outcome.attempt and outcome.scheduled >= begin]
    in_time = sum(outcome.is_accepted and outcome.latency <= deadline_s for outcome in sent)
    return Retries(len(sent), in_time / len(sent) if sent else None)
