"""The size of the system under search, and the disturbances that may happen to it."""

from __future__ import annotations

import dataclasses

from aiocuda.completion._wait_rule import CompletionPolicy

__all__ = ["PARKING", "POLLING", "Setting"]

#: Parks at once. A parked queue is checked only if nothing else can happen.
PARKING = CompletionPolicy.named("efficient")

#: Polls first, then parks; a parked queue may be checked at any moment.
POLLING = CompletionPolicy("polling", unknown=1.0, lead=0.0, grace=0.0)


@dataclasses.dataclass(frozen=True, slots=True)
class Setting:
    """The size of a system, and the disturbances that may happen to it; each of them may happen at any moment."""

    producers: int = 2
    items: int = 2
    notifiers: int = 4
    in_flight: int = 400
    policy: CompletionPolicy = PARKING
    descriptor: bool = True  # the port has a descriptor; otherwise it calls a function
    callbacks: bool = False  # each item has a callback, too
    enqueued_first: bool = False  # all items are enqueued before anything else happens
    cancels: int = 0  # cancelled awaits
    lost: int = 0  # lost notifications
    repeated: int = 0  # repeated notifications
    late: bool = False  # notifications may come after their notifier was quarantined
    close: str = ""  # "device": closed on its loop; "loop": the loop is closed, and another one starts
    successors: int = 1  # items of that other loop

    def __str__(self) -> str:
        """Return the values that differ from the defaults."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        changed = {name: getattr(value, "name", value) for name, value in values.items() if value != defaults[name]}
        return " ".join(f"{name}={value}" for name, value in changed.items()) or "defaults"
