"""Work with the record of an event after it, as one call."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from ..._base._types import Dim3
from ..protocol import RecordedCall, RecordRefused
from ._core import WAIT_DEFAULT
from ._graphs import CudaGraphs
from ._memory import CudaMemory

__all__ = ["CudaRecorded"]


class CudaRecorded(CudaGraphs, CudaMemory):
    """The methods of `aiocuda.driver.protocol` that bind work with the record of an event after it.

    One Python function makes both driver calls. The stream is looked up only when the call is bound.
    """

    def recorded_launch(self, stream: int, function: int, grid: Dim3, block: Dim3, shared_bytes: int) -> RecordedCall:
        """Bind a launch with the record of an event after it."""
        bound = self.bind_launch(stream, function, grid, block, shared_bytes)
        info, pack_into, buffer = bound.stream, bound.pack_into, bound.buffer
        config, kernel, parameters = bound.config, bound.kernel, bound.parameters
        events, word, device = self.events, info.word, info.device

        def launch(arguments: Sequence[Any], event: int) -> None:
            if parameters is not None:
                pack_into(buffer, 0, *arguments)
            calls = info.calls
            code = calls.cuLaunchKernelEx(config, kernel, parameters, None)
            if code:
                self.fail("cuLaunchKernelEx", code, device)
            try:
                recorded = events.get(event)
                if recorded is None or recorded.device != device or calls.cuEventRecord(recorded.word, word):
                    self.event_record(event, stream)  # raises the error
            except BaseException as error:  # noqa: BLE001 - raised again by the queue
                raise RecordRefused(error) from None
            self.call_count += 2

        config_address, function_address, parameters_address = bound.addresses
        self.offer_native(
            launch, info, "cuLaunchKernelEx", (config_address, function_address, parameters_address, 0), bound.places,
            functools.partial(pack_into, buffer, 0), bound,
        )  # fmt: skip
        return launch

    def recorded_upload(self, stream: int, target: int, source: int, nbytes: int) -> RecordedCall:
        """Bind an `upload` with the record of an event after it."""
        return self._recorded_copy("cuMemcpyHtoDAsync", stream, target, source, nbytes)

    def recorded_download(self, stream: int, target: int, source: int, nbytes: int) -> RecordedCall:
        """Bind a `download` with the record of an event after it."""
        return self._recorded_copy("cuMemcpyDtoHAsync", stream, target, source, nbytes)

    def recorded_wait(self, stream: int) -> RecordedCall:
        """Bind waits for several events with the record of an event after them."""
        info = self.stream_info(stream)
        word, events, device = info.word, self.events, info.device

        def wait(awaited: Sequence[Any], event: int) -> None:
            calls = info.calls
            stream_wait_event = calls.cuStreamWaitEvent
            for each in awaited:
                try:
                    code = stream_wait_event(word, events[each].word, WAIT_DEFAULT)
                except KeyError:
                    raise self.unknown_handle("event", each) from None
                if code:
                    self.fail("cuStreamWaitEvent", code, device)
            try:
                recorded = events.get(event)
                if recorded is None or recorded.device != device or calls.cuEventRecord(recorded.word, word):
                    self.event_record(event, stream)  # raises the error
            except BaseException as error:  # noqa: BLE001 - raised again by the queue
                raise RecordRefused(error) from None
            self.call_count += len(awaited) + 1

        return wait

    def _recorded_copy(self, function: str, stream: int, target: int, source: int, nbytes: int) -> RecordedCall:
        info = self.stream_info(stream)
        handle, word, events, device = info.handle, info.word, self.events, info.device

        def copy(_: Sequence[Any], event: int) -> None:
            calls = info.calls
            code = getattr(calls, function)(target, source, nbytes, handle)
            if code:
                self.copy_again(function, code, info, target, source, nbytes, handle)
            try:
                recorded = events.get(event)
                if recorded is None or recorded.device != device or calls.cuEventRecord(recorded.word, word):
                    self.event_record(event, stream)  # raises the error
            except BaseException as error:  # noqa: BLE001 - raised again by the queue
                raise RecordRefused(error) from None
            self.call_count += 2

        self.offer_native(copy, info, function, (target, source, nbytes, handle))
        return copy
