"""The metric of each figure in the statistics of devices, pools, pipelines, loaders, batchers and clusters."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, Final, Literal, TypeAlias

__all__ = ["EXCLUDED", "NESTED", "TABLES", "Metric", "Reading", "readings"]

Kind: TypeAlias = Literal["counter", "gauge", "histogram"]

#: Labels and the value of one sample; for a histogram, the number of observations of each value.
Reading: TypeAlias = tuple["Metric", dict[str, str], Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Metric:
    """The metric of one field of a statistics class.

    Attributes
    ----------
    field
        The field. Its value is a number, or a mapping from a key to a number. None has no sample.
    name
        The name of the metric. That of a counter ends with ``_total``.
    kind
        A counter only grows, until its object is made again. A value that can decrease is a gauge.
    text
        The HELP text.
    key
        The label that has the key, if the value is a mapping. A histogram has none.
    scale
        Factor from the field's unit to the metric's.
    quantile
        The value of the label ``quantile``, for a percentile.
    """

    field: str
    name: str
    kind: Kind
    text: str
    key: str | None = None
    scale: float = 1.0
    quantile: str | None = None

    def labels(self) -> tuple[str, ...]:
        """Return the names of the labels that this metric adds to those of its object."""
        found = () if self.key is None else (self.key,)
        return found if self.quantile is None else (*found, "quantile")

    def readings(self, value: Any, labels: dict[str, str]) -> Iterator[Reading]:
        """Yield the samples of a field's value."""
        if self.quantile is not None:
            labels = {**labels, "quantile": self.quantile}
        if self.kind == "histogram":
            yield self, labels, value
        elif self.key is None:
            if value is not None:
                yield self, labels, value * self.scale
        else:
            for key, each in value.items():
                if each is not None:
                    yield self, {**labels, self.key: str(key)}, each * self.scale


def _counter(field: str, name: str, text: str, key: str | None = None) -> Metric:
    return Metric(field, f"aiocuda_{name}_total", "counter", text, key)


def _gauge(
    field: str, name: str, text: str, key: str | None = None, scale: float = 1.0, quantile: str | None = None
) -> Metric:
    return Metric(field, f"aiocuda_{name}", "gauge", text, key, scale, quantile)


def _percentiles(fields: tuple[str, str], name: str, text: str, scale: float = 1.0) -> tuple[Metric, Metric]:
    """Return the metrics of the fields with the 50th and the 99th percentile."""
    return tuple(  # type: ignore[return-value]  # as many as fields
        _gauge(field, name, text, scale=scale, quantile=quantile)
        for field, quantile in zip(fields, ("0.5", "0.99"), strict=True)
    )


