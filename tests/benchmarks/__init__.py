"""Benchmarks: aiocuda compared with the bare driver and with other libraries.

``python -m tests.benchmarks [NAME…] --json FILE`` measures the rows of `rows.ROWS`. Every row compares with a
baseline that is measured in the same process, alternating with it, and with peers: other libraries used as their
documentation recommends, each in its own process. Ratios can be compared between machines, times cannot.

========================  ==============================================================================
``rows``                  the table: names, units, bounds, baselines, peers, sizes
``harness``               the parent: one process per row and peer, time limits, the JSON file
``child``                 the process of one row or of one peer
``latency``               rows about one operation
``throughput``            rows about many operations
``transfers``             rows about bytes
``lateness``              rows of the group ``waits`` about the time from the end of a kernel to its coroutine
``streams_bound``         rows of the group ``waits`` about many streams in a process with idle ones
``raw_waits``             awaiting by a raw host callback, beside those rows; ``durations``: their kernels' patterns
``torch_submit``          the row of the group ``waits`` about PyTorch
``services``              rows about services with a model of PyTorch; ``serving_torch``: with batches;
``frozen_service``        over HTTP, with and without frozen objects
``coordination``, ``mix``  rows about several streams; the mix of work for pools
``compare``               two checkouts, in slices that alternate; ``slices``: the slices
``setting``               the arguments of a row: the device, the baseline's driver, the iteration meter
``turns``                 durations of loop iterations
``figures``               percentiles, summaries, bounds; ``runs``: the median and the worst of several runs
``sources``, ``kernels``  the kernels of all rows and peers
``report``, ``machine``   the JSON file; the machine of a run
``peers``                 the other libraries, and the bare driver
``readme``                README's table, from ``docs/benchmarks/*.json``
========================  ==============================================================================
"""
