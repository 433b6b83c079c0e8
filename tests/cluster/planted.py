"""Planted bugs of the cluster, and the test that must find each. They were chosen before the tests were written."""

from __future__ import annotations

from tests.planting import Bug

__all__ = ["BUGS"]

BUGS = [
    Bug(
        "answer-of-a-lost-epoch",
        "A reply that arrives after the loss is accepted, by a call that the loss has not failed yet.",
        "_replica.py",
        "        if epoch != self.epoch or self._lost.done():\n            return  # a late reply",
        "        if outer.done():\n            return  # a late reply",
    ),
    Bug(
        "run-twice",
        "A request that arrives twice is run twice.",
        "_server.py",
        "        if not self._seen.add(body.id):\n            known = self._runs.get(body.id)\n",
        "        if not self._seen.add(body.id) and body.id not in self._runs:\n            known = None\n",
    ),
    Bug(
        "run-of-an-old-epoch",
        "A request of an old epoch is run.",
        "_server.py",
        "        if request.epoch not in (ANY_EPOCH, self.info.epoch):\n",
        "        if request.epoch > self.info.epoch:\n",
    ),
    Bug(
        "run-after-its-cancellation",
        "A call that was cancelled before it arrived runs.",
        "_server.py",
        "            self._seen.add(cancelled)\n",
        "",
    ),
    Bug(
        "one-restart-more",
        "The limit of restarts is off by one.",
        "_replica.py",
        "        if len(times) >= self._limit:\n",
        "        if len(times) > self._limit:\n",
    ),
    Bug(
        "back-off-constant",
        "The back-off does not double.",
        "_replica.py",
        "min(FIRST_DELAY * 2.0 ** min(len(times), 10), LONGEST_DELAY)",
        "FIRST_DELAY",
    ),
    Bug(
        "sent-again-without-retry",
        "A call without retry is sent again.",
        "_cluster.py",
        "                if not retry:\n                    raise\n",
        "",
    ),
    Bug(
        "loss-leaves-its-calls",
        "A loss does not fail the calls in flight.",
        "_replica.py",
        "        self._wakes.wake_all(waiting, functools.partial(_fail, self._error))\n",
        "",
    ),
    Bug(
        "waiting-calls-sleep-on",
        "Waiting calls are not woken when a replica runs again.",
        "_replica.py",
        "        self.state = state\n        self._changes.notify()\n",
        '        self.state = state\n        if state != "running":\n            self._changes.notify()\n',
    ),
    Bug(
        "work-of-a-failed-call",
        "The predicted work is not taken back when a call fails.",
        "_replica.py",
        "            meter.end()\n            self._work = self._work - work if meter.in_flight else 0.0\n"
        "        reply: Reply = packet.message\n",
        "            meter.end()\n            self._work -= work\n"
        "        reply: Reply = packet.message\n"
        "        if reply.failure is not None:\n            self._work += work\n",
    ),
    Bug(
        "settled-calls-are-kept",
        "A replica never forgets calls that are settled.",
        "_server.py",
        "            self._runs.pop(settled, None)\n",
        "",
    ),
    Bug(
        "objects-are-not-created-again",
        "A replica that is started again has no objects.",
        "_replica.py",
        "        for program in tuple(self._programs.values()):\n",
        "        for program in tuple(self._programs.values()) if self.epoch == 1 else ():\n",
    ),
    Bug(
        "silence-does-not-count",
        "Probes that are not answered do not count.",
        "_replica.py",
        "            unanswered = 0 if self._answered else unanswered + 1\n",
        "            unanswered = 0\n",
    ),
    Bug(
        "cancelled-here-only",
        "A call that is cancelled goes on in the replica.",
        "_server.py",
        "            if run is not None:\n                run.cancel()\n",
        "",
    ),
]
