from __future__ import annotations

import ctypes
import functools
import gc
import os
import signal
import sys
from collections.abc import Callable, Generator, Iterable
from pathlib import Path
from typing import Any

import pytest

from aiocuda._base._checks import has_gil
from aiocuda._core._form import form
from tests.helpers import device, latch, no_blocking_calls, other, stream

__all__ = ["device", "latch", "no_blocking_calls", "other", "stream"]

#: The tests that compare a measured time with a limit. They get the mark `alone`: `make slow` runs them last, one by
#: one. Together they take at most 90 s. All other tests use virtual time, counts, latches, or a condition with a
#: generous end.
ALONE: frozenset[str] = frozenset((
    "tests/cli/test_doctor_checks.py::test_a_long_switch_interval",
    "tests/cli/test_doctor_checks.py::test_threads_that_compute_keep_the_gil",
    "tests/cli/test_doctor_checks.py::test_timers_of_a_blocked_loop_are_late",
    "tests/cli/test_main.py::test_the_stages_of_the_demo_overlap",
    "tests/completion/test_alarm.py::test_alarm_is_more_precise_than_timers_of_the_loop",
    "tests/completion/test_reactor.py::test_256_waiting_streams_take_at_most_5_percent_of_a_core",
    "tests/data/test_advice.py::test_decoder_that_computes_on_a_busy_machine_is_said_to_be_queued",
    "tests/data/test_advice.py::test_decoders_that_share_the_gil_get_processes",
    "tests/data/test_advice.py::test_decoders_that_wait_get_more_workers_than_there_are_processors",
    "tests/data/test_advice.py::test_processor_time_of_processes_is_that_of_the_decoder",
    "tests/data/test_advice.py::test_training_loop_that_waits_for_the_gil_is_not_the_bottleneck",
    "tests/data/test_processes.py::test_a_process_that_exceeds_the_timeout_is_killed",
    "tests/data/test_processes.py::test_a_sample_that_its_process_has_not_begun_exceeds_its_timeout",
    "tests/data/test_timeouts.py::test_a_late_function_writes_into_no_later_batch",
    "tests/data/test_timeouts.py::test_a_late_sample_raises_at_its_turn",
    "tests/data/test_timeouts.py::test_late_memory_is_another_range",
    "tests/data/test_timeouts.py::test_more_late_samples_than_workers_end_the_epoch",
    "tests/data/test_timeouts.py::test_others_go_on_in_its_place",
    "tests/driver/host/test_memory.py::test_upload_download_and_kernel_overlap",
    *(
        f"tests/driver/test_conformance.py::{driver}::{test}"
        for driver in ("TestHostConformance", "TestCudaConformance")
        for test in (
            "test_upload_compute_and_download_overlap",
            "test_two_copies_of_one_direction_share_an_engine",
            "test_kernels_of_eight_streams_overlap",
        )
    ),
    "tests/load/test_service.py::test_overload_costs_no_goodput_and_refused_clients_can_come_back",
    "tests/memory/test_interchange.py::test_arrays_cross_in_both_directions",
    "tests/observe/test_page.py::test_cost_of_a_page_is_linear",
    "tests/observe/test_page.py::test_twenty_thousand_spans_are_drawn_in_ten_times_the_time_of_twenty_at_most",
    "tests/observe/test_requests.py::test_blocked_iteration_has_the_line_that_the_log_event_names",
    "tests/observe/test_requests.py::test_each_blocked_iteration_has_its_own_line",
    "tests/observe/test_requests.py::test_garbage_collection_that_blocks_the_loop_is_named",
    "tests/observe/test_trace.py::test_cost_of_a_trace_is_linear",
    "tests/pipeline/test_advice_about_the_host.py::test_functions_that_share_the_gil_help_in_processes",
    "tests/pipeline/test_advice_about_the_host.py::test_nothing_is_promised_where_kernels_of_the_host_driver_share_the_gil",
    "tests/pipeline/test_advice_about_the_host.py::test_stage_that_blocks_the_loop_gets_no_more_items_and_helps_in_a_thread",
    "tests/pipeline/test_advice_about_the_host.py::test_stage_that_waits_gets_more_items_at_a_time",
    "tests/pipeline/test_bound.py::test_figures_are_those_of_the_exported_trace_on_a_gpu",
    "tests/pipeline/test_replay.py::test_figures_on_a_gpu",
    "tests/project/test_import.py::test_import_time_without_the_required_packages",
    "tests/test_host_use.py::test_gil_is_free_while_a_thread_waits",
    "tests/test_host_use.py::test_gil_that_a_thread_keeps_is_taken",
))  # fmt: skip

