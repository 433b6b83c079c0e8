"""For the time being."""

from ..clock import Clock, running_clock

__all__ = ["Clock", "running_clock"]
