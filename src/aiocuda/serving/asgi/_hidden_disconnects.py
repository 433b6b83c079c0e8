"""HiddenDisconnects: the warning that a middleware hides the disconnects of clients."""

from __future__ import annotations

import warnings

from ._disconnect_watch import DisconnectWatch

__all__ = ["HiddenDisconnects"]


class HiddenDisconnects:
    """Warns once that handlers are not cancelled, because another middleware replaces ``receive``."""

    def __init__(self, cure: str) -> None:
        self._cure = cure
        self._reported = False

    def report(self, watch: DisconnectWatch) -> None:
        """Warn if the watch could not see the disconnect."""
        if watch.hidden is not None and not self._reported:
            self._reported = True
            warnings.warn(
                "a handler is not cancelled when its client disconnects: a middleware hides the disconnect; after the "
                f"last chunk of the body its `receive` {watch.hidden} and not 'http.disconnect'. {self._cure}",
                RuntimeWarning,
                stacklevel=2,
            )
