"""The modes of PyTorch that belong to a thread: grad mode, inference mode and autocast."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

__all__ = ["ModeSwitch", "Modes"]


class Autocast(NamedTuple):
    """Autocast for one type of device: whether it is enabled, and to which dtype."""

    enabled: bool
    dtype: Any


class Modes(NamedTuple):
    """The modes of a thread."""

    grad: bool
    inference: bool
    cuda: Autocast
    cpu: Autocast
    cache: bool  # of casts in an autocast region

    @classmethod
    def of_this_thread(cls) -> Modes:
        """Return the modes of this thread."""
        return cls(
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            Autocast(torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")),
            Autocast(torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
            torch.is_autocast_cache_enabled(),
        )

    @property
    def casts(self) -> bool:
        """True if some autocast is enabled."""
        return self.cuda.enabled or self.cpu.enabled


class ModeSwitch:
    """Sets the modes of the thread.

    PyTorch sets the inference mode by guards, and dropping a guard restores the modes of the time when it was made. So
    a switch has at most one guard, which the next call of `to` drops first.
    """

    __slots__ = ("_guard",)

    def __init__(self) -> None:
        self._guard: Any = None

    def to(self, modes: Modes) -> None:
        """Set the modes of this thread."""
        now = Modes.of_this_thread()
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
        for kind, autocast in (("cuda", modes.cuda), ("cpu", modes.cpu)):
            torch.set_autocast_enabled(kind, autocast.enabled)
            torch.set_autocast_dtype(kind, autocast.dtype)
        torch.set_autocast_cache_enabled(modes.cache)