#: The metrics of each statistics class, by the name of the class: the classes of higher layers cannot be imported here.
TABLES: Final[Mapping[str, tuple[Metric, ...]]] = {
    "DeviceStatistics": (
        _counter("submitted", "operations_submitted", "Operations that were enqueued on streams."),
        _counter("resolved", "operations_resolved", "Operations that have finished without an error."),
        _counter("failed", "operations_failed", "Operations that have failed."),
        _counter("abandoned", "operations_abandoned", "Operations whose result was given up."),
        _gauge("in_flight", "operations_in_flight", "Unfinished operations, on the host and on the device."),
        _counter("polls", "polls", "Queries of a stream queue."),
        _counter("sleeps", "sleeps", "Waits for operations by a timer."),
        _counter("parks", "parks", "Waits for operations by a notifier."),
        _gauge("armed", "notifiers_armed", "Notifiers that wait for an event at present."),
        _counter("notifications", "notifications", "Notifications of events and finished jobs that loops have read."),
        _counter("watchdog_wakes", "watchdog_wakes", "Ticks of the watchdog."),
        _counter("lost_wakes", "lost_wakes", "Notifiers that did not report a finished event."),
        _counter(
            "driver_calls_waited", "driver_calls_waited",
            "Calls of the driver that have taken more than 20 ms beside unfinished work, for all its devices.",
        ),
        _gauge("streams", "streams_open", "Open streams."),
        _counter("streams_created", "streams_created", "CUDA streams that the driver has created."),
        _gauge("events", "driver_events", "Events of the driver, for all its devices."),
        _gauge("threads", "driver_threads", "Threads of the driver, for all its devices."),
    ),
    "MemoryStatistics": (
        _gauge("live_bytes", "memory_live_bytes", "Device memory of buffers that are in use."),
        _gauge("peak_bytes", "memory_peak_bytes", "Largest amount of device memory in use so far."),
        _gauge("reserved_bytes", "memory_reserved_bytes", "Device memory that the pool holds, in use or not."),
        _gauge("by_class", "memory_class_bytes", "Device memory in use, by size class.", "size_class"),
        _gauge("fragmentation", "memory_fragmentation_ratio", "Share of the reserved memory that is not in use."),
    ),
    "BatcherStatistics": (
        _counter("accepted", "batcher_requests_accepted", "Requests that were accepted."),
        _counter("answered", "batcher_requests_answered", "Requests that got a result."),
        _counter("failed", "batcher_requests_failed", "Requests that got an exception."),
        _counter("cancelled", "batcher_requests_cancelled", "Requests that were cancelled."),
        _counter("overloaded", "batcher_requests_overloaded", "Requests that were refused by a full queue."),
        _counter("refused", "batcher_requests_refused", "Requests that were refused by their deadline."),
        _counter("missed_deadlines", "batcher_requests_missed_deadline", "Accepted requests whose deadline passed."),
        _gauge("queued", "batcher_queue_length", "Requests that wait for a batch."),
        _gauge("running", "batcher_requests_running", "Requests in running batches."),
        Metric("sizes", "aiocuda_batcher_batch_size", "histogram", "Number of items in the batches that have ended."),
        _gauge("fill", "batcher_fill_ratio", "Average weight of a batch as a share of max_batch_size."),
        *_percentiles(
            ("wait_p50_s", "wait_p99_s"),
            "batcher_wait_seconds",
            "Time from submit to the beginning of the batch, over the last 1024 requests.",
        ),
        _gauge("predicted_s", "batcher_batch_predicted_seconds", "Predicted time of a batch, by bucket.", "bucket"),
        _gauge("actual_s", "batcher_batch_last_seconds", "Time of the last batch, by bucket.", "bucket"),
        _gauge("rate", "batcher_capacity_requests_per_second", "Requests per second that the batcher can serve."),
        _counter("results_copied", "batcher_results_copied", "Results with a part in the memory of a slot."),
        _counter("blocks_replaced", "batcher_blocks_replaced", "Blocks that were held when the next batch came."),
    ),
    "LoaderStats": (
        _counter("batches", "loader_batches", "Batches that were delivered."),
        _counter("samples", "loader_samples", "Samples in the batches that were delivered."),
        _counter("skipped", "loader_samples_skipped", "Samples that have failed and were skipped."),
        _counter("padded", "loader_samples_padded", "Delivered samples that repeat other samples of the epoch."),
        _counter("kept", "loader_batches_kept", "Batches that another library still held at the next request."),
        _counter("restarts", "loader_worker_restarts", "Worker processes started in place of lost ones."),
        _counter("set_aside", "loader_samples_set_aside", "Samples that have exceeded the timeout on a thread."),
        _counter("nbytes", "loader_uploaded_bytes", "Bytes that were copied to the device."),
        _gauge("workers", "loader_workers", "Samples that are decoded at a time."),
        _counter("start_seconds", "loader_start_seconds", "Time from openings until the worker processes were ready."),
        _counter("wall_seconds", "loader_wall_seconds", "Time of all epochs."),
        _counter("source_seconds", "loader_source_seconds", "Time in which the source was read."),
        _counter("decode_seconds", "loader_decode_seconds", "Time of decoding, of all workers together."),
        _counter("upload_seconds", "loader_upload_seconds", "Device time of the uploads."),
        _counter("consumer_seconds", "loader_consumer_seconds", "Time for which the consumer has had batches."),
        _counter("waited_seconds", "loader_waited_seconds", "Time for which the consumer has waited for batches."),
        _counter("decode_cpu_seconds", "loader_decode_cpu_seconds", "Processor time of decoding."),
        _counter("process_cpu_seconds", "loader_process_cpu_seconds", "Processor time of this process in all epochs."),
        _counter("decode_queued_seconds", "loader_decode_queued_seconds", "Time of decoding, queued for a processor."),
        _gauge("throttled_share", "loader_throttled_ratio", "Share of periods in which the quota was used up."),
        _gauge("gil_share", "loader_gil_ratio", "Share of the time in which a thread had to wait for the GIL."),
    ),
    "DeviceBatchesStats": (
        _counter("batches", "device_batches", "Batches of another loader that were delivered."),
        _counter("kept", "device_batches_kept", "Such batches that another library still held at the next request."),
        _counter("nbytes", "device_batches_uploaded_bytes", "Bytes of such batches that were copied to the device."),
        _counter("wall_seconds", "device_batches_wall_seconds", "Time of all iterations of such batches."),
        _counter("source_seconds", "device_batches_source_seconds", "Time in which the other loader was read."),
        _counter("consumer_seconds", "device_batches_consumer_seconds", "Time for which the consumer has had batches."),
        _counter("waited_seconds", "device_batches_waited_seconds", "Time for which the consumer has waited for them."),
    ),
    "PipelineStats": (
        _counter("iterations", "pipeline_items", "Items that have passed all stages."),
        _counter("skipped", "pipeline_items_skipped", "Items that a stage has skipped."),
        _gauge("average_ms", "pipeline_item_mean_seconds", "Mean time of an item, of the last 4096.", scale=1e-3),
        *_percentiles(
            ("p50_ms", "p99_ms"), "pipeline_item_seconds", "Time of an item, of the last 4096.", scale=1e-3
        ),
        _gauge("utilisation", "pipeline_utilisation_ratio", "Share of the time of the busiest stage that processes."),
        _gauge("overlap_efficiency", "pipeline_overlap_ratio", "Share of the time with a busy slowest stage."),
        _gauge("peak_busy_slots", "pipeline_busy_slots_peak", "Largest number of slots that were busy together."),
        _counter("wall_seconds", "pipeline_wall_seconds", "Time in which at least one slot was busy."),
        _gauge("stage_seconds", "pipeline_stage_busy_seconds", "Estimated busy time of each stage so far.", "stage"),
        _counter("source_seconds", "pipeline_source_seconds", "Time of waits for the source with a free slot."),
        _counter("consumer_seconds", "pipeline_consumer_seconds", "Time for which the consumer has had results."),
        _counter("results_copied", "pipeline_results_copied", "Results with a part in the memory of a slot."),
        _counter("blocks_replaced", "pipeline_blocks_replaced", "Blocks that were held when the next item came."),
    ),
    "CoordinatorStatistics": (
        _counter("by_kind", "coordinator_operations", "Operations that were registered, by kind.", "kind"),
        _gauge("waiting", "coordinator_operations_waiting", "Operations that no stream has yet."),
        _gauge("in_flight", "coordinator_operations_in_flight", "Operations on streams that have not finished."),
        _counter("done", "coordinator_operations_done", "Operations that have finished without an error."),
        _counter("failed", "coordinator_operations_failed", "Operations that have failed."),
        _counter("skipped", "coordinator_operations_skipped", "Operations skipped because of another failure."),
        _counter("abandoned", "coordinator_operations_abandoned", "Operations whose result was given up."),
        _gauge("average_overhead", "coordinator_overhead_seconds", "Mean host time of the coordinator per operation."),
        _counter("deadlocks", "coordinator_deadlocks", "Deadlocks that were found."),
        _counter("dropped", "coordinator_finished_dropped", "Finished operations that no poll has returned in time."),
    ),
    "StreamPoolStatistics": (
        _gauge("minimum", "stream_pool_streams_minimum", "Smallest number of streams."),
        _gauge("maximum", "stream_pool_streams_maximum", "Largest number of streams."),
        _gauge("streams", "stream_pool_streams", "Streams of the pool."),
        _gauge("peak", "stream_pool_streams_peak", "Largest number of streams so far."),
        _counter("made", "stream_pool_streams_created", "Streams that the pool has created."),
        _counter("closed", "stream_pool_streams_closed", "Streams that the pool has closed."),
        _gauge("leases", "stream_pool_leases", "Present leases."),
        _gauge("exclusive", "stream_pool_leases_exclusive", "Present exclusive leases."),
        _gauge("waiting", "stream_pool_requests_waiting", "Requests that wait for a stream."),
        _counter("leased", "stream_pool_leases_granted", "Leases so far."),
        _counter("waited", "stream_pool_leases_waited", "Leases that had to wait for a stream."),
        _gauge("utilisation", "stream_pool_utilisation_ratio", "Share of the maximum that is leased or at work."),
    ),
    "WorkloadStatistics": (
        _counter("leases", "stream_pool_workload_leases", "Leases whose operations have ended, by workload."),
        _counter("seconds", "stream_pool_workload_seconds", "Time of the leases that have ended, by workload."),
        *_percentiles(
            ("p50_ms", "p99_ms"), "stream_pool_workload_lease_seconds", "Time of a lease, of the last 512.", scale=1e-3
        ),
    ),
    "EventPoolStatistics": (
        _gauge("limit", "event_pool_events_maximum", "Events that may be lent at the same time."),
        _gauge("lent", "event_pool_events_lent", "Events that are lent."),
        _gauge("lent_timing", "event_pool_events_lent_timing", "Timing events that are lent."),
        _gauge("peak", "event_pool_events_lent_peak", "Largest number of events lent so far."),
        _counter("acquired", "event_pool_loans", "Loans so far."),
        _counter("waited", "event_pool_loans_waited", "Loans that had to wait for an event."),
        _gauge("utilisation", "event_pool_utilisation_ratio", "Share of the limit that is lent."),
    ),
    "StreamStatistics": (
        _counter("operations", "stream_operations", "Operations that were enqueued on the stream."),
        _counter("launches", "stream_launches", "Launches of kernels."),
        _counter("uploads", "stream_uploads", "Copies to the device."),
        _counter("downloads", "stream_downloads", "Copies from the device."),
        _counter("copies", "stream_copies", "Copies between device buffers."),
        _counter("fills", "stream_fills", "Fills of buffers."),
        _counter("bytes_uploaded", "stream_uploaded_bytes", "Bytes copied to the device."),
        _counter("bytes_downloaded", "stream_downloaded_bytes", "Bytes copied from the device."),
        _counter("bytes_copied", "stream_copied_bytes", "Bytes copied between device buffers."),
        _gauge("average_ms", "stream_operation_mean_seconds", "Mean time of the last 512 operations.", scale=1e-3),
        *_percentiles(
            ("p50_ms", "p99_ms"), "stream_operation_seconds", "Time of an operation, of the last 512.", scale=1e-3
        ),
        _gauge("live_bytes", "stream_live_bytes", "Device memory in use that was allocated through the stream."),
        _gauge("peak_bytes", "stream_peak_bytes", "Largest amount of such memory so far."),
    ),
    "ResourceStatistics": (
        _gauge("live_bytes", "resource_live_bytes", "Memory that is allocated from the resource."),
        _gauge("peak_bytes", "resource_peak_bytes", "Largest amount of allocated memory so far."),
        _counter("allocations", "resource_allocations", "Allocations that have succeeded."),
        _counter("deallocations", "resource_deallocations", "Deallocations."),
        _counter("refusals", "resource_refusals", "Allocations that have failed."),
        _gauge("by_class", "resource_class_bytes", "Allocated memory, by size class.", "size_class"),
    ),
    "ClusterStatistics": (
        _gauge("waiting", "cluster_calls_waiting", "Calls that wait for a replica to be restarted."),
        _counter("retries", "cluster_calls_retried", "Calls sent to another replica because theirs was lost."),
    ),
    "ReplicaStatistics": (
        _gauge("epoch", "cluster_replica_epoch", "Number of the present process: 1 for the first."),
        _counter("calls", "cluster_replica_calls", "Calls that were sent to the replica."),
        _counter("answered", "cluster_replica_calls_answered", "Calls whose method has returned."),
        _counter("failed", "cluster_replica_calls_failed", "Calls whose method has raised."),
        _counter("lost", "cluster_replica_calls_lost", "Calls that the replica was running when it was lost."),
        _gauge("in_flight", "cluster_replica_calls_in_flight", "Calls that the replica is running."),
        *_percentiles(
            ("latency_p50_s", "latency_p99_s"),
            "cluster_replica_latency_seconds",
            "Time from a call to its reply, over the last 1024.",
        ),
        _counter("restarts", "cluster_replica_restarts", "Processes started in place of a lost one."),
        _gauge("running", "cluster_replica_up", "1 while the replica is running, otherwise 0."),
    ),
}  # fmt: skip

