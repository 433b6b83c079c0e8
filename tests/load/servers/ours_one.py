"""`ours` with one batch at a time: a lower latency at a low load, and a lower capacity.

The device is idle while the results of a batch are delivered and the next batch is launched.
"""

from __future__ import annotations

from ..setting import Setting
from ._uvicorn import run
from .ours import make_app


def serve(port: int, setting: Setting) -> None:
    run(make_app(setting, concurrent=1), port)
