"""The modes of PyTorch that belong to a thread: grad mode, inference mode and autocast."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch

__all__ = ["ModeSwitch", "Modes"]


class Modes(NamedTuple):
    """The modes of a thread."""

    grad: bool
    inference: bool
    casts_on_cuda: bool  # autocast is enabled
    cuda_dtype: Any
    casts_on_cpu: bool
    cpu_dtype: Any
    cache: bool  # of casts in an autocast region

    @classmethod
    def of_this_thread(cls) -> Modes:
        """Return the modes of this thread."""
        return cls(
            torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cuda"),
            torch.get_autocast_dtype("cuda"), torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"),
            torch.is_autocast_cache_enabled(),
        )  # fmt: skip

    @property
    def casts(self) -> bool:
        """True if some autocast is enabled."""
        return self.casts_on_cuda or self.casts_on_cpu


class ModeSwitch:
    """Sets the modes of the thread.

    PyTorch sets the inference mode by guards, and dropping a guard restores the modes of the time when it was made. So
    a switch has at most one guard, which the next call of `to` drops first.
    """

    __slots__ = ("_guard",)

    #: Guards of coroutines that have ended in another mode than that of the thread: dropping them would change it.
    _kept: ClassVar[list[Any]] = []

    def __init__(self) -> None:
        self._guard: Any = None

    def __del__(self) -> None:
        if self._guard is not None:
            self._kept.append(self._guard)

    def to(self, modes: Modes, now: Modes | None = None) -> None:
        """Set the modes of this thread, which are ``now`` if the caller knows them."""
        now = Modes.of_this_thread() if now is None else now
        if now.casts or modes.casts:
            torch.clear_autocast_cache()  # its tensors belong to the stream that made them
        if self._guard is None and now == modes:
            return
        if self._guard is not None:
            guard, self._guard = self._guard, None
            guard.__exit__(None, None, None)
        if torch.is_inference_mode_enabled() != modes.inference:
            self._guard = torch.inference_mode(modes.inference)
            self._guard.__enter__()
        torch.set_grad_enabled(modes.grad)
        torch.set_autocast_enabled("cuda", modes.casts_on_cuda)
        torch.set_autocast_dtype("cuda", modes.cuda_dtype)
        torch.set_autocast_enabled("cpu", modes.casts_on_cpu)
        torch.set_autocast_dtype("cpu", modes.cpu_dtype)
        torch.set_autocast_cache_enabled(modes.cache)
