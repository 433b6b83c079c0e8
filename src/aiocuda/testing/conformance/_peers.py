"""Several devices of one driver."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import pytest

from ...errors import WrongDeviceError
from ._base import Conformance
from ._probes import probe
from ._rig import Rig

if TYPE_CHECKING:
    from ...driver.protocol import Driver

__all__ = ["PeerConformance"]


class PeerConformance(Conformance):
    """Rules for two devices of one driver: events, streams and copies between devices 0 and 1."""

    @pytest.fixture
    def peer(self, driver: Driver, rig: Rig) -> Iterator[Rig]:
        """A `Rig` on device 1."""
        with Rig(driver, 1, patience=self.patience, hold_seconds=self.hold_seconds) as peer:
            yield peer
            rig.release_all()  # freeing page-locked memory waits for all devices

    def test_event_of_another_device_is_refused(self, rig: Rig, peer: Rig) -> None:
        """`event_record` refuses a stream of another device."""
        with pytest.raises(WrongDeviceError):
            rig.driver.event_record(peer.event(), rig.stream())

    def test_stream_of_another_device_is_not_imported(self, rig: Rig, peer: Rig) -> None:
        """`stream_import` refuses a stream of another device."""
        with pytest.raises(WrongDeviceError):
            rig.driver.stream_import(rig.device, rig.driver.stream_handle(peer.stream()))

    def test_wait_across_devices(self, rig: Rig, peer: Rig) -> None:
        """A stream waits for an event of another device."""
        work = probe(peer, "fill")
        held, waiter = rig.stream(), peer.stream()
        hold = rig.hold(held)
        rig.driver.stream_wait(waiter, rig.record(held))
        work.enqueue(waiter)
        peer.witness()
        assert work.untouched()
        hold.release()
        peer.finish(waiter)
        assert work.complete()

    def test_held_device_does_not_hold_the_other(self, rig: Rig, peer: Rig) -> None:
        """A held stream of one device delays no work of the other device."""
        hold = rig.hold(rig.stream())
        peer.witness()
        assert hold.running

    def test_copy_between_devices_is_in_stream_order(self, rig: Rig, peer: Rig) -> None:
        """`copy_peer` waits for the earlier work of its stream."""
        content = np.arange(1000, dtype="u4")
        source, target = rig.uploaded(content), peer.memory(content.nbytes)
        stream = rig.stream()
        hold = rig.hold(stream)
        rig.driver.copy_peer(stream, target, 1, source, 0, content.nbytes)
        rig.witness()
        assert not peer.look(target, 1000, "u4").any()
        hold.release()
        rig.finish(stream)
        assert (peer.look(target, 1000, "u4") == content).all()