_FILLS = "fills the memory of the device"
_FAULTS = "faults the device: CUDA of other processes waits meanwhile"
_TIMES = "compares times of the device or of the host"
_FREES = "expects that the device has executed all frees, which other processes delay"
_STARTS = "starts 28 processes, each with a time limit"
_CUDA = "tests/driver/test_conformance.py::TestCudaConformance"

#: Files, functions and cases of tests that run alone on a GPU, too, and why. They get the mark `alone_on_a_gpu`, which
#: only `python -m tests.gpu` uses: it runs them, and those in `ALONE`, after all others and one by one.
ALONE_ON_A_GPU: dict[str, str] = {
    f"{_CUDA}::test_out_of_memory_reports_sizes_and_is_not_permanent": _FILLS,
    "tests/bad_input/test_refused.py::test_refused_alike_on_each_driver[cuda-7-2**46 bytes]": _FILLS,
    "tests/features/test_g.py::test_no_room_is_an_error_with_sizes_and_leaves_everything_usable": _FILLS,
    "tests/memory/test_bad_input.py::test_more_than_the_device_has": _FILLS,
    f"{_CUDA}::test_high_priority_goes_first": "needs all multiprocessors: those of others take turns",
    f"{_CUDA}::test_kernels_of_eight_streams_overlap": _TIMES,
    f"{_CUDA}::test_two_copies_of_one_direction_share_an_engine": _TIMES,
    f"{_CUDA}::test_upload_compute_and_download_overlap": _TIMES,
    "tests/completion/test_reactor.py::test_256_waiting_streams_take_at_most_5_percent_of_a_core": _TIMES,
    "tests/memory/test_interchange.py": _TIMES,
    "tests/memory/test_no_room.py::test_closed_device_keeps_nothing_in_the_pool_of_its_driver": _FREES,
    "tests/memory/test_unified_gpu.py::test_prefetch_moves_the_pages": _TIMES,
    "tests/memory/test_unified_gpu.py::test_read_mostly_leaves_a_copy_with_each_reader": _TIMES,
    "tests/pipeline/test_advice_about_the_host.py": _TIMES,
    "tests/pipeline/test_bound.py::test_figures_are_those_of_the_exported_trace_on_a_gpu": _TIMES,
    "tests/cluster/test_gpu.py": _FAULTS,
    "tests/driver/cuda/test_gpu.py::test_fault_is_latched_for_good": _FAULTS,
    "tests/faults/test_cuda_faults.py": _FAULTS,
    "tests/integrations/test_torch_torture.py::test_fault_in_a_kernel_of_torch_reaches_every_waiter": _FAULTS,
    "tests/faults/test_exit.py::test_some_of_each_on_a_gpu": _STARTS,
}  # fmt: skip

#: Files whose tests start processes that open the GPU. With 32 hardware queues each, an H200 has room for 12 to 19
#: processes, and the next gets ``cuDevicePrimaryCtxRetain: out of memory``. So `python -m tests.gpu` runs these tests
#: after the others, with a quarter as many processes side by side. They get the mark `few_on_a_gpu`.
FEW_ON_A_GPU: frozenset[str] = frozenset((
    "tests/cli/test_bench.py",
    "tests/cli/test_doctor.py",
    "tests/cli/test_main.py",
    "tests/cluster/test_local.py",
    "tests/completion/test_loops.py",
    "tests/core/test_form.py",
    "tests/driver/cuda/test_fork.py",
    "tests/driver/cuda/test_gpu.py",
    "tests/driver/cuda/test_probe.py",
    "tests/examples/test_examples.py",
    "tests/examples/test_training.py",
    "tests/faults/test_fork.py",
    "tests/faults/test_workers.py",
    "tests/features/test_j.py",
    "tests/integrations/test_cupy.py",
    "tests/integrations/test_requirements.py",
    "tests/integrations/test_torch_torture.py",
    "tests/kernels/test_cuda_core.py",
    "tests/memory/test_shadow.py",
    "tests/project/test_docs.py",
    "tests/project/test_uninstalled.py",
    "tests/stream/test_beside_torch.py",
    "tests/stream/test_new_method.py",
    "tests/testing/test_plugin.py",
))  # fmt: skip

_FORM = "there is no compiled core on free-threaded Python"
_STACK = "no stack of another thread is read on free-threaded Python"
_PROMPT = "without the GIL, what a dropped object holds may go only in a garbage collection"
_BYTES = "objects are larger on free-threaded Python"

