"""Operations with a visible effect, one for each verb, for the tests of order."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Final

import numpy as np

from ..kernels import AFFINE
from ._rig import Rig, address_of, span
from ._waiting import Array

__all__ = ["VERBS", "Probe", "probe"]

_BYTES = 4096 + 12
_VALUE = 0x5A

#: The verbs that enqueue work with a visible effect. They are parameters of tests: ``…[upload]``.
VERBS: Final = ("upload", "download", "copy", "fill", "launch")


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
