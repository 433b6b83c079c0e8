"""TorchStep: PyTorch's state of the thread during the steps of one coroutine."""

from __future__ import annotations

from typing import Any, Self

import torch

from ..lowlevel import Queue, end_step
from ._torch_calls import parts_on
from ._torch_modes import Modes, ModeSwitch
from ._torch_stream import TorchStream

__all__ = ["TorchStep"]


class TorchStep:
    """PyTorch's state of the thread during the steps of one coroutine: `aiocuda.integrations.torch.on`."""

    def __init__(self, queue: Queue, theirs: TorchStream | None) -> None:
        queue.check()
        self._queue = queue
        self._theirs = theirs  # None without a GPU
        self._modes: Modes | None = None  # as the coroutine last had them; None before its first step
        self._switch = ModeSwitch()
        self._streams: CurrentStreams | None = None

    def __enter__(self) -> Self:
        self._outer_modes = Modes.of_this_thread()
        theirs = self._theirs
        if theirs is not None:
            outer = self._outer_streams = CurrentStreams.of_this_thread()
            if self._streams is None:
                caller = outer.streams[theirs.index]
                if caller != theirs.stream:
                    theirs.refuse_captured(outer.device)
                    theirs.wait(theirs.record(caller))
                torch.cuda.set_stream(theirs.stream)
            else:
                self._streams.restore(outer)
        if self._modes is not None:
            self._switch.to(self._modes, self._outer_modes)
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._modes = Modes.of_this_thread()
        self._switch.to(self._outer_modes, self._modes)
        theirs = self._theirs
        if theirs is None:
            return
        self._streams = CurrentStreams.of_this_thread()
        self._outer_streams.restore(self._streams)
        if isinstance(error, StopIteration) and error.value is not None:  # the coroutine has returned
            for part in parts_on(error.value, theirs.stream.device):
                part.record_stream(self._outer_streams.streams[theirs.index])
        end_step(self._queue)


class CurrentStreams:
    """The current device of the thread, and the current stream of each device."""

    __slots__ = ("device", "streams")

    def __init__(self, device: int, streams: list[Any]) -> None:
        self.device = device
        self.streams = streams

    @classmethod
    def of_this_thread(cls) -> CurrentStreams:
        """Return those of this thread."""
        device = torch.cuda.current_device()
        return cls(device, [torch.cuda.current_stream(index) for index in range(torch.cuda.device_count())])

    def restore(self, now: CurrentStreams) -> None:
        """Make them current again, in place of those that are current ``now``."""
        device = now.device
        for index, stream in enumerate(self.streams):
            if now.streams[index] != stream:
                torch.cuda.set_stream(stream)  # makes its device current, too
                device = index
        if device != self.device:
            torch.cuda.set_device(self.device)