#: Functions of tests that free-threaded Python cannot run, and why: they are skipped there. Tests of CUDA are skipped
#: in `tests.driver.cuda.fake.build` and `tests.helpers.open_peer`.
NEEDS_GIL: dict[str, str] = {
    "tests/context/test_context.py::test_memory_that_a_context_and_its_parts_take": _BYTES,
    "tests/context/test_context.py::test_memory_that_entering_takes_with_a_driver_of_its_own": _BYTES,
    "tests/core/test_build.py::test_reason_why_nothing_can_be_compiled": _FORM,
    "tests/core/test_form.py::test_command_that_builds_runs_where_the_compiled_form_is_asked_for": _FORM,
    "tests/core/test_reentrancy.py::test_garbage_collection_at_every_allocation": "without the GIL, a collection waits "
    "for more garbage than one object",
    "tests/data/test_processes.py::test_a_closed_loader_keeps_no_descriptor": _PROMPT,
    "tests/data/test_processes.py::test_a_worker_that_cannot_be_replaced_leaves_nothing": _PROMPT,
    "tests/data/test_processes.py::test_a_worker_that_cannot_start_leaves_nothing": _PROMPT,
    "tests/test_log.py::test_a_callback_that_blocks_inside_asyncio_is_named": _STACK,
    "tests/test_log.py::test_a_callback_that_blocks_the_loop_is_named": _STACK,
    "tests/test_log.py::test_a_garbage_collection_that_blocks_the_loop_is_named": _STACK,
    "tests/test_log.py::test_a_handler_of_the_standard_library_gets_lines": _STACK,
    "tests/test_log.py::test_callback_that_blocks_the_loop_while_requests_wait_is_named": _STACK,
    "tests/test_log.py::test_line_that_the_collector_interrupts_is_the_innermost_one": _STACK,
    "tests/test_performance_warnings.py::test_stage_that_blocks_the_loop": _STACK,
    "tests/test_stacks.py::test_collections_stay_disabled": _STACK,
    "tests/test_stacks.py::test_stack_is_shown_as_in_a_traceback": _STACK,
    "tests/test_stacks.py::test_stack_is_whole_though_a_collection_lets_its_thread_go_on": _STACK,
}

# Without an installed aiocuda, only this line loads the plugin. An installed aiocuda has an entry point with the name
# of the module: pytest finds the plugin registered, and this line does nothing.
pytest_plugins = ["aiocuda.testing.plugin"]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the project's short form of ``--aiocuda-require-gpu``, and ``--delay-jobs``."""
    group = parser.getgroup("aiocuda")
    group.addoption("--require-gpu", action="store_true", help="--aiocuda-require-gpu")
    group.addoption("--delay-jobs", type=float, metavar="SECONDS", help="delay each job of a thread by 0 to SECONDS")


def pytest_configure(config: pytest.Config) -> None:
    """Translate ``--require-gpu``, install the delays, and restore the handler of Ctrl-C.

    A background job of a shell ignores Ctrl-C; tests and their children need it.
    """
    if config.getoption("require_gpu"):
        config.option.aiocuda_require_gpu = True
    if config.getoption("delay_jobs"):
        from tests.delays import JobDelays

        delays = JobDelays(config.getoption("delay_jobs"))
        delays.install(pytest.MonkeyPatch())
        config.pluginmanager.register(delays)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if form().missing is not None:  # a checkout is not always compiled: `test_form.py` tests the warning
        config.addinivalue_line("filterwarnings", "ignore:.*so it runs in Python:aiocuda.errors.PerformanceWarning")


@functools.cache
def _has_driver() -> bool:
    """True if libcuda can be loaded. It is not initialised: some tests fork first."""
    try:
        ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return False
    return True


def _needs_gpu(value: Any) -> bool:
    return any(mark.name == "gpu" for mark in getattr(value, "marks", ()))


