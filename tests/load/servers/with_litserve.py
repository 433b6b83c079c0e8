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

from ..setting import (
    BOUND,
    MOST_IN_BATCH,
    PATH,
    SERVER_DEADLINE_S,
    WAIT_S,
    EmulatedDevice,
    batch_seconds,
    most_in_flight,
)
from ._limit import Limit


class Model(litserve.LitAPI):
    def setup(self, device: Any) -> None:
        self.model = EmulatedDevice(Path(__file__))  # any file that both workers can open
        logging.getLogger("litserve").setLevel(logging.CRITICAL)  # otherwise it logs each request that waits too long

    def predict(self, x: Any, **context: Any) -> Any:
        return [{"output": output} for output in self.model.compute([item["input"] for item in x])]


def serve(port: int) -> None:
    server = litserve.LitServer(
        Model(max_batch_size=MOST_IN_BATCH, batch_timeout=WAIT_S, api_path=PATH),
        accelerator="cpu",
        workers_per_device=2,
        fast_queue=True,
        timeout=SERVER_DEADLINE_S - batch_seconds(MOST_IN_BATCH),
        disable_openapi_url=True,
        middlewares=[(Limit, {"most": most_in_flight(BOUND)})],
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
