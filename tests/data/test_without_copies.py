"""The device reads the memory that decode wrote: the source of every upload is mapped to the views of the samples."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import aiocuda
from aiocuda.data import DataLoader
from aiocuda.driver.host import HostDriver
from tests.data.samples import addresses, place_of

#: Views of one page for each sample, so that no two samples lie at the same place by chance.
FIELDS: dict[str, Any] = {"a": ((256,), np.int64), "b": ((), np.int64), "raw": ((3,), np.uint8)}


class NotesUploads(HostDriver):
    """A host driver that notes the source of each upload."""

    def __init__(self) -> None:
        super().__init__()
        self.uploads: list[tuple[int, int]] = []

    def upload(self, stream: int, target: int, source: int, nbytes: int) -> None:
        self.uploads.append((source, nbytes))
        super().upload(stream, target, source, nbytes)

    def recorded_upload(self, stream: int, target: int, source: int, nbytes: int) -> Any:
        call = super().recorded_upload(stream, target, source, nbytes)

        def noted(waits: Any, event: int) -> None:
            self.uploads.append((source, nbytes))
            call(waits, event)

        return noted


@pytest.mark.slow
@pytest.mark.asyncio
@pytest.mark.parametrize("executor", ["thread", "process"])
async def test_the_device_reads_the_memory_that_decode_wrote(executor: Any) -> None:
    """Each sample contains the addresses of its own views; in a process, their offsets in the shared file."""
    driver = NotesUploads()
    async with aiocuda.open_device(driver=driver) as device:
        async with DataLoader(
            device, range(37), fields=FIELDS, decode=addresses, batch_size=5, workers=3, executor=executor
        ) as loader:
            batches = 0
            async for batch in loader:
                uploads = [(place_of(source), nbytes) for source, nbytes in driver.uploads]
                for field in ("a", "b"):
                    host = await batch.stream.download(batch[field])
                    written = host.reshape(len(host), -1)[:, 0].tolist()
                    begin = written[0]
                    assert written == [begin + row * host[0].nbytes for row in range(len(host))]
                    assert (begin, host.nbytes) in uploads
                batches += 1
            assert len(driver.uploads) == 3 * batches  # one for each field, and nothing else
