"""Common parts of the three workloads that colour graphs."""
