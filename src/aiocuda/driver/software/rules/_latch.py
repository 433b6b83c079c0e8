"""The first fault, for good."""

from __future__ import annotations

from ....errors import DeviceFault

__all__ = ["Latch"]


class Latch:
    """Holds the first fault of any device of one driver.

    A CUDA fault is a fault of the process (measured on two devices), so a driver has one latch, and nothing opens it.
    """

    __slots__ = ("fault",)

    def __init__(self) -> None:
        self.fault: DeviceFault | None = None

    def set(self, code: int, device: int, reason: str, cause: BaseException | None = None) -> DeviceFault:
        """Latch a fault, unless there is one. What is latched is returned."""
        if self.fault is None:
            self.fault = DeviceFault(
                f"device {device} has faulted: {reason} (CUDA error {code}). Its driver can do nothing more; open a "
                "new one",
                code=code,
                device=device,
                operation=None,
            )
            self.fault.__cause__ = cause
        return self.fault

    def blame(self, operation: str) -> None:
        """Name the operation that saw the fault first. Later names are ignored."""
        fault = self.fault
        if fault is not None and fault.operation is None:
            named = DeviceFault(
                f"{fault} (first seen by {operation})", code=fault.code, device=fault.device, operation=operation
            )
            named.__cause__ = fault.__cause__
            self.fault = named
