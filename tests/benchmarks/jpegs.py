"""JPEG files of the size of photographs, and the decoder of a training script: a module for worker processes."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["SIDE", "JpegSamples", "WriteJpeg", "decoded", "write_files"]

SIDE = 224
_WIDTH, _HEIGHT = 500, 375


def write_files(folder: Path, count: int) -> list[str]:
    """Write so many JPEG files of 500 x 375 pixels, of about 60 KB each; return their paths."""
    from PIL import Image  # type: ignore[import-not-found,unused-ignore]

    random, paths = np.random.default_rng(0), []
    for number in range(count):
        coarse = random.integers(0, 256, (_HEIGHT // 12 + 1, _WIDTH // 12 + 1, 3), np.uint8)
        image = Image.fromarray(coarse).resize((_WIDTH, _HEIGHT), Image.Resampling.BICUBIC)
        noise = random.integers(-12, 13, (_HEIGHT, _WIDTH, 3))
        pixels = np.clip(np.asarray(image) + noise, 0, 255).astype(np.uint8)
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, "jpeg", quality=85)
        path = folder / f"{number}.jpg"
        path.write_bytes(file.getvalue())
        paths.append(str(path))
    return paths


def decoded(path: str) -> Any:
    """Return the middle of an image, resized: uint8, of shape (224, 224, 3)."""
    from PIL import Image

    with Image.open(path) as image:
        box = ((_WIDTH - _HEIGHT) // 2, 0, (_WIDTH + _HEIGHT) // 2, _HEIGHT)
        return np.asarray(image.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BILINEAR, box))


class WriteJpeg:
    """``decode(sample, out)`` of our loader."""

    def __init__(self, paths: list[str]) -> None:
        self.paths = paths

    def __call__(self, index: int, out: Any) -> None:
        image, label = out
        image[...] = decoded(self.paths[index % len(self.paths)])
        label[...] = index % 1000


class JpegSamples:
    """A dataset of PyTorch: an image as a tensor, and its label."""

    def __init__(self, paths: list[str], length: int) -> None:
        self.paths, self.length = paths, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        import torch

        return torch.from_numpy(decoded(self.paths[index % len(self.paths)]).copy()), index % 1000
