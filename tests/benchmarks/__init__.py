"""Benchmarks: how close aiocuda comes to what the hardware can do, and how far others are from it.

``python -m tests.benchmarks [NAME…] --json FILE`` measures the rows of `rows.ROWS`. Every row compares with a
baseline that is measured in the same process, interleaved with it, and with peers: other libraries doing the same
as their own documentation does it, each in a process of its own. Ratios travel from machine to machine, times do not.

========================  ==============================================================================
``rows``                  the table: names, units, bounds, baselines, peers, sizes
``harness``               the parent: one process per row and peer, time limits, the JSON file
``child``                 the process of one row or of one peer
``latency``               rows about one operation
``throughput``            rows about many operations
``transfers``             rows about bytes
``coordination``, ``mix``  rows about several streams; the mix that pools are compared on
``setting``               what a row gets: the device, the baseline's driver, the loop's turn meter
``turns``                 how long the loop's turns take
``figures``               percentiles, summaries, bounds
``sources``, ``kernels``  the kernels that everybody runs
``report``, ``machine``   the JSON file; where a run took place
``peers``                 the others, and the bare driver
``readme``                README's table, from ``docs/benchmarks/*.json``
========================  ==============================================================================
"""
