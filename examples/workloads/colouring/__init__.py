"""What the three workloads that colour graphs share."""
