"""The kernels that everybody runs, in CUDA C++: one that does nothing, and one that takes a given time.

`SPIN` watches ``%globaltimer``, which counts nanoseconds whatever the clock of the multiprocessors does; a loop of a
given number of cycles would take 5.7 times as long on an idle H200 (345 MHz) as on a busy one (1 980 MHz). Its own
time is still measured, with timing events, in each run.
"""

from __future__ import annotations

EMPTY = 'extern "C" __global__ void empty() {}'

SPIN = """
extern "C" __global__ void spin(unsigned long long nanoseconds) {
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
    do {
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    } while (now - start < nanoseconds);
}
"""
