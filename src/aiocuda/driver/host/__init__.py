"""The host driver: streams, copies and kernels without a GPU. `README.md` of the folder above lists the files."""

from __future__ import annotations

from ._driver import HostDriver

__all__ = ["HostDriver"]
