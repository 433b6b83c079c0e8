"""Counter-based random numbers: each is a function of its purpose and its counter, and of no earlier number.

Philox4x32-10 of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), as CUDA C++ and
as NumPy. The numbers are the same on every driver, in any order of use.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

__all__ = ["EXCHANGE", "GRAPH", "ORDER", "SOURCE", "START", "VISIT", "WEIGHTS", "draw", "philox", "scaled"]

# The purposes of numbers: two purposes never share a number.
START: Final = 1  # the colours at the start
ORDER: Final = 2  # the order of the visits
VISIT: Final = 3  # the new colour of a vertex
EXCHANGE: Final = 4  # the exchange of replicas
WEIGHTS: Final = 5  # the reservoir's
GRAPH: Final = 6

SOURCE = """
struct Words { unsigned a, b, c, d; };

// Philox4x32-10: four words for one counter and one key.
__device__ inline Words philox(unsigned a, unsigned b, unsigned c, unsigned d, unsigned key, unsigned other) {
    for (int round = 0; round < 10; ++round) {
        unsigned high = __umulhi(0xD2511F53u, a), low = 0xD2511F53u * a;
        unsigned top = __umulhi(0xCD9E8D57u, c), bottom = 0xCD9E8D57u * c;
        a = top ^ b ^ key;
        b = bottom;
        c = high ^ d ^ other;
        d = low;
        key += 0x9E3779B9u;
        other += 0xBB67AE85u;
    }
    return Words{a, b, c, d};
}

__device__ inline Words draw(unsigned long long seed, unsigned purpose, unsigned sweep, unsigned replica,
                             unsigned index, unsigned part) {
    return philox(index, replica, sweep, purpose << 24 | part, (unsigned)seed, (unsigned)(seed >> 32));
}

// A word as one of so many.
__device__ inline int scaled(unsigned word, int many) { return (int)__umulhi(word, (unsigned)many); }
"""

Words = npt.NDArray[np.uint32]

_LOW: Final = np.uint64(0xFFFFFFFF)
_HALF: Final = np.uint64(32)


def philox(a: Any, b: Any, c: Any, d: Any, key: int, other: int) -> tuple[Words, Words, Words, Words]:
    """Return four words for each counter of four words; the shapes are broadcast."""
    a, b, c, d = (np.asarray(word, np.uint64) for word in (a, b, c, d))
    for _ in range(10):
        left, right = np.uint64(0xD2511F53) * a, np.uint64(0xCD9E8D57) * c
        a = (right >> _HALF) ^ b ^ np.uint64(key)
        b = right & _LOW
        c = (left >> _HALF) ^ d ^ np.uint64(other)
        d = left & _LOW
        key, other = (key + 0x9E3779B9) & 0xFFFFFFFF, (other + 0xBB67AE85) & 0xFFFFFFFF
    return a.astype(np.uint32), b.astype(np.uint32), c.astype(np.uint32), d.astype(np.uint32)


def draw(
    seed: int, purpose: int, sweep: int, replica: npt.ArrayLike, index: npt.ArrayLike, part: npt.ArrayLike = 0
) -> tuple[Words, Words, Words, Words]:
    """Return four random words for each combination of replica and index.

    Parameters
    ----------
    seed
        64 bits.
    replica, index, part
        Integers of 32 bits, ``part`` of 24, in shapes that can be broadcast.
    """
    last = np.uint64(purpose << 24) | np.asarray(part, np.uint64)
    return philox(index, replica, sweep, last, seed & 0xFFFFFFFF, seed >> 32)


def scaled(word: npt.NDArray[np.uint32], many: int) -> npt.NDArray[np.int64]:
    """Map each word to an integer from 0 to ``many - 1``."""
    return (word.astype(np.uint64) * np.uint64(many) >> _HALF).astype(np.int64)
