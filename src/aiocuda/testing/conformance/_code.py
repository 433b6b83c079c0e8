"""Kernels: loading them, and the arguments of launches."""

from __future__ import annotations

import numpy as np
import pytest

from ...driver.protocol import CudaSource, LoadedKernel, Program
from ...errors import CompileError, InvalidTypeError, UnsupportedError
from ..kernels import AFFINE, EXTENT, SAXPY, SCALARS
from ._base import Conformance
from ._rig import Rig, span

__all__ = ["CodeConformance"]


class CodeConformance(Conformance):
    """Rules for kernels: loading, compiling, and the arguments of launches."""

    def test_saxpy(self, rig: Rig) -> None:
        """A kernel with scalar and pointer arguments computes y + 2.5 x."""
        n = 10_001
        x = np.linspace(-1, 1, n, dtype="f4")
        y = np.linspace(5, 3, n, dtype="f4")
        dx, dy = rig.uploaded(x), rig.uploaded(y)
        stream = rig.stream()
        rig.launch(stream, SAXPY, n, 2.5, span(dx, n, "f4"), span(dy, n, "f4"), grid=(40, 1, 1), block=(256, 1, 1))
        rig.finish(stream)
        np.testing.assert_allclose(rig.look(dy, n, "f4"), np.float32(2.5) * x + y, rtol=1e-6)
        assert (rig.look(dx, n, "f4") == x).all()

    def test_scalars_of_every_type_arrive(self, rig: Rig) -> None:
        """A kernel gets scalar arguments of every type unchanged."""
        out, stream = rig.memory(11 * 8), rig.stream()
        values = [-128, 2**53, True, -(2**15), 1.5e300, 255, -(2**31), 2**16 - 1, -0.375, 2**32 - 1, -(2**53)]
        rig.launch(stream, SCALARS, *values, span(out, 11, "f8"))
        rig.finish(stream)
        assert rig.look(out, 11, "f8").tolist() == values

    @pytest.mark.parametrize(
        ("grid", "block"),
        [((1, 1, 1), (1, 1, 1)), ((5, 4, 3), (8, 2, 1)), ((70_000, 1, 1), (1, 1, 64))],
        ids=["one", "three-dimensional", "large"],
    )
    def test_grid_and_block_arrive(self, rig: Rig, grid: tuple[int, int, int], block: tuple[int, int, int]) -> None:
        """A kernel sees the grid and the block of its launch."""
        out, stream = rig.memory(24), rig.stream()
        rig.launch(stream, EXTENT, span(out, 6, "u4"), grid=grid, block=block)
        rig.finish(stream)
        assert rig.look(out, 6, "u4").tolist() == [*grid, *block]

    def test_pointer_into_the_middle(self, rig: Rig) -> None:
        """A pointer argument may point into an allocation."""
        memory, stream = rig.memory(256), rig.stream()
        rig.affine(stream, memory + 64, 16, 1, 7)
        rig.finish(stream)
        assert rig.look(memory, 64, "u4").tolist() == [0] * 16 + [7] * 16 + [0] * 32

    def test_kernel_writes_page_locked_memory(self, rig: Rig) -> None:
        """A kernel may write page-locked host memory."""
        words, stream = rig.small(16, "u4"), rig.stream()
        rig.affine(stream, words.ctypes.data, 16, 1, 9)
        rig.finish(stream)
        assert (words == 9).all()

    def test_launch_keeps_the_values_that_it_was_given(self, rig: Rig) -> None:
        """A launch copies its arguments: a later change of the list has no effect."""
        memory, stream = rig.memory(64), rig.stream()
        launch = rig.driver.launcher(stream, rig.function(AFFINE), (1, 1, 1), (32, 1, 1), 0)
        arguments = rig.arguments(span(memory, 16, "u4"), 16, 10, 0)
        hold = rig.hold(stream)
        with rig.unblocked("launching"):
            for digit in (1, 2, 3):
                arguments[3] = digit
                launch(arguments)
        arguments[3] = 9
        hold.release()
        rig.finish(stream)
        assert (rig.look(memory, 16, "u4") == 123).all()

    def test_launchers_of_one_function_do_not_mix(self, rig: Rig) -> None:
        """Two launchers of one function launch into their own streams with their own arguments."""
        memory = rig.memory(128)
        first, second = rig.stream(), rig.stream()
        function = rig.function(AFFINE)
        launchers = [rig.driver.launcher(stream, function, (1, 1, 1), (32, 1, 1), 0) for stream in (first, second)]
        hold = rig.hold(first)
        launchers[0](rig.arguments(span(memory, 16, "u4"), 16, 1, 1))
        launchers[1](rig.arguments(span(memory + 64, 16, "u4"), 16, 1, 2))
        rig.finish(second)
        assert rig.look(memory, 32, "u4").tolist() == [0] * 16 + [2] * 16
        hold.release()
        rig.finish(first)
        assert rig.look(memory, 32, "u4").tolist() == [1] * 16 + [2] * 16

    def test_program_that_the_driver_cannot_run_is_refused(self, rig: Rig) -> None:
        """`load` refuses a program without the form that the driver needs."""
        driver = rig.driver
        program = Program("affine", AFFINE.format, host=AFFINE.host if driver.wants_image else None)
        with pytest.raises(UnsupportedError, match="affine"):
            rig.offload(lambda: driver.load(rig.device, program))

    def test_kernel_of_another_library_runs_as_its_host_implementation(self, rig: Rig) -> None:
        """A driver that runs host implementations ignores `Program.loaded`, and refuses a program with nothing else."""
        driver = rig.driver
        if driver.wants_image:
            return  # the kernel would have to be loaded by another library
        loaded = LoadedKernel(1, object())
        with pytest.raises(UnsupportedError, match="from_cuda_core"):
            rig.offload(lambda: driver.load(rig.device, Program("affine", AFFINE.format, loaded=loaded)))
        program = Program("affine", AFFINE.format, host=AFFINE.host, loaded=loaded)
        function = rig.offload(lambda: driver.load(rig.device, program))
        memory, stream = rig.memory(64), rig.stream()
        launch = driver.launcher(stream, function, (1, 1, 1), (32, 1, 1), 0)
        launch(rig.arguments(span(memory, 16, "u4"), 16, 0, 9))
        rig.finish(stream)
        assert (rig.look(memory, 16, "u4") == 9).all()

    def test_image_must_agree_with_the_format(self, rig: Rig) -> None:
        """`load` refuses an image with other parameters than the format."""
        driver = rig.driver
        if not driver.wants_image:
            return  # a host implementation declares no parameter types
        image, symbol, *_ = rig.offload(lambda: driver.compile(rig.device, CudaSource(AFFINE.name, AFFINE.source)))
        with pytest.raises(InvalidTypeError, match="affine"):
            rig.offload(lambda: driver.load(rig.device, Program("affine", "PiI", image=image, symbol=symbol)))

    def test_compile_error_has_the_log(self, rig: Rig) -> None:
        """`CompileError.log` names the error in the source."""
        driver = rig.driver
        if not driver.wants_image:
            return  # nothing is compiled
        source = CudaSource("broken", 'extern "C" __global__ void broken() { no_such_name(); }')
        with pytest.raises(CompileError) as caught:
            rig.offload(lambda: driver.compile(rig.device, source))
        assert "no_such_name" in caught.value.log