#: Fields whose items are statistics themselves: their class, the label for the item, and the item's field that is its
#: value; None for the key of a mapping.
NESTED: Final[Mapping[str, Mapping[str, tuple[str, str, str | None]]]] = {
    "StreamPoolStatistics": {"workloads": ("WorkloadStatistics", "workload", None)},
    "ClusterStatistics": {"replicas": ("ReplicaStatistics", "replica", "index")},
}

#: Fields without a metric, with the reason.
EXCLUDED: Final[Mapping[str, Mapping[str, str]]] = {
    "DeviceStatistics": {"core": "a name"},
    "BatcherStatistics": {"batches": "the count of the histogram of sizes"},
    "LoaderStats": {"executor": "a name", "fatal": "indices of samples, which are counted as skipped"},
    "PipelineStats": {"throughput": "the rate of the items"},
    "CoordinatorStatistics": {"registered": "the sum over the kinds"},
    "StreamPoolStatistics": {"strategy": "a name"},
    "WorkloadStatistics": {"average_ms": "the time divided by the leases"},
    "ReplicaStatistics": {"index": "a label", "state": "the metric of `running`", "last_loss": "a text"},
}


def readings(statistics: Any, labels: dict[str, str]) -> Iterator[Reading]:
    """Yield the samples of a statistics object, and of those that it contains."""
    name = type(statistics).__name__
    for metric in TABLES[name]:
        if metric.field == "running" and name == "ReplicaStatistics":
            value: Any = float(statistics.state == "running")
        else:
            value = getattr(statistics, metric.field)
        yield from metric.readings(value, labels)
    for field, (_, label, index) in NESTED.get(name, {}).items():
        value = getattr(statistics, field)
        items = value.items() if index is None else ((getattr(each, index), each) for each in value)
        for key, each in items:
            yield from readings(each, {**labels, label: str(key)})
