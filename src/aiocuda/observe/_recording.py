"""Recording: everything that a timeline has recorded, with device times and host times."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

__all__ = [
    "LABEL_KEPT",
    "LABEL_SHOWN",
    "Batch",
    "Blocked",
    "HostSlice",
    "LoopRecord",
    "Recording",
    "Request",
    "Resume",
    "TimelineSpan",
    "WaitedCall",
    "kept",
    "merged",
    "offsets_us",
    "shown",
]

#: Characters of a label that a picture or a page shows; a longer text would cover the operations beside it.
LABEL_SHOWN: Final = 80
#: Characters of a label in the data of a picture, a page or a trace. A label may have any length.
LABEL_KEPT: Final = 1000

#: Characters that XML does not allow, and surrogates, which UTF-8 cannot encode.
_NOT_XML: Final = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def shown(text: str, most: int = LABEL_SHOWN) -> str:
    """Return a text with at most ``most`` characters, all of them valid in XML and UTF-8."""
    short = text if len(text) <= most else f"{text[: most - 1]}…"
    return _NOT_XML.sub("\ufffd", short)


def kept(text: str) -> str:
    """Return a text for the data of an output: `shown` with at most `LABEL_KEPT` characters."""
    return shown(text, LABEL_KEPT)


class TimelineSpan(NamedTuple):
    """One operation. Times are microseconds since the timeline began."""

    stream: str
    kind: str  #: ``"upload"``, ``"launch"``, ``"download"``, ``"wait"`` …
    start_us: float
    end_us: float
    operation: int  #: id of the operation
    kernel: str | None = None  #: name of the kernel of a launch
    label: str | None = None  #: the operation's label
    nbytes: int = 0  #: bytes moved or filled; 0 for other kinds
    waited_for: tuple[int, ...] = ()  #: ids of the operations of other streams for which the device waited

    @property
    def name(self) -> str:
        """The name of the kernel, or the kind."""
        return self.kernel or self.kind


class HostSlice(NamedTuple):
    """A job of a worker thread. Times are seconds of the driver's clock."""

    thread: int
    name: str
    start: float
    end: float


class WaitedCall(NamedTuple):
    """A call of the driver that took more than 20 ms beside unfinished work. Times are seconds of its clock."""

    name: str  #: CUDA's function
    start: float
    end: float
    running: str  #: the oldest unfinished operations of some streams


class Resume(NamedTuple):
    """An operation wakes a task that waits for it."""

    at: float  #: seconds of the driver's clock
    iteration: int  #: index of the loop's iteration in which the task resumes
    operation: int
    name: str
    label: str | None


class Blocked(NamedTuple):
    """An iteration that blocked its loop. Times are seconds of the driver's clock."""

    start: float
    end: float
    callback: str | None = None  #: the function or coroutine that the loop ran when its timer was late; if it was seen
    line: str | None = None  #: its innermost line, as in the event ``loop_blocked``


class Batch(NamedTuple):
    """A batch of a `MicroBatcher`: its function runs from start to end. Times are seconds of the driver's clock."""

    batcher: int
    function: str
    number: int
    start: float
    end: float
    size: int
    failed: int  #: requests that got an exception of the batch


class Request(NamedTuple):
    """A request of a `MicroBatcher`. Times are seconds of the driver's clock."""

    batcher: int
    function: str
    number: int
    submitted: float
    began: float | None  #: when its batch was formed; None if it was in no batch
    ended: float
    outcome: str  #: ``"answered"``, ``"failed"``, ``"expired"`` or ``"cancelled"``
    batch: int | None  #: number of its batch; None if no batch has got it
    label: str | None


@dataclasses.dataclass(frozen=True, slots=True)
class LoopRecord:
    """One event loop: its noticed iterations, those that blocked it, and the resumed waits. Seconds of the clock."""

    iterations: Sequence[tuple[float, float]] = ()
    blocked: Sequence[Blocked] = ()
    resumes: Sequence[Resume] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Recording:
    """Everything that a timeline has recorded.

    Attributes
    ----------
    device
        Name of the device and its driver.
    spans
        The operations, in the order of their ids.
    loops, jobs
        The event loops that used the device, and the jobs of its worker threads.
    counters
        Pairs of a time of the driver's clock and a value, by name.
    host_zero
        The time of the driver's clock at the device time 0, in seconds.
    accuracy_us
        The largest error of ``host_zero``, in microseconds.
    batches, requests
        The batches of the device's batchers, and their requests, in the order of their ends.
    calls
        The calls of the driver that have waited, of all its devices.
    """

    device: str
    spans: Sequence[TimelineSpan]
    loops: Sequence[LoopRecord] = ()
    jobs: Sequence[HostSlice] = ()
    counters: Mapping[str, Sequence[tuple[float, int]]] = dataclasses.field(default_factory=dict)
    host_zero: float = 0.0
    accuracy_us: float = 0.0
    batches: Sequence[Batch] = ()
    requests: Sequence[Request] = ()
    calls: Sequence[WaitedCall] = ()

    def microseconds(self, seconds: float) -> float:
        """Return a time of the driver's clock on the axis of the device times."""
        return (seconds - self.host_zero) * 1e6


def offsets_us(recordings: Sequence[Recording]) -> list[float]:
    """Return for each recording the microseconds from the earliest device time 0 of all recordings to its own."""
    zero = min((each.host_zero for each in recordings), default=0.0)
    return [(each.host_zero - zero) * 1e6 for each in recordings]


def merged(recordings: Sequence[Recording]) -> list[TimelineSpan]:
    """Return the spans of all recordings on one axis. With several, the number of the device precedes each stream."""
    if len(recordings) == 1:
        return list(recordings[0].spans)
    return [
        span._replace(stream=f"{number}: {span.stream}", start_us=span.start_us + offset, end_us=span.end_us + offset)
        for number, (recording, offset) in enumerate(zip(recordings, offsets_us(recordings), strict=True), 1)
        for span in recording.spans
    ]
