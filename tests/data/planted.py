"""Planted bugs of the data loader, and the test that must find each. They were chosen before the tests were written."""

from __future__ import annotations

from tests.planting import Bug

__all__ = ["BUGS"]

BUGS = [
    Bug(
        "slot-released-by-count",
        "A slot is used again when later batches have begun, and not when its upload is complete.",
        "_epoch.py",
        "            self._wake(batch)\n        except BaseException as error:\n",
        "            self._wake(batch)\n"
        "            self._resources.slots.give_back(batch.job.slot)\n"
        "            self._give_back = lambda batch: None  # type: ignore[method-assign]\n"
        "        except BaseException as error:\n",
    ),
    Bug(
        "delivered-before-its-upload",
        "A batch is delivered when its upload has begun.",
        "_epoch.py",
        "            self._wake(batch)\n        except BaseException as error:\n",
        '            batch.state = "ready"\n            self._wake(batch)\n        except BaseException as error:\n',
    ),
    Bug(
        "named-stream-forgotten",
        "The memory does not wait for the streams that used_on() names.",
        "_batch.py",
        "        self._used_on[handle] = queue_of\n",
        "",
    ),
    Bug(
        "keep-ignored",
        "A kept batch is freed at the next request.",
        "_batch.py",
        '        if self.kept:\n            self._mark_uses()\n            return "kept"\n',
        "",
    ),
    Bug(
        "export-freed",
        "A batch that another library holds is freed at the next request.",
        "_batch.py",
        "            if block_of(buffer).is_exported:\n",
        "            if False:\n",
    ),
    Bug(
        "freed-after-own-stream",
        "The memory is used again after the work of the loader's stream, and not after that of other streams.",
        "_batch.py",
        "            try:\n                buffer.free()\n",
        "            block_of(buffer).uses.clear()\n            try:\n                buffer.free()\n",
    ),
    Bug(
        "gap-not-closed",
        "If a sample is skipped, the first rows are uploaded instead of those that were decoded.",
        "_upload.py",
        "stream.copy(target[part], array[begin:end])",
        "stream.copy(target[part], array[part])",
    ),
    Bug(
        "position-of-batches-ahead",
        "The state counts a batch when it begins, and not when it is delivered.",
        "_state.py",
        "        self._ends[number] = end\n",
        "        self._ends[number] = end\n        self._position, self._batches = end, number + 1\n",
    ),
    Bug(
        "batches-ahead-forgotten",
        "Batches that were delivered out of order are delivered again after a resume.",
        "_state.py",
        "            ahead=tuple(sorted({*self._ends, *self._ahead})),\n",
        "            ahead=(),\n",
        first=194,
    ),
    Bug(
        "no-padding",
        "Ranks have as many batches as they have samples, and not all the same number.",
        "_sources.py",
        "else -(-left // self._world)",
        "else -(-(left - self._rank) // self._world)",
    ),
    Bug(
        "slot-of-a-late-function",
        "The memory that a function still writes after its timeout is used for a later batch.",
        "_epoch.py",
        "        if not batch.job.expired:\n            self._resources",
        "        if True:\n            self._resources",
        "tests/data/test_timeouts.py::test_late_memory_is_another_range",
    ),
    Bug(
        "half-written-batch",
        "The rows of a worker process that was lost count as decoded.",
        "_processes.py",
        "        self._isolate(place, job, row, exit_code)\n",
        "        place.end_request()\n"
        "        self._report(job, place.rows, {}, {}, ThreadTimes())\n"
        "        return True\n"
        "        self._isolate(place, job, row, exit_code)\n",
        "tests/data/test_processes.py::test_a_lost_worker_is_replaced_and_its_samples_are_decoded_again",
    ),
    Bug(
        "rest-of-a-request-forgotten",
        "The other rows of a request whose process was lost count as decoded.",
        "_processes.py",
        "            self._rows.put_back(job, others)\n",
        "            self._report(job, others, {}, {}, ThreadTimes())\n",
        "tests/data/test_processes.py::test_no_sample_is_skipped_for_another_one",
    ),
    Bug(
        "skipped-at-the-first-loss",
        "A sample is skipped when one process has ended while it was decoding it.",
        "_processes.py",
        "MOST_TRIES = 2\n",
        "MOST_TRIES = 1\n",
        "tests/data/test_processes.py::test_no_sample_is_skipped_for_another_one",
    ),
    Bug(
        "copy-before-the-upload",
        "Samples are decoded into other memory and copied into the slot.",
        "_threads.py",
        "                self._decoder.write(index, job.sample(row), job.slot.row(row), place)\n",
        "                out = job.slot.row(row)\n"
        "                copies = {name: view.copy() for name, view in out.items()}\n"
        "                self._decoder.write(index, job.sample(row), copies, place)\n"
        "                for name, view in out.items():\n"
        "                    view[...] = copies[name]\n",
        "tests/data/test_without_copies.py::test_the_device_reads_the_memory_that_decode_wrote",
    ),
]
