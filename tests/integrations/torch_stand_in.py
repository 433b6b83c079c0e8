"""A stand-in for PyTorch with one GPU. It has the modes, streams and events that `submit` uses, and notes the calls."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

__all__ = ["StandIn"]


class StandIn(ModuleType):
    """The module ``torch``.

    Attributes
    ----------
    log : list of tuple
        What was done on streams: ``("record", event, stream)``, ``("wait", event, stream)``, ``("current", stream)``.
    count : Counter
        The calls that read or clear something, by name.

    Parameters
    ----------
    primitives
        ``torch._C`` has the functions below those of ``torch.cuda``.
    """

    def __init__(self, primitives: bool) -> None:
        super().__init__("torch")
        self.__spec__ = ModuleSpec("torch", None)
        self.__version__ = "2.4.0"
        self.log: list[tuple[Any, ...]] = []
        self.count: Counter[str] = Counter()
        self.current, self.current_device, self.is_captured = 0, 0, False
        self.modes: dict[str, Any] = {
            "grad": True, "inference": False, "cuda": False, "cuda dtype": "float16", "cpu": False,
            "cpu dtype": "bfloat16", "cache": True,
        }  # fmt: skip
        log = self.log

        class Stream:
            def __init__(self, stream_id: int = 0, device_index: int = 0, device_type: int = 1) -> None:
                self.stream_id = self.cuda_stream = stream_id
                self.device_index, self.device_type, self.device = device_index, device_type, "cuda:0"

        class EventBase:
            def record(self, stream: Stream) -> None:
                log.append(("record", self, stream.cuda_stream))

            def wait(self, stream: Stream) -> None:
                log.append(("wait", self, stream.cuda_stream))

        class Event(EventBase): ...

        class Module:
            def __call__(self) -> None: ...

        class Tensor:
            layout, device = "strided", "cuda:0"

            def record_stream(self, stream: Stream) -> None:
                log.append(("record_stream", self, stream.cuda_stream))

        self.Tensor, self.strided = Tensor, "strided"
        self.nn = SimpleNamespace(Module=Module)
        self._C = SimpleNamespace()
        if primitives:
            self._C._cuda_getCurrentRawStream = lambda index: self.current
            self._C._cuda_isCurrentStreamCapturing = self._capturing
            self._C._cuda_setStream = lambda stream_id, device_index, device_type: self._set_current(stream_id)
            self._C._cuda_getDevice = lambda: self.current_device
            self._C._is_any_autocast_enabled = lambda: self.modes["cuda"] or self.modes["cpu"]
            self._C._CudaEventBase = EventBase
        self.cuda = SimpleNamespace(
            ExternalStream=lambda handle, device: Stream(handle, device),
            Stream=Stream,
            Event=Event,
            CUDAGraph=object,
            default_stream=lambda index: Stream(),
            current_stream=lambda index: Stream(self.current),
            current_device=lambda: self.current_device,
            set_stream=lambda stream: self._set_current(stream.stream_id),
            set_device=lambda index: setattr(self, "current_device", index),
            is_current_stream_capturing=self._capturing,
            device=self._on_device,
        )

    def _capturing(self) -> bool:
        return self.is_captured and self.current_device == 0

    def _set_current(self, stream: int) -> None:
        self.current, self.current_device = stream, 0
        self.log.append(("current", stream))

    @contextlib.contextmanager
    def _on_device(self, index: int) -> Iterator[None]:
        before, self.current_device = self.current_device, index
        yield
        self.current_device = before

    def is_grad_enabled(self) -> Any:
        return self.modes["grad"]

    def set_grad_enabled(self, mode: bool) -> None:
        self.modes["grad"] = mode

    def is_inference_mode_enabled(self) -> Any:
        return self.modes["inference"]

    @contextlib.contextmanager
    def inference_mode(self, mode: bool) -> Iterator[None]:
        before, self.modes["inference"] = self.modes["inference"], mode
        yield
        self.modes["inference"] = before

    def is_autocast_enabled(self, device: str) -> Any:
        return self.modes[device]

    def set_autocast_enabled(self, device: str, mode: bool) -> None:
        self.modes[device] = mode

    def get_autocast_dtype(self, device: str) -> Any:
        self.count["get_autocast_dtype"] += 1
        return self.modes[f"{device} dtype"]

    def set_autocast_dtype(self, device: str, dtype: str) -> None:
        self.modes[f"{device} dtype"] = dtype

    def is_autocast_cache_enabled(self) -> Any:
        return self.modes["cache"]

    def set_autocast_cache_enabled(self, mode: bool) -> None:
        self.modes["cache"] = mode

    def clear_autocast_cache(self) -> None:
        self.count["clear_autocast_cache"] += 1
