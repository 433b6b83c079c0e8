"""LitServe: one API server, two workers for the device, ZeroMQ between them.

`fast_queue` is what its documentation recommends above 100 requests per second. A second worker forms and answers
batches while the device computes those of the first: 1 300 instead of 950 requests per second. ``timeout`` makes a
worker answer 504 to a request that has waited too long in the queue. LitServe has no limit of the queue: a middleware
has one.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import litserve

from ..setting import MOST_IN_BATCH, PATH, EmulatedDevice, Setting
from ._limit import Limit


class Model(litserve.LitAPI):
    def setup(self, device: Any) -> None:
        shared = Path(__file__)  # any file that both workers can open
        self.model = EmulatedDevice(Setting.of_environment(), shared)
        logging.getLogger("litserve").setLevel(logging.CRITICAL)  # otherwise it logs each request that waits too long

    def predict(self, x: Any, **context: Any) -> Any:
        return [{"output": output} for output in self.model.compute([item["input"] for item in x])]


def serve(port: int, setting: Setting) -> None:
    server = litserve.LitServer(
        Model(max_batch_size=MOST_IN_BATCH, batch_timeout=setting.wait_s, api_path=PATH),
        accelerator="cpu",
        workers_per_device=2,
        fast_queue=True,
        timeout=setting.server_deadline_s - setting.batch_seconds(MOST_IN_BATCH),
        disable_openapi_url=True,
        middlewares=[(Limit, {"most": setting.most_in_flight(setting.bound)})],
    )
    server.run(
        host="127.0.0.1",
        port=port,
        num_api_servers=1,
        log_level="critical",
        generate_client_file=False,
        access_log=False,
        timeout_keep_alive=60,
    )
