"""What all parts of the conformance suite share."""

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
    """Base of the suite's parts: the fixtures, and what a subclass may set."""

    #: Seconds to wait for something that must come. Only a failing test waits so long.
    patience: ClassVar[float] = 5.0

    #: After so many seconds a held kernel ends by itself, so that no test leaves a device spinning.
    hold_seconds: ClassVar[float] = 10.0

    #: How many held kernels, each with more blocks than the device takes, leave no room for another kernel.
    full_house: ClassVar[int] = 1

    #: Does a port tell its loop only when there is a tag? It may then sleep.
    quiet_port: ClassVar[bool] = True

    #: Seconds that one leg of an overlap test takes by itself.
    leg_seconds: ClassVar[float] = 0.2

    #: Bytes of one copy of a leg.
    leg_bytes: ClassVar[int] = 64 << 20

    @pytest.fixture
    def driver(self) -> Driver:
        """The driver under test. A subclass overrides this one; any scope will do."""
        raise NotImplementedError(f"{type(self).__name__} has no fixture 'driver': define one that returns the driver")

    @pytest.fixture
    def rig(self, driver: Driver) -> Iterator[Rig]:
        """Makes what a test needs on device 0, and clears it away."""
        with Rig(
            driver, patience=self.patience, hold_seconds=self.hold_seconds, pause=lambda: self.pause(driver)
        ) as rig:
            yield rig

    def pause(self, driver: Driver) -> None:
        """Let some time pass. A driver whose time does not go by itself overrides this one."""
        nap()

    def current_context(self) -> object:
        """The calling thread's current CUDA context. A driver without contexts has nothing to override here."""
        return None

    def foreign_context(self) -> contextlib.AbstractContextManager[object]:
        """A block in which another context than the driver's is current on the calling thread."""
        return contextlib.nullcontext()
