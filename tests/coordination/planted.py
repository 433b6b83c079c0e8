"""Planted bugs of collectives, and the test that must find each. They were chosen before the programs were written."""

from __future__ import annotations

from tests.planting import Bug

__all__ = ["BUGS"]

BUGS = [
    Bug(
        "chunk-twice",
        "The last item of a chunk is combined twice.",
        "_collectives.py",
        "        yield low, min(low + max(1, step), stop)\n",
        "        yield low, min(low + max(1, step) + 1, stop)\n",
    ),
    Bug(
        "kernel-too-early",
        "The kernel does not wait for the chunks of other devices.",
        "_collectives.py",
        "                    compute.wait(copies.copy(landing, part))\n",
        "                    copies.copy(landing, part)\n",
    ),
    Bug(
        "landing-too-early",
        "A chunk is copied over one that the kernel still reads.",
        "_collectives.py",
        "                    copies.wait(read[slot])\n",
        "",
    ),
    Bug(
        "gather-too-early",
        "Other devices get the result of a part before it is there.",
        "_collectives.py",
        '        compute = self._lanes[self._owner, "compute"]\n        result',
        '        compute = self._lanes[self._owner, "copy"]\n        result',
    ),
    Bug(
        "tree-too-early",
        "A device of a broadcast does not wait for its parent.",
        "_collectives.py",
        "                lane.wait(arrived[parent])\n",
        "",
        first=225,
    ),
    Bug(
        "begin-too-early",
        "The streams of other devices do not wait for the dependencies of the node.",
        "_collectives.py",
        "            self.wait(self.begin)\n",
        "            pass\n",
    ),
    Bug(
        "end-too-early",
        "The node ends before the work of other streams.",
        "_collectives.py",
        "                first.wait(end)\n",
        "                pass\n",
    ),
    Bug(
        "wrong-order",
        "The owner's buffers are combined before those of other devices.",
        "_collectives.py",
        "                parts.append(part)\n",
        "                parts.insert(len(parts) if part.size and carrier is not self._owner else 0, part)\n",
    ),
    Bug(
        "partial-forgotten",
        "The 9th and later sources replace the partial results of the first 8.",
        "_collectives.py",
        "CONTINUES * (first > 0) | UNFINISHED",
        "UNFINISHED",
    ),
    Bug(
        "rounded-twice",
        "Partial results of float16 are rounded to float16.",
        "_reductions.py",
        "                partial[:n] = total\n",
        "                partial[:n] = narrow(total)\n",
        first=34,
    ),
    Bug(
        "streams-left-open",
        "The streams of other devices are not closed with the coordinator.",
        "_coordinator_streams.py",
        "        return found + [(resources, stream) for (resources, _, _), stream in self._lanes.items()]\n",
        "        return found\n",
    ),
    Bug(
        "parts-forgotten",
        "Nothing waits for what other streams have accepted of a collective that has failed.",
        "_scheduled_node.py",
        "        for operations in (self.parts, *(other",
        "        for operations in ((), *(other",
        first=132,
    ),
    Bug(
        "failure-stays",
        "A stream keeps the failure of a collective, and skips those that were waiting for it.",
        "_collectives.py",
        "                        lane.queue.poison.delivered = True\n",
        "                        pass\n",
        test="tests/coordination/test_collectives.py::test_refused_call_fails_only_the_node",
    ),
]
