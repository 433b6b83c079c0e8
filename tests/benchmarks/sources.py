"""The kernels that are run, in CUDA C++: one that does nothing, one that takes a given time, one that reads memory.

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

READ = """
extern "C" __global__ void read(const unsigned int *words, unsigned int *sum, unsigned long long count) {
    unsigned int found = 0;
    unsigned long long step = (unsigned long long)gridDim.x * blockDim.x;
    for (unsigned long long i = (unsigned long long)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += step)
        found += words[i];
    atomicAdd(sum, found);
}
"""
