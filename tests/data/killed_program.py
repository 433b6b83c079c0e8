"""A program that trains with a data loader, commits its progress after each step, and may be killed at any time.

``python -m tests.data.killed_program FILE WORLD EXECUTOR``: the ranks run in one process, step by step. The file has
the indices of all samples so far, in the global order, and the state of the loader; it is replaced by one rename.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

import aiocuda
from aiocuda.data import Batch, DataLoader, Shuffle

SAMPLES, BATCH, EPOCHS = 61, 2, 3


def decode(sample: int, out: Any) -> None:
    out["x"][...] = sample


def flat(batches: list[Batch]) -> list[int]:
    """The samples of a step, in the global order: one of each rank in turn."""
    rows = itertools.zip_longest(*(batch.indices for batch in batches))
    return [index for row in rows for index in row if index is not None]


def load(file: Path) -> dict[str, Any]:
    if not file.exists():
        return {"indices": [[] for _ in range(EPOCHS)], "state": None}
    done: dict[str, Any] = json.loads(file.read_text())
    return done


async def main(file: Path, world: int, executor: Any) -> None:
    done = load(file)
    async with contextlib.AsyncExitStack() as stack:
        device = await stack.enter_async_context(aiocuda.open_device(driver="host"))
        ranks = [
            await stack.enter_async_context(
                DataLoader(
                    device, range(SAMPLES), fields={"x": ((), np.int64)}, decode=decode, batch_size=BATCH, workers=2,
                    executor=executor, shuffle=Shuffle(seed=7), shard=(rank, world),
                )
            )
            for rank in range(world)
        ]  # fmt: skip
        if done["state"] is not None:
            for rank in ranks:
                rank.load_state_dict(done["state"])
        print("pids", *(pid for rank in ranks for pid in rank.worker_pids), flush=True)  # noqa: T201 - for the test
        while (epoch := ranks[0].state_dict()["epoch"]) < EPOCHS:
            iterators = [aiter(rank) for rank in ranks]
            while True:
                batches = [batch for each in iterators if (batch := await anext(each, None)) is not None]
                left = SAMPLES - len(done["indices"][epoch])
                done["indices"][epoch] += flat(batches)[:left]  # without samples that repeat the start
                done["state"] = DataLoader.merge_state_dicts(rank.state_dict() for rank in ranks)
                new = file.with_suffix(".new")
                new.write_text(json.dumps(done))
                os.rename(new, file)
                print("step", flush=True)  # noqa: T201 - for the test
                if not batches:
                    break


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]))
