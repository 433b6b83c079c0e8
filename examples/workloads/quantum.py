"""A wave packet in a harmonic well, by the split-operator method, compared with the exact solution.

One step of length dt multiplies the wave function by half of the potential's phase, goes to momentum space by an FFT,
multiplies it by the kinetic energy's phase, comes back, and multiplies by the other half (Strang's splitting): the norm
stays 1, and the error falls with dt². A coherent state keeps its shape and swings like a pendulum, so that the error is
known at every time.

    python examples/workloads/quantum.py --points 256 --dimensions 2 --dt 0.02 --steps 1000 --plot quantum.svg

Units are natural: ħ = m = ω = 1, and a period takes 2π.
"""

from __future__ import annotations

import argparse
import collections
import functools
import hashlib
import json
import math
import sys
import time
from pathlib import Path
from typing import NamedTuple

import charts
import numpy as np
from program import check_outputs, run

import aiocuda
from aiocuda import ManagedContext, StepConfig

SOURCE = """
__device__ double2 times(double2 a, double2 b) { return make_double2(a.x * b.x - a.y * b.y, a.x * b.y + a.y * b.x); }

// Stockham's FFT, radix 2: each pass reads one half of the shared memory and writes the other, and the result comes out
// in order. roots[j] is exp(-2 pi i j / points); a sign of -1 makes the transform the inverse one, times points.
__device__ double2* transform(double2* from, double2* to, const double2* roots, int points, double sign)
{
    for (int run = 1; run < points; run *= 2) {
        __syncthreads();
        for (int i = threadIdx.x; i < points / 2; i += blockDim.x) {
            const double2 a = from[i], b = from[i + points / 2];
            const int first = i & ~(run - 1);
            const double2 root = make_double2(roots[first].x, sign * roots[first].y);
            to[i + first] = make_double2(a.x + b.x, a.y + b.y);
            to[i + first + run] = times(make_double2(a.x - b.x, a.y - b.y), root);
        }
        double2* const swap = from;
        from = to;
        to = swap;
    }
    __syncthreads();
    return from;
}

// A block takes a line of the grid: its points are `stride` apart, and the next line begins `pitch` further on.
extern "C" __global__ void split_step(double2* psi, const double2* potential, const double2* kinetic,
                                      const double2* roots, int points, int stride, int pitch, int before, int after)
{
    extern __shared__ double2 shared[];
    const long long line = (long long)blockIdx.x * pitch;
    for (int i = threadIdx.x; i < points; i += blockDim.x) {
        const long long at = line + (long long)i * stride;
        shared[i] = before ? times(psi[at], potential[at]) : psi[at];
    }
    double2* const waves = transform(shared, shared + points, roots, points, 1.0);
    for (int i = threadIdx.x; i < points; i += blockDim.x) waves[i] = times(waves[i], kinetic[i]);
    double2* const other = waves == shared ? shared + points : shared;
    const double2* const moved = transform(waves, other, roots, points, -1.0);
    for (int i = threadIdx.x; i < points; i += blockDim.x) {
        const long long at = line + (long long)i * stride;
        psi[at] = after ? times(moved[i], potential[at]) : moved[i];
    }
}

// Of each row: the sums of |psi|^2, x |psi|^2, y |psi|^2, and |psi - exact|^2. The order of the additions is fixed.
extern "C" __global__ void measure(const double2* psi, const double* axis, const double2* exact, double* sums,
                                   int points)
{
    extern __shared__ double parts[];
    double sum[4] = {0.0, 0.0, 0.0, 0.0};
    for (int i = threadIdx.x; i < points; i += blockDim.x) {
        const double2 here = psi[(long long)blockIdx.x * points + i];
        const double2 there = times(exact[i], exact[points + blockIdx.x]);
        const double density = here.x * here.x + here.y * here.y;
        const double x = here.x - there.x, y = here.y - there.y;
        sum[0] += density;
        sum[1] += axis[i] * density;
        sum[2] += axis[blockIdx.x] * density;
        sum[3] += x * x + y * y;
    }
    for (int k = 0; k < 4; k++) parts[4 * threadIdx.x + k] = sum[k];
    for (int half = blockDim.x / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half)
            for (int k = 0; k < 4; k++) parts[4 * threadIdx.x + k] += parts[4 * (threadIdx.x + half) + k];
    }
    __syncthreads();
    if (threadIdx.x < 4) sums[4 * blockIdx.x + threadIdx.x] = parts[threadIdx.x];
}
"""


