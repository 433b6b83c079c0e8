"""Overlap: work on different engines runs at the same time, work on one engine does not."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ..kernels import SPIN
from ._base import Conformance
from ._rig import Rig, address_of

__all__ = ["OverlapConformance"]

#: Enqueues the work of one leg into a stream. Alone it takes `Conformance.leg_seconds`.
_Leg = Callable[[int], None]


class OverlapConformance(Conformance):
    """Rules about overlap. Each test compares the times of its legs, alone and together, measured in the same run."""

    def test_upload_compute_and_download_overlap(self, rig: Rig) -> None:
        """An upload, a kernel and a download together take about as long as the longest of them."""
        legs = [self._copies(rig, "upload"), self._spin(rig), self._copies(rig, "download")]
        alone = [self._together(rig, leg) for leg in legs]
        # On a GPU the two directions slow each other down a little: to 0.92 of full speed on an H200.
        assert self._least(rig, legs, (sum(alone) + max(alone)) / 2)

    @pytest.mark.parametrize("verb", ["upload", "download"])
    def test_two_copies_of_one_direction_share_an_engine(self, rig: Rig, verb: str) -> None:
        """Two copies in the same direction take as long as one after the other."""
        legs = [self._copies(rig, verb), self._copies(rig, verb)]
        alone = [min(self._together(rig, leg) for _ in range(2)) for leg in legs]
        # Two engines would take half of the sum.
        assert self._together(rig, *legs) > 0.75 * sum(alone)

    def test_kernels_of_eight_streams_overlap(self, rig: Rig) -> None:
        """Eight kernels of eight streams take less than four times as long as one."""
        legs = [self._spin(rig)] * 8
        alone = self._together(rig, legs[0])
        assert self._least(rig, legs, 4 * alone)

    def _least(self, rig: Rig, legs: list[_Leg], bound: float) -> bool:
        """True if one of three runs of all legs takes less than ``bound``. A busy machine delays single runs."""
        return any(self._together(rig, *legs) < bound for _ in range(3))

    def _together(self, rig: Rig, *legs: _Leg) -> float:
        """Return the seconds from the first enqueue until all legs are done, each in its own stream."""
        streams = [rig.stream() for _ in legs]
        start = rig.driver.now()
        with rig.unblocked("enqueueing a leg"):
            for stream, leg in zip(streams, legs, strict=True):
                leg(stream)
        rig.finish(*streams)
        return rig.driver.now() - start

    def _spin(self, rig: Rig) -> _Leg:
        nanoseconds = int(self.leg_seconds * 1e9)
        return lambda stream: rig.launch(stream, SPIN, nanoseconds)

    def _copies(self, rig: Rig, verb: str) -> _Leg:
        nbytes = self.leg_bytes
        host, device = address_of(rig.pinned(nbytes)), rig.memory(nbytes)

        def copy(stream: int, count: int) -> None:
            for _ in range(count):
                if verb == "upload":
                    rig.driver.upload(stream, device, host, nbytes)
                else:
                    rig.driver.download(stream, host, device, nbytes)

        copy_seconds = min(self._together(rig, lambda stream: copy(stream, 2)) for _ in range(2)) / 2
        count = max(1, min(400, round(self.leg_seconds / copy_seconds)))
        return lambda stream: copy(stream, count)
