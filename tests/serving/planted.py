"""Planted bugs of the batcher, and the test that must find each. They were chosen before the tests were written."""

from __future__ import annotations

from tests.planting import Bug

__all__ = ["BUGS"]

BUGS = [
    Bug(
        "cancelled-in-a-batch",
        "A request that was cancelled just before its batch began is part of the batch.",
        "_batch.py",
        "[request for request in self.requests if request.waits(now)]\n",
        "[request for request in self.requests if request.waits(now) or request.done]\n",
    ),
    Bug(
        "outcome-twice",
        "A result for a request that is done ends the delivery: later requests of the batch wait forever.",
        "_requests.py",
        "        if future is None or future.done():\n            return False\n        future.set_result(result)\n",
        "        assert future is not None\n        future.set_result(result)\n",
    ),
    Bug(
        "no-batch-after-a-batch",
        "Requests that arrived while a batch ran wait for the next call of submit.",
        "_batcher.py",
        "        if self._queue.weight:\n            self._advance()\n",
        "",
    ),
    Bug(
        "weight-ignored",
        "A batch is filled by the number of items.",
        "_requests.py",
        "                weight += request.weight\n",
        "                weight += 1\n",
    ),
    Bug(
        "expired-at-the-batch",
        "A deadline passes only when a batch ends.",
        "_batcher.py",
        "            self._deadlines.add(request, now + deadline)\n",
        "            pass\n",
    ),
    Bug(
        "wait-of-zero",
        "batch_wait_timeout_s=0 waits for a full batch.",
        "_batcher.py",
        "        if wait == 0.0:\n            self._timer = loop.call_soon(self._advance, context=self._context)\n",
        "        if wait == 0.0:\n            pass\n",
    ),
    Bug(
        "cancelled-keeps-its-place",
        "A cancelled request counts as waiting until its batch would begin.",
        "_batcher.py",
        "            self._meter.cancelled += 1\n            self._queue.remove(request)\n",
        "            self._meter.cancelled += 1\n",
    ),
    Bug(
        "queue-survives-a-fault",
        "Waiting requests do not get the fault.",
        "_batcher.py",
        "fault=str(fault))\n        self._fail_queued()\n",
        "fault=str(fault))\n",
    ),
    Bug(
        "low-priority-starves",
        "Overtakings are not counted.",
        "_requests.py",
        "        for risen in self._by_priority.served(request):\n",
        "        for risen in ():\n",
    ),
    Bug(
        "close-forgets-the-queue",
        "Closing completes the running batches only, and fails the requests that wait.",
        "_batcher.py",
        "            await self._answered()\n            # The requests",
        "            self._fail_queued()\n            await self._answered()\n            # The requests",
    ),
    Bug(
        "place-of-a-failure",
        "A batch whose function raises keeps its place.",
        "_batcher.py",
        "            found = self._failures(failure)\n",
        "            found = self._failures(failure)\n"
        "            self._running[RunningBatch(0, (), 0, 0.0, 0.0)] = None\n",
    ),
    Bug(
        "results-of-others",
        "The results of requests that were cancelled in their batch are given to those after them.",
        "_batcher.py",
        "        self._delivery.put(running.requests, found, later=self._batches != before)\n",
        "        live = [request for request in running.requests if not request.done]\n"
        "        self._delivery.put(live, found, later=self._batches != before)\n",
    ),
]
