"""The functions in C of calls that a stream repeats: `NativeCall`."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

from ..protocol import NativeCall, RecordRefused
from ._abi import CUDA_ERROR_NOT_READY
from ._core import Core, StreamInfo

__all__ = ["CudaNative"]


def _nothing(*_: object) -> None:
    """Do nothing: only a kernel has arguments to pack."""


class CudaNative(Core):
    """Gives calls that are bound to a stream their `NativeCall`."""

    def offer_native(
        self, call: Callable[..., None], info: StreamInfo, name: str = "", arguments: tuple[int, ...] = (0, 0, 0, 0),
        parameters: tuple[tuple[str, int], ...] = (), pack: Callable[..., object] = _nothing, owner: object = None,
    ) -> None:  # fmt: skip
        """Let `native_call` return the functions in C of a call that is bound to a stream, if it keeps the GIL.

        Parameters
        ----------
        name, arguments
            The function of the work, and its four arguments; "" if the call only records an event.
        """
        if info.calls is self.keep_gil:
            native = functools.partial(self._native, info, name, arguments, parameters, pack, owner)
            setattr(call, "native", native)  # noqa: B010 - for mypy, a function has no such attribute

    def _native(
        self, info: StreamInfo, name: str, arguments: tuple[int, ...], parameters: tuple[tuple[str, int], ...],
        pack: Callable[..., object], owner: object,
    ) -> NativeCall:  # fmt: skip
        addresses, state = self.load_library().addresses, self.native
        block = (ctypes.c_uint64 * 4)(*arguments)
        return NativeCall(
            work=addresses[name] if name else 0,
            name=name,
            block=ctypes.addressof(block),
            parameters=parameters,
            pack=pack,
            record=addresses["cuEventRecord"],
            wait=addresses["cuStreamWaitEvent"],
            query=addresses["cuEventQuery"],
            not_ready=CUDA_ERROR_NOT_READY,
            stream=info.handle,
            event=self._native_event,
            closed=(ctypes.addressof(state.closed), ctypes.addressof(info.closed)),
            calls=ctypes.addressof(state.calls),
            refuse=functools.partial(self._refuse_native, info, arguments, bool(name)),
            owner=(block, state, info, owner),
        )

    def _native_event(self, event: int) -> int:
        return self.event_info(event).handle

    def _refuse_native(
        self, info: StreamInfo, arguments: tuple[int, ...], after_work: bool, name: str, code: int
    ) -> None:
        """Raise the error of a call in C, unless it is a copy that succeeds in the context of its stream."""
        if name.startswith("cuMemcpy"):
            return self.copy_again(name, code, info, *arguments)
        error = self.error(name, code, info.device)
        if after_work and name == "cuEventRecord":
            raise RecordRefused(error)
        raise error
