"""Clusters: replicas of a program's classes in processes of their own. See `README.md` in this directory."""

from __future__ import annotations

from ._cluster import Cluster
from ._errors import DeadlineError, RemoteError, ReplicaLostError
from ._handle import ReplicaHandle
from ._open_cluster import open_cluster
from ._replica_info import ReplicaInfo, current_replica
from ._statistics import ClusterStatistics, ReplicaStatistics

__all__ = [
    "Cluster", "ClusterStatistics", "DeadlineError", "RemoteError", "ReplicaHandle", "ReplicaInfo", "ReplicaLostError",
    "ReplicaStatistics", "current_replica", "open_cluster",
]  # fmt: skip
