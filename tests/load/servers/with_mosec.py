"""mosec: its front in Rust, and one worker process for the device.

``capacity`` is the limit of requests in its queue, beyond which it answers 429.
"""

from __future__ import annotations

import sys
from typing import Any

import mosec

from ..setting import MOST_IN_BATCH, PATH, EmulatedDevice, Setting


class Model(mosec.Worker):
    def __init__(self) -> None:
        super().__init__()
        self.model = EmulatedDevice(Setting.of_environment())

    def deserialize(self, data: Any) -> Any:
        return super().deserialize(data)["input"]

    def forward(self, data: Any) -> Any:
        return self.model.compute(data)

    def serialize(self, data: Any) -> Any:
        return super().serialize({"output": data})


def serve(port: int, setting: Setting) -> None:
    sys.argv[1:] = [
        *("--port", str(port), "--address", "127.0.0.1"),
        *("--capacity", str(setting.most_in_flight(setting.bound)), "--log-level", "error"),
    ]
    server = mosec.Server()
    wait_ms = round(setting.wait_s * 1e3)
    server.append_worker(Model, max_batch_size=MOST_IN_BATCH, max_wait_time=wait_ms, route=PATH)
    server.run()
