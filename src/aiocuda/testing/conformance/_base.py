"""The base class of all parts of the suite, and the operations with a visible effect that test the order of work."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, ClassVar, Final

import numpy as np
import pytest

from ..kernels import AFFINE
from ._rig import Array, Hold, Rig, address_of, nap, span

if TYPE_CHECKING:
    from ...driver.protocol import Driver

__all__ = ["VERBS", "Conformance", "Probe", "probe"]

_BYTES = 4096 + 12
_VALUE = 0x5A

#: The verbs that enqueue work with a visible effect. They are parameters of tests: ``…[upload]``.
VERBS: Final = ("upload", "download", "copy", "fill", "launch")


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


@dataclasses.dataclass(frozen=True, slots=True)
class Probe:
    """An operation that is ready to be enqueued. Its memory is allocated, and zero where it will write."""

    verb: str
    enqueue: Callable[[int], None]  #: enqueues it in a stream
    look: Callable[[], Array]  #: returns the present content of the bytes that it writes

    def untouched(self) -> bool:
        """True if nothing has been written yet."""
        return not self.look().any()

    def complete(self) -> bool:
        """True if everything has been written."""
        return bool((self.look() == _VALUE).all())

    def check_waits_for(self, hold: Hold, rig: Rig, stream: int) -> None:
        """Check that the operation, which was enqueued in ``stream``, waits for a held kernel, and runs after it."""
        rig.witness()
        assert self.untouched()
        hold.release()
        rig.finish(stream)
        assert self.complete()


def probe(rig: Rig, verb: str) -> Probe:
    """Make an operation for one of `VERBS`. Not while a kernel is held."""
    driver = rig.driver
    host = rig.small(_BYTES, value=_VALUE if verb == "upload" else 0)
    target = rig.memory(_BYTES)
    source = rig.memory(_BYTES, _VALUE)
    words = _BYTES // 4
    term = int(np.full(4, _VALUE, "u1").view("u4")[0])
    arguments = rig.arguments(span(target, words, "u4"), words, 1, term)
    affine = rig.function(AFFINE)

    def upload(stream: int) -> None:
        driver.upload(stream, target, address_of(host), _BYTES)

    def download(stream: int) -> None:
        driver.download(stream, address_of(host), source, _BYTES)

    def copy(stream: int) -> None:
        driver.copy(stream, target, source, _BYTES)

    def fill(stream: int) -> None:
        driver.fill(stream, target, bytes([_VALUE]), _BYTES)

    def launch(stream: int) -> None:
        driver.launcher(stream, affine, (4, 1, 1), (128, 1, 1), 0)(arguments)

    enqueue = {"upload": upload, "download": download, "copy": copy, "fill": fill, "launch": launch}[verb]
    return Probe(verb, enqueue, host.copy if verb == "download" else lambda: rig.look(target, _BYTES))
