"""Decoders that need PyTorch at the top of their module: the server of the worker processes imports it."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch


def seed(sample: Any) -> Any:
    """Return this process, and the seed of its generator."""
    return np.array([os.getpid(), torch.initial_seed() % 2**62])