def transform(lines, roots):
    """The kernel's FFT of each row."""
    count, points = lines.shape
    run = 1
    while run < points:
        a, b = lines.reshape(count, 2, points // (2 * run), run).swapaxes(0, 1)
        lines = np.empty((count, points // (2 * run), 2, run), np.complex128)
        np.add(a, b, out=lines[:, :, 0])
        np.subtract(a, b, out=lines[:, :, 1])
        lines[:, :, 1] *= roots[: points // 2 : run, None]
        run *= 2
    return lines.reshape(count, points)


def split_step_on_host(psi, potential, kinetic, roots, points, stride, pitch, before, after):
    grid, phase = psi.reshape(-1, points), potential.reshape(-1, points)
    if before:
        grid *= phase
    lines = grid if stride == 1 else grid.T
    waves = transform(lines, roots)
    waves *= kinetic
    lines[:] = transform(waves, roots.conj())
    if after:
        grid *= phase


def measure_on_host(psi, axis, exact, sums, points):
    grid, (x, y) = psi.reshape(-1, points), exact.reshape(2, points)
    rows = len(grid)
    density = grid.real**2 + grid.imag**2
    away = grid - y[:rows, None] * x
    found = sums.reshape(rows, 4)
    found[:, 0] = density.sum(axis=1)
    found[:, 1] = (density * axis).sum(axis=1)
    found[:, 2] = found[:, 0] * axis[:rows]
    found[:, 3] = (away.real**2 + away.imag**2).sum(axis=1)


split_step = aiocuda.Kernel("split_step", source=SOURCE, host=split_step_on_host)
measure = aiocuda.Kernel("measure", source=SOURCE, host=measure_on_host)


class Well:
    """The grid, the initial wave packet, and the exact state at any time.

    Positions and momenta have the same range, √(π points / 2) to both sides, so the packet has the same width in both.
    It starts 1 to 3 from the centre of that plane, along each axis, as the seed determines.
    """

    def __init__(self, points: int, dimensions: int, seed: int) -> None:
        self.points, self.dimensions = points, dimensions
        self.rows = points ** (dimensions - 1)
        self.spacing = math.sqrt(2 * math.pi / points)
        self.axis = self.spacing * (np.arange(points) - points // 2)
        self.momenta = 2 * math.pi * np.fft.fftfreq(points, self.spacing)
        self.roots = np.exp(-2j * math.pi * np.arange(points) / points)
        random = np.random.default_rng(seed)
        self.radius, self.angle = random.uniform(1, 3, dimensions), random.uniform(0, 2 * math.pi, dimensions)

    def centre(self, time: float):
        """Return the position and the momentum of the packet, along each axis."""
        return self.radius * np.cos(self.angle - time), self.radius * np.sin(self.angle - time)

    def exact(self, time: float):
        """Return the factors of the wave function along x and along y; 1 for a missing axis."""
        waves = np.ones((2, self.points), np.complex128)
        for wave, x, p in zip(waves, *self.centre(time), strict=False):
            phase = p * self.axis - x * p / 2 - time / 2
            wave[:] = math.pi**-0.25 * np.exp(-((self.axis - x) ** 2) / 2 + 1j * phase)
        return waves

    def start(self):
        """Return the initial wave function."""
        x, y = self.exact(0.0)
        return y[: self.rows, None] * x

    def phases(self, dt: float):
        """Return the factors of half a step for the potential, and of a step for the kinetic energy along one axis.

        The latter includes the factor of the inverse transform.
        """
        squares = self.axis**2 + (self.axis**2)[: self.rows, None] * (self.dimensions == 2)
        return np.exp(-0.25j * dt * squares), np.exp(-0.5j * dt * self.momenta**2) / self.points


class Sample(NamedTuple):
    """Return the measurements after a number of steps."""

    step: int
    time: float
    norm: float
    error: float  #: √∫|ψ - exact|²
    position: list[float]  #: the mean, along each axis
    exact_position: list[float]


class Evolution:
    """The wave function on the device. Each step of the context advances it by several time steps.

    While the device runs one step, the host computes the exact state at the end of the next one.
    """

    def __init__(self, well: Well, dt: float, context: ManagedContext) -> None:
        self.well, self.dt, self.context = well, dt, context

    async def run(self, ranges):
        """Run the steps of each range and measure after each; yields the samples."""
        well, stream, under_way = self.well, self.context.stream("upload"), collections.deque()
        arrays = well.start(), *well.phases(self.dt), well.roots, well.axis
        buffers = await aiocuda.gather(*map(stream.upload, arrays))
        self.psi, self.potential, self.kinetic, self.roots, self.axis = buffers
        for steps in ranges:
            under_way.append(steps.stop)
            exact = well.exact(steps.stop * self.dt)
            config = StepConfig({"exact": exact}, functools.partial(self.compute, len(steps)), ["sums"])
            telemetry = await self.context.triple_buffered_step(config)
            if telemetry is not None:  # of the one before the last
                yield self.sample(under_way.popleft(), telemetry)
        for telemetry in await self.context.flush():
            yield self.sample(under_way.popleft(), telemetry)

    def compute(self, steps, slot):
        """Enqueue the time steps and the sums."""
        points, rows, stream = self.well.points, self.well.rows, slot.stream
        threads, room = min(points // 2, 512), 32 * points
        tables = self.psi, self.potential, self.kinetic, self.roots, points
        for _ in range(steps):
            if self.well.dimensions == 1:
                stream.launch(split_step, 1, threads, *tables, 1, points, 1, 1, shared_bytes=room)
            else:  # the kinetic energies along x and y commute: first all rows, then all columns
                stream.launch(split_step, points, threads, *tables, 1, points, 1, 0, shared_bytes=room)
                stream.launch(split_step, points, threads, *tables, points, 1, 0, 1, shared_bytes=room)
        exact, sums = slot.buffer("exact"), slot.buffer("sums", (rows, 4), np.float64)
        return stream.launch(measure, rows, 128, self.psi, self.axis, exact, sums, points, shared_bytes=128 * 32)

    def sample(self, step, telemetry):
        well, at = self.well, step * self.dt
        cell = well.spacing**well.dimensions
        density, x, y, away = (cell * telemetry.outputs["sums"].sum(axis=0)).tolist()
        position = [x / density, y / density][: well.dimensions]
        return Sample(step, at, math.sqrt(density), math.sqrt(away), position, well.centre(at)[0].tolist())

    async def state(self):
        """Return the wave function after all steps."""
        return await self.context.stream("download").download(self.psi)


async def main(options):
    well = Well(options.points, options.dimensions, options.seed)
    ranges = [
        range(first, min(first + options.every, options.steps)) for first in range(0, options.steps, options.every)
    ]
    async with ManagedContext(driver=options.driver, asynchronous=options.mode == "async") as context:
        evolution = Evolution(well, options.dt, context)
        began = time.perf_counter()
        samples = [sample async for sample in evolution.run(ranges)]
        seconds = time.perf_counter() - began
        return report(options, context, samples, await evolution.state(), seconds)


def report(options, context, samples, state, seconds):
    last = samples[-1]
    return {
        "workload": "quantum",
        "device": context.device.name,
        "driver": context.device.driver.name,
        "mode": options.mode,
        "streams_created": context.statistics().streams_created,
        "points": options.points,
        "dimensions": options.dimensions,
        "dt": options.dt,
        "steps": options.steps,
        "seed": options.seed,
        "seconds": seconds,
        "norm": last.norm,
        "norm_drift": max(abs(sample.norm - 1) for sample in samples),
        "error": last.error,
        "state": hashlib.sha256(state.tobytes()).hexdigest(),
        "history": [sample._asdict() for sample in samples],
    }


def picture(found):
    history = found["history"]
    times = [sample["time"] for sample in history]
    places = []
    for axis in range(found["dimensions"]):
        name = "xy"[axis]
        places.append(charts.Line(f"⟨{name}⟩", times, [sample["position"][axis] for sample in history]))
        exact = [sample["exact_position"][axis] for sample in history]
        places.append(charts.Line(f"{name} exactly", times, exact, dashed=True))
    errors = [charts.Line("‖ψ - exact‖", times, [sample["error"] for sample in history])]
    norms = [charts.Line("norm - 1", times, [sample["norm"] - 1 for sample in history])]
    title = f"A coherent state on {found['points']} points, {found['dimensions']}-D, dt {found['dt']:g}"
    return charts.draw(
        f"{title} ({found['driver']}, {found['mode']})",
        "time (a period takes 2π)",
        [
            charts.Chart("mean position", places),
            charts.Chart("error", errors, logarithmic=True),
            charts.Chart("norm - 1", norms),
        ],
    )


def parse(arguments=None):
    parser = argparse.ArgumentParser(description="a wave packet in a harmonic well, by the split-operator method")
    parser.add_argument("--points", type=int, default=256, help="along each axis: a power of two, 64 to 4096")
    parser.add_argument("--dimensions", type=int, choices=(1, 2), default=1)
    parser.add_argument("--dt", type=float, default=0.02, help="of a step; a period takes 2π")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--every", type=int, default=10, help="steps from one sample to the next")
    parser.add_argument("--seed", type=int, default=1, help="where the packet begins")
    parser.add_argument("--driver", choices=("auto", "host", "simulated", "cuda"), default="auto")
    parser.add_argument("--mode", choices=("sync", "async"), default="async")
    parser.add_argument("--json", metavar="FILE", help="- for the standard output")
    parser.add_argument("--plot", metavar="FILE.svg")
    options = parser.parse_args(arguments)
    if not (64 <= options.points <= 4096 and options.points.bit_count() == 1):
        parser.error(f"--points is {options.points}: it takes a power of two, 64 to 4096")
    if not 0 < options.dt <= 1:
        parser.error(f"--dt is {options.dt}: it takes more than 0 and at most 1")
    if min(options.steps, options.every) < 1 or options.seed < 0:
        parser.error("--steps and --every take 1 or more, --seed 0 or more")
    check_outputs(parser, options.json, options.plot)
    return options


if __name__ == "__main__":
    options = parse()
    found = run(main(options))
    if options.json == "-":
        json.dump(found, sys.stdout, indent=1)
    else:
        kept = f"norm kept to {found['norm_drift']:.1e}, error {found['error']:.2e}"
        print(f"{found['steps']} steps of {found['dt']:g}: {kept}, {found['seconds']:.1f} s ({found['driver']})")
        if options.json:
            Path(options.json).write_text(json.dumps(found, indent=1), encoding="utf-8")
    if options.plot:
        Path(options.plot).write_text(picture(found), encoding="utf-8")
