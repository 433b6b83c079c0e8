"""What runs the commands that take time."""

from __future__ import annotations

from typing import Literal, TypeAlias

from ._command import Command

__all__ = ["Engine", "EngineKind"]

EngineKind: TypeAlias = Literal["upload", "download", "compute"]


class Engine:
    """One engine of one device: it runs at most ``slots`` commands at once.

    A device has one copy engine per direction, with one slot each: two uploads are one after the other, an upload and
    a download overlap. Kernels run on the compute engine, and so do fills and copies within the device: they use the
    device's memory and not the bus, and on a GPU they are kernels too.

    ``ready`` is sorted: smallest priority number first, then in order of arrival.
    """

    __slots__ = ("device", "kind", "ready", "running", "slots")

    def __init__(self, kind: EngineKind, device: int, slots: int) -> None:
        self.kind = kind
        self.device = device
        self.slots = slots
        self.running = 0
        self.ready: list[Command] = []

    def __repr__(self) -> str:
        return f"<{self.kind} engine of device {self.device}: {self.running} running, {len(self.ready)} ready>"
