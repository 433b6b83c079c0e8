"""The bits of `Ring.obstacles`: why a new operation cannot take the short way."""

from __future__ import annotations

__all__ = ["BARRED", "CLOSED", "COMPLICATED", "ENDED", "FAULTED", "INACTIVE", "POISONED", "RECORDED", "REFUSING",
           "SHARED", "UNASKED"]  # fmt: skip

#: The queue is closed, shared, recorded, poisoned or not active, the device has faulted, or the queue has ended.
CLOSED, SHARED, RECORDED, POISONED, INACTIVE, FAULTED, ENDED = (1 << number for number in range(7))

#: The bits with which a queue may refuse a new operation.
REFUSING = CLOSED | SHARED | RECORDED

#: The bits with which a queue takes no part in a `BoundJoin`.
BARRED = CLOSED | SHARED | RECORDED | POISONED | FAULTED

#: The bits with which a device-side wait of the queue, or for it, is more than a wait for one event.
COMPLICATED = SHARED | RECORDED | POISONED

#: The bits with which the driver is not queried for a program that asks without an await: see `Ring.glance`.
UNASKED = CLOSED | RECORDED | FAULTED
