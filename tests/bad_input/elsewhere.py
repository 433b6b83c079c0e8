"""Rows of the table of bad input that have tests where what they need is: a compiler, a cache, several devices."""

from __future__ import annotations

__all__ = ["ELSEWHERE"]

_CACHE = "tests/driver/cuda/test_cache.py::test_"
_COMPILER = "tests/driver/cuda/test_compiler.py::test_"

#: By their numbers. 73 is not here: nothing reads traces or settings from files. 74 waits for something that listens.
ELSEWHERE: dict[int, tuple[str, ...]] = {
    1: ("tests/memory/test_bad_input.py::test_size_out_of_range",),
    4: ("tests/memory/test_bad_input.py::test_size_of_a_wrong_type",),
    7: ("tests/memory/test_no_room.py::test_sizes_are_told_and_nothing_is_lost",),
    11: ("tests/memory/test_bad_input.py::test_nothing_at_all_has_its_place_in_the_order",),
    20: (
        "tests/memory/test_staging.py::test_there_and_back",
        "tests/memory/test_staging.py::test_loop_turns_while_bytes_move",
    ),
    21: ("tests/memory/test_bad_input.py::test_source_cannot_shrink_while_it_is_read",),
    22: ("tests/memory/test_bad_input.py::test_one_array_is_the_target_of_one_copy_at_a_time",),
    23: ("tests/memory/test_bad_input.py::test_mapped_file_as_a_source_and_a_target",),
    25: ("tests/memory/test_array_interface.py::test_wrong_entry_is_refused_by_name",),
    29: ("tests/memory/test_bad_input.py::test_buffer_of_another_device",),
    30: ("tests/driver/test_conformance.py::TestSimulatedPeers::test_event_of_another_device_is_refused",),
    34: ("tests/features/test_g.py::test_free_waits_on_the_device_for_every_stream_that_used_it",),
    38: (
        "tests/driver/test_conformance.py::TestHostConformance::test_destroyed_stream_cannot_be_imported",
        "tests/driver/test_conformance.py::TestSimulatedConformance::test_destroyed_stream_cannot_be_imported",
        "tests/driver/test_codes.py::test_classes",
    ),
    40: (
        "tests/driver/cuda/test_driver.py::test_context_of_the_calling_thread_stays",
        "tests/driver/test_conformance.py::TestCudaConformance::test_context_of_the_calling_thread_is_left_alone",
    ),
    43: ("tests/kernels/test_binding.py::test_a_dtype_mismatch_names_both_types",),
    44: ("tests/kernels/test_numbers.py::test_an_integer_is_taken_if_its_type_holds_it",),
    46: ("tests/kernels/test_source.py::test_a_hostile_source_takes_linear_time",),
    48: (
        f"{_COMPILER}no_include_directory_is_an_option",
        f"{_COMPILER}a_definition_is_no_further_option",
        "tests/kernels/test_kernel.py::test_an_option_outside_the_list_is_refused",
    ),
    49: (
        f"{_COMPILER}an_error_carries_the_compilers_words",
        f"{_COMPILER}an_error_directive",
        f"{_COMPILER}a_log_is_cut_at_its_limit",
        f"{_COMPILER}a_compilation_that_takes_too_long_is_stopped",
        f"{_COMPILER}a_compilation_that_takes_too_much_memory_is_stopped",
    ),
    50: (
        f"{_COMPILER}no_file_is_opened_where_includes_are_refused",
        f"{_COMPILER}nor_can_it_be_asked_what_files_there_are",
    ),
    51: (
        "tests/driver/cuda/test_code.py::test_image_that_does_not_load",
        "tests/driver/cuda/test_gpu.py::test_image_that_is_none",
        "tests/kernels/test_object_code.py::test_every_truncated_cubin_is_refused",
        "tests/kernels/test_object_code.py::test_code_that_a_gpu_refuses_is_a_compile_error",
    ),
    52: (
        f"{_CACHE}a_flipped_byte_is_noticed_and_can_be_replaced",
        f"{_CACHE}what_another_user_owns_is_not_trusted",
        f"{_CACHE}a_symbolic_link_is_not_followed",
        f"{_CACHE}a_directory_that_others_may_write_is_not_used",
        f"{_COMPILER}a_spoilt_entry_is_compiled_again",
    ),
    56: ("tests/completion/test_operation.py::test_waiting_in_another_loop_is_refused_before_any_driver_call",),
    63: (
        "tests/pipeline/test_failing.py::test_a_stage_that_raises_ends_the_run",
        "tests/pipeline/test_leaving.py::test_a_time_limit",
    ),
    67: (
        "tests/memory/test_guard.py::test_the_operation_that_uses_it_is_named",
        "tests/memory/test_guard.py::test_views_handed_out_before_ask_again",
    ),
    68: ("tests/driver/cuda/test_memory.py::test_devices_out_of_reach",),
    69: ("tests/driver/cuda/test_fork.py::test_every_method_is_refused_in_the_child",),
    70: ("tests/faults/test_host_faults.py::test_later_calls_raise_the_same_without_touching_the_driver",),
    71: ("tests/pool/test_events.py::test_acquire_waits_at_the_limit",),
    75: ("tests/driver/cuda/test_entry.py::test_garbage_in_the_environment_is_refused",),
    76: (
        "tests/completion/test_interrupted_submission.py::test_queued_operation_with_an_interrupted_call_is_not_done",
        "tests/completion/test_failure.py::test_interrupt_between_the_calls_of_a_launch_waits_for_the_kernel",
        "tests/memory/test_no_room.py::test_an_interrupt_between_allocation_and_use_loses_nothing",
    ),
    84: ("tests/cluster/test_cluster.py::test_wrong_arguments_of_spawn_and_call",),
    85: ("tests/observe/test_labels.py::test_wrong_labels_are_refused",),
    86: (
        "tests/observe/test_listen.py::test_wrong_listeners_are_refused",
        "tests/observe/test_page.py::test_a_title_is_a_string",
        "tests/cli/test_trace.py::test_a_refused_run_leaves_the_script_and_the_files_alone",
    ),
    87: (
        "tests/observe/test_prometheus.py::test_wrong_arguments",
        "tests/observe/test_opentelemetry.py::test_wrong_arguments",
        "tests/observe/test_nvtx.py::test_wrong_arguments",
    ),
}
