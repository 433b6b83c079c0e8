"""What the benchmark of data loaders loads: batches of some size, a decoder, and a step of the consumer on the GPU.

The decoders:

- ``memcpy``: a sample is a whole batch, and one copy from an array decodes it;
- ``images``: 64 samples of a batch are copied one by one;
- ``resize``: 64 images of 256 x 256 are resized to 224 x 224 by NumPy, bilinear along each axis;
- ``png``: 64 images of 224 x 224 are decoded by Pillow.
"""

from __future__ import annotations

import dataclasses
import io
import time
from typing import Any

import numpy as np

__all__ = [
    "CASES",
    "SPIN",
    "WORKERS",
    "Case",
    "DecodeBatch",
    "Decoder",
    "Indices",
    "TorchSamples",
    "WriteField",
    "batches_for",
    "marks",
    "sleep",
]

KIB, MIB = 1 << 10, 1 << 20
IMAGE = (224, 224, 3)
IMAGES = 64
WORKERS = 8

#: The measured part of a case is divided into windows, for a median: at most so many, of at least so many batches. Some
#: loaders deliver batches in groups, one of each worker.
WINDOWS, LEAST = 5, 2 * WORKERS

SPIN = """
extern "C" __global__ void spin(const unsigned char* batch, unsigned long long nanoseconds) {
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
    do {
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    } while (now - start < nanoseconds + batch[0] * 0ull);
}
"""


@dataclasses.dataclass(frozen=True)
class Case:
    """Batches of a size, a decoder, and the milliseconds of a step."""

    decoder: str
    nbytes: int
    step_ms: float

    @property
    def rows(self) -> int:
        return 1 if self.decoder == "memcpy" else IMAGES

    @property
    def sample_bytes(self) -> int:
        return self.nbytes // self.rows

    @property
    def name(self) -> str:
        size = f"{self.nbytes / 1e6:.2g} MB" if self.nbytes >= 1e6 else f"{self.nbytes / 1e3:.2g} KB"
        return f"{self.decoder}, {size}, step {self.step_ms:g} ms"


PAYLOAD = IMAGES * IMAGE[0] * IMAGE[1] * IMAGE[2]  # 9.6 MB
CASES = [
    *(Case("memcpy", nbytes, step) for nbytes in (64 * KIB, MIB, PAYLOAD, 64 * MIB) for step in (0.2, 1.0)),
    Case("images", PAYLOAD, 0.2),
    Case("resize", PAYLOAD, 1.0),
    Case("png", PAYLOAD, 1.0),
    # Where a loader may not help: tiny batches, and a long step.
    Case("memcpy", 4 * KIB, 0.02),
    Case("memcpy", MIB, 10.0),
]


class Decoder:
    """Decodes sample ``index`` of a case into an array of bytes. A process makes the large source data again."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self._data: list[Any] = self._make()

    def __getstate__(self) -> Any:
        return {"case": self.case, "_data": self._data if self.case.decoder in ("resize", "png") else None}

    def __setstate__(self, state: Any) -> None:
        self.case = state["case"]
        self._data = self._make() if state["_data"] is None else state["_data"]

    def __call__(self, index: int, out: Any) -> None:
        data = self._data[index % len(self._data)]
        if self.case.decoder == "resize":
            out[...] = resized(data, IMAGE[0], IMAGE[1]).reshape(-1)
        elif self.case.decoder == "png":
            from PIL import Image  # type: ignore[import-not-found,unused-ignore]

            out[...] = np.asarray(Image.open(io.BytesIO(data))).reshape(-1)
        else:
            np.copyto(out, data)

    def _make(self) -> list[Any]:
        bits = np.random.default_rng(0)
        if self.case.decoder == "resize":
            return [bits.integers(0, 255, (256, 256, 3), np.uint8) for _ in range(16)]
        if self.case.decoder == "png":
            from PIL import Image

            smooth = np.add.outer(np.arange(224), np.arange(224))[:, :, None] // 2 + np.zeros(3, int)
            made = []
            for number in range(16):
                file = io.BytesIO()
                noise = bits.integers(0, 8, IMAGE)
                Image.fromarray(((smooth + noise + number) % 256).astype(np.uint8)).save(file, "png")
                made.append(file.getvalue())
            return made
        count = 2 if self.case.sample_bytes > 16 * MIB else 8
        return [np.full(self.case.sample_bytes, number, np.uint8) for number in range(count)]


def resized(image: Any, height: int, width: int) -> Any:
    """Return the image, resized by linear interpolation along each axis."""
    for axis, size in ((0, height), (1, width)):
        at = np.linspace(0, image.shape[axis] - 1, size, dtype=np.float32)
        low = at.astype(np.intp)
        high = np.minimum(low + 1, image.shape[axis] - 1)
        share = (at - low).reshape((-1, 1, 1) if axis == 0 else (1, -1, 1))
        image = image.take(low, axis) * (1 - share) + image.take(high, axis) * share
    return image.astype(np.uint8)


class Indices:
    """A source whose samples are their indices."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


class WriteField:
    """``decode(sample, out)`` of our loader."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder

    def __call__(self, sample: int, out: Any) -> None:
        self.decoder(sample, out["x"])


class TorchSamples:
    """A dataset of PyTorch: it returns a tensor for each sample."""

    def __init__(self, length: int, decoder: Decoder) -> None:
        self.length, self.decoder = length, decoder

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        import torch

        tensor = torch.empty(self.decoder.case.sample_bytes, dtype=torch.uint8)
        self.decoder(index, tensor.numpy())
        return tensor


class DecodeBatch:
    """A stage of SPDL: it decodes the samples of a batch into one tensor."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder

    def __call__(self, indices: list[int]) -> Any:
        import torch

        batch = torch.empty((len(indices), self.decoder.case.sample_bytes), dtype=torch.uint8)
        for index, row in zip(indices, batch.numpy(), strict=True):
            self.decoder(index, row)
        return batch


def batches_for(case: Case, seconds: float) -> int:
    """Return how many batches a loader may take about that long for, at the best: some must be left."""
    decode = {"images": 20e-6, "resize": 0.4e-3, "png": 0.2e-3}.get(case.decoder, 0.0) * case.rows  # of eight workers
    return max(4 * LEAST, int(seconds / max(case.step_ms * 1e-3, case.nbytes / 50e9, decode)))


def marks(count: int) -> list[int]:
    """Return the batches whose steps end the windows; the first begins them. A quarter of the batches comes before."""
    first, last = count // 4 - 1, count - 1
    windows = min(WINDOWS, (last - first) // LEAST)
    return [first + (last - first) * window // windows for window in range(windows + 1)]


def sleep(batch: Any, nanoseconds: int) -> None:
    """Run a step on the host driver."""
    time.sleep(nanoseconds * 1e-9)  # noqa: TID251 - it stands for the work of a kernel
