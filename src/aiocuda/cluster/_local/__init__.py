"""The engine ``"local"``: processes of this machine, connected by socket pairs that they inherit."""

from __future__ import annotations

from ._local_engine import LocalEngine

__all__ = ["LocalEngine"]
