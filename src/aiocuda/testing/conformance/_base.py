"""The base class of all parts of the conformance suite."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar

import pytest

from ._rig import Rig
from ._waiting import nap

if TYPE_CHECKING:
    from ...driver.protocol import Driver

__all__ = ["Conformance"]


class Conformance:
    """Base of all parts of the suite: the fixtures, and the settings that a subclass may change."""

    #: Seconds to wait for something that must happen. Only a failing test waits so long.
    patience: ClassVar[float] = 5.0

    #: Seconds after which a held kernel ends by itself, so that a failing test leaves no kernel running.
    hold_seconds: ClassVar[float] = 10.0

    #: Number of held kernels, each with more blocks than fit on the device, that leave no room for another kernel.
    full_house: ClassVar[int] = 1

    #: True if a port wakes its loop only when a tag has arrived, so that the loop may sleep.
    quiet_port: ClassVar[bool] = True

    #: Seconds that each part of an overlap test takes alone.
    leg_seconds: ClassVar[float] = 0.2

    #: Bytes of one copy of an overlap test.
    leg_bytes: ClassVar[int] = 64 << 20

    @pytest.fixture
    def driver(self) -> Driver:
        """The driver under test. A subclass overrides this fixture, with any scope."""
        raise NotImplementedError(f"{type(self).__name__} has no fixture 'driver': define one that returns the driver")

    @pytest.fixture
    def rig(self, driver: Driver) -> Iterator[Rig]:
        """A `Rig` on device 0."""
        with Rig(
            driver, patience=self.patience, hold_seconds=self.hold_seconds, pause=lambda: self.pause(driver)
        ) as rig:
            yield rig

    def pause(self, driver: Driver) -> None:
        """Let some time pass. Overridden for a driver with virtual time."""
        nap()

    def current_context(self) -> object:
        """Return the current CUDA context of the calling thread. A driver without contexts need not override this."""
        return None

    def foreign_context(self) -> contextlib.AbstractContextManager[object]:
        """Return a block that makes another CUDA context than the driver's current on the calling thread."""
        return contextlib.nullcontext()
