"""Serving: parts of a web service that uses a device."""

from __future__ import annotations

from ._errors import BatchError, DeadlineError, OverloadedError

__all__ = ["BatchError", "DeadlineError", "OverloadedError"]
