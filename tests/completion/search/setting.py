"""Setting: what is to be explored of the wake-up protocol."""

from __future__ import annotations

import dataclasses

from aiocuda.completion._policy import CompletionPolicy

__all__ = ["PARKING", "POLLING", "Setting"]

PARKING = CompletionPolicy.named("efficient")

#: Polls, then parks, and asks once more now and then.
POLLING = CompletionPolicy("polling", unknown=1.0, lead=0.0, grace=0.0)


@dataclasses.dataclass(frozen=True, slots=True)
class Setting:
    """How large the system is, and what may happen to it; each of the latter at any moment."""

    producers: int = 2
    items: int = 2
    notifiers: int = 4
    in_flight: int = 400
    policy: CompletionPolicy = PARKING
    descriptor: bool = True  # the port has one; else it calls
    callbacks: bool = False  # each item has one, too
    begun: bool = False  # all items are given to their streams before anything else happens
    cancels: int = 0  # of awaits
    lost: int = 0  # notifications
    repeated: int = 0  # notifications
    late: bool = False  # notifications may come after their notifier has been given up
    close: str = ""  # "device": closed on its loop; "loop": the loop is closed, and another one comes
    successors: int = 1  # items of that

    def __str__(self) -> str:
        """What is not as usual."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        usual = {field.name: field.default for field in dataclasses.fields(self)}
        told = {name: getattr(value, "name", value) for name, value in values.items() if value != usual[name]}
        return " ".join(f"{name}={value}" for name, value in told.items()) or "as usual"
