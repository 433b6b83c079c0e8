"""Names that programs look for on an object: those of other libraries, and of other designs. `lacks` reads them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

__all__ = ["CURES", "each_name"]

_AWAIT = "await it first, and use its result"
_BLOCK = "`async with device.stream() as stream`: streams do the work, such as stream.copy(target, source)"
_CALL = "`handle = await cluster.spawn(Model)`, then `await handle.call('method', …)`"
_CLOSE = "`await {0}.aclose()` closes it, as the end of `async with` does"
_EMPTY = "stream.empty(shape, dtype) makes a buffer"
_HANDLE = "`async with stream.lend() as handle` gives CUDA's handle to another library"
_LAUNCH = "stream.launch(kernel, grid, block, *arguments)"
_PINNED = "device.pinned(shape, dtype) makes page-locked memory, and `async with device.pin(array)` locks an array"
_STATISTICS = "{0}.statistics() has the figures"
_UNIFIED = "device.unified(shape, dtype) makes managed memory"

_ARRAY = (
    "shape dtype size ndim T numpy cpu copy_to_host to_host item tolist tobytes astype reshape sum mean max min prod "
    "std var argmax argmin all any"
)

#: For each class and module: names that it lacks, separated by spaces, and what to use in their place.
_CURES: Final[Mapping[str, Mapping[str, str]]] = {
    "AsyncCoordinator": {
        "launch launch_kernel queue_compute run execute submit": "coordinator.compute(kernel, grid, block, *arguments)",
        "queue_upload": "coordinator.upload(array) copies to the device",
        "queue_download": "coordinator.download(buffer) copies to the host",
        "fill copy memset memcpy": "`async with coordinator.operation('transfer', writes=[buffer]) as bracket`, and "
        "the methods of bracket.stream",
        "empty allocate": "coordinator.compute_stream.empty(shape, dtype) makes a buffer",
        "register begin_operation complete_operation": "`async with coordinator.operation(kind)` is for any library",
        "synchronize synchronize_all wait_all sync": "`await coordinator.drain()` waits for all operations",
        "allreduce": "it is called coordinator.all_reduce(buffers)",
        "barrier": "after= orders operations, and aiocuda.StreamBarrier is for streams",
        "detect_deadlocks": "it raises a DeadlockError by itself; AsyncCoordinator(device, deadlock_timeout=…)",
        "stats metrics get_metrics": _STATISTICS.format("coordinator"),
        "close": _CLOSE.format("coordinator"),
        "stream": "each of its operations has a stream: coordinator.compute_stream is one for kernels",
        "add add_node": "coordinator.compute(…), upload(…), download(…) and operation(kind) make nodes",
    },
    "Batch": {
        "inputs requests rows data array": "batch.items has one for each request",
        "buffer pinned": "batch.slot.buffer(name, shape, dtype) and batch.slot.pinned(name, shape, dtype) are memory",
        "device": "batch.stream.device is the device",
        "results outputs futures set_result set_results set_exception": "the function returns one result, or one "
        "exception, for each item of batch.items: `return results`",
    },
    "BatcherStatistics": {
        "queue_length queue_size": "it is called queued",
        "requests": "accepted counts them, and answered those with a result",
        "latency p50 p99 latency_p50 latency_p99 latency_p50_s latency_p99_s": "wait_p50_s and wait_p99_s are waits "
        "for a batch; predicted_s and actual_s its time",
        "mean_batch_size average_batch_size batch_size": "sizes has the number of batches of each size, and fill their "
        "average share of max_batch_size",
    },
    "Bracket": {"launch fill copy upload download empty": "bracket.stream has the methods of a stream"},
    "Capture": {"launch replay update close wait": "`async with stream.capture() as graph`, and the graph has it"},
    "Cluster": {
        "call submit map": _CALL,
        "rolling_restart restart": "open a second cluster, send it the later calls, and close the first one",
        "replicas num_replicas": "cluster.statistics().replicas has one entry for each",
        "stats metrics": _STATISTICS.format("cluster"),
        "close shutdown": _CLOSE.format("cluster"),
    },
    "ClusterStatistics": {
        "alive running healthy dead": "each entry of replicas has its state, and cluster.healthy is for all",
        "restarts calls answered failed lost in_flight latency_p50_s latency_p99_s": "each entry of replicas has it",
    },
    "Device": {
        "synchronize synchronize_all sync": "`await device.drain()`; `await stream.synchronize()` for one stream",
        "create_stream get_stream acquire_stream Stream": "device.stream() makes a stream",
        "default_stream current_stream": "there is none: device.stream() makes a stream, and each call names its own",
        "use set_current make_current": "no device is current: device.stream() makes a stream, and the calls of that "
        "work on this device",
        "upload to_device": "`await stream.upload(array)` makes a buffer of an array",
        "empty allocate alloc malloc": _EMPTY,
        "zeros": "stream.zeros(shape, dtype) makes a buffer",
        "copy fill launch download memcpy memset": _BLOCK,
        "alloc_pinned allocate_pinned pin_memory": _PINNED,
        "managed alloc_managed allocate_unified": _UNIFIED,
        "event create_event": "stream.record() returns an event, and aiocuda.EventPool lends events to record later",
        "capture graph": "`async with stream.capture() as graph` records the work of a stream",
        "memory_pool mempool": "it is device.memory: device.memory.statistics(), and `await device.memory.trim()`",
        "pool": "aiocuda.StreamPool(device) is a pool of streams, and device.memory the pool of memory",
        "mem_info mem_get_info memory_info memory_stats": "device.memory.statistics() has the figures",
        "stats metrics get_metrics": _STATISTICS.format("device"),
        "empty_cache": "`await device.memory.trim()` returns what is unused",
        "close": "`await device.aclose()` closes it, or `async with aiocuda.open_device() as device`",
        "streams": "`async with aiocuda.StreamPool(device) as pool` has several streams",
        "pinned_array empty_pinned": _PINNED,
        "profile": "`async with aiocuda.observe.StreamProfiler(device) as profiler`",
        "compute_capability": "device.properties.compute_capability has it",
        "id": "it is called device.index",
        "reset": "it is closed, and opened again: `async with aiocuda.open_device() as device`",
    },
    "DeviceBuffer": {"close release destroy": "buffer.free() frees it, and so does the end of the last reference"},
    "DeviceMemory": {
        "allocate alloc malloc allocate_async": _EMPTY,
        "deallocate free_async": "buffer.free(stream) frees a buffer in the order of a stream",
        "used allocated used_bytes allocated_bytes": "device.memory.statistics().live_bytes are those of buffers",
        "limit": "it has no limit of its own: device.memory.statistics() has what it holds",
        "stats metrics info memory_info": "device.memory.statistics() has the figures",
        "empty_cache release_cached": "`await device.memory.trim()` returns what is unused",
    },
    "Event": {
        "cancel": "a stream passes every event that it has recorded. Cancel the task that awaits it",
        "synchronize sync": "`await event` waits for it",
        "query is_ready is_complete is_done": "event.done() is True if it has passed",
        "elapsed_time elapsed time_since": "start.elapsed_ms(end) is the time between two events",
        "record": "stream.record(event=event) records it",
        "close destroy": "event.release() ends its loan",
    },
    "EventPool": {
        "get get_event acquire_event create_event": "`await pool.acquire()`, or `async with pool.borrow() as event`",
        "event": "`await pool.acquire()`, or `async with pool.borrow() as event`; a new one is stream.record()",
        "acquire_timing acquire_timing_event": "`await pool.acquire(timing=True)`",
        "put release_event return_event": "pool.release(event) ends the loan",
        "stats metrics": _STATISTICS.format("pool"),
    },
    "Gathering": {"cancel": "cancel the task that awaits it, or drop each result by operation.abandon()"},
    "Graph": {
        "replay run execute launch_async": "graph.launch(stream) runs it",
        "instantiate upload": "`await graph` waits until it can be launched",
        "num_nodes nodes": "len(graph) is the number of its operations",
        "destroy reset": "graph.close() destroys it",
    },
    "Kernel": {
        "launch run execute": f"{_LAUNCH} launches it",
        "parameters": "kernel.signature has them",
        "forall": f"{_LAUNCH} launches it: choose grid and block yourself, such as (n + 255) // 256 and 256",
    },
    "ManagedContext": {
        "sync drain synchronize_all": "`await context.synchronize()` waits for all work",
        "upload download launch copy": "context.stream('compute') is a stream, with upload, download, launch and copy",
        "stream_pool": "context.pool is its pool",
        "step execute_step": "`await context.triple_buffered_step(config)`",
        "reset": "`await context.reset_pipeline()`",
        "is_async mode": "context.asynchronous is the mode",
        "stats metrics": _STATISTICS.format("context"),
        "close": _CLOSE.format("context"),
    },
    "MicroBatcher": {
        "infer predict call enqueue put request remote": "`await batcher.submit(item)` returns the result for an item",
        "map submit_many": "`await asyncio.gather(*map(batcher.submit, items))` returns the results for several items",
        "queue_size queue_length queue_depth qsize": "batcher.statistics().queued is the number of requests that wait",
        "start run": "`async with batcher` starts it",
        "stats metrics": _STATISTICS.format("batcher"),
        "reset_statistics": "its counts never go back: subtract those of an earlier batcher.statistics()",
        "is_healthy health": "it is called healthy",
        "closed is_closed": "batcher.submit(item) raises a ClosedError when it is closed",
        "close stop shutdown": _CLOSE.format("batcher"),
    },
    "Node": {
        "cancel": "nodes may depend on it. Cancel the task that awaits it, or withdraw it by node.abandon()",
        "get": "`await node` is its result; node.buffer is the buffer of an upload, at once",
        _ARRAY: f"{_AWAIT}; node.buffer is the buffer of an upload, at once",
    },
    "Operation": {
        "cancel": "a stream runs the work that it has accepted. Cancel the task that awaits it, or drop its result by "
        "operation.abandon()",
        "synchronize sync": "`await operation` waits for it",
        "query is_ready is_complete is_done finished": "operation.done() says whether it has finished",
        "get": "`await operation` is its result",
        "add_callback then": "operation.add_done_callback(function) calls a function when it has finished",
        _ARRAY: _AWAIT,
    },
    "OverloadedError": {
        "retry_after": "it is called retry_after_s",
        "queue_size queue_length": "it is called queued",
    },
    "Pipeline": {
        "execute process step": "`await pipeline.execute_iteration(item)`, or `await pipeline.submit(item)` in a loop",
        "map": "`async for result in pipeline.run(source)`",
        "add_stage": "Pipeline(device, stages) takes all stages, and pipeline.set_order(names) changes their order",
        "flush drain synchronize": "the end of `async with pipeline` waits for all items",
        "reset reset_stats": "pipeline.reset_statistics() resets its figures",
        "stats metrics get_stats": _STATISTICS.format("pipeline"),
        "close": _CLOSE.format("pipeline"),
        "push submit_nowait": "`ticket = await pipeline.submit(item)` waits for a free slot",
        "join": "the end of `async with pipeline` waits for all items",
        "stream buffer slots": "a stage has them: its function takes a slot, with slot.stream and slot.buffer(name, …)",
    },
    "ProfileReport": {"kernels": "report.total.operations has a row for each of them"},
    "ReplicaStatistics": {
        "status": "it is called state",
        "alive healthy": "its state is 'running' while it serves",
        "latency p50 p99": "latency_p50_s and latency_p99_s are times of calls",
    },
    "Slot": {
        "empty zeros": "slot.buffer(name, shape, dtype) is memory that stays with the slot, and "
        "slot.stream.empty(shape, dtype) is new memory",
        "unified managed": "a slot has memory of the device, slot.buffer(name, shape, dtype), and of the host, "
        "slot.pinned(name, shape, dtype)",
        "upload download launch copy fill": "slot.stream has the methods of a stream",
        "host": "slot.pinned(name, shape, dtype) is memory of the host",
        "device alloc allocate": "slot.buffer(name, shape, dtype) is memory of the device",
        "buffers": "slot.buffer(name, shape, dtype) is memory of the device",
        "data": "slot.item is the item",
    },
    "Stream": {
        "sync synchronize_async wait_idle": "`await stream.synchronize()` waits for its work",
        "wait_stream": "stream.wait(other) makes it wait for another stream",
        "wait_event": "stream.wait(event) makes it wait for an event",
        "add_dependency depends_on": "stream.wait(operation) makes it wait, and so does an event or a stream",
        "event record_event": "stream.record() returns an event",
        "query done is_ready is_idle is_complete": "stream.tail is None if all its work is done",
        "use set_current": "no stream is current: call its own methods, such as stream.launch(kernel, grid, block, …)",
        "cuda_stream ptr handle": _HANDLE,
        "memset memset_async": "stream.fill(buffer, value) sets all items",
        "memcpy memcpy_async copy_async": "stream.copy(target, source), stream.upload(array), stream.download(buffer)",
        "memcpy_htod memcpy_h2d copy_h2d to_device": "`await stream.upload(array)`, or stream.copy(buffer, array)",
        "memcpy_dtoh memcpy_d2h copy_d2h copy_to_host": "`await stream.download(buffer)` is a NumPy array",
        "prefetch_async prefetch_to_device prefetch_to_host": "stream.prefetch(buffer, to='device'), or to='host'",
        "allocate alloc malloc allocate_async malloc_async": _EMPTY,
        "free free_async deallocate": "buffer.free(stream) frees a buffer in the order of a stream",
        "ones full": "stream.empty(shape, dtype), then stream.fill(buffer, value)",
        "pin pinned": _PINNED,
        "unified managed": _UNIFIED,
        "launch_kernel run execute": _LAUNCH,
        "begin_capture capture_begin end_capture capture_end": "`async with stream.capture() as graph` records work",
        "wait_for": "stream.wait(other) makes it wait for an operation, an event or a stream",
        "copy_to_device array": "`await stream.upload(array)` makes a buffer of an array",
        "zeros_like": "stream.zeros(array.shape, array.dtype) makes a buffer",
        "graph": "`async with stream.capture() as graph` records its work",
        "stats metrics get_metrics": _STATISTICS.format("stream"),
        "close": "`await stream.aclose()` closes it, or `async with device.stream() as stream`",
        "auto_synchronize": "`async with device.stream() as stream` waits for its work at the end",
        "launch_host_func add_done_callback": "stream.add_callback(function) runs a function after its work",
    },
    "StreamBarrier": {"arrive arrive_and_wait synchronize": "`await barrier.wait(stream)` waits for all parties"},
    "StreamGroup": {
        "synchronize synchronize_all sync wait wait_all": "`await group.barrier()` waits for all streams",
        "execute parallel parallel_execute map": "`await group.run(function)` calls a function for each stream",
        "streams": "list(group) has the streams",
        "close": _CLOSE.format("group"),
    },
    "StreamPool": {
        "acquire acquire_stream get get_stream lease borrow": "`async with pool.stream() as stream` leases a stream",
        "release release_stream return_stream put": "a lease ends with its block, or by stream.release()",
        "wait_any get_ready_stream": "`await pool.any_ready()` leases a stream that is idle",
        "synchronize synchronize_all sync drain": "the end of `async with pool` waits, and `await device.drain()`",
        "submit run map execute launch": "`async with pool.stream() as stream` leases a stream, which has the methods",
        "record_completion": "pool.record(workload, seconds) records a time",
        "rebalance optimize_allocation": "pool.optimize() changes the strategy",
        "set_strategy resize": "StreamPool(device, minimum, maximum, strategy=…) takes them",
        "size num_streams stats metrics": _STATISTICS.format("pool"),
        "run": "`async with pool.stream() as stream`, and the methods of that",
        "close": _CLOSE.format("pool"),
    },
    "StreamProfiler": {
        "summary key_averages": "profiler.report() has the figures, and print(profiler.report()) shows them",
        "start": "`async with profiler` starts it",
    },
    "Ticket": {
        "cancel": "its item goes on. Cancel the task that awaits it; to end all items, leave the pipeline's block",
        "get": "`await ticket` is its result",
        _ARRAY: _AWAIT,
    },
    "Timeline": {
        "save export_chrome_trace": "Path('x.html').write_text(timeline.to_html()), or timeline.to_trace()",
        "events": "timeline.spans has them",
        "start": "`async with timeline` starts it",
    },
    "TripleBuffer": {
        "next": "ring.upload_slot() takes a free slot, and `await ring.acquire()` waits for one",
        "rotate swap": "ring.advance() passes the slots on",
        "uploading get_upload_slot": "ring.upload_slot() takes a free slot",
        "processing get_compute_slot": "ring.compute_slot() is the slot that computes, or None",
        "downloading get_download_slot": "ring.download_slot() is the slot that downloads, or None",
        "close": _CLOSE.format("ring"),
    },
    "UnifiedBuffer": {
        "prefetch prefetch_to_device prefetch_to_host": "stream.prefetch(buffer, to='device'), or to='host'",
        "set_read_mostly": "`await buffer.advise('read_mostly')`",
        "set_preferred_location": "`await buffer.advise('preferred_location', to)`",
        "set_accessed_by": "`await buffer.advise('accessed_by', to)`",
        "numpy data": "buffer.array is a NumPy array over the memory",
    },
}


def each_name(table: Mapping[str, Mapping[str, str]]) -> dict[str, dict[str, str]]:
    """Return a table with an entry for each name, of one whose keys have several."""
    return {
        cls: {name: cure for names, cure in cures.items() for name in names.split()} for cls, cures in table.items()
    }


#: For each class: names that it lacks, and what to use in their place. The loaders' package has a table of its own.
CURES: Final[Mapping[str, Mapping[str, str]]] = each_name(_CURES)