@pytest.hookimpl(tryfirst=True)  # before pytest calls `parametrize` for marks and fixtures
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Leave out parameters marked ``gpu`` if there is no NVIDIA driver, since a sixth of all tests would be skipped.

    All remain with ``--require-gpu``, and if ``-m`` names ``gpu``. A test with such parameters only keeps them.
    """
    config = metafunc.config
    if config.getoption("aiocuda_require_gpu") or "gpu" in config.getoption("markexpr", "") or _has_driver():
        return
    parametrize = metafunc.parametrize

    def parametrize_without_gpu(
        argnames: Any,
        argvalues: Iterable[Any],
        *,
        ids: Iterable[Any] | Callable[[Any], Any] | None = None,
        **options: Any,
    ) -> None:
        values = list(argvalues)
        kept = [index for index, value in enumerate(values) if not _needs_gpu(value)] or range(len(values))
        if ids is not None and not callable(ids):
            names = list(ids)
            ids = [names[index] for index in kept] if len(names) == len(values) else names
        parametrize(argnames, [values[index] for index in kept], ids=ids, **options)

    vars(metafunc)["parametrize"] = parametrize_without_gpu


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark the tests in `ALONE`, `ALONE_ON_A_GPU`, `FEW_ON_A_GPU` and `NEEDS_GIL`.

    The project's mark ``gpu`` becomes the plugin's ``aiocuda_gpu``. The shipped conformance suite has no mark of this
    project, so its slow tests are marked here.
    """
    function = item.nodeid.partition("[")[0]
    if function in ALONE:
        item.add_marker("alone")
    if not ALONE_ON_A_GPU.keys().isdisjoint((item.nodeid, function, function.partition("::")[0])):
        item.add_marker("alone_on_a_gpu")
    if function.partition("::")[0] in FEW_ON_A_GPU:
        item.add_marker("few_on_a_gpu")
    if function in NEEDS_GIL and not has_gil():
        item.add_marker(pytest.mark.skip(reason=NEEDS_GIL[function]))
    marker = item.get_closest_marker("gpu")
    if marker is not None:
        item.add_marker(pytest.mark.aiocuda_gpu(*marker.args, **marker.kwargs))
    if item.get_closest_marker("python_core") is not None and form().name == "compiled":
        item.add_marker(pytest.mark.skip(reason="AIOCUDA_CORE=python runs it"))
    if isinstance(item, pytest.Function) and item.function.__qualname__.startswith("OverlapConformance."):
        item.add_marker(pytest.mark.slow)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the soak tests, unless ``-m`` names them. With several processes, let the longest files begin.

    With ``--require-gpu``, where a skip is an error, also those that the core in use cannot run.
    """
    if "PYTEST_XDIST_WORKER" in os.environ:
        places = {file: place for place, file in enumerate(_LONGEST)}
        items.sort(key=lambda item: places.get(item.nodeid.partition("::")[0], len(places)))
    marks = [] if "soak" in config.getoption("markexpr", "") else ["soak"]
    if config.getoption("aiocuda_require_gpu") and form().name == "compiled":
        marks.append("python_core")
    for mark in marks:
        dropped = [item for item in items if item.get_closest_marker(mark) is not None]
        if dropped:
            config.hook.pytest_deselected(items=dropped)
            items[:] = [item for item in items if item.get_closest_marker(mark) is None]


#: Files whose tests take long. They begin first, in this order: no process then waits for another one at the end.
_LONGEST = (
    # In `make slow`.
    *("tests/simulation/test_command.py", "tests/coordination/test_planted.py", "tests/simulation/test_forms.py"),
    *("tests/lives/test_planted.py", "tests/project/test_left_behind.py", "tests/coordination/test_hypothesis.py"),
    *("tests/cluster/test_losses.py", "tests/core/test_build.py"),
    # In `make test`, from 30 to 5 s, of a processor or of waiting.
    *("tests/project/test_docs.py", "tests/data/test_processes.py", "tests/examples/test_examples.py"),
    *("tests/project/test_lives.py", "tests/test_performance_warnings.py", "tests/testing/test_fixtures.py"),
    *("tests/benchmarks/test_rows.py", "tests/lives/test_task_factories.py", "tests/serving/asgi/test_lifespan.py"),
    *("tests/pipeline/test_sampling.py", "tests/pipeline/test_simulated.py"),
    *("tests/completion/test_wakeup_schedules.py", "tests/coordination/test_checker.py", "tests/cli/test_main.py"),
    *("tests/cluster/test_cluster.py", "tests/cluster/test_local.py", "tests/driver/cuda/test_compiler.py"),
)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage while tests are collected: where that compiles them, it takes a third of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Exclude the collected tests from garbage collections: many tests make some, of a third of a second each.

    What has become garbage is collected first: it may hold threads.
    """
    gc.collect()
    gc.freeze()


_folder_of_last_test: list[Path] = []


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Before the first test of a folder, collect what others have left, and exclude the rest."""
    if _folder_of_last_test != [item.path.parent]:
        _folder_of_last_test[:] = [item.path.parent]
        gc.collect()
        gc.freeze()
