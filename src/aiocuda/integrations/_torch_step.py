"""TorchStep: PyTorch's state of the thread during the steps of one coroutine."""

from __future__ import annotations

from typing import Any, Self

import torch

from ..completion._stream_queue import StreamQueue
from ._steps import end_step
from ._torch_calls import record, record_results
from ._torch_modes import Modes, ModeSwitch

__all__ = ["TorchStep"]


class TorchStep:
    """PyTorch's state of the thread during the steps of one coroutine: `aiocuda.integrations.torch.on`."""

    def __init__(self, queue: StreamQueue, ours: Any) -> None:
        queue.check()
        self._queue = queue
        self._ours = ours  # None without a GPU
        self._modes: Modes | None = None  # as the coroutine last had them; None before its first step
        self._switch = ModeSwitch()
        self._streams: CurrentStreams | None = None

    def __enter__(self) -> Self:
        self._outer_modes = Modes.of_this_thread()
        if self._ours is not None:
            self._outer_streams = CurrentStreams()
            if self._streams is None:
                caller = torch.cuda.current_stream(self._ours.device_index)
                if caller != self._ours:
                    self._ours.wait_event(record(caller))
                torch.cuda.set_stream(self._ours)
            else:
                self._streams.restore()
        if self._modes is not None:
            self._switch.to(self._modes)
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._modes = Modes.of_this_thread()
        self._switch.to(self._outer_modes)
        if self._ours is None:
            return
        self._streams = CurrentStreams()
        self._outer_streams.restore()
        if isinstance(error, StopIteration):  # the coroutine has returned
            record_results(error.value, torch.cuda.current_stream(self._ours.device_index))
        end_step(self._queue)


class CurrentStreams:
    """The current device of the thread, and the current stream of each device."""

    __slots__ = ("_device", "_streams")

    def __init__(self) -> None:
        self._device = torch.cuda.current_device()
        self._streams = [torch.cuda.current_stream(index) for index in range(torch.cuda.device_count())]

    def restore(self) -> None:
        """Make them current again."""
        for index, stream in enumerate(self._streams):
            if torch.cuda.current_stream(index) != stream:
                torch.cuda.set_stream(stream)
        if torch.cuda.current_device() != self._device:
            torch.cuda.set_device(self._device)
