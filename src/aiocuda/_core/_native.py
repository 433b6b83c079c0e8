"""Native: calls of the driver's C functions, in place of a driver call in Python that a stream repeats."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ._calls import add_to_word, call_four, call_one, call_three, call_two, read_word, write_value

if TYPE_CHECKING:
    from ..driver.protocol import NativeCall
    from ._hot import Lease

__all__ = ["Native"]


class Native:
    """Calls of the driver's C functions, in place of a `RecordedCall` and of `event_query`: without `ctypes`.

    Only the compiled form makes one. Its fields are those of `aiocuda.driver.protocol.NativeCall`, which says in what
    order they are used: addresses of functions, of their arguments, and of words of 64 bits. A word of ``_closed`` and
    ``_stream_closed`` is not 0 if the driver or the stream is closed; that of ``_calls`` counts the driver's calls.
    ``_letters`` and ``_places`` are the type and the address of each argument of a kernel.
    """

    __slots__ = ("_block", "_calls", "_closed", "_event", "_letters", "_name", "_not_ready", "_owner", "_pack",
                 "_places", "_query", "_record", "_refuse", "_stream", "_stream_closed", "_wait", "_work")  # fmt: skip

    _refuse: Callable[[str, int], object]

    def __init__(self, call: NativeCall) -> None:
        self._work = call.work
        self._name = call.name
        self._block = call.block
        self._letters = [ord(letter) for letter, _ in call.parameters]  # as `write_value` takes them
        self._places = [place for _, place in call.parameters]
        self._pack = call.pack
        self._record = call.record
        self._query = call.query
        self._wait = call.wait
        self._not_ready = call.not_ready
        self._stream = call.stream
        self._event = call.event
        self._closed, self._stream_closed = call.closed
        self._calls = call.calls
        self._refuse = call.refuse
        self._owner = call.owner  # holds the memory of the addresses

    def enqueue(self, values: Sequence[Any], lease: Lease) -> bool:
        """Enqueue the work, and record the event of a lease.

        Return False if the driver or the stream is closed: the driver's own call then raises the error.

        Raises
        ------
        RecordRefused
            The stream has accepted the work, and the event was not recorded.
        """
        if read_word(self._closed) or read_word(self._stream_closed):
            return False
        event = lease.word
        if not event:
            event = lease.word = self._event(lease.handle)
        at = 0
        for value in values:
            if not write_value(self._letters[at], self._places[at], value):
                self._pack(*values)  # a value that C does not convert: the driver writes all, or raises its error
                break
            at += 1
        code = call_four(self._work, self._block) if self._work else 0  # without work, only the event is recorded
        if code:
            self._refuse(self._name, code)  # raises, unless the driver has done the work in another way
        code = call_two(self._record, event, self._stream)
        if code:
            self._refuse("cuEventRecord", code)
        add_to_word(self._calls, 2 if self._work else 1)
        return True

    def wait(self, lease: Lease) -> bool:
        """Make the stream wait for the event of a lease. Return False if the driver's own call has to do it."""
        if read_word(self._closed) or read_word(self._stream_closed):
            return False
        event = lease.word
        if not event:
            event = lease.word = self._event(lease.handle)
        code = call_three(self._wait, self._stream, event, 0)
        if code:
            self._refuse("cuStreamWaitEvent", code)
        add_to_word(self._calls, 1)
        return True

    def query(self, lease: Lease) -> int:
        """Return 1 if the event of a lease is done, 0 if not, -1 if the driver's own query has to find out."""
        if read_word(self._closed) or not lease.word:
            return -1
        code = call_one(self._query, lease.word)
        if code and code != self._not_ready:
            return -1  # an error, which the driver's own query raises
        add_to_word(self._calls, 1)
        return not code
